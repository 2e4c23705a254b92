"""What a given plan costs: the simulated step and the peak of every rank. Prices any plan, also one never searched."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import ceil

from autopar.axes import Layout, RankMesh
from autopar.cluster import ClusterSpec
from autopar.measured import LayerProfile, LinkProfile, Origin, weakest
from autopar.memory import Unit, edge_bytes, walk
from autopar.model import ModelSpec
from autopar.pipeline import StageTimes, Timeline, actions, simulate, step
from autopar.plan import Plan, Prediction, RankMemory
from autopar.strategy import Strategy
from autopar.tables import activation_bytes, layer_cost, layer_layout, shared_bytes
from autopar.work import Work, layer_work, relayout_s, send_s


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """Seconds of one stage: of one micro-batch by cause (forward and backward), and once a step."""

    forward_s: dict[str, float]
    backward_s: dict[str, float]
    sync_s: float
    optimizer_s: float
    origin: Origin

    @property
    def times(self) -> StageTimes:
        """The stage as the simulation sees it."""
        return StageTimes(
            forward_s=sum(self.forward_s.values()),
            backward_s=sum(self.backward_s.values()),
            tail_s=self.sync_s + self.optimizer_s,
        )


def predict(
    plan: Plan, model: ModelSpec, layers: LayerProfile, cluster: ClusterSpec, links: LinkProfile
) -> Prediction:
    """The predicted step and its parts for the stage that ends last, and the peak of every rank with its parts.

    O(layers * micro-batches). Raises ValueError for a layer that was not measured as the plan runs it.
    """
    works = stage_works(plan, model, layers, cluster, links)
    times, count = [work.times for work in works], plan.num_micro_batches
    one_send_s = _send_s(plan, model, layers, cluster, links)
    step_s, last_stage = step(times, schedule=plan.schedule, micro_batches=count, send_s=one_send_s)
    free_s, _ = step(times, schedule=plan.schedule, micro_batches=count, send_s=0.0) if one_send_s else (step_s, 0)
    last, ends = works[last_stage], times[last_stage]
    parts = {
        name: count * (last.forward_s[name] + last.backward_s[name])
        for name in ("compute", "tp_communication", "zero_communication", "relayout")
    }
    idle_s = max(0.0, step_s - count * (ends.forward_s + ends.backward_s) - ends.tail_s)
    # What the sends add to the step; the rest of the waiting is the bubble.
    parts["p2p"] = min(idle_s, max(0.0, step_s - free_s))
    parts["bubble"] = idle_s - parts["p2p"]
    parts["gradient_sync"], parts["optimizer"] = last.sync_s, last.optimizer_s
    units: Units = {}
    by_stage = [stage_memory(plan, stage, model, layers, units) for stage in range(plan.pp)]
    memory = tuple(peak for peak in by_stage for _ in range(plan.mesh.ranks_per_stage))
    peaks = [peak.peak_bytes for peak in memory]
    return Prediction(
        step_s=step_s,
        parts_s=parts,
        memory=memory,
        worst_rank=peaks.index(max(peaks)),
        origin=weakest(*(work.origin for work in works)),
    )


def timeline(plan: Plan, model: ModelSpec, layers: LayerProfile, cluster: ClusterSpec, links: LinkProfile) -> Timeline:
    """The simulated step of a plan, operation by operation."""
    works = stage_works(plan, model, layers, cluster, links)
    return simulate(
        [work.times for work in works],
        schedule=plan.schedule,
        micro_batches=plan.num_micro_batches,
        send_s=_send_s(plan, model, layers, cluster, links),
    )


def stage_works(
    plan: Plan, model: ModelSpec, layers: LayerProfile, cluster: ClusterSpec, links: LinkProfile
) -> tuple[StageWork, ...]:
    """The seconds of each stage of a plan, by cause."""
    known: dict[tuple[str, Strategy], Work] = {}
    return tuple(_stage_work(plan, stage, model, layers, cluster, links, known) for stage in range(plan.num_stages))


Units = dict[tuple[str, Strategy, float, int, bool], Unit]


def stage_memory(
    plan: Plan, stage: int, model: ModelSpec, layers: LayerProfile, known: Units | None = None
) -> RankMemory:
    """The peak of each rank of a stage over a step; `known` keeps units from one call to the next."""
    known = {} if known is None else known
    mesh, first = plan.mesh, plan.stage_layers(stage)[0]
    moved_bytes = ceil(activation_bytes(model, layers, plan.micro_batch) / mesh.ranks_per_stage)
    buffers_bytes, held_bytes = edge_bytes(moved_bytes, stage=stage, pp=plan.pp, micro_batches=plan.num_micro_batches)
    units = []
    for layer in plan.stage_layers(stage):
        strategy = plan.strategies[layer]
        arriving = _layout(mesh, plan, layer - 1) if layer > first else mesh.boundary
        shared, samples = shared_bytes(model, layer, plan.pp, strategy.tp), plan.micro_batch / strategy.dp
        relayout = layer > 0 and arriving != _layout(mesh, plan, layer)
        key = (model.layers[layer], strategy, samples, shared, relayout)
        if key not in known:
            cost = layer_cost(model, layers, layer, strategy)
            known[key] = Unit.of(cost, strategy, samples, shared_bytes=shared, relayout=relayout)
        units.append(known[key])
    if stage > 0 and not units[0].relayout:
        # Without a relayout the saved input of the first layer is the receive buffer itself.
        held_bytes -= min(units[0].input_bytes, units[0].kept_bytes)
    return walk(
        units,
        actions(plan.schedule, plan.pp, stage, plan.num_micro_batches),
        optimizer=plan.request.optimizer,
        buffers_bytes=buffers_bytes,
        held_bytes=held_bytes,
    )


def _layout(mesh: RankMesh, plan: Plan, layer: int) -> Layout:
    return layer_layout(mesh, plan.strategies[layer], is_end=layer in (0, len(plan.strategies) - 1))


def _send_s(plan: Plan, model: ModelSpec, layers: LayerProfile, cluster: ClusterSpec, links: LinkProfile) -> float:
    return send_s(plan.mesh, cluster, links, activation_bytes(model, layers, plan.micro_batch))


def _stage_work(
    plan: Plan,
    stage: int,
    model: ModelSpec,
    layers: LayerProfile,
    cluster: ClusterSpec,
    links: LinkProfile,
    known: dict[tuple[str, Strategy], Work],
) -> StageWork:
    mesh, span = plan.mesh, plan.stage_layers(stage)
    moved_bytes = activation_bytes(model, layers, plan.micro_batch)
    causes = ("compute", "tp_communication", "zero_communication", "relayout")
    forward, backward = dict.fromkeys(causes, 0.0), dict.fromkeys(causes, 0.0)
    sync_s = optimizer_s = 0.0
    origins = []
    layouts = [_layout(mesh, plan, layer) for layer in span]
    if stage > 0:
        layouts.insert(0, mesh.boundary)
    if stage < plan.pp - 1:
        layouts.append(mesh.boundary)
    for source, target in pairwise(layouts):
        there_s, back_s = relayout_s(
            source, target, mesh=mesh, cluster=cluster, links=links, activation_bytes=moved_bytes
        )
        forward["relayout"] += there_s
        backward["relayout"] += back_s
    for layer in span:
        strategy = plan.strategies[layer]
        key = (model.layers[layer], strategy)
        if key not in known:
            known[key] = layer_work(
                layer_cost(model, layers, layer, strategy),
                strategy,
                mesh=mesh,
                cluster=cluster,
                links=links,
                samples=plan.micro_batch / strategy.dp,
                optimizer=plan.request.optimizer,
            )
        work = known[key]
        forward["compute"] += work.forward_s
        backward["compute"] += work.backward_s
        forward["tp_communication"] += work.tp_forward_s + work.sequence_forward_s
        backward["tp_communication"] += work.tp_backward_s + work.sequence_backward_s
        forward["zero_communication"] += work.zero_forward_s
        backward["zero_communication"] += work.zero_backward_s
        sync_s += work.sync_s
        optimizer_s += work.optimizer_s
        origins.append(work.origin)
    return StageWork(
        forward_s=forward,
        backward_s=backward,
        sync_s=sync_s,
        optimizer_s=optimizer_s,
        origin=weakest(*origins),
    )
