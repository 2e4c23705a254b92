"""The best tables, cuts and strategies of all: exact in each table, best first over tables.

    minimise  sum_i T_i + (micro_batches - 1) * max_i T_i     (autopar.price has the terms)

What is proven is this objective, a surrogate of the simulated step.
"""

from __future__ import annotations

import heapq
import time as clock
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.errors import RunError
from autopar.price import INFEASIBLE, Choice, CostTables, Score, score
from autopar.solvers.limited import search_limited
from autopar.solvers.quick import quick_bound
from autopar.solvers.segment import FORBIDDEN, Engine
from autopar.solvers.table import TableSearch, search_table


@dataclass(frozen=True, kw_only=True)
class TableChoice:
    """The best choice of one table of several.

    table: its place in the sequence; score: what the choice adds up to; lower_bound_ns: no choice of *any* table is
    below it, so the first of a shortlist is optimal over all tables when its objective equals it
    (`choice.lower_bound_ns` speaks of this table alone).
    """

    table: int
    choice: Choice
    score: Score
    lower_bound_ns: int

    @property
    def objective_ns(self) -> int:
        """The surrogate objective, added up by `autopar.price.score`."""
        return self.score.objective_ns


def halting(deadline: float | None, stop: Callable[[], bool] | None) -> Callable[[], bool]:
    """What says whether to stop: after the deadline, a moment of `time.monotonic()`, or when `stop` says so."""
    return lambda: (deadline is not None and clock.monotonic() >= deadline) or (stop is not None and stop())


def solve_table(tables: CostTables, *, upper_bound_ns: int | None = None, engine: Engine = "numpy") -> Choice:
    """The choice of least objective that fits in one table; only objectives <= upper_bound_ns count.

    Exact with respect to `autopar.price.score`. Status "infeasible" when nothing counts: lower_bound_ns is then
    INFEASIBLE if nothing fits at all, else above upper_bound_ns. Status "gap" only when labels overflowed.
    Raises ValueError when totals may leave the exact range (2^50 ns or bytes).
    """
    below = FORBIDDEN if upper_bound_ns is None else min(FORBIDDEN, upper_bound_ns + 1)
    return search_table(tables, below_ns=below, engine=engine).choice()


def solve_pipeline(
    tables: Sequence[CostTables],
    *,
    shortlist: int = 8,
    deadline: float | None = None,
    stop: Callable[[], bool] | None = None,
    max_strategies: int | None = None,
    within: float | None = None,
    floors_ns: Sequence[int] | None = None,
    limits_ns: Sequence[int] | None = None,
    engine: Engine = "numpy",
) -> tuple[TableChoice, ...]:
    """The best choices of the `shortlist` best tables, by objective, then place; empty when nothing fits anywhere.

    Tables are searched in the order of a cheap lower bound; those that cannot enter the shortlist are not. deadline: a
    moment of `time.monotonic()` after which the best so far is returned, with its gap; stop: asked between two
    segments, for the same. Then the choices may be "gap", and tables that were not reached are missing.
    limits_ns: only choices of a table below its limit count; floors_ns: lower bounds of the tables, so that those that
    cannot matter are never taken from the sequence.
    max_strategies: at most so many distinct ones over the layers between the first and the last. engine: "numba"
    compiles the inner loops where it is installed, with the same result.
    Raises RunError when stopped before anything was found, ValueError for shortlist < 1.
    """
    if shortlist < 1:
        raise ValueError(f"shortlist must be >= 1, is {shortlist}")

    halted = halting(deadline, stop)
    # A bound, a place, and whether the bound is that of the table itself.
    limits = limits_ns or [FORBIDDEN] * len(tables)
    queue = [(bound, place, False) for place, bound in enumerate(floors_ns or [0] * len(tables))]
    heapq.heapify(queue)
    best: list[tuple[int, int]] = []
    searches: dict[int, TableSearch] = {}
    lower, stopped = INFEASIBLE, False
    while queue and not stopped:
        worst = best[shortlist - 1] if len(best) >= shortlist else (FORBIDDEN, 0)
        if within is not None and best:
            worst = min(worst, (int(best[0][0] * (1 + within)) + 1, 0))
        if queue[0][:2] >= worst:
            break
        if halted():
            stopped = True
            break
        bound, place, is_its_own = heapq.heappop(queue)
        if not is_its_own:
            bound = max(bound, quick_bound(tables[place]))
            if bound < INFEASIBLE:
                heapq.heappush(queue, (bound, place, True))
            continue
        # A table that ties with the worst of the shortlist enters it when its place is lower.
        below = min(worst[0] + (place < worst[1]), limits[place])
        if bound >= below:
            lower = min(lower, bound)
            continue
        if max_strategies is None:
            search = search_table(tables[place], below_ns=below, halted=halted, engine=engine)
        else:
            search = search_limited(tables[place], max_strategies, below_ns=below, halted=halted, engine=engine)
        lower = min(lower, search.lower_ns)
        stopped = not search.done
        if search.cuts is not None:
            searches[place] = search
            insort(best, (search.best_ns, place))
    if queue:
        lower = min(lower, queue[0][0])
    if stopped and not best:
        raise RunError(
            "the search was stopped before it found a plan that fits",
            why=f"{len(queue)} of {len(tables)} tables were not reached",
            fix="give it more time",
        )
    if within is not None:
        best = [entry for entry in best if entry[0] <= best[0][0] * (1 + within)]
    return tuple(_table_choice(tables[place], place, searches[place], lower) for _, place in best[:shortlist])


def _table_choice(tables: CostTables, place: int, search: TableSearch, lower: int) -> TableChoice:
    choice = search.choice()
    assert choice.layers_per_stage is not None
    assert choice.strategies is not None
    result = score(tables, choice.layers_per_stage, choice.strategies)
    if result.objective_ns != search.best_ns or not result.fits:
        raise AssertionError(f"table {place}: the search says {search.best_ns} ns, the score {result}")
    return TableChoice(table=place, choice=choice, score=result, lower_bound_ns=min(lower, result.objective_ns))
