"""Stages run by torch's own pipeline schedules. All private or unsettled names of that package are used here only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining import schedules as stock

from autopar.request import Schedule
from autopar.runtime.stage import StageModule

_ONE_STAGE: dict[Schedule, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
_SEVERAL_STAGES: dict[Schedule, Any] = {
    "looped-bfs": ScheduleLoopedBFS,
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


@contextmanager
def without_neighbours() -> Iterator[None]:
    """While inside, a stage runs where no other rank is: nothing is asked of it or sent to it.

    What a schedule sends lives as long as gloo would hold it: until the schedule forgets the message.
    """
    before = stock._PipelineSchedule._warmup_p2p, stock._batch_p2p
    stock._PipelineSchedule._warmup_p2p = _take_given_shapes
    stock._batch_p2p = lambda operations, desc=None: [_Message(operation.tensor) for operation in operations]
    try:
        yield
    finally:
        stock._PipelineSchedule._warmup_p2p, stock._batch_p2p = before


def _take_given_shapes(schedule: Any, stages: Any, *others: Any) -> None:
    for stage in stages:
        stage._inference_mode = stock.InferenceMode.STATIC


@dataclass(frozen=True)
class _Message:
    tensor: Tensor

    def wait(self) -> None:
        """Return: nobody sends or receives."""


def shapes_of(boundaries: Sequence[tuple[Tensor, ...]]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The shapes of what crosses each boundary."""
    return tuple(tuple(tuple(x.shape) for x in sent) for sent in boundaries)


class Pipeline:
    """One rank's stages under a stock schedule; shapes are fixed by the first batch.

    modules: the stages of this rank by their number, in the order of the chain; num_stages: over all ranks.
    boundaries: what each stage but the last sends for a micro-batch on this rank, as tensors of the meta device.
    """

    def __init__(
        self,
        *,
        modules: Mapping[int, StageModule],
        num_stages: int,
        schedule: Schedule,
        num_micro_batches: int,
        group: dist.ProcessGroup,
        device: torch.device,
        boundaries: Sequence[tuple[Tensor, ...]],
    ) -> None:
        self.shapes = shapes_of(boundaries)
        self._num_micro_batches = num_micro_batches
        self._device = device
        self.waited_s = self._busy_s = 0.0
        """Of the last step: not within a stage of this rank; the rest."""
        self._first, self._last = 0 in modules, num_stages - 1 in modules
        self._stages = []
        for stage, module in modules.items():
            # Given shapes spare the schedule a trial forward and backward.
            received = (torch.empty(1, device="meta"),) if stage == 0 else boundaries[stage - 1]
            loss = (torch.empty((), device="meta").requires_grad_(),)
            sent = loss if stage == num_stages - 1 else boundaries[stage]
            self._stages.append(
                PipelineStage(
                    module,
                    stage,
                    num_stages,
                    device,
                    input_args=received,
                    output_args=sent,
                    group=group,
                )
            )
            for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                setattr(self._stages[-1], name, self._counted(getattr(self._stages[-1], name)))
        one = _ONE_STAGE.get(schedule)
        made: Any = self._stages[0] if one else self._stages
        self._schedule = (one or _SEVERAL_STAGES[schedule])(
            made, num_micro_batches, loss_fn=lambda loss, _: loss, scale_grads=False
        )

    @property
    def receive_buffers(self) -> list[Tensor]:
        """What the schedule receives activations and gradients into: one each for every micro-batch, kept for good."""
        infos = [
            row
            for stage in self._stages
            for kept in (stage.args_recv_info, stage.grad_recv_info)
            for row in kept.values()
        ]
        return [info.buffer for row in infos for info in row if info.buffer is not None]

    def step(self, batch: Mapping[str, Tensor]) -> None:
        """Forward and backward of all micro-batches of this rank's batch (its first dimension, in order)."""
        # The first stage wants a positional input and the last a target; both are in the batch already.
        anchor = torch.zeros(self._num_micro_batches, device=self._device)
        arguments = (anchor,) if self._first else ()
        target = anchor if self._last else None
        began, self._busy_s = time.perf_counter(), 0.0
        self._schedule.step(*arguments, target=target, return_outputs=False, **batch)
        self.waited_s = time.perf_counter() - began - self._busy_s

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = function(*args, **kwargs)
            self._busy_s += time.perf_counter() - began
            return result

        return call
