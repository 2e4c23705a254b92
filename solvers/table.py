"""The exact optimum of one table: cuts into stages and strategies of layers together.

Every interval of layers starts with a lower bound; the best partition under the bounds is found, its intervals are
solved exactly, and so on until the best partition is exact. Only a few intervals are ever solved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autopar.price import INFEASIBLE, Choice, CostTables, OutOfRange
from autopar.solvers.canonical import canonical
from autopar.solvers.partition import best_cuts, least_max, least_sums
from autopar.solvers.segment import FORBIDDEN, LARGEST_TOTAL_NS, Engine, is_compiled
from autopar.solvers.stages import StageCosts


@dataclass(kw_only=True)
class TableSearch:
    """The search in one table, which can be stopped: lower_ns and the best choice so far are valid at any time.

    best_ns: the objective of the best choice so far, or what a choice must be below; done: lower_ns is final.
    """

    tables: CostTables
    best_ns: int
    lower_ns: int = 0
    cuts: tuple[int, ...] | None = None
    strategies: tuple[int, ...] | None = None
    labels: int = 0
    done: bool = False

    def choice(self) -> Choice:
        """What was found, in its plainest equal form."""
        if self.cuts is None or self.strategies is None:
            return Choice(
                status="infeasible",
                layers_per_stage=None,
                strategies=None,
                lower_bound_ns=self.lower_ns,
                labels=self.labels,
            )
        layers = tuple(b - a for a, b in pairwise(self.cuts))
        return Choice(
            status="optimal" if self.lower_ns >= self.best_ns else "gap",
            layers_per_stage=layers,
            strategies=canonical(self.tables, layers, self.strategies),
            lower_bound_ns=min(self.lower_ns, self.best_ns),
            labels=self.labels,
        )


def quick_bound(tables: CostTables) -> int:
    """A lower bound of the table without looking at memory, INFEASIBLE when a layer has no strategy. O(U S).

    sum T >= the fastest times; max T >= its P-th part and >= the slowest single layer.
    """
    units = tables.time_ns.shape[0]
    times = tables.time_ns
    if units < tables.stages or (times == INFEASIBLE).all(axis=1).any():
        return INFEASIBLE
    least = times.min(axis=1)
    ends = 0
    if tables.tied and units > 1:
        both = np.flatnonzero((times[0] != INFEASIBLE) & (times[-1] != INFEASIBLE))
        if not both.size:
            return INFEASIBLE
        ends = int((times[0, both] + times[-1, both]).min() - least[0] - least[-1])
    total = int(least.sum()) + ends + (tables.stages - 1) * tables.p2p_ns
    largest = max(-(-total // tables.stages), int(least.max()))
    return total + (tables.micro_batches - 1) * largest


def check(tables: CostTables) -> None:
    """Return when the solvers' arithmetic is exact on this table; ValueError otherwise."""
    parts = (tables.time_ns, tables.transition_ns, tables.entry_ns, tables.exit_ns)
    time, *rest = (np.where(part == INFEASIBLE, 0, part) for part in parts)
    units = len(time)
    largest = float(time.max(axis=1).sum()) + units * sum(float(part.max(initial=0)) for part in rest)
    largest += tables.stages * tables.p2p_ns
    if largest * (tables.stages + tables.micro_batches) >= 2**59 or largest >= LARGEST_TOTAL_NS:
        raise OutOfRange("a table whose totals may leave the exact range of the solver: use a coarser unit of time")
    state, saved, peak = (
        np.where(part == INFEASIBLE, 0, part).astype(float)
        for part in (tables.state_bytes, tables.saved_bytes, tables.transient_bytes)
    )
    if (state + max(tables.in_flight) * saved + peak).max(axis=1).sum() >= LARGEST_TOTAL_NS:
        raise OutOfRange("a table whose memory may reach 2^50 bytes")


def search_table(
    tables: CostTables,
    *,
    below_ns: int = FORBIDDEN,
    halted: Callable[[], bool] = lambda: False,
    engine: Engine = "numpy",
) -> TableSearch:
    """The best choice of a table with objective < below_ns; stops between two segments when `halted` says so."""
    check(tables)
    search = TableSearch(tables=tables, best_ns=below_ns)
    quick = quick_bound(tables)
    if quick == INFEASIBLE:
        search.lower_ns, search.done = INFEASIBLE, True
        return search
    costs = StageCosts.of(tables, is_compiled(engine))
    if tables.tied and len(tables.time_ns) > 1:
        _search_tied(search, costs, halted)
    else:
        _search(search, costs, quick, halted)
    return search


def _search_tied(search: TableSearch, costs: StageCosts, halted: Callable[[], bool]) -> None:
    """Fill `search`, one strategy of embed and head after the other, in the order of their lower bounds."""
    tables = search.tables
    variants = []
    for strategy in _end_strategies(tables, costs):
        held = costs.held(strategy)
        bounds = [held.bounds[held.key(stage)] for stage in range(tables.stages)]
        found = best_cuts(bounds, tables.micro_batches, search.best_ns)
        if found is not None:
            variants.append((found[0], strategy, held))
        elif least_max(bounds) is not None:
            variants.append((search.best_ns, strategy, held))
    variants.sort(key=lambda variant: variant[:2])
    lower = INFEASIBLE
    for place, (floor, _, held) in enumerate(variants):
        if floor >= search.best_ns:
            lower = min(lower, search.best_ns)
            break
        part = TableSearch(tables=tables, best_ns=search.best_ns)
        _search(part, held, floor, halted)
        lower = min(lower, part.lower_ns)
        if part.cuts is not None:
            search.best_ns, search.cuts, search.strategies = part.best_ns, part.cuts, part.strategies
        if not part.done:
            search.labels = costs.labels
            search.lower_ns = min([lower, *(later for later, _, _ in variants[place + 1 : place + 2])])
            return
    search.lower_ns, search.labels, search.done = lower, costs.labels, True


def _end_strategies(tables: CostTables, costs: StageCosts) -> list[int]:
    """What embed and head can share; without strategies that another of the same layout matches in everything."""
    parts = (tables.time_ns, tables.state_bytes, tables.saved_bytes, tables.transient_bytes)
    rows = np.concatenate([*(part[[0, -1]] for part in parts), tables.entry_ns[None], tables.exit_ns[None]])
    no_worse = (rows[:, :, None] <= rows[:, None, :]).all(axis=0) & (costs.group[:, None] == costs.group[None, :])
    earlier = np.triu(np.ones_like(no_worse), 1)
    dominated = (no_worse & (earlier | ~no_worse.T)).any(axis=0)
    return [int(s) for s in np.flatnonzero((tables.time_ns[[0, -1]] != INFEASIBLE).all(axis=0) & ~dominated)]


def _search(search: TableSearch, costs: StageCosts, floor: int, halted: Callable[[], bool]) -> None:
    """Fill `search` with the best choice below its best_ns."""
    tables = search.tables
    shared = costs.bounds
    bounds = [shared[costs.key(stage)] for stage in range(tables.stages)]
    more = tables.micro_batches - 1
    search.lower_ns = floor
    while True:
        found = best_cuts(bounds, tables.micro_batches, search.best_ns)
        least = least_max(bounds)
        if found is None or least is None:
            possible = search.cuts is not None or least is not None
            search.lower_ns = search.best_ns if possible else INFEASIBLE
            search.done = True
            return
        search.lower_ns, cuts = max(search.lower_ns, found[0]), found[1]
        before, after = least_sums(bounds)
        limits = []
        for stage, (first, end) in enumerate(pairwise(cuts)):
            rest = int(before[stage][first] + after[stage][end])
            # In a partition below best_ns: T + rest + more * max(T, least) < best_ns.
            limits.append(min(search.best_ns - rest - more * least[0], (search.best_ns - 1 - rest) // (more + 1) + 1))
        news = False
        for look in (costs.relaxed, costs.exact):
            answers = []
            for stage, (first, end) in enumerate(pairwise(cuts)):
                if halted():
                    return
                answer = look(stage, first, end, limits[stage])
                answers.append(answer)
                key = costs.key(stage)
                if answer.lower_ns > shared[key][first, end]:
                    news = True
                    for a, b in _same(costs.layer_id, first, end):
                        shared[key][a, b] = max(shared[key][a, b], answer.lower_ns)
            times = [answer.upper_ns for answer in answers if answer.upper_ns is not None]
            if len(times) == len(answers):
                value = sum(times) + more * max(times)
                if value < search.best_ns:
                    search.best_ns, search.cuts, news = value, cuts, True
                    search.strategies = tuple(s for answer in answers for s in answer.strategies)
            if news:
                break
        search.labels = costs.labels
        if not news:
            search.done = True
            return


def _same(ids: tuple[int, ...], first: int, end: int) -> list[tuple[int, int]]:
    """The intervals of the chain with the same layers as first..end-1."""
    part, size = ids[first:end], end - first
    return [(a, a + size) for a in range(len(ids) - size + 1) if ids[a : a + size] == part]
