"""What a stage of a table costs for every interval of layers: a cheap lower bound for all, exactly for some."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.price import INFEASIBLE, CostTables, Int
from autopar.solvers.dual import Dual, bound
from autopar.solvers.intervals import Contents, contents
from autopar.solvers.labels import solve_segment
from autopar.solvers.segment import FORBIDDEN, Kind, Segment, groups_of, kind_of

StageKey = tuple[int, int, bool, bool]
"""What distinguishes stages: micro-batches in flight, budget, whether it has an entry, whether it has an exit."""

Hull = list[tuple[float, float]]
"""Memory and time of the corners of a lower convex hull, from the leanest to the fastest."""

IntervalName = tuple[StageKey, int, int]
"""A kind of stage, the content of its layers, and the strategy at which the ends are held (-1: they are not)."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """What is known of the layers of an interval on one stage, p2p included.

    No choice is faster than lower_ns; upper_ns and strategies: the best one seen, None and empty without; final:
    a search with a higher limit could tell nothing new.
    """

    lower_ns: int
    upper_ns: int | None
    strategies: tuple[int, ...]
    labels: int
    final: bool


@dataclass(eq=False)
class Shared:
    """What is computed once for a table, whatever embed and head are held at."""

    kinds: dict[tuple[int, int, bool, bool], Kind | None] = field(default_factory=dict)
    known: dict[IntervalName, Interval] = field(default_factory=dict)
    duals: dict[IntervalName, tuple[Segment, Dual, int]] = field(default_factory=dict)
    hulls: dict[tuple[int, int], Hull] = field(default_factory=dict)
    inner: dict[StageKey, Int] = field(default_factory=dict)


@dataclass(eq=False)
class StageCosts:
    """The costs of intervals of one table, by their content, each computed once.

    `layer_id[l]` names what layer l can do (equal layers are equal numbers), `rows` says where. With `held`, embed
    and head are held at one strategy; such variants of a table share what does not touch the ends.
    """

    tables: CostTables
    group: Int
    steps: Int
    layer_id: tuple[int, ...]
    compiled: bool
    rows: dict[int, tuple[int, int | None]]
    held_at: int = -1
    shared: Shared = field(default_factory=Shared)

    @classmethod
    def of(cls, tables: CostTables, compiled: bool = False) -> StageCosts:
        """The costs of a table, nothing solved yet."""
        group, steps = groups_of(tables.transition_ns[None])
        ids = equal_rows(tables)
        rows: dict[int, tuple[int, int | None]] = {}
        for layer, one in enumerate(ids):
            rows.setdefault(one, (layer, None))
        return cls(tables=tables, group=group, steps=steps, layer_id=ids, compiled=compiled, rows=rows)

    def held(self, strategy: int) -> StageCosts:
        """The same with embed and head held at one strategy."""
        units = self.tables.time_ns.shape[0]
        ids, rows = list(self.layer_id), dict(self.rows)
        for layer in {0, units - 1}:
            ids[layer] = (1 + 2 * strategy + (layer > 0)) * units + layer
            rows[ids[layer]] = (layer, strategy)
        return replace(self, layer_id=tuple(ids), rows=rows, held_at=strategy)

    @cached_property
    def contents(self) -> Contents:
        """What the intervals hold."""
        names = list(dict.fromkeys(self.layer_id))
        return contents(tuple(names.index(one) for one in self.layer_id))

    def key(self, stage: int) -> StageKey:
        """What this stage has in common with others."""
        tables = self.tables
        return tables.in_flight[stage], tables.budget_bytes[stage], stage > 0, stage < tables.stages - 1

    def kind(self, layer_id: int, in_flight: int, enters: bool, leaves: bool) -> Kind | None:
        """The options of a layer that may fit; with the costs of entering and leaving the stage at that layer."""
        name = (layer_id, in_flight, enters, leaves)
        if name not in self.shared.kinds:
            tables = self.tables
            layer, only = self.rows[layer_id]
            allowed = may_fit(tables, layer, in_flight)
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
            self.shared.kinds[name] = kind_of(
                time, state + in_flight * saved, tables.transient_bytes[layer], self.group, allowed
            )
        return self.shared.kinds[name]

    def relaxed(self, stage: int, content: int, below_ns: int) -> Interval:
        """A sharper lower bound of these layers on this stage, and the choice that came with it, if any."""
        name, known = self._name(stage, content), self.shared.known
        if name not in known:
            segment = self._segment(*name[:2])
            if segment is None:
                known[name] = Interval(lower_ns=FORBIDDEN, upper_ns=None, strategies=(), labels=0, final=True)
            else:
                dual = self._dual(name, segment, below_ns)
                base = segment.base_time_ns + self._hop(name[0])
                known[name] = Interval(
                    lower_ns=min(FORBIDDEN, base + dual.least_ns),
                    upper_ns=None if dual.path is None else base + dual.upper_ns,
                    strategies=() if dual.path is None else self._strategies(segment, dual.path),
                    labels=0,
                    final=not dual.possible or (dual.path is not None and dual.least_ns == dual.upper_ns),
                )
        return known[name]

    def exact(self, stage: int, content: int, below_ns: int) -> Interval:
        """The best choice of these layers on this stage if it takes less than below_ns."""
        known = self.relaxed(stage, content, below_ns)
        if known.final or known.lower_ns >= below_ns:
            return known
        name = self._name(stage, content)
        segment, dual, limit = self.shared.duals[name]
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
        self.shared.known[name] = known
        return known

    def sharpen(self, stage: int, content: int, lower_ns: int) -> bool:
        """Raise the bound of a content on this stage and on those like it; whether that is news."""
        bounds = self.bounds[self.key(stage)]
        if lower_ns <= bounds[content]:
            return False
        bounds[content] = lower_ns
        return True

    def _name(self, stage: int, content: int) -> IntervalName:
        key = self.key(stage)
        return key, content, -1 if key[2] and key[3] else self.held_at

    def _dual(self, name: IntervalName, segment: Segment, below_ns: int) -> Dual:
        dual = bound(segment, below_ns - self._hop(name[0]) - segment.base_time_ns)
        self.shared.duals[name] = (segment, dual, below_ns)
        return dual

    def _hop(self, key: StageKey) -> int:
        return self.tables.p2p_ns if key[3] else 0

    def _segment(self, key: StageKey, content: int) -> Segment | None:
        in_flight, budget, enters, leaves = key
        first, size = int(self.contents.first[content]), int(self.contents.size[content])
        ids, last = self.layer_id[first : first + size], size - 1
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
        return sum(interval.labels for interval in self.shared.known.values())

    @cached_property
    def bounds(self) -> dict[StageKey, Int]:
        """The lower bounds of all stages, to be sharpened; inner stages are shared by held variants."""
        found: dict[StageKey, Int] = {}
        inner = self.shared.inner
        for stage in range(self.tables.stages):
            key = self.key(stage)
            if key in found:
                continue
            if key[2] and key[3]:
                if key not in inner:
                    inner[key] = self.lower_bounds(stage)
                found[key] = inner[key]
            else:
                found[key] = self.lower_bounds(stage)
        return found

    def lower_bounds(self, stage: int) -> Int:
        """[V + 1]: no choice of the layers of a content on this stage is faster; FORBIDDEN where nothing fits.

        Contents that this stage cannot hold are FORBIDDEN too, as is the last entry, of no layers. The continuous
        multiple-choice knapsack over the lower hull of each layer; transitions count as their least, the transient as
        the least that some layer of the content needs. O(contents * hull edges) in numpy.
        """
        tables, held = self.tables, self.contents
        in_flight, budget, enters, leaves = self.key(stage)
        names = list(dict.fromkeys(self.layer_id))
        result = np.full(len(held.size) + 1, FORBIDDEN, dtype=np.int64)
        hop = int(tables.entry_ns.min()) if enters else 0
        if leaves:
            hop += int(tables.exit_ns.min()) + tables.p2p_ns
        if hop >= FORBIDDEN:
            return result
        longest = len(self.layer_id) - (tables.stages - 1)
        places = np.flatnonzero(held.placed[:, int(enters), int(leaves)] & (held.size <= longest))
        counts = held.counts[places]
        bad = np.zeros(len(counts), dtype=bool)
        time, spare, peak = np.zeros(len(counts)), np.full(len(counts), float(budget)), np.zeros(len(counts))
        edges: list[tuple[float, float, float, int]] = []
        inside = np.ascontiguousarray(counts.T, dtype=np.float64)
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
        result[places] = bounds
        return result

    def _hull(self, name: int, in_flight: int, kind: Kind) -> Hull:
        if (name, in_flight) not in self.shared.hulls:
            self.shared.hulls[name, in_flight] = lower_hull(kind.memory_bytes, kind.time_ns)
        return self.shared.hulls[name, in_flight]


def lower_hull(memory_bytes: Int, time_ns: Int) -> Hull:
    """The lower convex hull of options."""
    hull: list[tuple[int, int]] = []
    for m, t in sorted(zip(memory_bytes.tolist(), time_ns.tolist(), strict=True)):
        if hull and t >= hull[-1][1]:
            continue
        while len(hull) >= 2 and (hull[-2][1] - hull[-1][1]) * (m - hull[-1][0]) <= (hull[-1][1] - t) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((m, t))
    return [(float(m), float(t)) for m, t in hull]


def equal_rows(tables: CostTables) -> tuple[int, ...]:
    """A number for what each layer can do, by first appearance: equal layers have equal numbers."""
    arrays = (tables.time_ns, tables.state_bytes, tables.saved_bytes, tables.transient_bytes)
    known: dict[bytes, int] = {}
    rows = np.concatenate(arrays, axis=1)
    return tuple(known.setdefault(row.tobytes(), len(known)) for row in rows)


def may_fit(tables: CostTables, layer: int, in_flight: int) -> NDArray[np.bool_]:
    """bool[S]: what this layer can take, and would fit if it were alone on the stage of the largest budget."""
    left = max(tables.budget_bytes) - tables.transient_bytes[layer]
    allowed = (tables.time_ns[layer] != INFEASIBLE) & (tables.saved_bytes[layer] != INFEASIBLE)
    # Written so that nothing overflows: INFEASIBLE is the largest integer.
    left = left - np.minimum(tables.state_bytes[layer], left + 1)
    allowed = allowed & (left >= 0)
    return np.asarray(allowed & (tables.saved_bytes[layer] <= left // in_flight) if in_flight else allowed)
