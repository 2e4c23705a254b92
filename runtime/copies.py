"""Parameters of embedding and head that several stages hold: tied ones, and those used again between two chains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from autopar.plan import Plan
from autopar.runtime.gradients import HeldParameter
from autopar.runtime.groups import RankGroups
from autopar.runtime.structure import Structure
from autopar.schedules import stage_rank


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Where a parameter is: the stages that hold it, and the pipeline ranks of those; name: its first one."""

    name: str
    stages: tuple[int, ...]
    ranks: tuple[int, ...]


def copies_of(model: nn.Module, structure: Structure, plan: Plan) -> Mapping[str, Copies]:
    """The parameters that more than one stage of the plan holds, by each of their names; the model is still whole."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if structure.is_outside(name):
            names.setdefault(id(parameter), []).append(name)
    used = [structure.outside_names(plan.stage_layers(stage)) for stage in range(plan.num_stages)]
    found: dict[str, Copies] = {}
    for shared in names.values():
        stages = tuple(stage for stage, own in enumerate(used) if not own.isdisjoint(shared))
        if len(stages) > 1:
            ranks = {stage_rank(plan.schedule, pp=plan.pp, stage=stage) for stage in stages}
            one = Copies(name=shared[0], stages=stages, ranks=tuple(sorted(ranks)))
            found |= dict.fromkeys(shared, one)
    return found


def sum_copies(held: Sequence[HeldParameter], groups: RankGroups) -> None:
    """Sum the gradients of the copies that several stages have of a parameter, in one order on all ranks."""
    mine: defaultdict[Copies, list[HeldParameter]] = defaultdict(list)
    for entry in held:
        if entry.copies is not None and entry.parameter.requires_grad:
            mine[entry.copies].append(entry)
    for copies in sorted(mine, key=lambda one: one.name):
        for entry in mine[copies]:
            if entry.stepped.grad is None:  # other ranks wait for it all the same
                entry.stepped.grad = torch.zeros_like(entry.stepped)
        first, *others = (grad for entry in mine[copies] if (grad := entry.local_grad) is not None)
        for grad in others:
            first += grad
        if len(copies.ranks) > 1:
            dist.all_reduce(first, group=groups.across(copies.ranks))
        for grad in others:
            grad.copy_(first)
