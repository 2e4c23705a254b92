"""Parameters of embedding and head that several stages hold: tied ones, and those used again between two chains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from autopar.plan import Plan
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
