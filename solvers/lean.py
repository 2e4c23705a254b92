"""When nothing fits: the choice that comes closest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.price import INFEASIBLE, CostTables, Int, Score, score
from autopar.solvers.intervals import contents
from autopar.solvers.partition import MOST_INTERVALS, least_max, spread, within
from autopar.solvers.segment import FORBIDDEN, distinct
from autopar.solvers.stages import equal_rows

LARGEST_BYTES = 1 << 48
"""What a layer needs beyond this is counted as this, so that sums over long chains stay exact."""

Lean = tuple[tuple[int, ...], tuple[int, ...], Score]
"""Layers of each stage, strategies, and what they add up to."""


def excess_bytes(tables: CostTables, result: Score) -> int:
    """By how much the worst stage is over its budget (negative: under)."""
    return max(size - budget for size, budget in zip(result.stage_bytes, tables.budget_bytes, strict=True))


def leanest(tables: CostTables) -> Lean | None:
    """The choice of least max over stages of memory - budget, exact; None when no choice is legal at all.

    For every threshold of the transient, each layer takes the leanest strategy below it; a stage takes its best
    threshold. O(P * thresholds * contents) in numpy, times S when embed and head are tied. Among equally lean
    strategies of a layer the fastest. Transitions count only where they are INFEASIBLE.
    """
    best: tuple[int, Lean] | None = None
    allowed = tables.feasible & (tables.state_bytes != INFEASIBLE)
    allowed &= (tables.saved_bytes != INFEASIBLE) & (tables.transient_bytes != INFEASIBLE)
    variants = [allowed]
    if tables.tied and len(allowed) > 1:
        variants = []
        for strategy in np.flatnonzero(allowed[0] & allowed[-1]):
            held = allowed.copy()
            held[[0, -1]] = False
            held[[0, -1], strategy] = True
            variants.append(held)
    for variant in variants:
        found = _leanest(tables, variant)
        if found is not None:
            excess = excess_bytes(tables, found[2])
            if best is None or excess < best[0]:
                best = excess, found
    return None if best is None else best[1]


def leanest_of(tables: Sequence[CostTables]) -> tuple[int, Lean] | None:
    """The table (its place) whose leanest choice is closest to its budget, and that choice.

    Tables are looked at in the order of a lower bound on that distance, until the bound says that no other is closer.
    """
    best: tuple[int, int, Lean] | None = None
    for bound, place in sorted((_least_excess(one), place) for place, one in enumerate(tables)):
        if best is not None and (bound, place) > best[:2]:
            break
        lean = leanest(tables[place])
        if lean is not None:
            found = (excess_bytes(tables[place], lean[2]), place, lean)
            best = found if best is None or found[:2] < best[:2] else best
    return None if best is None else (best[1], best[2])


def _least_excess(tables: CostTables) -> int:
    """A lower bound on the excess of the worst stage: the P-th part of all layers at their leanest, or one layer."""
    if not tables.feasible.any(axis=1).all():
        return FORBIDDEN
    kept = tables.state_bytes + min(tables.in_flight) * tables.saved_bytes
    least = np.where(tables.feasible, kept, FORBIDDEN).min(axis=1)
    alone = np.where(tables.feasible, kept + tables.transient_bytes, FORBIDDEN).min(axis=1)
    whole = -(-(int(least.sum()) - sum(tables.budget_bytes)) // tables.stages)
    return max(whole, int(alone.max()) - max(tables.budget_bytes))


def _leanest(tables: CostTables, allowed: NDArray[np.bool_]) -> Lean | None:
    units = len(allowed)
    if units < tables.stages or not allowed.any(axis=1).all():
        return None
    ids = _numbers(tables, allowed)
    held = contents(ids)
    keys = list(zip(tables.in_flight, tables.budget_bytes, strict=True))
    needed = {key: _Needs(tables, allowed, ids, *key) for key in dict.fromkeys(keys)}
    excess = [needed[key].excess for key in keys]
    cuts = spread(held.where, excess, min(int(one.min()) for one in excess) - 1)
    limit = FORBIDDEN - 1
    if cuts is not None:
        limit = max(int(one[held.where[end, first]]) for one, (first, end) in zip(excess, pairwise(cuts), strict=True))
    stages = within(held.where, np.append(held.size, 0), excess, limit, MOST_INTERVALS)
    best = None if stages is None else least_max(stages)
    if best is not None:
        cuts = best[1]
    if cuts is None:
        return None
    strategies: list[int] = []
    for key, (first, end) in zip(keys, pairwise(cuts), strict=True):
        strategies += needed[key].strategies(first, end)
    layers = tuple(b - a for a, b in pairwise(cuts))
    return layers, tuple(strategies), score(tables, layers, tuple(strategies))


class _Needs:
    """The least bytes of every content of the chain on the stages with so many micro-batches in flight."""

    def __init__(
        self, tables: CostTables, allowed: NDArray[np.bool_], ids: tuple[int, ...], in_flight: int, budget_bytes: int
    ) -> None:
        rows = [ids.index(one) for one in range(max(ids) + 1)]
        self.ids, self.allowed = ids, allowed[rows]
        self.time_ns = np.where(self.allowed, tables.time_ns[rows], INFEASIBLE)
        state, saved, self.transient = (
            np.minimum(part[rows], LARGEST_BYTES)
            for part in (tables.state_bytes, tables.saved_bytes, tables.transient_bytes)
        )
        self.size = np.where(self.allowed, np.minimum(state + in_flight * saved, LARGEST_BYTES), FORBIDDEN)
        self.thresholds = distinct(self.transient[self.allowed])
        counts = contents(ids).counts
        best = np.full(len(counts) + 1, FORBIDDEN, dtype=np.int64)
        for threshold in self.thresholds:
            least = self.least(int(threshold))
            missing = least >= FORBIDDEN
            total = counts @ np.where(missing, 0, least) + threshold
            total[(counts[:, missing] > 0).any(axis=1)] = FORBIDDEN
            np.minimum(best[:-1], total, out=best[:-1])
        self.excess = np.where(best < FORBIDDEN, best - budget_bytes, FORBIDDEN)

    def least(self, threshold: int) -> Int:
        """[K]: bytes of the leanest strategy of each kind of layer below the threshold of the transient."""
        return np.asarray(np.where(self.transient <= threshold, self.size, FORBIDDEN).min(axis=1))

    def strategies(self, first: int, end: int) -> list[int]:
        """The leanest strategies of an interval: least bytes, then least time, then first column."""
        part = list(self.ids[first:end])
        options = []
        for threshold in self.thresholds:
            least = self.least(int(threshold))[part]
            options.append((int(least.sum() if (least < FORBIDDEN).all() else FORBIDDEN) + int(threshold), threshold))
        size = np.where(self.transient <= min(options)[1], self.size, FORBIDDEN)
        leanest = {one: int(np.lexsort((self.time_ns[one], size[one]))[0]) for one in set(part)}
        return [leanest[one] for one in part]


def _numbers(tables: CostTables, allowed: NDArray[np.bool_]) -> tuple[int, ...]:
    """A number for what each layer can do and is allowed to."""
    known: dict[tuple[int, bytes], int] = {}
    return tuple(
        known.setdefault((one, row.tobytes()), len(known))
        for one, row in zip(equal_rows(tables), allowed, strict=True)
    )
