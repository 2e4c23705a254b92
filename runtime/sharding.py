"""The ZeRO layers of a stage: which of its modules are sharded together, over which ranks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from autopar.axes import Placement, RankMesh
from autopar.plan import Plan
from autopar.runtime.gradients import TensorParallelCut
from autopar.runtime.groups import RankGroups
from autopar.runtime.precision import Masters
from autopar.runtime.stage import StageBody, StageModule
from autopar.runtime.zero import owners, shard_modules, shard_root
from autopar.schedules import SPLIT_BACKWARD


def axes_of_copies(mesh: RankMesh, placed: Placement, tp: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Over which axes the gradients of a layer are summed, and which of them repeat what ZeRO shards.

    Other samples lie along dp, other parts of the sequence along sp and cp; and parameters of embedding and head that
    are not of the vocabulary work on other samples along `tp` too.
    """
    cut = {*placed.sp, *placed.cp, *tp}
    summed = tuple(name for name in mesh.names if name in {*placed.dp, *cut})
    return summed, tuple(name for name in mesh.names if name in {*placed.dp_replicate, *cut})


def shard_layers(
    stage: StageModule, plan: Plan, groups: RankGroups, masters: Masters, cuts: Mapping[str, TensorParallelCut]
) -> None:
    """Wrap the ZeRO layers of the stage; embedding and head go together when they share parameters."""
    body = stage.body
    mesh, structure = plan.mesh, body.structure
    last = structure.num_blocks + 1
    sharded = [layer for layer in body.held_layers if plan.strategies[layer].zero >= 2]
    if not sharded:
        return
    for layer in sharded:
        for name, parameter in body.layer_parameters(layer).items():
            cut = cuts.get(name)
            master = masters.of(name, parameter, None if cut is None else cut.piece)
            if master is not None:
                parameter.data = master
    units: list[tuple[int, ...]] = [(layer,) for layer in sharded]
    if structure.tied and 0 in sharded and last in sharded:
        units = [(0, last), *((layer,) for layer in sharded if layer not in (0, last))]
    for unit in units:
        strategy = plan.strategies[unit[0]]
        placed = mesh.place(strategy)
        modules = list({id(m): m for layer in unit for m in _modules_of(body, layer)}.values())
        # A module that contains the blocks (parameters directly on the model) is left to the root.
        modules = [m for m in modules if not _contains_blocks(m, body)]
        outside = unit[0] in (0, last)
        words = {id(p) for name, p in body.model.named_parameters(remove_duplicate=False) if name in cuts}
        cut_modules = [m for m in modules if outside and any(id(p) in words for p in m.parameters(recurse=False))]
        rest = [m for m in modules if all(m is not other for other in cut_modules)]
        for whole, tp in ((cut_modules, ()), (rest, placed.tp if outside else ())):
            for part in _apart(whole) if outside and len(structure.starts) > 1 else [whole] if whole else []:
                device_mesh = groups.mesh_along(placed.dp_shard, axes_of_copies(mesh, placed, tp)[1])
                shard_modules(part, device_mesh, keep_unsharded=strategy.zero == 2, gathered=masters.dtype)
    named = {id(p) for layer in sharded for p in body.layer_parameters(layer).values()}
    ignored = {p for p in body.parameters() if id(p) not in named}
    split = plan.pp > 1 and plan.schedule in SPLIT_BACKWARD
    shard_root(stage if split else body, groups.mesh_along(mesh.names), ignored, gathered=masters.dtype)


def _modules_of(body: StageBody, layer: int) -> list[nn.Module]:
    """The modules that hold the parameters of a layer: the block, or the owners of those of embedding or head."""
    if 0 < layer <= body.structure.num_blocks:
        return [body.blocks()[layer - 1]]
    return owners(body.model, body.layer_parameters(layer))


def _contains_blocks(module: nn.Module, body: StageBody) -> bool:
    blocks = {id(body.structure.block(body.model, number)) for number in range(body.structure.num_blocks)}
    return any(id(child) in blocks for child in module.modules() if child is not module)


def _apart(modules: list[nn.Module]) -> list[list[nn.Module]]:
    """The modules one by one, together only where they share parameters.

    What runs in several places of a forward must be gathered for each: a group is, for the first and last of it, once.
    """
    parts: list[list[nn.Module]] = []
    for module in modules:
        own = {id(p) for p in module.parameters()}
        met = [part for part in parts if own & {id(p) for other in part for p in other.parameters()}]
        parts = [part for part in parts if part not in met] + [[*(m for part in met for m in part), module]]
    return parts
