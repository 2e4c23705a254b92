"""A model under a plan: its training step, its gradients and its files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import lcm
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset, DistributedSampler

from autopar.errors import InputError
from autopar.plan import Plan
from autopar.runtime.activity import activity
from autopar.runtime.batches import sequence_length
from autopar.runtime.checkpoint import ModelForm, beside, load_checkpoint, raised_by_all
from autopar.runtime.copies import sum_copies
from autopar.runtime.crossing import Boundaries
from autopar.runtime.fakes import number
from autopar.runtime.finite import refuse_loss
from autopar.runtime.given import check_batch, check_folder, check_norm, check_optimizer
from autopar.runtime.gradients import (
    HeldParameter,
    check_gradients_present,
    clip_gradients,
    reduce_added,
    reduce_gradients,
    scale_gradients,
)
from autopar.runtime.groups import RankGroups
from autopar.runtime.layers import LocalLayers
from autopar.runtime.losses import loss_of, with_loss
from autopar.runtime.pipelining import Pipeline, shapes_of
from autopar.runtime.precision import mixed_dtype
from autopar.runtime.relayout import refuse_length
from autopar.runtime.samples import own_samples
from autopar.runtime.saving import CheckpointWriter
from autopar.runtime.stage import StageModule
from autopar.runtime.step_check import StepCheck
from autopar.runtime.stepping import follow_steps
from autopar.runtime.structure import Probe


class ParallelModel(nn.Module):
    """A model under a plan.

    train_step(batch): forward and backward of this rank's samples over all micro-batches, pipelined or not.
    forward(**batch): without a pipeline, the model's own output, for a loop of the user's.
    The batch is this rank's part; `shard_batch` cuts it from the global one.
    """

    def __init__(
        self,
        plan: Plan,
        found: Probe,
        groups: RankGroups,
        layers: LocalLayers,
        form: ModelForm,
        boundaries: Boundaries | None = None,
    ) -> None:
        """boundaries: where more crosses stages than one hidden state of one shape."""
        super().__init__()
        self.plan, self._form = plan, form
        self.stages = nn.ModuleList(layers.stages.values())
        self._stage_numbers = tuple(layers.stages)
        self.held: tuple[HeldParameter, ...] = layers.held
        self._structure, self._groups = found.structure, groups
        self._boundaries = boundaries
        self._hidden_shape, self._probe_tokens = found.hidden_shape, found.tokens
        self._pipeline_group = groups.pipeline() if plan.pp > 1 else None
        self._pipeline: Pipeline | None = None
        self._steps = self._optimizer_steps = 0
        self._writer = CheckpointWriter(
            fingerprint=plan.model.fingerprint, writer=groups.place, writers=plan.mesh.ranks_per_stage
        )
        self._reduce_in_backward = False
        for entry in self.held:
            if entry.stands_in:
                entry.parameter.register_post_accumulate_grad_hook(self._handed_on(entry))
            elif entry.group is not None and entry.parameter.requires_grad:
                entry.parameter.register_hook(self._summed(entry.group))
        self.step_check = StepCheck(plan, self.held, self.device)
        """What the first steps took beside the plan's prediction."""
        follow_steps(self, self.held, self.step_check, after=ParallelModel._after_step)
        self._names = frozenset(name for name, _ in self.named_parameters())

    def _refuse_new_parameters(self) -> None:
        """Raise InputError when the model has more parameters than when it was wrapped."""
        if sum(1 for _ in self.parameters()) <= len(self._names):
            return
        new = sorted(name.split(".body.model.")[-1] for name, _ in self.named_parameters() if name not in self._names)
        raise InputError(
            f"{len(new)} parameters appeared after autopar.parallelize: {', '.join(new[:6])}",
            why="they have no strategy, and each rank would train its own",
            fix="add adapters and the like before autopar.parallelize",
        )

    def _handed_on(self, entry: HeldParameter) -> Any:
        def hook(parameter: Tensor) -> None:
            if self._reduce_in_backward:
                reduce_added(entry)

        return hook

    def _summed(self, group: dist.ProcessGroup) -> Any:
        def hook(grad: Tensor) -> Tensor | None:
            if not self._reduce_in_backward:
                return None
            grad = grad.clone()
            dist.all_reduce(grad, group=group)
            return grad

        return hook

    @property
    def stage(self) -> StageModule:
        """The first stage of this rank; the only one unless the schedule gives each rank several."""
        stage = self.stages[0]
        assert isinstance(stage, StageModule)
        return stage

    @property
    def model(self) -> nn.Module:
        """The wrapped model, with its own parameter names; of several stages of this rank, the first one's part."""
        return self.stage.body.model

    def _stages(self) -> list[StageModule]:
        return [stage for stage in self.stages if isinstance(stage, StageModule)]

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return next(entry.parameter.device for entry in self.held)

    @property
    def local_batch(self) -> int:
        """The samples of one step on this rank."""
        return self.plan.request.global_batch // self.plan.mesh.ranks_per_stage

    def shard_batch(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's samples of a global batch (first dimension global_batch), micro-batch by micro-batch."""
        check_batch("batch", batch)
        return {
            name: value.to(self.device) for name, value in own_samples(batch, self.plan, self._groups.place).items()
        }

    def sampler(self, dataset: Dataset[Any], *, shuffle: bool = True, seed: int = 0) -> DistributedSampler[Any]:
        """A sampler that gives this rank its part of a dataset; the ranks of one pipeline get the same samples."""
        return DistributedSampler(
            dataset, num_replicas=self.plan.mesh.ranks_per_stage, rank=self._groups.place, shuffle=shuffle, seed=seed
        )

    def forward(self, **batch: Tensor) -> Any:
        """The model's output for this rank's samples; its loss is the global mean, with gradients to match.

        Only without a pipeline. The backward leaves summed gradients, also after several calls (accumulation).
        Raises RunError, on every rank, where a loss to train by is not finite.
        """
        if self.plan.pp > 1:
            raise InputError(
                "a pipelined model has no forward of its own",
                why=f"the plan has {self.plan.pp} stages",
                fix="use model.train_step(batch)",
            )
        with activity.during(f"forward, step {self._optimizer_steps + 1}"):
            self._refuse_new_parameters()
            self._refuse_batch(batch)
            self._reduce_in_backward = torch.is_grad_enabled()
            if self._reduce_in_backward:
                self.step_check.call_begins()
            output = self.stage.body(None, **batch)
            mean = loss_of(output)
            output = output if mean is None else with_loss(output, mean, self._global_mean(output, batch))
        activity.backward_follows = self._reduce_in_backward
        return output

    def _global_mean(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        """The global mean as value, this rank's share of it as gradient: summed over ranks, that is the whole one."""
        total, count = self.stage.loss(output, batch)
        sums = torch.stack([total.detach().double().cpu(), count.double().cpu()])
        mine = number(sums[0])
        dist.all_reduce(sums, group=self._groups.along(self.plan.mesh.names))
        if total.requires_grad:
            refuse_loss(number(sums[0]), max(1.0, number(sums[1])), mine, step=self._optimizer_steps + 1)
            sums[1].clamp_(min=1.0)  # a call of several may have no label on any rank: its part is 0
        local = total / sums[1].to(total)
        return local + (sums[0] / sums[1] - local.detach().cpu()).to(local)

    def train_step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The global mean loss, on every rank; the gradients are ready for the optimizer.

        batch: this rank's samples, `local_batch` of them. Gradients of earlier steps must have been cleared.
        Raises InputError for a batch of another size or a length that the plan cannot cut, RunError when the loss is
        not finite or, in the first step, when a trained parameter got no gradient.
        """
        check_batch("batch", batch)
        watched = activity.during(f"train_step {self._steps + 1}")
        with watched, self.step_check.train_step(self, self.receive_buffers, batch):
            return self._train_step(batch)

    def _train_step(self, batch: Mapping[str, Tensor]) -> Tensor:
        self._refuse_batch(batch)
        samples = {value.shape[0] for value in batch.values()}
        if samples != {self.local_batch}:
            raise InputError(
                f"the batch has {sorted(samples)} samples on this rank",
                why=f"the plan gives each rank {self.local_batch} of {self.plan.request.global_batch}",
                fix="cut the global batch with model.shard_batch",
            )
        self._refuse_new_parameters()
        self._reduce_in_backward = False
        for stage in self._stages():
            stage.reset()
        if self.plan.pp > 1:
            self._pipelined(batch)
        else:
            for part in range(self.plan.num_micro_batches):
                size = self.local_batch // self.plan.num_micro_batches
                micro = {name: value[part * size : (part + 1) * size] for name, value in batch.items()}
                self.stage(None, **micro).backward()
        return self._finish()

    def _refuse_batch(self, batch: Mapping[str, Any]) -> None:
        """Raise InputError, on all ranks alike, where their batches differ or have a length that no layer can cut."""
        self.stage.body.side_inputs.agree_on_batch(batch, self.device)
        if len(self._structure.starts) == 1:  # otherwise layers have sequences of different lengths
            refuse_length(self._tokens(batch), lcm(*(s.sequence_pieces for s in self.plan.strategies[1:-1])))

    def _tokens(self, batch: Mapping[str, Any]) -> int:
        """How long the hidden state of a batch is; not all models' follows the batch."""
        sequence = sequence_length(batch)
        return sequence if sequence and self._hidden_shape[0] == self._probe_tokens else self._hidden_shape[0]

    def _pipelined(self, batch: Mapping[str, Tensor]) -> None:
        boundaries = self._crossing(batch)
        if self._pipeline is None:
            assert self._pipeline_group is not None
            self._pipeline = Pipeline(
                modules=dict(zip(self._stage_numbers, self._stages(), strict=True)),
                num_stages=self.plan.num_stages,
                schedule=self.plan.schedule,
                num_micro_batches=self.plan.num_micro_batches,
                group=self._pipeline_group,
                device=self.device,
                boundaries=boundaries,
            )
        if shapes_of(boundaries) != self._pipeline.shapes:
            before, now = next(
                pair for pair in zip(self._pipeline.shapes, shapes_of(boundaries), strict=True) if pair[0] != pair[1]
            )
            raise InputError(
                f"the activations between stages changed from {_listed(before)} to {_listed(now)}",
                why="a pipeline keeps the shapes of its first batch",
                fix="pad every batch to one sequence length",
            )
        self._pipeline.step(batch)
        self.step_check.waited(self._pipeline.waited_s)

    @property
    def receive_buffers(self) -> list[Tensor]:
        """The tensors that a pipeline keeps to receive into; they exist from the first step on."""
        return [] if self._pipeline is None else self._pipeline.receive_buffers

    def _crossing(self, batch: Mapping[str, Tensor]) -> Sequence[tuple[Tensor, ...]]:
        """What crosses each boundary between stages with a micro-batch, on the meta device."""
        samples = self.local_batch // self.plan.num_micro_batches
        if self._boundaries is not None:
            masks = self.stage.body.side_inputs.keeps_masks(batch)
            return self._boundaries.of({name: value[:samples] for name, value in batch.items()}, masks=masks)
        hidden = torch.empty(
            (samples, self._tokens(batch), *self._hidden_shape[1:]),
            dtype=mixed_dtype(self.plan.request.dtype)
            or next(p.dtype for p in self.model.parameters() if p.is_floating_point()),
            device="meta",
        )
        return [(hidden.requires_grad_(),)] * (self.plan.num_stages - 1)

    def _finish(self) -> Tensor:
        """Reduce, check and scale the gradients after the last backward; the global mean loss."""
        if self._steps == 0:
            check_gradients_present(self.held, self._groups.along(self.plan.mesh.names))
        with self.step_check.timed("gradient_sync"):
            reduce_gradients(self.held)
            self._sum_copies()
        sums = torch.zeros(2, dtype=torch.float64)
        for total, count in (pair for stage in self._stages() for pair in stage.counted):
            sums += torch.stack([total.double().cpu(), count.double().cpu()])
        mine = number(sums[0])
        dist.all_reduce(sums)
        self._steps += 1
        labels = number(sums[1])
        refuse_loss(number(sums[0]), labels, mine, step=self._steps)
        scale_gradients(self.held, 1.0 / labels)
        return sums[0] / sums[1]

    def _sum_copies(self) -> None:
        sum_copies(self.held, self._groups)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """The 2-norm of the gradient of the whole model, which is then scaled down to `max_norm` if larger.

        Raises RunError, on every rank, where it is not finite.
        """
        check_norm(max_norm)
        with activity.during("clip_grad_norm_"), self.step_check.timed("clip"):
            return clip_gradients(self.held, max_norm, step=max(self._steps, self._optimizer_steps + 1))

    def save(
        self, folder: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None, *, wait: bool = True
    ) -> None:
        """Write a checkpoint that any plan of this model reads again, with the optimizer's states if given.

        wait=False: training may go on when this returns, while a thread writes what was; the next save, load or
        `wait_for_save` waits for it and raises what failed. Call `wait_for_save` before the process group is left.
        """
        self._check_files(folder, optimizer)
        with activity.during("save", grows=beside(Path(folder), "new")):
            self._writer.save(folder, self.held, optimizer, wait=wait)

    def wait_for_save(self) -> None:
        """Return when what was saved with wait=False is written; InputError where it could not be."""
        with activity.during("wait_for_save", grows=self._writer.growing):
            self._writer.wait()

    def export(self, folder: str | os.PathLike[str]) -> None:
        """Write the weights as plain safetensors under the model's own names; a collective.

        Under mixed precision they are the rounded ones, which the model computes with.
        """
        check_folder("folder", folder)
        # safetensors comes with transformers only.
        from autopar.runtime.exporting import export_weights

        persistent = {name for stage in self._stages() for name in stage.body.model.state_dict()}
        buffers = {name: value for name, value in self.model.named_buffers() if name in persistent}
        with activity.during("export", grows=Path(folder)):
            export_weights(
                folder,
                self.held,
                writes=self._groups.place == 0,
                dtype=mixed_dtype(self.plan.request.dtype),
                buffers=buffers,
            )

    def import_weights(self, folder: str | os.PathLike[str]) -> None:
        """Take the weights of plain safetensors files, read one tensor at a time."""
        check_folder("folder", folder)
        from autopar.runtime.exporting import import_weights

        with activity.during("import_weights"), raised_by_all():
            import_weights(folder, self.held)

    def _after_step(self) -> None:
        self._optimizer_steps += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, also of what the optimizer steps in place of parameters."""
        super().zero_grad(set_to_none)
        for entry in self.held:
            entry.stepped.grad = None

    def load(self, folder: str | os.PathLike[str], optimizer: torch.optim.Optimizer | None = None) -> None:
        """Take the parameters, and the optimizer's states if given, from a checkpoint of any plan of this model."""
        self._check_files(folder, optimizer)
        self.wait_for_save()
        with activity.during("load"):
            load_checkpoint(folder, self.held, form=self._form, optimizer=optimizer)

    def load_optimizer(self, folder: str | os.PathLike[str], optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer's states alone from a checkpoint, as after `parallelize(weights=folder)`."""
        self._check_files(folder, optimizer)
        self.wait_for_save()
        with activity.during("load_optimizer"):
            load_checkpoint(folder, self.held, form=self._form, optimizer=optimizer, parameters=False)

    def _check_files(self, folder: object, optimizer: object) -> None:
        check_folder("folder", folder)
        if optimizer is not None:
            check_optimizer(optimizer, self.held)

    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups for an elementwise torch optimizer: this rank's part, in plain tensors.

        They are rows of the parameters under ZeRO, float32 masters under mixed precision. After each
        `optimizer.step()` the parameters of the model follow; an optimizer that is not elementwise is refused there.
        """
        stepped = {id(e.stepped): e.stepped for e in self.held if e.parameter.requires_grad}
        return [{"params": list(stepped.values())}]


def _listed(shapes: tuple[tuple[int, ...], ...]) -> str:
    return ", ".join(map(str, shapes))
