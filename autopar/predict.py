"""What a given plan costs: the simulated step and the peak of every rank. Prices any plan, also one never searched."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil

from autopar.axes import Layout, RankMesh
from autopar.cluster import ClusterSpec
from autopar.measured import LayerProfile, LinkProfile, Origin, weakest
from autopar.memory import Unit, edge_bytes, walk
from autopar.model import ModelSpec
from autopar.pipeline import StageTimes, Timeline, actions, simulate
from autopar.plan import Plan, Prediction, RankMemory
from autopar.strategy import Strategy
from autopar.tables import activation_bytes, layer_cost, shared_bytes
from autopar.work import layer_work, relayout_s, send_s


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
    line = _simulate(plan, works, _send_s(plan, model, layers, cluster, links))
    free = _simulate(plan, works, 0.0)
    last, count = works[line.last_stage], plan.num_micro_batches
    parts = {
        name: count * (last.forward_s[name] + last.backward_s[name])
        for name in ("compute", "tp_communication", "zero_communication", "relayout")
    }
    idle_s = max(0.0, line.step_s - line.busy_s(line.last_stage))
    # What the sends add to the step; the rest of the waiting is the bubble.
    parts["p2p"] = min(idle_s, max(0.0, line.step_s - free.step_s))
    parts["bubble"] = idle_s - parts["p2p"]
    parts["gradient_sync"], parts["optimizer"] = last.sync_s, last.optimizer_s
    by_stage = [stage_memory(plan, stage, model, layers) for stage in range(plan.pp)]
    memory = tuple(peak for peak in by_stage for _ in range(plan.mesh.ranks_per_stage))
    peaks = [peak.peak_bytes for peak in memory]
    return Prediction(
        step_s=line.step_s,
        parts_s=parts,
        memory=memory,
        worst_rank=peaks.index(max(peaks)),
        origin=weakest(*(work.origin for work in works)),
    )


def timeline(plan: Plan, model: ModelSpec, layers: LayerProfile, cluster: ClusterSpec, links: LinkProfile) -> Timeline:
    """The simulated step of a plan, operation by operation."""
    works = stage_works(plan, model, layers, cluster, links)
    return _simulate(plan, works, _send_s(plan, model, layers, cluster, links))


def stage_works(
    plan: Plan, model: ModelSpec, layers: LayerProfile, cluster: ClusterSpec, links: LinkProfile
) -> tuple[StageWork, ...]:
    """The seconds of each stage of a plan, by cause."""
    return tuple(_stage_work(plan, stage, model, layers, cluster, links) for stage in range(plan.pp))


def stage_memory(plan: Plan, stage: int, model: ModelSpec, layers: LayerProfile) -> RankMemory:
    """The peak of each rank of a stage over a step."""
    mesh, first = plan.mesh, plan.stage_layers(stage)[0]
    moved_bytes = ceil(activation_bytes(model, layers, plan.micro_batch) / mesh.ranks_per_stage)
    buffers_bytes, held_bytes = edge_bytes(moved_bytes, stage=stage, pp=plan.pp, micro_batches=plan.num_micro_batches)
    units = []
    for layer in plan.stage_layers(stage):
        strategy = plan.strategies[layer]
        arriving = _layout(mesh, plan.strategies[layer - 1]) if layer > first else mesh.boundary
        units.append(
            Unit.of(
                layer_cost(model, layers, layer, strategy),
                strategy,
                plan.micro_batch / strategy.dp,
                shared_bytes=shared_bytes(model, layer, plan.pp),
                relayout=layer > 0 and arriving != _layout(mesh, strategy),
            )
        )
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


@lru_cache(maxsize=4096)
def _layout(mesh: RankMesh, strategy: Strategy) -> Layout:
    return mesh.place(strategy).layout


def _send_s(plan: Plan, model: ModelSpec, layers: LayerProfile, cluster: ClusterSpec, links: LinkProfile) -> float:
    return send_s(plan.mesh, cluster, links, activation_bytes(model, layers, plan.micro_batch))


def _simulate(plan: Plan, works: tuple[StageWork, ...], one_send_s: float) -> Timeline:
    return simulate(
        [work.times for work in works],
        schedule=plan.schedule,
        micro_batches=plan.num_micro_batches,
        send_s=one_send_s,
    )


def _stage_work(
    plan: Plan, stage: int, model: ModelSpec, layers: LayerProfile, cluster: ClusterSpec, links: LinkProfile
) -> StageWork:
    mesh, span = plan.mesh, plan.stage_layers(stage)
    moved_bytes = activation_bytes(model, layers, plan.micro_batch)
    causes = ("compute", "tp_communication", "zero_communication", "relayout")
    forward, backward = dict.fromkeys(causes, 0.0), dict.fromkeys(causes, 0.0)
    sync_s = optimizer_s = 0.0
    origins = []
    layouts = [_layout(mesh, plan.strategies[layer]) for layer in span]
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
        work = layer_work(
            layer_cost(model, layers, layer, strategy),
            strategy,
            mesh=mesh,
            cluster=cluster,
            links=links,
            samples=plan.micro_batch / strategy.dp,
            optimizer=plan.request.optimizer,
        )
        forward["compute"] += work.forward_s
        backward["compute"] += work.backward_s
        forward["tp_communication"] += work.tp_forward_s
        backward["tp_communication"] += work.tp_backward_s
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
