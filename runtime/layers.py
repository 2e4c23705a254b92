"""The strategies of a plan put onto one stage: tensor parallelism, recompute, relayout, ZeRO, in that order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.axes import Layout, Placement, RankMesh
from autopar.plan import Plan
from autopar.runtime.arguments import argument, replace_argument
from autopar.runtime.gradients import HeldParameter, TensorParallelCut
from autopar.runtime.groups import RankGroups
from autopar.runtime.precision import Masters
from autopar.runtime.randomness import BlockStream, agreed_seed
from autopar.runtime.relayout import GroupOf, relayout
from autopar.runtime.shares import shards_of, tensor_share
from autopar.runtime.spec import DescribedModel
from autopar.runtime.stage import LossFunction, StageBody, StageModule, same_tensors_again
from autopar.runtime.stepping import stand_in
from autopar.runtime.structure import Probe, Structure
from autopar.runtime.vocabulary import WordPlan, cut_ends, vocabulary_ends
from autopar.runtime.vocabulary_check import check_end, measure_ends
from autopar.runtime.zero import owners, shard_modules, shard_root
from autopar.schedules import SPLIT_BACKWARD

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
) -> LocalLayers:
    """The layers of this rank's stages under their strategies; changes the model in place.

    Further stages of this rank get trees of modules of their own, which hold the same model's other layers.
    batch: a small example, for the check of vocabulary-parallel ends.
    """
    mesh, structure = plan.mesh, found.structure
    placed = [mesh.place(strategy) for strategy in plan.strategies]
    extra = {axes for p in placed for tp in ((), p.tp) for axes in _axes_of_copies(mesh, p, tp)}
    extra |= {axes for p in placed for axes in (p.cp, tuple(n for n in mesh.names if n in {*p.sp, *p.cp}))}
    groups.prepare(placed, extra)
    tied = _tied_parameters(model, structure)
    seed = agreed_seed()
    numbers = plan.stages_of_rank(groups.stage)
    models = [model, *(same_tensors_again(model) for _ in numbers[1:])]
    stages: dict[int, StageModule] = {}
    cuts: dict[str, TensorParallelCut] = {}
    checked: set[Any] = set()
    cut_parameters: dict[nn.Parameter, nn.Parameter] = {}
    for number, tree in zip(numbers, models, strict=True):
        body = StageBody(tree, structure, plan.stage_layers(number))
        stages[number] = StageModule(body, loss)
        ends = _cut_ends(stages[number], plan, found, groups, batch, cut_parameters)
        block_plans = _cut_blocks(body, plan, found, described, groups, checked)
        cuts |= _tensor_cuts(body, plan, groups, block_plans, ends)
        for place, block in body.blocks().items():
            if plan.strategies[place + 1].recompute == "full":
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        _attach_relayouts(body, plan, groups)
        _attach_streams(body, plan, groups, seed)
        _shard(stages[number], plan, groups, masters, cuts)
        body.attach_ends()
    return LocalLayers(stages=stages, held=tuple(_held(stages, plan, groups, masters, cuts, tied)))


def _axes_of_copies(mesh: RankMesh, placed: Placement, tp: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Over which axes the gradients of a layer are summed, and which of them repeat what ZeRO shards.

    Other samples lie along dp, other parts of the sequence along sp and cp; and parameters of embedding and head that
    are not of the vocabulary work on other samples along `tp` too.
    """
    cut = {*placed.sp, *placed.cp, *tp}
    summed = tuple(name for name in mesh.names if name in {*placed.dp, *cut})
    return summed, tuple(name for name in mesh.names if name in {*placed.dp_replicate, *cut})


def _cut_ends(
    stage: StageModule,
    plan: Plan,
    found: Probe,
    groups: RankGroups,
    batch: Mapping[str, Tensor],
    known: dict[nn.Parameter, nn.Parameter],
) -> Mapping[int, tuple[str, WordPlan]]:
    """The vocabulary-parallel ends of a stage, after cutting them for this rank and checking every gradient.

    known: the local parameters of this rank's earlier stages, which tied ends share.
    """
    ends = vocabulary_ends(plan, found, stage.body.layers)
    if not ends:
        return {}
    before = measure_ends(stage, ends, batch, groups.place)
    cut = cut_ends(stage.body, plan, ends, groups, known)
    after = measure_ends(stage, ends, batch, groups.place)
    for layer, (_, words) in cut.items():
        group = groups.along(plan.mesh.place(plan.strategies[layer]).tp)
        check_end(layer, before[layer], after[layer], words, group)
    return cut


def _cut_blocks(
    body: StageBody,
    plan: Plan,
    found: Probe,
    described: DescribedModel,
    groups: RankGroups,
    checked: set[Any],
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
        from autopar.runtime.tensor_parallel import apply, check_plan

        placed = mesh.place(strategy)
        axes = placed.tp
        sizes = tuple(mesh.size((axis,)) for axis in axes)
        block_plan = described.derivations[kind].plan(sizes, strategy.sequence_norms, strategy.sp, strategy.cp)
        where = mesh.coordinates(groups.rank)
        coordinate = tuple(where[axis] for axis in axes)
        tensor_groups = _tensor_groups(groups, axes) if axes else []
        sharing = _sharing(groups, placed) if strategy.sp * strategy.cp > 1 else None
        key = (kind, axes, strategy.sequence_norms, placed.sp, placed.cp)
        if key not in checked:
            checked.add(key)
            args, kwargs = found.inputs[kind].args, found.inputs[kind].kwargs
            check_plan(block, block_plan, tensor_groups, coordinate, args, kwargs, sharing=sharing)
        apply(block, block_plan, tensor_groups, coordinate, sharing=sharing)
        cut[number] = block_plan
    return cut


def _sharing(groups: RankGroups, placed: Placement) -> SequenceTeams:
    """The ranks that share the sequence of this rank's samples in a layer placed so."""
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
    return SequenceTeams(team(axes), team(placed.sp), team(placed.cp), tuple(own), tuple(every))


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


def _attach_relayouts(body: StageBody, plan: Plan, groups: RankGroups) -> None:
    """Hooks that move the hidden state from layout to layout, beginning and ending in that of the boundary."""
    mesh, structure = plan.mesh, body.structure
    before = mesh.boundary
    blocks = body.blocks()

    def group_of(axis: str) -> dist.ProcessGroup:
        return groups.along((axis,))

    for number, block in blocks.items():
        layout = mesh.place(plan.strategies[number + 1]).layout
        hook = _Entry(structure, source=before, boundary=mesh.boundary, target=layout, group_of=group_of)
        if hook.needed:
            block.register_forward_pre_hook(hook, with_kwargs=True)
        before = layout
    if blocks and before != mesh.boundary:
        last = blocks[max(blocks)]
        last.register_forward_hook(_exit(structure, before, mesh.boundary, group_of))


class _Entry:
    """A pre-hook that brings a block's inputs into its layout: the hidden state from `source`, the rest from outside.

    Side inputs that carry the batch come from the model's forward, which runs in the boundary layout.
    """

    def __init__(
        self, structure: Structure, *, source: Layout, boundary: Layout, target: Layout, group_of: GroupOf
    ) -> None:
        self.structure, self.group_of = structure, group_of
        self.source, self.boundary, self.target = source, boundary, target

    @property
    def needed(self) -> bool:
        return self.source != self.target or bool(
            self.structure.batch_inputs and self.boundary.batch != self.target.batch
        )

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = argument(args, kwargs, self.structure.hidden)
        moved = relayout(hidden, self.source, self.target, self.group_of)
        args, kwargs = replace_argument(args, kwargs, self.structure.hidden, moved)
        for key, dim in self.structure.batch_inputs:
            value = argument(args, kwargs, key)
            if isinstance(value, Tensor):
                whole, local = Layout(batch=self.boundary.batch), Layout(batch=self.target.batch)
                value = relayout(value, whole, local, self.group_of, batch_dim=dim)
                args, kwargs = replace_argument(args, kwargs, key, value)
        return args, kwargs


def _exit(structure: Structure, source: Layout, target: Layout, group_of: GroupOf) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        moved = relayout(structure.hidden_in(output), source, target, group_of)
        return (moved, *output[1:]) if structure.output_length else moved

    return hook


def _attach_streams(body: StageBody, plan: Plan, groups: RankGroups, seed: int) -> None:
    """A random stream for each block, the same on the ranks that hold the same samples."""
    for number, block in body.blocks().items():
        axes = plan.mesh.place(plan.strategies[number + 1]).dp
        place = plan.mesh.group(groups.rank, axes).index(groups.rank)
        BlockStream(block, seed=seed, number=number, place=place)


def _modules_of(body: StageBody, layer: int) -> list[nn.Module]:
    """The modules that hold the parameters of a layer: the block, or the owners of those of embedding or head."""
    if 0 < layer <= body.structure.num_blocks:
        return [body.blocks()[layer - 1]]
    structure = body.structure
    return owners(body.model, structure.embed_parameters if layer == 0 else structure.head_parameters)


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
        prefix = body.structure.block_path(number) + "."
        for name in body.structure.layer_parameters(body.model, number + 1):
            found[name] = TensorParallelCut(plan=block_plan, name=name.removeprefix(prefix), group=group)
    for layer, (path, words) in ends.items():
        group = groups.along(plan.mesh.place(plan.strategies[layer]).tp)
        own = {id(p) for p in body.model.get_submodule(path).parameters(recurse=False)}
        for name, parameter in body.structure.layer_parameters(body.model, layer).items():
            if id(parameter) in own:
                found[name] = TensorParallelCut(plan=words, name=name, group=group)
    return found


def _shard(
    stage: StageModule, plan: Plan, groups: RankGroups, masters: Masters, cuts: Mapping[str, TensorParallelCut]
) -> None:
    """Wrap the ZeRO layers of the stage; embedding and head go together when they share parameters."""
    body = stage.body
    mesh, structure = plan.mesh, body.structure
    last = structure.num_blocks + 1
    sharded = [layer for layer in body.layers if plan.strategies[layer].zero >= 2]
    if not sharded:
        return
    for layer in sharded:
        for name, parameter in structure.layer_parameters(body.model, layer).items():
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
        for part, tp in ((cut_modules, ()), (rest, placed.tp if outside else ())):
            if part:
                device_mesh = groups.mesh_along(placed.dp_shard, _axes_of_copies(mesh, placed, tp)[1])
                shard_modules(part, device_mesh, keep_unsharded=strategy.zero == 2, gathered=masters.dtype)
    named = {id(p) for layer in sharded for p in structure.layer_parameters(body.model, layer).values()}
    ignored = {p for p in body.parameters() if id(p) not in named}
    split = plan.pp > 1 and plan.schedule in SPLIT_BACKWARD
    shard_root(stage if split else body, groups.mesh_along(mesh.names), ignored, gathered=masters.dtype)


def _contains_blocks(module: nn.Module, body: StageBody) -> bool:
    blocks = body.structure.block_list(body.model)
    return any(child is blocks for child in module.modules())


def _held(
    stages: Mapping[int, StageModule],
    plan: Plan,
    groups: RankGroups,
    masters: Masters,
    cuts: Mapping[str, TensorParallelCut],
    tied: Mapping[str, tuple[str, ...]],
) -> list[HeldParameter]:
    """Every parameter of the stages once, under the name of the first layer that uses it."""
    mesh = plan.mesh
    found: list[HeldParameter] = []
    seen: set[int] = set()
    across, last = plan.num_stages > 1, len(plan.strategies) - 1
    for body, layer in ((stage.body, layer) for stage in stages.values() for layer in stage.body.layers):
        structure = body.structure
        strategy = plan.strategies[layer]
        placed = mesh.place(strategy)
        for name, parameter in structure.layer_parameters(body.model, layer).items():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            rows = groups.along(placed.dp_shard) if strategy.zero == 1 and parameter.dim() else None
            cut = cuts.get(name)
            along_tp = placed.tp if layer in (0, last) and cut is None else ()
            copies, replicas = _axes_of_copies(mesh, placed, along_tp)
            share: float | Tensor = shards_of(parameter, rows) / mesh.size(copies)
            if cut is not None:
                share = share * tensor_share(cut, parameter, rows)
            master = masters.of(name, parameter, None if cut is None else cut.piece)
            in_both = across and name in tied
            summed = () if strategy.zero > 1 else copies if rows is None else replicas
            found.append(
                HeldParameter(
                    name=name,
                    layer=layer,
                    parameter=parameter,
                    stepped=stand_in(parameter, rows, master),
                    rows=rows,
                    group=groups.along(summed) if summed else None,
                    share=share,
                    tied=in_both,
                    counted=not (in_both and layer > 0),
                    aliases=tied.get(name, ()),
                    tensor_parallel=cut,
                )
            )
    return found
