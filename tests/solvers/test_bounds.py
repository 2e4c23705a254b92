"""Every lower bound that the pipeline solver prunes with is below what brute force finds."""

from __future__ import annotations

from itertools import product

import numpy as np

from autopar.price import INFEASIBLE, CostTables, score
from autopar.solvers.brute import brute_table
from autopar.solvers.intervals import contents
from autopar.solvers.quick import quick_bound
from autopar.solvers.segment import FORBIDDEN, Engine
from autopar.solvers.stages import StageCosts
from tests.solvers.random_tables import random_table


def test_the_quick_bound_is_below_the_optimum() -> None:
    reached = 0
    for seed in range(200):
        tables = random_table(seed, layers=4)
        best = brute_table(tables)
        if best is not None:
            assert quick_bound(tables) <= best[0], seed
            reached += quick_bound(tables) == best[0]
    assert reached > 10


def brute_interval(tables: CostTables, stage: int, first: int, end: int) -> int:
    """The least time of layers first..end-1 on a stage, FORBIDDEN when nothing fits."""
    best = FORBIDDEN
    for strategies in product(range(len(tables.strategies)), repeat=end - first):
        rows = range(first, end)
        if any(tables.time_ns[row, s] == INFEASIBLE for row, s in zip(rows, strategies, strict=True)):
            continue
        # One stage alone, by the one function that adds up; its entry, exit and hop are added here.
        alone = CostTables(
            stages=1,
            micro_batches=1,
            schedule=tables.schedule,
            strategies=tables.strategies,
            time_ns=tables.time_ns[first:end],
            state_bytes=tables.state_bytes[first:end],
            saved_bytes=tables.saved_bytes[first:end],
            transient_bytes=tables.transient_bytes[first:end],
            transition_ns=tables.transition_ns,
            entry_ns=tables.entry_ns,
            exit_ns=tables.exit_ns,
            p2p_ns=0,
            layout=tables.layout,
            in_flight=(tables.in_flight[stage],),
            budget_bytes=(tables.budget_bytes[stage],),
        )
        result = score(alone, (end - first,), strategies)
        if result.fits:
            time_ns = result.objective_ns
            time_ns += int(tables.entry_ns[strategies[0]]) if stage else 0
            time_ns += int(tables.exit_ns[strategies[-1]]) + tables.p2p_ns if stage < tables.stages - 1 else 0
            best = min(best, time_ns)
    return best


def test_every_interval_is_bounded_from_below_and_solved_exactly(engine: Engine) -> None:
    closed = 0
    for seed in range(40):
        tables = random_table(seed, layers=4, tied=False)
        costs = StageCosts.of(tables, engine == "numba")
        units = len(tables.time_ns)
        for stage in range(tables.stages):
            bounds, where = costs.lower_bounds(stage), costs.contents.where
            # The intervals that leave a layer for every other stage.
            for first in range(stage, units) if stage else range(1):
                last = stage == tables.stages - 1
                for end in range(units if last else first + 1, units - (tables.stages - 1 - stage) + 1):
                    content = int(where[end, first])
                    best = brute_interval(tables, stage, first, end)
                    place = (seed, stage, first, end)
                    assert bounds[content] <= best, place
                    assert costs.relaxed(stage, content, FORBIDDEN).lower_ns <= best, place
                    exact = costs.exact(stage, content, FORBIDDEN)
                    assert (exact.lower_ns if exact.upper_ns is None else exact.upper_ns) == best, place
                    assert exact.lower_ns == best, place
                    closed += best < FORBIDDEN and bounds[content] == best
    assert closed > 30


def test_what_intervals_are_made_of() -> None:
    rng = np.random.default_rng(0)
    patterns = [(0,), (0, 0, 0), (0, *[1] * 6, 2), (0, 1, 2) * 3, tuple(range(30))]
    patterns += [tuple(int(kind) for kind in np.unique(rng.integers(0, 4, 9), return_inverse=True)[1])]
    for pattern in patterns:
        found = contents(pattern)
        units, known = len(pattern), {}
        for first in range(units + 1):
            for end in range(units + 1):
                content = int(found.where[end, first])
                if end <= first:
                    assert content == len(found.size)
                    continue
                # Equal numbers are equal layers, and the other way round.
                assert known.setdefault(pattern[first:end], content) == content
                assert (
                    found.counts[content].tolist()
                    == np.bincount(pattern[first:end], minlength=max(pattern) + 1).tolist()
                )
                assert found.size[content] == end - first
                assert pattern[found.first[content] :][: end - first] == pattern[first:end]
                assert found.placed[content, int(first > 0), int(end < units)]
        assert sorted(known.values()) == list(range(len(found.size)))
    assert len(contents((0, *[1] * 100, 2)).size) <= 4 * 102
