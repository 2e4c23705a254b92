"""Everything tried, nothing clever: the judge of the other solvers, for tiny tables only."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise, product

import numpy as np

from autopar.price import INFEASIBLE, CostTables, Int, Score, score
from autopar.solvers.chain import score_chain


def brute_chain(
    time_ns: Int, memory_bytes: Int, transition_ns: Int, budget_bytes: int
) -> tuple[int, tuple[int, ...]] | None:
    """The least time and the first choice that reaches it, None when nothing fits. O(S^L)."""
    best: tuple[int, tuple[int, ...]] | None = None
    for choice in product(range(time_ns.shape[1]), repeat=len(time_ns)):
        try:
            objective, memory = score_chain(time_ns, memory_bytes, transition_ns, choice)
        except ValueError:
            continue
        if memory <= budget_bytes and (best is None or objective < best[0]):
            best = objective, choice
    return best


def every_choice(tables: CostTables) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], Score]]:
    """Every legal choice of a table with its score, also those that do not fit."""
    units = tables.time_ns.shape[0]
    columns = [[int(s) for s in np.flatnonzero(row)] for row in tables.feasible]
    if units < tables.stages:
        return
    cuts = [(0, *inner, units) for inner in combinations(range(1, units), tables.stages - 1)]
    for strategies in product(*columns):
        if tables.tied and strategies[0] != strategies[-1]:
            continue
        for ends in cuts:
            layers = tuple(b - a for a, b in pairwise(ends))
            result = score(tables, layers, strategies)
            if result.objective_ns < INFEASIBLE:
                yield layers, strategies, result


def brute_table(tables: CostTables) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
    """The least objective that fits, its cuts and strategies; None when nothing fits. O(S^U * U^P)."""
    best: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None
    for layers, strategies, result in every_choice(tables):
        if result.fits and (best is None or result.objective_ns < best[0]):
            best = result.objective_ns, layers, strategies
    return best


def brute_leanest(tables: CostTables) -> int | None:
    """The least worst excess over the budget, max over stages of memory - budget; None without a legal choice."""
    return min(
        (
            max(size - budget for size, budget in zip(result.stage_bytes, tables.budget_bytes, strict=True))
            for _, _, result in every_choice(tables)
        ),
        default=None,
    )
