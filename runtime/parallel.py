"""`autopar.parallelize(model, plan)`: the plan applied to an unmodified model on stock torch.distributed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import lcm

import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.plan import Plan
from autopar.runtime.activity import activity
from autopar.runtime.batches import example_batch
from autopar.runtime.checkpoint import ModelForm
from autopar.runtime.crossing import Boundaries
from autopar.runtime.given import check_model_and_plan
from autopar.runtime.groups import RankGroups
from autopar.runtime.held_shapes import check_local_shapes
from autopar.runtime.launch import HANG_TIMEOUT_S
from autopar.runtime.layers import place_layers
from autopar.runtime.losses import own_loss
from autopar.runtime.parallel_model import ParallelModel
from autopar.runtime.precision import Masters, mixed_dtype
from autopar.runtime.probing import probe
from autopar.runtime.spec import describe
from autopar.runtime.stage import LossFunction
from autopar.runtime.stand_ins import with_numbers
from autopar.runtime.watching import check_timeout, group_timeout, watch
from autopar.runtime.weights import Weights, take_weights
from autopar.runtime.world import equalise, join_world, same_use

__all__ = ["ParallelModel", "parallelize"]

_PROBE_SAMPLES, _PROBE_TOKENS = 3, 8


def parallelize(
    model: nn.Module,
    plan: Plan,
    *,
    loss: LossFunction | None = None,
    example: Mapping[str, Tensor] | None = None,
    weights: str | os.PathLike[str] | None = None,
    timeout_s: float = HANG_TIMEOUT_S,
) -> ParallelModel:
    """The model running as the plan says, on the ranks of the current process group.

    model: any nn.Module, equal on all ranks (otherwise rank 0's weights are taken); it is changed in place, parameter
    names stay. Under a bfloat16 plan (mixed precision, see autopar.runtime.precision) it may be in float32.
    loss(output, batch) -> (sum, count); default: the model's own mean loss times its number of labels.
    example: a small batch (3 samples) for models whose input cannot be made up from their signature.
    weights: a checkpoint of any plan, or a folder (or file) of safetensors, to begin with.
    timeout_s: when ranks have waited for others for so long and none gets on, all end with an error that names the
    rank that hangs (see autopar.runtime.watching); more than any rank may take between two steps.
    A model that was built inside `autopar.empty_weights()` has shapes only: each rank makes what it holds, one
    parameter at a time. One that was built on the meta device begins with `weights`.
    Raises InputError when the plan was made for another model or world, or cannot run on this one.
    """
    check_timeout(timeout_s)
    check_model_and_plan(model, plan, loss, example, weights)
    join_world(plan, group_timeout(timeout_s))
    watch(timeout_s)
    with activity.during("autopar.parallelize"):
        return _wrapped(model, plan, loss, example, weights, timeout_s)


def _wrapped(
    model: nn.Module,
    plan: Plan,
    loss: LossFunction | None,
    example: Mapping[str, Tensor] | None,
    weights: str | os.PathLike[str] | None,
    timeout_s: float,
) -> ParallelModel:
    device = torch.device("cpu")
    if plan.cluster.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    equalise(model)
    source = None if weights is None else Weights(folder=weights)
    if any(p.is_meta for p in model.parameters()):
        source = take_weights(model, weights, device)
    masters = Masters(model, mixed_dtype(plan.request.dtype))
    if not any(p.requires_grad for p in model.parameters()):
        why = "requires_grad is False for every one"
        raise InputError(f"{type(model).__name__} has no parameter to train", why=why, fix="unfreeze some")
    max_tp = max(max(strategy.tp, strategy.sp, strategy.cp) for strategy in plan.strategies)
    with with_numbers(model, device):
        batch = dict(example) if example is not None else _example(model, plan)
        found = probe(model, batch)
        same_use(found.used)
        described = describe(model, found, source=plan.model.source, name=plan.model.name, max_tp=max_tp)
        plan.check(described.spec)
        loss = loss or own_loss(model, batch)
    form = ModelForm.of(model, plan.model.fingerprint)
    groups = RankGroups(plan.mesh, plan.cluster.device, group_timeout(timeout_s))
    boundaries = None
    if plan.pp > 1 and (found.structure.seams or found.structure.sides):
        starts = [plan.stage_layers(stage)[0] for stage in range(1, plan.num_stages)]
        boundaries = Boundaries(model, found.structure, starts, device)
    layers = place_layers(model, plan, found, described, groups, loss, masters, batch, device)
    check_local_shapes(layers.held, plan, described.spec, found.structure, groups)
    if source is not None:
        source.fill(layers.held, form=form)
    return ParallelModel(plan, found, groups, layers, form, boundaries)


def _example(model: nn.Module, plan: Plan) -> dict[str, Tensor]:
    # Sequence-parallel norms and Ulysses want a sequence that every degree divides.
    tokens = lcm(*(s.tp * s.sp * (2 * s.cp if s.cp > 1 else 1) for s in plan.strategies), _PROBE_TOKENS)
    if tokens > plan.request.sequence:
        tokens = plan.request.sequence
    batch = example_batch(model, samples=_PROBE_SAMPLES, sequence=tokens)
    device = next(model.parameters()).device
    return {name: value.to(device) for name, value in batch.items()}
