"""What can be said of a table at once: a lower bound of its objective, and whether the arithmetic is exact on it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np

from autopar.price import INFEASIBLE, CostTables, OutOfRange
from autopar.solvers.segment import LARGEST_TOTAL_NS
from autopar.solvers.stages import Hull, equal_rows, lower_hull, may_fit


def quick_bound(tables: CostTables) -> int:
    """A lower bound of the table, INFEASIBLE when nothing fits by that bound. O(U S).

    sum T as `least_sum_ns`; max T >= its P-th part and >= the fastest of the slowest single layer.
    """
    found = least_sum_ns(tables)
    if found is None:
        return INFEASIBLE
    total, slowest = found
    largest = max(-(-total // tables.stages), slowest)
    return min(INFEASIBLE - 1, total + (tables.micro_batches - 1) * largest)


def least_sum_ns(tables: CostTables) -> tuple[int, int] | None:
    """A lower bound of the sum of all stages, and of the slowest layer; None when nothing fits. O(U S).

    The fastest strategies that fit into all stages together: a continuous knapsack, with as few micro-batches in
    flight as any stage has.
    """
    units, in_flight = tables.time_ns.shape[0], min(tables.in_flight)
    if units < tables.stages:
        return None
    ids = equal_rows(tables)
    least: dict[int, int] = {}
    hulls: list[tuple[int, Hull]] = []
    for one, count in Counter(ids).items():
        layer = ids.index(one)
        allowed = may_fit(tables, layer, in_flight)
        if not allowed.any():
            return None
        time = tables.time_ns[layer, allowed]
        size = tables.state_bytes[layer, allowed] + in_flight * tables.saved_bytes[layer, allowed]
        least[one] = int(time.min())
        hulls.append((count, lower_hull(size, time)))
    total = _least_time(hulls, sum(tables.budget_bytes))
    if total is None:
        return None
    if tables.tied and units > 1:
        both = np.flatnonzero(may_fit(tables, 0, in_flight) & may_fit(tables, units - 1, in_flight))
        if not both.size:
            return None
        ends = min(map(sum, tables.time_ns[[0, units - 1]][:, both].T.tolist()))
        total = max(total, sum(least[one] for one in ids[1:-1]) + ends)
    return total + (tables.stages - 1) * tables.p2p_ns, max(least.values())


def _least_time(hulls: list[tuple[int, Hull]], budget_bytes: int) -> int | None:
    """The least time of so many layers of each hull within the budget, layers cut at will; None when none fits."""
    spare, total, gained = float(budget_bytes), 0, 0.0
    edges = []
    for count, hull in hulls:
        spare -= count * hull[0][0]
        total += count * int(hull[0][1])
        edges += [((t1 - t0) / (m1 - m0), count, m1 - m0, t0 - t1) for (m0, t0), (m1, t1) in pairwise(hull)]
    if spare < 0:
        return None
    for _, count, memory, gain in sorted(edges):
        if count * memory > spare:
            gained += spare / memory * gain
            break
        spare -= count * memory
        gained += count * gain
    return max(0, total - int(gained * (1 + 2.0**-40)) - 1)


def check(tables: CostTables) -> None:
    """Return when the solvers' arithmetic is exact on what may fit of this table; OutOfRange otherwise."""
    units, in_flight = tables.time_ns.shape[0], min(tables.in_flight)
    ids = equal_rows(tables)
    largest = size = 0.0
    used = np.zeros(len(tables.strategies), dtype=bool)
    for one, count in Counter(ids).items():
        layer = ids.index(one)
        allowed = may_fit(tables, layer, in_flight)
        used |= allowed
        largest += count * float(tables.time_ns[layer, allowed].max(initial=0))
        parts = (part[layer, allowed].astype(float) for part in (tables.state_bytes, tables.saved_bytes))
        state, saved = parts
        needed = state + max(tables.in_flight) * saved + tables.transient_bytes[layer, allowed]
        # What does not fit alone is never looked at.
        size += count * min(float(max(tables.budget_bytes)), float(needed.max(initial=0)))
    for moves in (tables.transition_ns[np.ix_(used, used)], tables.entry_ns[used], tables.exit_ns[used]):
        largest += units * float(moves.max(where=moves != INFEASIBLE, initial=0))
    largest += tables.stages * tables.p2p_ns
    if largest * (tables.stages + tables.micro_batches) >= 2**59 or largest >= LARGEST_TOTAL_NS:
        raise OutOfRange("a table whose totals may leave the exact range of the solver: use a coarser unit of time")
    if size >= LARGEST_TOTAL_NS:
        raise OutOfRange("a table whose memory may reach 2^50 bytes")
