"""What a given plan costs: the simulated step and the peak of every rank. Prices any plan, also one never searched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import ceil, exp
from typing import TypedDict

from autopar.axes import Layout, RankMesh
from autopar.boundaries import activation_bytes, crossing, doubled_bytes, made_bytes, parts_of
from autopar.cluster import ClusterSpec
from autopar.comm import seconds, shape_of
from autopar.layer_memory import Unit
from autopar.measured import GroupShape, LayerProfile, LinkProfile, Origin, weakest
from autopar.memory import ends_bytes, walk_stages
from autopar.model import ModelSpec
from autopar.orders import actions
from autopar.pipeline import Ending, StageTimes, Timeline, simulate, step
from autopar.plan import Plan, Prediction, RankMemory
from autopar.request import Schedule
from autopar.schedules import stage_rank
from autopar.sharing import Sharing
from autopar.strategy import Strategy
from autopar.streams import Row
from autopar.tables import kind_cost, layer_layout, shared_bytes
from autopar.work import Work, layer_work, relayout_s, send_s

CAUSES = ("compute", "tp_communication", "zero_communication", "relayout")
"""What the actions of a rank spend their time on."""

GLOBAL_SUM_BYTES = 16
"""The loss with its number of labels, and the norm of the gradient: an all-reduce over all ranks each."""


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """Seconds of one stage: of one micro-batch by cause (forward and backward), and once a step.

    gather_s: of ZeRO-2 layers, once between two backwards; not in the others. forward_row, backward_row: layer by
    layer, the forward with all its gathers.
    """

    forward_s: dict[str, float]
    backward_s: dict[str, float]
    gather_s: float
    forward_row: Row
    backward_row: Row
    sync_s: float
    optimizer_s: float
    origin: Origin

    @property
    def times(self) -> StageTimes:
        """The stage as the simulation sees it."""
        forward_s, backward_s = sum(self.forward_s.values()), sum(self.backward_s.values())
        return StageTimes(
            forward_s=forward_s,
            backward_s=backward_s,
            waiting_forward_s=forward_s - self.forward_s["compute"],
            waiting_backward_s=backward_s - self.backward_s["compute"],
            gather_s=self.gather_s,
        )

    def cause_s(self, cause: str) -> float:
        """Seconds of one micro-batch that go to a cause."""
        return self.forward_s[cause] + self.backward_s[cause] + self.gather_s * (cause == "zero_communication")


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What the simulation of a plan needs."""

    plan: Plan
    works: tuple[StageWork, ...]
    send_s: float
    ending: Ending
    sharing: Sharing | None

    @property
    def times(self) -> list[StageTimes]:
        """The stages in order."""
        return [work.times for work in self.works]

    @property
    def asked(self) -> Asked:
        """What stays the same whatever a send takes."""
        plan = self.plan
        return Asked(
            schedule=plan.schedule,
            micro_batches=plan.num_micro_batches,
            pp=plan.pp,
            ending=self.ending,
            sharing=self.sharing,
        )


class Asked(TypedDict):
    """Arguments of `simulate` and `step`."""

    schedule: Schedule
    micro_batches: int
    pp: int
    ending: Ending
    sharing: Sharing | None


@dataclass(kw_only=True)
class Known:
    """What pricing one plan found out that holds for other plans of the same request on the same files."""

    units: dict[tuple[str, Strategy, float, int, bool], Unit] = field(default_factory=dict)
    works: dict[tuple[int, int, str, Strategy, int], Work] = field(default_factory=dict)
    walks: dict[tuple[object, ...], RankMemory] = field(default_factory=dict)


def predict(
    plan: Plan,
    model: ModelSpec,
    layers: LayerProfile,
    cluster: ClusterSpec,
    links: LinkProfile,
    known: Known | None = None,
) -> Prediction:
    """The predicted step and its parts for the rank that the others wait for, and the peak of every rank.

    known: kept for other calls. O(layers + stages * micro-batches). Raises ValueError for a layer that was not
    measured as the plan runs it.
    """
    known = known or Known()
    found = simulated(plan, model, layers, cluster, links, known)
    ending, run = found.ending, partial(step, found.times, **found.asked)
    took = run(send_s=found.send_s)
    step_s = took.step_s
    free_s = run(send_s=0.0).step_s if found.send_s else step_s
    held = plan.stages_of_rank(took.last_rank)
    parts = {
        cause: plan.num_micro_batches * sum(found.works[stage].cause_s(cause) for stage in held) for cause in CAUSES
    }
    # Where ranks share cores, the compute takes what the others leave to it.
    parts["compute"] = max(0.0, parts["compute"] + took.busy_s - sum(parts.values()))
    at_an_end = not {0, plan.num_stages - 1}.isdisjoint(held)
    sync_s = ending.sync_s[took.last_rank] + ending.tied_s * at_an_end
    idle_s = max(0.0, took.ready_s - took.busy_s - sync_s)
    # What the sends add to the step; the rest of the waiting is the bubble.
    parts["p2p"] = min(idle_s, max(0.0, step_s - free_s))
    parts["bubble"] = idle_s - parts["p2p"]
    parts["gradient_sync"], parts["clip"] = sync_s, ending.clip_s
    parts["optimizer"] = max(ending.optimizer_s)
    by_rank = [rank_memory(plan, rank, model, layers, known) for rank in range(plan.pp)]
    memory = tuple(peak for peak in by_rank for _ in range(plan.mesh.ranks_per_stage))
    peaks = [peak.peak_bytes for peak in memory]
    return Prediction(
        step_s=step_s,
        parts_s=parts,
        memory=memory,
        worst_rank=peaks.index(max(peaks)),
        origin=weakest(*(work.origin for work in found.works)),
        step_s_interval=_interval_s(step_s, cluster),
    )


def _interval_s(step_s: float, cluster: ClusterSpec) -> tuple[float, float] | None:
    if cluster.calibration is None or not cluster.calibration.runs:
        return None
    factor = exp(cluster.calibration.log_spread)
    return step_s / factor, step_s * factor


def timeline(plan: Plan, model: ModelSpec, layers: LayerProfile, cluster: ClusterSpec, links: LinkProfile) -> Timeline:
    """The simulated step of a plan, operation by operation."""
    found = simulated(plan, model, layers, cluster, links)
    return simulate(found.times, send_s=found.send_s, **found.asked)


def simulated(
    plan: Plan,
    model: ModelSpec,
    layers: LayerProfile,
    cluster: ClusterSpec,
    links: LinkProfile,
    known: Known | None = None,
) -> Simulated:
    """The seconds of each stage of a plan, of what ends its step, and how its ranks share cores."""
    mesh, known = plan.mesh, known or Known()
    works = tuple(_stage_work(plan, s, model, layers, cluster, links, known) for s in range(plan.num_stages))
    held = [plan.stages_of_rank(rank) for rank in range(plan.pp)]
    world = RankMesh.of(world_size=mesh.world_size, ranks_per_node=cluster.ranks_per_node)
    everyone = shape_of(world, world.names, cluster.ranks_per_node)
    ending = Ending(
        sync_s=tuple(sum(works[stage].sync_s for stage in stages) for stages in held),
        tied_s=_tied_s(plan, model, cluster, links),
        clip_s=2 * seconds(links, "all_reduce", everyone, GLOBAL_SUM_BYTES).seconds,
        optimizer_s=tuple(sum(works[stage].optimizer_s for stage in stages) for stages in held),
    )
    sharing = None
    if cluster.compute_speedup:
        # The seconds of the layers were measured while so many ranks of a node computed.
        usual = cluster.compute_speedup[min(layers.processes, len(cluster.compute_speedup)) - 1]
        sharing = Sharing(
            speed=tuple(speed / usual for speed in cluster.compute_speedup),
            ranks_per_stage=mesh.ranks_per_stage,
            ranks_per_node=cluster.ranks_per_node,
        )
    one_send_s = send_s(mesh, cluster, links, _mean_sent_bytes(plan, model, layers))
    return Simulated(plan=plan, works=works, send_s=one_send_s, ending=ending, sharing=sharing)


def _mean_sent_bytes(plan: Plan, model: ModelSpec, layers: LayerProfile) -> float:
    """Of the ranks of a stage, what a send takes, the mean over boundaries and both ways."""
    width, stages = plan.mesh.ranks_per_stage, range(1, plan.num_stages)
    found = [crossing(model, layers, plan.stage_layers(s).start, plan.micro_batch, width) for s in stages]
    return width * sum((one.sent_bytes + one.back_bytes) / 2 for one in found) / max(1, len(found))


def _tied_s(plan: Plan, model: ModelSpec, cluster: ClusterSpec, links: LinkProfile) -> float:
    """Seconds of summing the gradient of parameters that the first and the last stage share, on different ranks."""
    last = stage_rank(plan.schedule, pp=plan.pp, stage=plan.num_stages - 1)
    size_bytes = shared_bytes(model, len(model.layers) - 1, pp=1)
    if last == 0 or not size_bytes:
        return 0.0
    width, strategy = plan.mesh.ranks_per_stage, plan.strategies[-1]
    ends = GroupShape.of(((0, last * width),), cluster.ranks_per_node)
    local_bytes = size_bytes / (strategy.state_shards if strategy.zero >= 2 else 1)
    return seconds(links, "all_reduce", ends, local_bytes).seconds


def rank_memory(
    plan: Plan,
    rank: int,
    model: ModelSpec,
    layers: LayerProfile,
    known: Known | None = None,
    moments: list[RankMemory] | None = None,
    most_bytes: int | None = None,
    working: list[int | None] | None = None,
) -> RankMemory:
    """The peak of the ranks of a pipeline rank over a step; moments and more: see autopar.memory.walk_stages."""
    known = known or Known()
    name = (
        plan.schedule,
        plan.pp,
        plan.num_micro_batches,
        plan.stages_per_rank,
        rank,
        *(
            part
            for stage in plan.stages_of_rank(rank)
            for span in (plan.stage_layers(stage),)
            for part in (stage, span.start, plan.strategies[0], plan.strategies[span.start : span.stop])
        ),
    )
    if name in known.walks and moments is None and working is None:
        return known.walks[name]
    stages: dict[int, list[Unit]] = {}
    held_bytes: dict[int, int] = {}
    buffers_bytes = 0
    for stage in plan.stages_of_rank(rank):
        stages[stage] = units = _stage_units(plan, stage, model, layers, known)
        fixed_bytes, held_bytes[stage] = _ends_bytes(plan, stage, model, layers)
        buffers_bytes += fixed_bytes
        if stage > 0 and not units[0].relayout:
            # Without a relayout the saved input of the first layer is the receive buffer itself.
            held_bytes[stage] -= min(units[0].input_bytes, units[0].kept_bytes)
    known.walks[name] = walk_stages(
        stages,
        actions(plan.schedule, plan.pp, rank, plan.num_micro_batches, plan.stages_per_rank),
        optimizer=plan.request.optimizer,
        buffers_bytes=buffers_bytes,
        held_bytes=held_bytes,
        moments=moments,
        most_bytes=most_bytes,
        working=working,
    )
    return known.walks[name]


def _ends_bytes(plan: Plan, stage: int, model: ModelSpec, layers: LayerProfile) -> tuple[int, int]:
    """What a stage keeps at its two ends: see autopar.memory.edge_bytes. With the sides that it makes itself."""
    span, samples, ranks = plan.stage_layers(stage), plan.micro_batch, plan.mesh.ranks_per_stage
    before = crossing(model, layers, span.start, samples, ranks) if stage > 0 else None
    behind = crossing(model, layers, span.stop, samples, ranks) if stage < plan.num_stages - 1 else None
    fixed_bytes, held_bytes = ends_bytes(
        received_bytes=ceil(before.sent_bytes) if before else 0,
        returned_bytes=ceil(behind.back_bytes) if behind else 0,
        sent_bytes=ceil(behind.hidden_bytes) if behind else 0,
        micro_batches=plan.num_micro_batches,
    )
    return fixed_bytes, held_bytes + ceil(made_bytes(layers, span, samples / ranks) if plan.pp > 1 else 0)


def _stage_units(plan: Plan, stage: int, model: ModelSpec, layers: LayerProfile, known: Known) -> list[Unit]:
    mesh, span, micro_batch = plan.mesh, plan.stage_layers(stage), plan.micro_batch
    units, arriving = [], mesh.boundary
    parts = parts_of(model, span, plan.pp)
    places = [part.layer for part in parts]
    for place, (part, layout) in enumerate(zip(parts, _layouts(mesh, plan, places), strict=True)):
        strategy = plan.strategies[part.layer]
        shared, samples = doubled_bytes(model, parts, place, strategy.tp), micro_batch / strategy.dp
        relayout = (part.layer > 0 or stage > 0 or place > 0) and arriving != layout
        key = (part.kind, strategy, samples, shared, relayout)
        if key not in known.units:
            cost = kind_cost(model, layers, part.kind, strategy)
            known.units[key] = Unit.of(
                cost, strategy, samples, shared_bytes=shared, relayout=relayout, dtype=layers.dtype
            )
        units.append(known.units[key])
        arriving = layout
    return units


def _layouts(mesh: RankMesh, plan: Plan, span: Sequence[int]) -> list[Layout]:
    """The layout of each layer; each strategy is looked up once."""
    last = len(plan.strategies) - 1
    keys = [(layer in (0, last), plan.strategies[layer]) for layer in span]
    found = {key: layer_layout(mesh, key[1], is_end=key[0]) for key in set(keys)}
    return [found[key] for key in keys]


def _stage_work(
    plan: Plan,
    stage: int,
    model: ModelSpec,
    layers: LayerProfile,
    cluster: ClusterSpec,
    links: LinkProfile,
    known: Known,
) -> StageWork:
    mesh, span = plan.mesh, plan.stage_layers(stage)
    moved_bytes = activation_bytes(model, layers, plan.micro_batch)
    forward, backward = dict.fromkeys(CAUSES, 0.0), dict.fromkeys(CAUSES, 0.0)
    parts = parts_of(model, span, plan.pp)
    layouts = _layouts(mesh, plan, [part.layer for part in parts])
    layouts.insert(0, mesh.boundary if stage > 0 else layouts[0])
    layouts.append(mesh.boundary if stage < plan.num_stages - 1 else layouts[-1])
    moves = [
        relayout_s(source, target, mesh=mesh, cluster=cluster, links=links, activation_bytes=moved_bytes)
        for source, target in pairwise(layouts)
    ]
    forward["relayout"] = sum(there_s for there_s, _ in moves)
    backward["relayout"] = sum(back_s for _, back_s in moves)
    works = []
    for place, part in enumerate(parts):
        strategy = plan.strategies[part.layer]
        shared = doubled_bytes(model, parts, place, strategy.tp)
        key = (plan.pp, plan.micro_batch, part.kind, strategy, shared)
        if key not in known.works:
            known.works[key] = layer_work(
                kind_cost(model, layers, part.kind, strategy),
                strategy,
                mesh=mesh,
                cluster=cluster,
                links=links,
                samples=plan.micro_batch / strategy.dp,
                optimizer=plan.request.optimizer,
                dtype=plan.request.dtype,
                shared_bytes=shared,
            )
        works.append(known.works[key])
    for work in works:
        forward["compute"] += work.forward_s
        backward["compute"] += work.backward_s
        forward["tp_communication"] += work.tp_forward_s + work.sequence_forward_s
        backward["tp_communication"] += work.tp_backward_s + work.sequence_backward_s
    # What moves an activation to its layer goes before it; what leaves the stage is added to the last.
    entering = [*moves[:-2], (moves[-2][0] + moves[-1][0], moves[-2][1] + moves[-1][1])]
    forwards = tuple(w.whole_forward_s - w.zero_forward_s + m[0] for w, m in zip(works, entering, strict=True))
    backwards = tuple(w.whole_backward_s - w.zero_backward_s + m[1] for w, m in zip(works, entering, strict=True))
    if plan.pp > 1:
        for times in (forward, backward):
            times["compute"] += cluster.pipeline_call_s / 2
    zeros = [plan.strategies[part.layer].zero for part in parts]
    whole, again = (
        tuple(w.gather_s * (z in kinds) for w, z in zip(works, zeros, strict=True)) for kinds in ((2, 3), (3,))
    )
    nothing = (0.0,) * len(works)
    # Collectives run beside the compute, one layer ahead; where that was not measured, each is waited for.
    slowdown = links.overlap_slowdown if links.overlap_origin != "assumed" else None
    warm, cold = (
        Row(computes_s=forwards, gathers_s=gathers, reduces_s=nothing, slowdown=slowdown) for gathers in (again, whole)
    )
    back = Row(
        computes_s=backwards[::-1],
        gathers_s=again[::-1],
        reduces_s=tuple(work.reduce_s for work in reversed(works)),
        slowdown=slowdown,
    )
    forward["zero_communication"], backward["zero_communication"] = warm.added_s, back.added_s
    return StageWork(
        forward_s=forward,
        backward_s=backward,
        gather_s=max(0.0, cold.added_s - warm.added_s),
        forward_row=cold,
        backward_row=back,
        sync_s=sum(work.sync_s for work in works),
        optimizer_s=sum(work.optimizer_s for work in works),
        origin=weakest(*(work.origin for work in works)),
    )
