"""What a stage of a table costs for every interval of layers: a cheap lower bound for all, exactly for some."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from autopar.price import INFEASIBLE, CostTables, Int
from autopar.solvers.dual import Dual, bound
from autopar.solvers.intervals import compositions
from autopar.solvers.labels import solve_segment
from autopar.solvers.segment import FORBIDDEN, Kind, Segment, groups_of, kind_of

StageKey = tuple[int, int, bool, bool]
"""What distinguishes stages: micro-batches in flight, budget, whether it has an entry, whether it has an exit."""


IntervalName = tuple[StageKey, tuple[int, ...]]
"""A kind of stage and the numbers of its layers."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """What is known of one interval of layers on one stage, p2p included.

    No choice is faster than lower_ns; upper_ns and strategies: the best one seen, None and empty without; final:
    a search with a higher limit could tell nothing new.
    """

    lower_ns: int
    upper_ns: int | None
    strategies: tuple[int, ...]
    labels: int
    final: bool


@dataclass(eq=False)
class StageCosts:
    """The exact costs of intervals of one table, each computed once.

    `layer_id[l]` names what layer l can do (equal layers are equal numbers). With `only`, embed and head are held at
    one strategy; such variants of a table share what does not touch the ends.
    """

    tables: CostTables
    group: Int
    steps: Int
    layer_id: tuple[int, ...]
    compiled: bool
    rows: dict[int, tuple[int, int | None]]
    kinds: dict[tuple[int, int, bool, bool], Kind | None] = field(default_factory=dict)
    known: dict[IntervalName, Interval] = field(default_factory=dict)
    duals: dict[IntervalName, tuple[Segment, Dual, int]] = field(default_factory=dict)
    hulls: dict[tuple[int, int], list[tuple[float, float]]] = field(default_factory=dict)
    inner: dict[StageKey, Int] = field(default_factory=dict)

    @classmethod
    def of(cls, tables: CostTables, compiled: bool = False) -> StageCosts:
        """The costs of a table, nothing solved yet."""
        group, steps = groups_of(tables.transition_ns[None])
        arrays = (tables.time_ns, tables.state_bytes, tables.saved_bytes, tables.transient_bytes)
        known: dict[bytes, int] = {}
        rows: dict[int, tuple[int, int | None]] = {}
        ids = []
        for layer in range(tables.time_ns.shape[0]):
            key = b"".join(array[layer].tobytes() for array in arrays)
            ids.append(known.setdefault(key, len(known)))
            rows.setdefault(ids[-1], (layer, None))
        return cls(tables=tables, group=group, steps=steps, layer_id=tuple(ids), compiled=compiled, rows=rows)

    def held(self, strategy: int) -> StageCosts:
        """The same with embed and head held at one strategy; memory of solved intervals is shared."""
        units = self.tables.time_ns.shape[0]
        ids = list(self.layer_id)
        for layer in {0, units - 1}:
            ids[layer] = (1 + 2 * strategy + (layer > 0)) * units + layer
            self.rows[ids[layer]] = (layer, strategy)
        return StageCosts(
            tables=self.tables,
            group=self.group,
            steps=self.steps,
            layer_id=tuple(ids),
            compiled=self.compiled,
            rows=self.rows,
            kinds=self.kinds,
            known=self.known,
            duals=self.duals,
            hulls=self.hulls,
            inner=self.inner,
        )

    def key(self, stage: int) -> StageKey:
        """What this stage has in common with others."""
        tables = self.tables
        return tables.in_flight[stage], tables.budget_bytes[stage], stage > 0, stage < tables.stages - 1

    def kind(self, layer_id: int, in_flight: int, enters: bool, leaves: bool) -> Kind | None:
        """The options of a layer; with the costs of entering and leaving the stage at that layer."""
        name = (layer_id, in_flight, enters, leaves)
        if name not in self.kinds:
            tables = self.tables
            layer, only = self.rows[layer_id]
            allowed = tables.time_ns[layer] != INFEASIBLE
            for array in (tables.state_bytes, tables.saved_bytes, tables.transient_bytes):
                allowed = allowed & (array[layer] != INFEASIBLE)
            if only is not None:
                allowed = allowed & (np.arange(len(allowed)) == only)
            extra = np.zeros_like(tables.entry_ns)
            for wanted, cost in ((enters, tables.entry_ns), (leaves, tables.exit_ns)):
                if wanted:
                    allowed = allowed & (cost != INFEASIBLE)
                    extra = extra + np.where(cost == INFEASIBLE, 0, cost)
            time = np.where(allowed, tables.time_ns[layer], 0) + extra
            state = np.where(allowed, tables.state_bytes[layer], 0)
            saved = np.where(allowed, tables.saved_bytes[layer], 0)
            self.kinds[name] = kind_of(
                time, state + in_flight * saved, tables.transient_bytes[layer], self.group, allowed
            )
        return self.kinds[name]

    def relaxed(self, stage: int, first: int, end: int, below_ns: int) -> Interval:
        """A sharper lower bound of layers first..end-1 on this stage, and the choice that came with it, if any."""
        name = (self.key(stage), self.layer_id[first:end])
        if name not in self.known:
            segment = self._segment(*name)
            if segment is None:
                self.known[name] = Interval(lower_ns=FORBIDDEN, upper_ns=None, strategies=(), labels=0, final=True)
            else:
                dual = self._dual(name, segment, below_ns)
                base = segment.base_time_ns + self._hop(name[0])
                self.known[name] = Interval(
                    lower_ns=min(FORBIDDEN, base + dual.least_ns),
                    upper_ns=None if dual.path is None else base + dual.upper_ns,
                    strategies=() if dual.path is None else self._strategies(segment, dual.path),
                    labels=0,
                    final=not dual.possible or (dual.path is not None and dual.least_ns == dual.upper_ns),
                )
        return self.known[name]

    def exact(self, stage: int, first: int, end: int, below_ns: int) -> Interval:
        """The best choice of layers first..end-1 on this stage if it takes less than below_ns."""
        known = self.relaxed(stage, first, end, below_ns)
        if known.final or known.lower_ns >= below_ns:
            return known
        name = (self.key(stage), self.layer_id[first:end])
        segment, dual, limit = self.duals[name]
        if below_ns > limit:
            dual = self._dual(name, segment, below_ns)
        hop = self._hop(name[0])
        solved = solve_segment(segment, below_ns=below_ns - hop, dual=dual)
        if solved.upper_ns is not None and solved.path is not None:
            known = Interval(
                lower_ns=solved.lower_ns + hop,
                upper_ns=solved.upper_ns + hop,
                strategies=self._strategies(segment, solved.path),
                labels=known.labels + solved.labels,
                final=True,
            )
        else:
            known = replace(known, lower_ns=solved.lower_ns + hop, labels=known.labels + solved.labels)
        self.known[name] = known
        return known

    def _dual(self, name: IntervalName, segment: Segment, below_ns: int) -> Dual:
        dual = bound(segment, below_ns - self._hop(name[0]) - segment.base_time_ns)
        self.duals[name] = (segment, dual, below_ns)
        return dual

    def _hop(self, key: StageKey) -> int:
        return self.tables.p2p_ns if key[3] else 0

    def _segment(self, key: StageKey, ids: tuple[int, ...]) -> Segment | None:
        in_flight, budget, enters, leaves = key
        last = len(ids) - 1
        names = [(one, enters and place == 0, leaves and place == last) for place, one in enumerate(ids)]
        unique = list(dict.fromkeys(names))
        kinds = [self.kind(one, in_flight, a, b) for one, a, b in unique]
        known = [kind for kind in kinds if kind is not None]
        if len(known) < len(kinds):
            return None
        return Segment(
            kinds=tuple(known),
            order=np.array([unique.index(name) for name in names], dtype=np.int64),
            steps=self.steps,
            step_order=np.zeros(len(ids), dtype=np.int64),
            budget_bytes=budget,
            compiled=self.compiled,
        )

    @staticmethod
    def _strategies(segment: Segment, path: Int) -> tuple[int, ...]:
        chosen = zip(segment.order, path, strict=True)
        return tuple(int(segment.kinds[kind].strategy[option]) for kind, option in chosen)

    @property
    def labels(self) -> int:
        """How many labels were kept so far, held variants included."""
        return sum(interval.labels for interval in self.known.values())

    @cached_property
    def bounds(self) -> dict[StageKey, Int]:
        """The lower bounds of all stages, to be sharpened in place; inner stages are shared by held variants."""
        found: dict[StageKey, Int] = {}
        for stage in range(self.tables.stages):
            key = self.key(stage)
            if key[2] and key[3]:
                if key not in self.inner:
                    self.inner[key] = self.lower_bounds(stage)
                found[key] = self.inner[key]
            else:
                found[key] = self.lower_bounds(stage)
        return found

    def lower_bounds(self, stage: int) -> Int:
        """[U + 1, U + 1]: no choice of layers a..b-1 on this stage is faster; FORBIDDEN where nothing fits.

        The continuous multiple-choice knapsack over the lower hull of each layer; transitions count as their least,
        the transient as the least that some layer of the interval needs. O(contents * hull edges + U^2) in numpy.
        """
        tables = self.tables
        in_flight, budget, enters, leaves = self.key(stage)
        names = list(dict.fromkeys(self.layer_id))
        counts, where = compositions(tuple(names.index(one) for one in self.layer_id))
        hop = int(tables.entry_ns.min()) if enters else 0
        if leaves:
            hop += int(tables.exit_ns.min()) + tables.p2p_ns
        if hop >= FORBIDDEN:
            return np.full(where.shape, FORBIDDEN, dtype=np.int64)
        bad = np.zeros(len(counts), dtype=bool)
        time, spare, peak = np.zeros(len(counts)), np.full(len(counts), float(budget)), np.zeros(len(counts))
        edges: list[tuple[float, float, float, int]] = []
        inside = counts.T.astype(np.float64)
        for index, name in enumerate(names):
            kind = self.kind(name, in_flight, False, False)
            if kind is None:
                bad |= inside[index] > 0
                continue
            hull = self._hull(name, in_flight, kind)
            spare -= inside[index] * (kind.base_memory_bytes + hull[0][0])
            time += inside[index] * (kind.base_time_ns + hull[0][1])
            peak = np.maximum(peak, np.where(inside[index] > 0, float(kind.transient_bytes.min()), 0.0))
            for (m0, t0), (m1, t1) in pairwise(hull):
                edges.append(((t1 - t0) / (m1 - m0), m1 - m0, t0 - t1, index))
        spare -= peak
        bad |= spare < 0
        spare[bad] = 0.0
        for _, memory, gain, index in sorted(edges):
            taken = np.minimum(inside[index], spare / memory)
            spare -= taken * memory
            time -= taken * gain
        bounds = np.floor(time * (1 - 2.0**-44) + 0.99).astype(np.int64) + hop
        bounds[bad] = FORBIDDEN
        return np.asarray(np.append(bounds, FORBIDDEN)[where])

    def _hull(self, name: int, in_flight: int, kind: Kind) -> list[tuple[float, float]]:
        """The lower convex hull of (memory, time) of the options, from the leanest to the fastest."""
        if (name, in_flight) not in self.hulls:
            points = sorted(zip(kind.memory_bytes.tolist(), kind.time_ns.tolist(), strict=True))
            hull: list[tuple[int, int]] = []
            for m, t in points:
                if hull and t >= hull[-1][1]:
                    continue
                while len(hull) >= 2 and (hull[-2][1] - hull[-1][1]) * (m - hull[-1][0]) <= (hull[-1][1] - t) * (
                    hull[-1][0] - hull[-2][0]
                ):
                    hull.pop()
                hull.append((m, t))
            self.hulls[name, in_flight] = [(float(m), float(t)) for m, t in hull]
        return self.hulls[name, in_flight]
