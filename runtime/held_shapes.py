"""What a rank holds has the shapes that the plan gives it: looked at once, when a model has been wrapped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from autopar.errors import RunError
from autopar.model import ModelSpec
from autopar.plan import Plan
from autopar.runtime.gradients import HeldParameter, local_piece
from autopar.runtime.groups import RankGroups
from autopar.runtime.rows import rows_of
from autopar.runtime.structure import Structure
from autopar.runtime.vocabulary import WordPlan


def check_local_shapes(
    held: Sequence[HeldParameter], plan: Plan, model: ModelSpec, structure: Structure, groups: RankGroups
) -> None:
    """Raise RunError when this rank steps a parameter in another shape than its layer's strategy leaves of it.

    model: the one that the plan was made for. Counted from its whole shapes, not from what the wrapping did.
    """
    for entry in held:
        expected, found = _expected(entry, plan, model, structure, groups), tuple(local_piece(entry.stepped).shape)
        if found != expected:
            raise RunError(
                f"{entry.name} has the shape {found} on rank {dist.get_rank()}, not {expected}",
                why=f"{plan.strategies[entry.layer].short} of layer {entry.layer} gives it that",
                fix="report this: the wrapping and the plan disagree",
            )


def _expected(
    entry: HeldParameter, plan: Plan, model: ModelSpec, structure: Structure, groups: RankGroups
) -> tuple[int, ...]:
    kind, strategy = model.kind(entry.layer), plan.strategies[entry.layer]
    inner = 0 < entry.layer < len(plan.strategies) - 1
    prefix = structure.paths[entry.layer - 1] + "." if inner else ""
    shape = next(p.shape for p in kind.parameters if p.name == entry.name.removeprefix(prefix))
    cut = entry.tensor_parallel
    if cut is not None:
        shape = (cut.plan.rows, *shape[1:]) if isinstance(cut.plan, WordPlan) else cut.plan.local_shapes[cut.name]
    if not shape or not (strategy.zero > 1 or entry.rows is not None):
        return tuple(shape)
    shards = groups.along(plan.mesh.place(strategy).dp_shard)
    column = torch.empty(shape[0], 0)
    return len(rows_of(column, dist.get_world_size(shards), dist.get_rank(shards))), *shape[1:]
