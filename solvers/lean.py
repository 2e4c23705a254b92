"""When nothing fits: the choice that comes closest."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.price import INFEASIBLE, CostTables, Int, Score, score
from autopar.solvers.partition import least_max
from autopar.solvers.segment import FORBIDDEN

Lean = tuple[tuple[int, ...], tuple[int, ...], Score]
"""Layers of each stage, strategies, and what they add up to."""


def excess_bytes(tables: CostTables, result: Score) -> int:
    """By how much the worst stage is over its budget (negative: under)."""
    return max(size - budget for size, budget in zip(result.stage_bytes, tables.budget_bytes, strict=True))


def leanest(tables: CostTables) -> Lean | None:
    """The choice of least max over stages of memory - budget, exact; None when no choice is legal at all.

    For every threshold of the transient, each layer takes the leanest strategy below it; a stage takes its best
    threshold. O(P * thresholds * U^2) in numpy, times S when embed and head are tied. Among equally lean strategies
    of a layer the fastest. Transitions count only where they are INFEASIBLE.
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
    needed = [_Needs(tables, allowed, stage) for stage in range(tables.stages)]
    found = least_max([needs.excess() for needs in needed])
    if found is None:
        return None
    cuts = found[1]
    strategies: list[int] = []
    for needs, (first, end) in zip(needed, pairwise(cuts), strict=True):
        strategies += needs.strategies(first, end)
    layers = tuple(b - a for a, b in pairwise(cuts))
    return layers, tuple(strategies), score(tables, layers, tuple(strategies))


class _Needs:
    """The least bytes of every interval of layers on one stage."""

    def __init__(self, tables: CostTables, allowed: NDArray[np.bool_], stage: int) -> None:
        saved = np.where(allowed, tables.saved_bytes, 0)
        self.size = np.where(allowed, tables.state_bytes, 0) + tables.in_flight[stage] * saved
        self.size[~allowed] = FORBIDDEN
        self.tables, self.allowed, self.stage = tables, allowed, stage
        self.thresholds = np.unique(tables.transient_bytes[allowed])

    def least(self, threshold: int) -> Int:
        """[U]: bytes of the leanest strategy of each layer below the threshold of the transient."""
        return np.asarray(np.where(self.tables.transient_bytes <= threshold, self.size, FORBIDDEN).min(axis=1))

    def excess(self) -> Int:
        """[U + 1, U + 1]: bytes over the budget of layers a..b-1, FORBIDDEN where impossible."""
        units = len(self.size)
        best = np.full((units + 1, units + 1), FORBIDDEN, dtype=np.int64)
        places = np.arange(units + 1)
        for threshold in self.thresholds:
            least = self.least(int(threshold))
            missing = np.concatenate([[0], np.cumsum(least >= FORBIDDEN)])
            total = np.concatenate([[0], np.cumsum(np.where(least >= FORBIDDEN, 0, least))])
            bytes_ = total[None, :] - total[:, None] + threshold
            bad = (missing[None, :] > missing[:, None]) | (places[None, :] <= places[:, None])
            best = np.minimum(best, np.where(bad, FORBIDDEN, bytes_))
        return np.where(best < FORBIDDEN, best - self.tables.budget_bytes[self.stage], FORBIDDEN)

    def strategies(self, first: int, end: int) -> list[int]:
        """The leanest strategies of an interval: least bytes, then least time, then first column."""
        options = []
        for threshold in self.thresholds:
            least = self.least(int(threshold))[first:end]
            options.append((int(least.sum() if (least < FORBIDDEN).all() else FORBIDDEN) + int(threshold), threshold))
        threshold = min(options)[1]
        time = np.where(self.allowed, self.tables.time_ns, INFEASIBLE)[first:end]
        size = np.where(self.tables.transient_bytes <= threshold, self.size, FORBIDDEN)[first:end]
        return [int(np.lexsort((t, m))[0]) for t, m in zip(time, size, strict=True)]
