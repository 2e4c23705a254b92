"""The tables that a solver optimises over, for one number of stages and micro-batches and one schedule."""

from __future__ import annotations

from itertools import accumulate
from math import ceil
from typing import Literal

import numpy as np

from autopar.axes import Layout, RankMesh
from autopar.cluster import ClusterSpec
from autopar.measured import LayerCost, LayerProfile, LinkProfile
from autopar.memory import Bound, Unit, edge_bytes, lower_bound, upper_bound
from autopar.model import ModelSpec
from autopar.pipeline import in_flight
from autopar.price import INFEASIBLE, CostTables
from autopar.request import Request, Schedule
from autopar.space import StrategySpace
from autopar.strategy import Strategy
from autopar.units import DTYPE_BYTES, NS_PER_S
from autopar.work import Work, layer_work, relayout_s, send_s


def tables(
    model: ModelSpec,
    layers: LayerProfile,
    cluster: ClusterSpec,
    links: LinkProfile,
    request: Request,
    *,
    pp: int,
    num_micro_batches: int,
    schedule: Schedule,
    memory: Literal["upper", "near", "lower"] = "upper",
) -> CostTables:
    """The costs of every layer under every legal strategy, rounded up once to nanoseconds and bytes.

    memory "upper": bounds that the simulated peak never exceeds, so that whatever fits the table fits; "lower": that
    it never goes below, so that no plan that fits is left out; "near": no bound, what a stage of like neighbours
    needs. Times are the same in all. O(kinds * strategies +
    layouts^2). Raises InputError when a pin or a layer has no legal strategy.
    """
    mesh = RankMesh.of(world_size=cluster.world_size, pp=pp, ranks_per_node=cluster.ranks_per_node)
    micro_batch = request.global_batch // num_micro_batches
    space = StrategySpace.of(model, layers, mesh, request, micro_batch)
    count, num_layers = len(space.strategies), len(model.layers)
    live = tuple(in_flight(schedule, pp, stage, num_micro_batches) for stage in range(pp))
    # Where stages differ, each bound assumes what is safe for it.
    steady = (all if memory == "lower" else any)(now < num_micro_batches for now in live)

    time_ns = np.full((num_layers, count), INFEASIBLE, dtype=np.int64)
    state, saved, transient = (np.zeros((num_layers, count), dtype=np.int64) for _ in range(3))
    works: dict[tuple[str, int], Work] = {}
    units: dict[tuple[int, int], Unit] = {}
    for layer, allowed in enumerate(space.allowed):
        for s in allowed:
            strategy = space.strategies[s]
            cost, samples = layer_cost(model, layers, layer, strategy), micro_batch / strategy.dp
            key = (model.layers[layer], s)
            if key not in works:
                works[key] = layer_work(
                    cost,
                    strategy,
                    mesh=mesh,
                    cluster=cluster,
                    links=links,
                    samples=samples,
                    optimizer=request.optimizer,
                )
            work = works[key]
            step_s = work.sync_s + work.optimizer_s
            time_ns[layer, s] = _ns(work.whole_forward_s + work.whole_backward_s + step_s / num_micro_batches)
            units[layer, s] = Unit.of(cost, strategy, samples, shared_bytes=shared_bytes(model, layer, pp))

    for (layer, s), bound in _bounds(units, space, request, memory=memory, steady=steady).items():
        state[layer, s], saved[layer, s] = bound.state_bytes, bound.saved_bytes
        transient[layer, s] = bound.transient_bytes

    moved_bytes = activation_bytes(model, layers, micro_batch)
    places = [mesh.place(strategy).layout for strategy in space.strategies]
    layouts = list(dict.fromkeys(places))
    layout = np.array([layouts.index(place) for place in places], dtype=np.int64)

    def move_ns(source: Layout, target: Layout) -> int:
        pair = relayout_s(source, target, mesh=mesh, cluster=cluster, links=links, activation_bytes=moved_bytes)
        return _ns(sum(pair))

    between = np.array([[move_ns(a, b) for b in layouts] for a in layouts], dtype=np.int64)
    budget = request.memory_bytes or cluster.memory_bytes
    edge = ceil(moved_bytes / mesh.ranks_per_stage)
    ends = [edge_bytes(edge, stage=stage, pp=pp, micro_batches=num_micro_batches) for stage in range(pp)]
    if memory == "lower":
        # The saved input of the first layer may be the receive buffer itself: it counts once.
        ends = [
            (fixed - now * edge * (stage > 0), held)
            for stage, (now, (fixed, held)) in enumerate(zip(live, ends, strict=True))
        ]
    kept_at_ends = [fixed + now * held for now, (fixed, held) in zip(live, ends, strict=True)]
    return CostTables(
        stages=pp,
        micro_batches=num_micro_batches,
        schedule=schedule,
        strategies=space.strategies,
        time_ns=time_ns,
        state_bytes=state,
        saved_bytes=saved,
        transient_bytes=transient,
        transition_ns=between[np.ix_(layout, layout)],
        entry_ns=np.array([move_ns(mesh.boundary, place) for place in layouts], dtype=np.int64)[layout],
        exit_ns=np.array([move_ns(place, mesh.boundary) for place in layouts], dtype=np.int64)[layout],
        p2p_ns=_ns(2 * send_s(mesh, cluster, links, moved_bytes)),
        layout=layout,
        in_flight=live,
        budget_bytes=tuple(max(0, budget - kept) for kept in kept_at_ends),
        tied=model.tied,
    )


def _bounds(
    units: dict[tuple[int, int], Unit],
    space: StrategySpace,
    request: Request,
    *,
    memory: Literal["upper", "near", "lower"],
    steady: bool,
) -> dict[tuple[int, int], Bound]:
    """The memory of each layer under each strategy, whatever the strategies of the others."""
    if memory == "lower":
        end = len(space.allowed) - 1
        return {
            (layer, s): lower_bound(unit, optimizer=request.optimizer, steady=steady, last=layer == end)
            for (layer, s), unit in units.items()
        }
    rows = [[units[layer, s] for s in allowed] for layer, allowed in enumerate(space.allowed)]
    gathered = [max((unit.parameter_bytes for unit in row if unit.zero), default=0) for row in rows]
    if memory == "near":
        return {
            (layer, s): upper_bound(
                unit,
                optimizer=request.optimizer,
                steady=steady,
                before_bytes=gathered[layer - 1] if unit.zero and layer else 0,
                after_bytes=[*gathered, 0][layer + 1] if unit.zero else 0,
            )
            for (layer, s), unit in units.items()
        }
    before = [0, *accumulate(gathered, max)]
    after = [0, *accumulate(reversed(gathered), max)][::-1]
    arriving = [0, *(max(unit.output_bytes for unit in row) for row in rows)]
    return {
        (layer, s): upper_bound(
            unit,
            optimizer=request.optimizer,
            steady=steady,
            before_bytes=before[layer],
            after_bytes=after[layer + 1],
            arriving_bytes=arriving[layer],
        )
        for (layer, s), unit in units.items()
    }


def layer_cost(model: ModelSpec, layers: LayerProfile, layer: int, strategy: Strategy) -> LayerCost:
    """What was measured of the layer at this place of the chain; ValueError when that strategy was not."""
    cost = layers.find(model.layers[layer], strategy.tp, strategy.sequence_norms)
    if cost is None:
        raise ValueError(f"layer {model.layer_names[layer]} was not measured as {strategy}")
    return cost


def activation_bytes(model: ModelSpec, layers: LayerProfile, samples: float) -> float:
    """Bytes of the whole activation between two layers for so many samples: the largest input of a block."""
    inputs = []
    for kind in model.kinds:
        cost = layers.find(kind.name)
        if kind.role == "block" and cost is not None:
            inputs.append(cost.input_bytes.at(samples))
    if not inputs:
        return samples * layers.sequence * model.hidden_size * DTYPE_BYTES[layers.dtype]
    return max(inputs)


def shared_bytes(model: ModelSpec, layer: int, pp: int) -> int:
    """Bytes of a layer's parameters that are those of another layer of the same stage: the head's of a tied model."""
    if not model.tied or pp > 1 or layer != len(model.layers) - 1:
        return 0
    embed = [(p.shape, p.dtype) for p in model.kind(0).parameters]
    total = 0
    for parameter in model.kind(layer).parameters:
        if (parameter.shape, parameter.dtype) in embed:
            embed.remove((parameter.shape, parameter.dtype))
            total += parameter.size_bytes
    return total


def _ns(seconds: float) -> int:
    return ceil(seconds * NS_PER_S)
