"""The exact optimum of one table with at most so many distinct strategies over its blocks.

The state of the chain solver cannot count strategies, so palettes are branched over: a node says which columns are in
the palette and which are not, and its bound is the optimum of the table with the latter masked. When that optimum
keeps to a palette, the node is solved; when not, its most used strategies make the next palette, and the others differ
from it in a first strategy that they leave out.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autopar.price import INFEASIBLE, Choice, CostTables, Int
from autopar.solvers.segment import FORBIDDEN, Engine
from autopar.solvers.table import TableSearch, search_table


def blocks_of(tables: CostTables) -> tuple[int, ...]:
    """The layers between embed and head."""
    return tuple(range(1, len(tables.time_ns) - 1))


def solve_limited(
    tables: CostTables,
    most_strategies: int,
    *,
    blocks: Sequence[int] | None = None,
    upper_bound_ns: int | None = None,
    engine: Engine = "numpy",
) -> Choice:
    """The best choice of a table with at most `most_strategies` distinct strategies over the layers `blocks`.

    blocks: all but the first and the last layer when None. The rest as for `solve_table`, in which forbidden and
    pinned strategies are masks. Exact; as many solutions of masked tables as palettes have to be told apart, at worst
    one for each of the S-over-q palettes. ValueError for most_strategies < 1.
    """
    below = FORBIDDEN if upper_bound_ns is None else min(FORBIDDEN, upper_bound_ns + 1)
    return search_limited(tables, most_strategies, blocks=blocks, below_ns=below, engine=engine).choice()


def search_limited(
    tables: CostTables,
    most_strategies: int,
    *,
    blocks: Sequence[int] | None = None,
    below_ns: int = FORBIDDEN,
    halted: Callable[[], bool] = lambda: False,
    engine: Engine = "numpy",
) -> TableSearch:
    """The search behind `solve_limited`, which can be stopped as `search_table` can."""
    if most_strategies < 1:
        raise ValueError(f"most_strategies must be >= 1, is {most_strategies}")
    rows = np.array(blocks_of(tables) if blocks is None else tuple(blocks), dtype=np.int64)
    search = TableSearch(tables=tables, best_ns=below_ns)
    open_ = np.flatnonzero(tables.feasible[rows].any(axis=0))
    # bound, full palettes first, order of creation, in the palette, still possible
    queue: list[tuple[int, bool, int, tuple[int, ...], tuple[int, ...]]] = [(0, True, 0, (), tuple(open_.tolist()))]
    made, lower = 1, INFEASIBLE
    while queue and queue[0][0] < search.best_ns:
        bound, _, _, palette, possible = heapq.heappop(queue)
        part = search_table(_masked(tables, rows, possible), below_ns=search.best_ns, halted=halted, engine=engine)
        search.labels += part.labels
        if not part.done:
            search.lower_ns = min(lower, max(bound, part.lower_ns))
            return search
        if part.cuts is None or part.strategies is None:
            lower = min(lower, part.lower_ns)
            continue
        used = Counter(part.strategies[row] for row in rows)
        if len({*palette, *used}) <= most_strategies:
            search.best_ns, search.cuts, search.strategies = part.best_ns, part.cuts, part.strategies
            lower = min(lower, part.lower_ns)
            continue
        news = sorted((-count, s) for s, count in used.items() if s not in palette)
        picked = list(palette)
        for _, s in news[: most_strategies - len(palette)]:
            without = tuple(other for other in possible if other != s)
            heapq.heappush(queue, (part.lower_ns, True, made, tuple(picked), without))
            picked.append(s)
            made += 1
        heapq.heappush(queue, (part.lower_ns, False, made, tuple(picked), tuple(sorted(picked))))
        made += 1
    if queue:
        lower = min(lower, max(queue[0][0], search.best_ns))
    search.lower_ns, search.done = min(lower, search.best_ns) if search.cuts is not None else lower, True
    return search


def _masked(tables: CostTables, rows: Int, possible: tuple[int, ...]) -> CostTables:
    """The table whose blocks take only the possible strategies."""
    time_ns = tables.time_ns.copy()
    closed = np.ones(time_ns.shape[1], dtype=bool)
    closed[list(possible)] = False
    time_ns[np.ix_(rows, np.flatnonzero(closed))] = INFEASIBLE
    return replace(tables, time_ns=time_ns)
