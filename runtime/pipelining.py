"""Stages run by torch's own pipeline schedules. All private or unsettled names of that package are used here only."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from autopar.request import Schedule
from autopar.runtime.stage import StageModule

SCHEDULE_CLASSES: dict[Schedule, type[Schedule1F1B] | type[ScheduleGPipe]] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
}


class Pipeline:
    """One rank's stage under a stock schedule; shapes are fixed by the first batch.

    hidden_shape: samples of one micro-batch on this rank, tokens, width: what crosses stages.
    """

    def __init__(
        self,
        *,
        module: StageModule,
        stage: int,
        num_stages: int,
        schedule: Schedule,
        num_micro_batches: int,
        group: dist.ProcessGroup,
        device: torch.device,
        hidden_shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self.hidden_shape = hidden_shape
        self._num_micro_batches = num_micro_batches
        self._device = device
        self._first, self._last = stage == 0, stage == num_stages - 1
        hidden = torch.empty(hidden_shape, dtype=dtype, device="meta")
        # Given shapes spare the schedule a trial forward and backward.
        received = torch.empty(1, device="meta") if self._first else hidden.requires_grad_()
        sent = torch.empty((), device="meta") if self._last else hidden
        self._stage = PipelineStage(
            module,
            stage,
            num_stages,
            device,
            input_args=(received,),
            output_args=(sent.requires_grad_(),),
            group=group,
        )
        self._schedule = SCHEDULE_CLASSES[schedule](
            self._stage, num_micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False
        )

    @property
    def receive_buffers(self) -> list[Tensor]:
        """What the schedule receives activations and gradients into: one each for every micro-batch, kept for good."""
        infos = [*self._stage.args_recv_info.values(), *self._stage.grad_recv_info.values()]
        return [info.buffer for row in infos for info in row if info.buffer is not None]

    def step(self, batch: Mapping[str, Tensor]) -> None:
        """Forward and backward of all micro-batches of this rank's batch (its first dimension, in order)."""
        # The first stage wants a positional input and the last a target; both are in the batch already.
        anchor = torch.zeros(self._num_micro_batches, device=self._device)
        arguments = (anchor,) if self._first else ()
        target = anchor if self._last else None
        self._schedule.step(*arguments, target=target, return_outputs=False, **batch)
