"""The tables that a solver optimises over, for one number of stages and micro-batches and one schedule."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, combinations
from math import ceil, floor
from typing import Literal

import numpy as np

from autopar import compute
from autopar.axes import Layout, RankMesh
from autopar.boundaries import Edge, activation_bytes, edges_of, made_bytes, parts_of
from autopar.bounds import lower_bound, upper_bound
from autopar.cluster import ClusterSpec
from autopar.derived import local_bytes, local_cost
from autopar.layer_memory import Unit
from autopar.measured import LayerCost, LayerProfile, LinkProfile
from autopar.memory import ends_bytes
from autopar.model import ModelSpec
from autopar.orders import in_flight
from autopar.price import INFEASIBLE, CostTables, Int
from autopar.request import Request, Schedule
from autopar.space import StrategySpace
from autopar.strategy import Strategy
from autopar.units import NS_PER_S
from autopar.work import Work, layer_work, relayout_s, send_s

Memory = Literal["upper", "near", "lower"]


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
    memory: Memory = "upper",
) -> CostTables:
    """The costs of every layer under every legal strategy, rounded up once to nanoseconds and bytes.

    memory "upper": bounds that the simulated peak never exceeds, so that whatever fits the table fits; "lower": that
    it never goes below, so that no plan that fits is left out; "near": no bound, what a stage of like neighbours
    needs. Times are the same in all. O(kinds * strategies + layouts^2).
    Raises InputError when a pin or a layer has no legal strategy.
    """
    prices = Prices.of(model, layers, cluster, links, request, pp=pp, num_micro_batches=num_micro_batches)
    return prices.tables(schedule, memory)


@dataclass(frozen=True, kw_only=True, eq=False)
class Prices:
    """What the tables of one number of stages and micro-batches have in common, whatever the schedule and the bound.

    classes[l]: layers that may do the same at the same costs; units[class][s]: the memory of one of them;
    waited_ns: of time_ns what a rank spends whatever the order of its work and whatever runs beside it; edges: the
    least and the most that crosses a boundary; front, between: of a chain with seams the part of the embedding before
    the first block, by strategy, and the parts after it; made_bytes: of the sides of one micro-batch.
    """

    model: ModelSpec
    request: Request
    mesh: RankMesh
    micro_batches: int
    space: StrategySpace
    classes: tuple[int, ...]
    units: tuple[dict[int, Unit], ...]
    time_ns: Int
    waited_ns: Int
    transition_ns: Int
    entry_ns: Int
    exit_ns: Int
    p2p_ns: int
    layout: Int
    budget_bytes: int
    edges: tuple[Edge, Edge]
    front: dict[int, Unit]
    between: tuple[Unit, ...]
    made_bytes: int

    @classmethod
    def of(
        cls,
        model: ModelSpec,
        layers: LayerProfile,
        cluster: ClusterSpec,
        links: LinkProfile,
        request: Request,
        *,
        pp: int,
        num_micro_batches: int,
        space: StrategySpace | None = None,
    ) -> Prices:
        """The prices of a cut, whose space may be known already; raises as `tables`."""
        mesh = RankMesh.of(world_size=cluster.world_size, pp=pp, ranks_per_node=cluster.ranks_per_node)
        micro_batch = request.global_batch // num_micro_batches
        space = space or StrategySpace.of(model, layers, mesh, request, micro_batch)
        works: dict[tuple[str, int], tuple[int, int]] = {}
        speeds = cluster.compute_speedup or (1.0,)
        fastest = max(speeds) / speeds[min(layers.processes, len(speeds)) - 1]
        rows: dict[tuple[str, int, tuple[int, ...]], int] = {}
        classes: list[int] = []
        units: list[dict[int, Unit]] = []
        times = []
        for layer, allowed in enumerate(space.allowed):
            shared, kind = shared_bytes(model, layer, pp), model.layers[layer]
            classes.append(rows.setdefault((kind, shared, allowed), len(rows)))
            if classes[-1] < len(units):
                continue
            row = np.full((2, len(space.strategies)), INFEASIBLE, dtype=np.int64)
            units.append({})
            for s in allowed:
                strategy = space.strategies[s]
                cost, samples = layer_cost(model, layers, layer, strategy), micro_batch / strategy.dp
                mine = shared and shared_bytes(model, layer, pp, strategy.tp)
                if (kind, s) not in works:
                    work = layer_work(
                        cost,
                        strategy,
                        mesh=mesh,
                        cluster=cluster,
                        links=links,
                        samples=samples,
                        optimizer=request.optimizer,
                        dtype=request.dtype,
                        shared_bytes=mine,
                    )
                    step_s = work.sync_s + work.optimizer_s
                    whole_s = work.whole_forward_s + work.whole_backward_s + step_s / num_micro_batches
                    works[kind, s] = _ns(whole_s), floor(_waited_s(work, whole_s, strategy, links, fastest) * NS_PER_S)
                row[:, s] = works[kind, s]
                units[-1][s] = Unit.of(cost, strategy, samples, shared_bytes=mine, dtype=layers.dtype)
            times.append(row)

        moved_bytes = activation_bytes(model, layers, micro_batch)
        every, width = range(len(model.layers)), mesh.ranks_per_stage
        ends = edges_of(model, layers, micro_batch, width)
        outside = [part.kind for part in parts_of(model, every, pp) if part.kind not in model.layers]
        parts = {
            name: {s: _unit(model, layers, name, space.strategies[s], micro_batch) for s in space.allowed[0]}
            for name in outside
        }
        columns = enumerate(space.strategies)
        places = [layer_layout(mesh, strategy, is_end=s in space.cut_ends) for s, strategy in columns]
        layouts = {place: i for i, place in enumerate(dict.fromkeys(places))}
        layout = np.array([layouts[place] for place in places], dtype=np.int64)

        def move_ns(a: Layout, b: Layout) -> int:
            return _ns(sum(relayout_s(a, b, mesh=mesh, cluster=cluster, links=links, activation_bytes=moved_bytes)))

        # There and back: the same from either side.
        moves_ns = np.zeros((len(layouts), len(layouts)), dtype=np.int64)
        for (a, i), (b, j) in combinations(layouts.items(), 2):
            moves_ns[i, j] = moves_ns[j, i] = move_ns(a, b)
        edge_ns = np.array([move_ns(mesh.boundary, place) for place in layouts], dtype=np.int64)[layout]
        return cls(
            model=model,
            request=request,
            mesh=mesh,
            micro_batches=num_micro_batches,
            space=space,
            classes=tuple(classes),
            units=tuple(units),
            time_ns=np.stack(times)[classes, 0],
            waited_ns=np.stack(times)[classes, 1],
            transition_ns=moves_ns[np.ix_(layout, layout)],
            entry_ns=edge_ns,
            exit_ns=edge_ns,
            p2p_ns=_ns(2 * send_s(mesh, cluster, links, ends.mean_bytes)),
            layout=layout,
            budget_bytes=request.memory_bytes or cluster.usable_bytes,
            edges=(ends.least, ends.most),
            front=parts[model.front] if parts else {},
            between=tuple(unit for name in outside if name != model.front for unit in parts[name].values()),
            made_bytes=ceil(made_bytes(layers, every, micro_batch / width)),
        )

    def tables(self, schedule: Schedule, memory: Memory) -> CostTables:
        """The tables under a schedule with memory bounded from above or below, or estimated."""
        pp, count, edge = self.mesh.pp, self.micro_batches, self.edges[memory != "lower"]
        live = tuple(in_flight(schedule, pp, stage, count) for stage in range(pp))
        # Where stages differ, each bound assumes what is safe for it.
        steady = (all if memory == "lower" else any)(now < count for now in live)
        if memory == "lower" and schedule == "gpipe" and 1 < pp < count:
            # The second backward begins with all gradients and one saved set less.
            live, steady = (count - 1,) * pp, True
        state, saved, transient = self._bounds(memory, steady)
        ends = [
            ends_bytes(
                received_bytes=edge.sent_bytes * (stage > 0),
                returned_bytes=edge.back_bytes * (stage < pp - 1),
                sent_bytes=(edge.hidden_bytes if memory == "lower" else edge.sent_bytes) * (stage < pp - 1),
                micro_batches=count,
            )
            for stage in range(pp)
        ]
        if memory == "lower":
            # The saved input of the first layer may be the receive buffer itself: it counts once.
            ends = [
                (fixed - now * self.edges[1].hidden_bytes * (stage > 0), held)
                for stage, (now, (fixed, held)) in enumerate(zip(live, ends, strict=True))
            ]
        kept_at_ends = [fixed + now * held for now, (fixed, held) in zip(live, ends, strict=True)]
        if memory == "upper" and pp > 1:
            kept_at_ends = [
                kept + self._between_bytes(now, steady) for now, kept in zip(live, kept_at_ends, strict=True)
            ]
        return CostTables(
            stages=pp,
            micro_batches=count,
            schedule=schedule,
            strategies=self.space.strategies,
            time_ns=self.time_ns,
            state_bytes=state,
            saved_bytes=saved,
            transient_bytes=transient,
            transition_ns=self.transition_ns,
            entry_ns=self.entry_ns,
            exit_ns=self.exit_ns,
            p2p_ns=self.p2p_ns,
            layout=self.layout,
            in_flight=live,
            budget_bytes=tuple(max(0, self.budget_bytes - kept) for kept in kept_at_ends),
            tied=self.model.tied,
        )

    def _between_bytes(self, live: int, steady: bool) -> int:
        """At most what the parts after the first of an embedding add to a stage, and the sides that are made there."""
        most = 0
        for unit in self.between:
            bound = upper_bound(unit, optimizer=self.request.optimizer, steady=steady)
            most = max(most, bound.state_bytes + live * bound.saved_bytes + bound.transient_bytes)
        return most + live * self.made_bytes

    def _least_units(self) -> tuple[dict[int, Unit], ...]:
        """The units with as little of the embedding as its stage holds."""
        return (self.front, *self.units[1:]) if self.front else self.units

    def ending_bytes(self) -> Int:
        """[L, S]: what a rank holds of a layer when its last backward is over: shares, and the summed gradients."""
        found = np.zeros((len(self.units), len(self.space.strategies)), dtype=np.int64)
        optimizer = self.request.optimizer
        for row, units in zip(found, self._least_units(), strict=True):
            for s, unit in units.items():
                kept = unit.held_bytes(optimizer) + unit.optimizer_bytes(optimizer)
                row[s] = kept + unit.share(unit.gradient_bytes)
        return found[list(self.classes)]

    def _bounds(self, memory: Memory, steady: bool) -> tuple[Int, Int, Int]:
        """[L, S] each: states, saved sets and transients, whatever the strategies of the other layers."""
        every = self._least_units() if memory == "lower" else self.units
        gathered = [max((u.buffer_bytes for u in row.values() if u.gathers), default=0) for row in every]
        outputs = [max(u.output_bytes for u in row.values()) for row in every]
        chain = [gathered[one] for one in self.classes]
        if memory == "upper":
            before = [0, *accumulate(chain, max)]
            after = [0, *accumulate(reversed(chain), max)][::-1][1:]
        else:
            before, after = [0, *chain], [*chain[1:], 0]
        arriving = [0, *(outputs[one] for one in self.classes)]
        end, optimizer = len(self.classes) - 1, self.request.optimizer
        rows: dict[tuple[int, ...], int] = {}
        found: list[Int] = []
        order = []
        for layer, one in enumerate(self.classes):
            around = (before[layer], after[layer], arriving[layer])
            key = (one, layer == end) if memory == "lower" else (one, *around)
            order.append(rows.setdefault(key, len(rows)))
            if order[-1] < len(found):
                continue
            row = np.zeros((3, len(self.space.strategies)), dtype=np.int64)
            for s, unit in every[one].items():
                if memory == "lower":
                    bound = lower_bound(unit, optimizer=optimizer, steady=steady, last=layer == end)
                elif memory == "near":
                    bound = upper_bound(
                        unit,
                        optimizer=optimizer,
                        steady=steady,
                        before_bytes=around[0] if unit.gathers else 0,
                        after_bytes=around[1] if unit.gathers else 0,
                    )
                else:
                    bound = upper_bound(
                        unit,
                        optimizer=optimizer,
                        steady=steady,
                        before_bytes=around[0],
                        after_bytes=around[1],
                        arriving_bytes=around[2],
                    )
                row[:, s] = bound.state_bytes, bound.saved_bytes, bound.transient_bytes
            found.append(row)
        state, saved, transient = np.stack(found)[order].transpose(1, 0, 2)
        return np.ascontiguousarray(state), np.ascontiguousarray(saved), np.ascontiguousarray(transient)


def _waited_s(work: Work, whole_s: float, strategy: Strategy, links: LinkProfile, fastest: float) -> float:
    """Of the seconds of a layer those that no schedule saves: without ZeRO's where they may run beside the compute.

    ZeRO-2 gathers once between two backwards; fastest: the speed of ranks that have their node's cores to themselves.
    """
    saved_s = (work.forward_s + work.backward_s) * (1 - 1 / fastest)
    if links.overlap_origin != "assumed":
        return whole_s - saved_s - work.zero_forward_s - work.zero_backward_s
    return whole_s - saved_s - (work.zero_forward_s if strategy.zero == 2 else 0.0)


def floor_ns(
    model: ModelSpec,
    layers: LayerProfile,
    cluster: ClusterSpec,
    space: StrategySpace,
    *,
    pp: int,
    num_micro_batches: int,
    micro_batch: int,
) -> int:
    """No choice of a cut with this space has a smaller objective: the fastest compute of each layer, nothing else.

    A small part of what the tables of the cut cost.
    """
    known: dict[tuple[str, tuple[int, ...]], float] = {}
    computed: dict[tuple[int, float], float] = {}

    def compute_s(layer: int, strategy: Strategy) -> float:
        cost, samples = layer_cost(model, layers, layer, strategy), micro_batch / strategy.dp
        if (id(cost), samples) not in computed:
            both = compute.forward(cost, samples).seconds + compute.backward(cost, samples).seconds
            computed[id(cost), samples] = both * cluster.compute_factor
        return computed[id(cost), samples]

    total = slowest = 0
    for layer, allowed in enumerate(space.allowed):
        name = model.layers[layer], allowed
        if name not in known:
            known[name] = min(compute_s(layer, space.strategies[s]) for s in allowed)
        least_ns = floor(known[name] * NS_PER_S)
        total, slowest = total + least_ns, max(slowest, least_ns)
    return total + (num_micro_batches - 1) * max(-(-total // pp), slowest)


def layer_cost(model: ModelSpec, layers: LayerProfile, layer: int, strategy: Strategy) -> LayerCost:
    """The cost of the layer at this place of the chain under a strategy; ValueError when nothing says what it is."""
    return kind_cost(model, layers, model.layers[layer], strategy)


def kind_cost(model: ModelSpec, layers: LayerProfile, name: str, strategy: Strategy) -> LayerCost:
    """As `layer_cost`, of a kind."""
    cost = local_cost(layers, model.kind_named(name), strategy)
    if cost is None:
        raise ValueError(f"a layer of kind {name} was not measured as {strategy}")
    return cost


def _unit(model: ModelSpec, layers: LayerProfile, name: str, strategy: Strategy, micro_batch: int) -> Unit:
    cost = kind_cost(model, layers, name, strategy)
    return Unit.of(cost, strategy, micro_batch / strategy.dp, dtype=layers.dtype)


def layer_layout(mesh: RankMesh, strategy: Strategy, *, is_end: bool) -> Layout:
    """How activations lie in a layer: embedding and head keep the boundary layout, also where tp cuts their words."""
    return mesh.boundary if is_end else mesh.place(strategy).layout


def shared_bytes(model: ModelSpec, layer: int, pp: int, tp: int = 1) -> int:
    """Bytes of a layer's parameters that are those of another layer of the same stage: the head's of a tied model.

    tp: over how many ranks the vocabulary is cut.
    """
    if not model.tied or pp > 1 or layer != len(model.layers) - 1:
        return 0
    embed = [(p.shape, p.dtype) for p in model.kind(0).parameters]
    total, kind = 0, model.kind(layer)
    for parameter in kind.parameters:
        if (parameter.shape, parameter.dtype) in embed:
            embed.remove((parameter.shape, parameter.dtype))
            total += local_bytes(parameter, kind, tp)
    return total


def _ns(seconds: float) -> int:
    return ceil(seconds * NS_PER_S)
