"""The strategies of a plan put onto one stage: tensor parallelism, recompute, relayout, ZeRO, in that order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.axes import Placement
from autopar.derived import goes_around
from autopar.plan import Plan
from autopar.runtime.copies import copies_of
from autopar.runtime.gradients import HeldParameter, TensorParallelCut
from autopar.runtime.groups import RankGroups
from autopar.runtime.holding import held_parameters
from autopar.runtime.moving import attach_relayouts
from autopar.runtime.precision import Masters
from autopar.runtime.randomness import BlockStream, agreed_seed
from autopar.runtime.recompute import recomputed
from autopar.runtime.sharding import axes_of_copies, shard_layers
from autopar.runtime.side_inputs import MASK, POSITIONS, SideInputs, probe_optional
from autopar.runtime.spec import DescribedModel
from autopar.runtime.stage import LossFunction, PassThrough, StageBody, StageModule, same_tensors_again
from autopar.runtime.stand_ins import copy_with_numbers, with_numbers
from autopar.runtime.structure import Probe, Structure
from autopar.runtime.vocabulary import WordPlan, cut_ends, vocabulary_ends
from autopar.runtime.vocabulary_check import check_end, measure_ends
from autopar.runtime.weights import make_room

if TYPE_CHECKING:
    from autopar.runtime.tensor_parallel import BlockPlan, SequenceTeams


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalLayers:
    """What one rank runs: its stages by their number, in the order of the chain, and the parameters that it holds."""

    stages: dict[int, StageModule]
    held: tuple[HeldParameter, ...]


def place_layers(
    model: nn.Module,
    plan: Plan,
    found: Probe,
    described: DescribedModel,
    groups: RankGroups,
    loss: LossFunction,
    masters: Masters,
    batch: Mapping[str, Tensor],
    device: torch.device,
) -> LocalLayers:
    """The layers of this rank's stages under their strategies; changes the model in place.

    Further stages of this rank get trees of modules of their own, which hold the same model's other layers.
    batch: a small example, for the check of vocabulary-parallel ends.
    """
    mesh, structure = plan.mesh, found.structure
    placed = [mesh.place(strategy) for strategy in plan.strategies]
    extra = {axes for p in placed for tp in ((), p.tp) for axes in axes_of_copies(mesh, p, tp)}
    extra |= {axes for p in placed for axes in (p.cp, tuple(n for n in mesh.names if n in {*p.sp, *p.cp}))}
    copies = copies_of(model, structure, plan)
    groups.prepare(placed, extra, sorted({one.ranks for one in copies.values()}))
    tied = _tied_parameters(model, structure)
    seed = agreed_seed()
    numbers = plan.stages_of_rank(groups.stage)
    models = [model, *(same_tensors_again(model) for _ in numbers[1:])]
    moves = any(p.layout != mesh.boundary for p in placed)
    with with_numbers(model, device):
        optional = probe_optional(model, batch) if moves else {}
    stages: dict[int, StageModule] = {}
    cuts: dict[str, TensorParallelCut] = {}
    checked: set[Any] = set()
    cut_parameters: dict[nn.Parameter, nn.Parameter] = {}
    for number, tree in zip(numbers, models, strict=True):
        side = SideInputs(
            group=groups.along(mesh.names) if moves else None,
            boundary=mesh.boundary,
            usual=frozenset(batch) - {MASK, POSITIONS},
            found=optional,
            always=structure.forms,
            handed_on=plan.pp > 1 and bool(structure.sides),
        )
        body = StageBody(tree, structure, plan.stage_layers(number), side, device=device)
        stages[number] = StageModule(body, loss)
        ends = _cut_ends(stages[number], plan, found, groups, batch, cut_parameters, device)
        block_plans = _cut_blocks(body, plan, found, described, groups, checked, device)
        cuts |= _tensor_cuts(body, plan, groups, block_plans, ends)
        for place, block in body.blocks().items():
            block.forward = recomputed(block.forward, plan.strategies[place + 1].recompute)
        attach_relayouts(body, plan, groups)
        _attach_streams(body, plan, groups, seed)
        shard_layers(stages[number], plan, groups, masters, cuts)
        body.attach_ends()
    make_room(list(stages.values()), device)
    return LocalLayers(stages=stages, held=tuple(held_parameters(stages, plan, groups, masters, cuts, tied, copies)))


def _cut_ends(
    stage: StageModule,
    plan: Plan,
    found: Probe,
    groups: RankGroups,
    batch: Mapping[str, Tensor],
    known: dict[nn.Parameter, nn.Parameter],
    device: torch.device,
) -> Mapping[int, tuple[str, WordPlan]]:
    """The vocabulary-parallel ends of a stage, after cutting them for this rank and checking every gradient.

    known: the local parameters of this rank's earlier stages, which tied ends share.
    """
    ends = vocabulary_ends(plan, found, stage.body.layers)
    if not ends:
        return {}
    tried, tried_known = stage, known
    if any(p.is_meta for p in stage.body.parameters()):
        tried, tried_known = _trial(stage, device), {}
    before = measure_ends(tried, ends, batch, groups.place)
    cut = cut_ends(tried.body, plan, ends, groups, tried_known)
    after = measure_ends(tried, ends, batch, groups.place)
    for layer, (_, words) in cut.items():
        group = groups.along(plan.mesh.place(plan.strategies[layer]).tp)
        check_end(layer, before[layer], after[layer], words, group)
    return cut if tried is stage else cut_ends(stage.body, plan, ends, groups, known)


def _trial(stage: StageModule, device: torch.device) -> StageModule:
    """A copy of a stage without numbers that has some, and no blocks, for the check of its ends."""
    body = stage.body
    forms = body.structure.forms
    instead: dict[Any, Any] = {block: PassThrough(forms[n], block, device) for n, block in body.blocks().items()}
    copied = copy_with_numbers(body, device, {**instead, body.side_inputs: body.side_inputs})
    assert isinstance(copied, StageBody)
    return StageModule(copied, stage.loss)


def _cut_blocks(
    body: StageBody,
    plan: Plan,
    found: Probe,
    described: DescribedModel,
    groups: RankGroups,
    checked: set[Any],
    device: torch.device,
) -> dict[int, BlockPlan]:
    """The plans of the tensor-parallel blocks of the stage by number, after cutting each for this rank.

    Each distinct plan is first checked on the real ranks, every gradient against the unsharded block. checked: those
    that were, also on earlier stages.
    """
    mesh = plan.mesh
    cut: dict[int, BlockPlan] = {}
    for number, block in body.blocks().items():
        strategy, kind = plan.strategies[number + 1], body.structure.kinds[number]
        if strategy.tp == strategy.sp == strategy.cp == 1:
            continue
        # torch.export takes a second to load and is needed under tensor parallelism only.
        from autopar.runtime.tensor_parallel import apply, check_again, check_plan

        placed = mesh.place(strategy)
        axes = placed.tp
        sizes = tuple(mesh.size((axis,)) for axis in axes)
        block_plan = described.derivations[kind].plan(sizes, strategy.sequence_norms, strategy.sp, strategy.cp)
        where = mesh.coordinates(groups.rank)
        coordinate = tuple(where[axis] for axis in axes)
        tensor_groups = _tensor_groups(groups, axes) if axes else []
        attention = described.derivations[kind].attention
        around = attention is not None and goes_around(attention, strategy)
        sharing = _sharing(groups, placed, around) if strategy.sp * strategy.cp > 1 else None
        key = (kind, axes, strategy.sequence_norms, placed.sp, placed.cp, around)
        args, kwargs = found.inputs[kind].args, found.inputs[kind].kwargs
        if key not in checked:
            with with_numbers(block, device):
                check_plan(block, block_plan, tensor_groups, coordinate, args, kwargs, sharing=sharing)
        graphs = apply(block, block_plan, tensor_groups, coordinate, sharing=sharing)
        if key not in checked:
            checked.add(key)
            for name, other in body.side_inputs.found.items():
                if isinstance(other, Probe):
                    inputs = other.inputs[other.structure.kinds[number]]
                    again = partial(check_again, graphs, tensor_groups, inputs.args, inputs.kwargs)
                    body.side_inputs.checks.setdefault(name, []).append(again)
        cut[number] = block_plan
    return cut


def _sharing(groups: RankGroups, placed: Placement, around: bool) -> SequenceTeams:
    """The ranks that share the sequence of this rank's samples in a layer placed so; around: see SequenceTeams."""
    from autopar.runtime.tensor_parallel import SequenceTeams, Team

    def team(axes: tuple[str, ...]) -> Team:
        if not axes:
            return Team(1, 0)
        group = groups.along(axes)
        return Team(dist.get_world_size(group), dist.get_rank(group), group)

    mesh, rank = groups.mesh, groups.rank
    axes = tuple(name for name in mesh.names if name in {*placed.sp, *placed.cp})
    parts = mesh.group(rank, axes)
    own = [parts.index(r) for r in mesh.group(rank, placed.sp)]
    every = [parts.index(r) for peer in mesh.group(rank, placed.cp) for r in mesh.group(peer, placed.sp)]
    dealt = tuple((mesh.size((name,)), name in placed.cp) for name in axes)
    return SequenceTeams(team(axes), team(placed.sp), team(placed.cp), tuple(own), tuple(every), dealt, around)


def _tensor_groups(groups: RankGroups, axes: tuple[str, ...]) -> list[dist.ProcessGroup]:
    """One group per tp axis, then one over all of them."""
    return [*(groups.along((axis,)) for axis in axes), groups.along(axes)]


def _tied_parameters(model: nn.Module, structure: Structure) -> dict[str, tuple[str, ...]]:
    """The names in embedding and head of the parameters that both use, with the other names of each."""
    embed = structure.layer_parameters(model, 0)
    head = structure.layer_parameters(model, structure.num_blocks + 1)
    shared = {id(p) for p in embed.values()} & {id(p) for p in head.values()}
    both = [(name, id(p)) for name, p in (*embed.items(), *head.items()) if id(p) in shared]
    return {name: tuple(other for other, j in both if j == i and other != name) for name, i in both}


def _attach_streams(body: StageBody, plan: Plan, groups: RankGroups, seed: int) -> None:
    """A random stream for each block, the same on the ranks that hold the same samples."""
    for number, block in body.blocks().items():
        axes = plan.mesh.place(plan.strategies[number + 1]).dp
        place = plan.mesh.group(groups.rank, axes).index(groups.rank)
        BlockStream(block, seed=seed, number=number, place=place)


def _tensor_cuts(
    body: StageBody,
    plan: Plan,
    groups: RankGroups,
    block_plans: Mapping[int, BlockPlan],
    ends: Mapping[int, tuple[str, WordPlan]],
) -> dict[str, TensorParallelCut]:
    """How tensor parallelism cut each parameter of the stage that lies in a block or vocabulary which it cut."""
    found = {}
    for number, block_plan in block_plans.items():
        if block_plan.tp == 1:
            continue
        group = groups.along(plan.mesh.place(plan.strategies[number + 1]).tp)
        prefix = body.structure.paths[number] + "."
        for name in body.structure.layer_parameters(body.model, number + 1):
            found[name] = TensorParallelCut(plan=block_plan, name=name.removeprefix(prefix), group=group)
    for layer, (path, words) in ends.items():
        group = groups.along(plan.mesh.place(plan.strategies[layer]).tp)
        own = {id(p) for p in body.model.get_submodule(path).parameters(recurse=False)}
        for name, parameter in body.layer_parameters(layer).items():
            if id(parameter) in own:
                found[name] = TensorParallelCut(plan=words, name=name, group=group)
    return found
