"""The parameters as a rank holds them once its stages are in place: what the optimizer steps, and who has the rest."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from autopar.plan import Plan
from autopar.request import OFFLOADED
from autopar.runtime.copies import Copies
from autopar.runtime.gradients import HeldParameter, TensorParallelCut
from autopar.runtime.groups import RankGroups
from autopar.runtime.precision import Masters
from autopar.runtime.sharding import axes_of_copies
from autopar.runtime.shares import shards_of, tensor_share
from autopar.runtime.stage import StageModule
from autopar.runtime.stepping import stand_in


def held_parameters(
    stages: Mapping[int, StageModule],
    plan: Plan,
    groups: RankGroups,
    masters: Masters,
    cuts: Mapping[str, TensorParallelCut],
    tied: Mapping[str, tuple[str, ...]],
    copies: Mapping[str, Copies],
) -> list[HeldParameter]:
    """Every parameter of the stages once, under the name of the first layer that uses it."""
    mesh = plan.mesh
    found: list[HeldParameter] = []
    seen: set[int] = set()
    away = plan.request.optimizer in OFFLOADED.values()
    last = len(plan.strategies) - 1
    every = ((number, stage.body, layer) for number, stage in stages.items() for layer in stage.body.held_layers)
    for number, body, layer in every:
        strategy = plan.strategies[layer]
        placed = mesh.place(strategy)
        for name, parameter in body.layer_parameters(layer).items():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            cut_rows = strategy.zero == 1 and parameter.dim() and parameter.requires_grad
            rows = groups.along(placed.dp_shard) if cut_rows else None
            cut = cuts.get(name)
            along_tp = placed.tp if layer in (0, last) and cut is None else ()
            spread, replicas = axes_of_copies(mesh, placed, along_tp)
            share: float | Tensor = shards_of(parameter, rows) / mesh.size(spread)
            if cut is not None:
                share = share * tensor_share(cut, parameter, rows)
            master = masters.of(name, parameter, None if cut is None else cut.piece)
            several = copies.get(name)
            summed = () if strategy.zero > 1 else spread if rows is None else replicas
            found.append(
                HeldParameter(
                    name=name,
                    layer=layer,
                    parameter=parameter,
                    stepped=stand_in(parameter, rows, master, away=away),
                    rows=rows,
                    group=groups.along(summed) if summed else None,
                    share=share,
                    copies=several,
                    counted=several is None or number == several.stages[0],
                    aliases=tied.get(name, ()),
                    tensor_parallel=cut,
                    in_host_memory=away and parameter.requires_grad,
                )
            )
    return found
