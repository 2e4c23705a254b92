"""The exact optimum of one table: cuts into stages and strategies of layers together.

Every interval of layers starts with a lower bound; the best partition under the bounds is found, its intervals are
solved exactly, and so on until the best partition is exact. Only a few intervals are ever solved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autopar.price import INFEASIBLE, Choice, CostTables
from autopar.solvers.canonical import canonical
from autopar.solvers.partitions import Partitions
from autopar.solvers.quick import check, quick_bound
from autopar.solvers.segment import FORBIDDEN, Engine, is_compiled
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
        _search_tied(search, costs, quick, halted)
    else:
        _search(search, Partitions(costs), quick, halted)
    return search


def _search_tied(search: TableSearch, costs: StageCosts, quick: int, halted: Callable[[], bool]) -> None:
    """Fill `search`, one strategy of embed and head after the other, in the order of their lower bounds.

    quick: a lower bound of all.
    """
    variants = []
    for strategy in _end_strategies(search.tables, costs):
        partitions = Partitions(costs.held(strategy))
        found = partitions.best(search.best_ns)
        if found is not None:
            variants.append((max(quick, found.value), strategy, partitions))
        elif partitions.incomplete or partitions.possible():
            variants.append((quick if partitions.incomplete else search.best_ns, strategy, partitions))
    variants.sort(key=lambda variant: variant[:2])
    lower = INFEASIBLE
    for place, (floor, _, partitions) in enumerate(variants):
        if floor >= search.best_ns:
            lower = min(lower, search.best_ns)
            break
        part = TableSearch(tables=search.tables, best_ns=search.best_ns)
        _search(part, partitions, floor, halted)
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


def _search(search: TableSearch, partitions: Partitions, floor: int, halted: Callable[[], bool]) -> None:
    """Fill `search` with the best choice below its best_ns."""
    costs, more = partitions.costs, search.tables.micro_batches - 1
    search.lower_ns = floor
    while True:
        found = partitions.best(search.best_ns)
        if found is None:
            if not partitions.incomplete:
                possible = search.cuts is not None or partitions.possible()
                search.lower_ns = search.best_ns if possible else INFEASIBLE
            search.done = True
            return
        search.lower_ns = max(search.lower_ns, found.value)
        limits = []
        for stage, (first, end) in enumerate(pairwise(found.cuts)):
            rest = int(found.before[stage][first] + found.after[stage][end])
            # In a partition below best_ns: T + rest + more * max(T, least) < best_ns.
            limits.append(
                min(search.best_ns - rest - more * found.least_max_ns, (search.best_ns - 1 - rest) // (more + 1) + 1)
            )
        news = False
        for look in (costs.relaxed, costs.exact):
            answers = []
            for stage, content in enumerate(partitions.contents(found.cuts)):
                if halted():
                    return
                answers.append(look(stage, content, limits[stage]))
                news |= costs.sharpen(stage, content, answers[-1].lower_ns)
            times = [answer.upper_ns for answer in answers if answer.upper_ns is not None]
            if len(times) == len(answers):
                value = sum(times) + more * max(times)
                if value < search.best_ns:
                    search.best_ns, search.cuts, news = value, found.cuts, True
                    search.strategies = tuple(s for answer in answers for s in answer.strategies)
            if news:
                break
        search.labels = costs.labels
        if not news:
            search.done = True
            return
