"""At most q distinct strategies over the blocks, against brute force."""

from __future__ import annotations

from functools import cache

import pytest

from autopar.price import INFEASIBLE, CostTables, score
from autopar.solvers import solve_limited, solve_pipeline, solve_table
from autopar.solvers.brute import every_choice
from autopar.solvers.limited import search_limited
from autopar.solvers.segment import Engine
from tests.solvers.random_tables import random_table
from tests.solvers.test_pipeline import big_table

Fitting = list[tuple[tuple[int, ...], int]]
"""Strategies and objective of every choice that fits."""


@cache
def fitting_of(seed: int) -> Fitting:
    return fitting(random_table(seed, layers=5, columns=4))


def fitting(tables: CostTables) -> Fitting:
    return [(s, r.objective_ns) for _, s, r in every_choice(tables) if r.fits]


def least(choices: Fitting, most: int, blocks: slice) -> int | None:
    """The least objective with so many distinct strategies over the blocks."""
    return min((objective for s, objective in choices if len(set(s[blocks])) <= most), default=None)


def test_equals_brute_force(engine: Engine) -> None:
    binding = 0
    for seed in range(100):
        tables = random_table(seed, layers=5, columns=4)
        choices = fitting_of(seed)
        whole = seed % 2 == 1
        counted, blocks = (slice(None), range(len(tables.time_ns))) if whole else (slice(1, -1), None)
        for most in (1, 2):
            expected = least(choices, most, counted)
            found = solve_limited(tables, most, blocks=blocks, engine=engine)
            if expected is None:
                assert (found.status, found.lower_bound_ns) == ("infeasible", INFEASIBLE), seed
                continue
            assert found.layers_per_stage is not None, seed
            assert found.strategies is not None
            result = score(tables, found.layers_per_stage, found.strategies)
            assert result.fits
            assert len(set(found.strategies[counted])) <= most, seed
            assert result.objective_ns == expected == found.lower_bound_ns, seed
            assert found.status == "optimal"
            binding += expected > min(objective for _, objective in choices)
    assert binding > 16


def test_a_looser_limit_never_hurts_and_a_loose_one_is_none() -> None:
    for tables in (big_table(), big_table(tied=True)):
        free = solve_table(tables).lower_bound_ns
        values = [solve_limited(tables, most).lower_bound_ns for most in (1, 2, 3, 12)]
        assert values == sorted(values, reverse=True)
        assert values[-1] == free
        assert values[0] > free


def test_an_upper_bound_cuts_off_and_loses_nothing() -> None:
    for seed in range(40):
        tables = random_table(seed)
        value = solve_limited(tables, 1).lower_bound_ns
        if value == INFEASIBLE:
            continue
        assert solve_limited(tables, 1, upper_bound_ns=value).lower_bound_ns == value, seed
        below = solve_limited(tables, 1, upper_bound_ns=value - 1)
        assert below.strategies is None
        assert below.lower_bound_ns >= value, seed


def test_a_stopped_search_says_how_far_it_is() -> None:
    tables = big_table()
    best = solve_limited(tables, 2).lower_bound_ns
    stopped = 0
    for allowed in (0, 3, 10, 30, 100):
        calls = iter(range(10**9))
        found = search_limited(tables, 2, halted=lambda calls=calls, allowed=allowed: next(calls) >= allowed)
        assert found.lower_ns <= best <= found.best_ns
        stopped += not found.done
    assert stopped >= 3


def test_a_shortlist_under_a_limit_equals_solving_every_table() -> None:
    for seed in range(8):
        tables = [random_table(97 * seed + place, layers=4) for place in range(10)]
        values = [least(fitting(one), 1, slice(1, -1)) for one in tables]
        optima = [(value, place) for place, value in enumerate(values) if value is not None]
        found = solve_pipeline(tables, shortlist=4, max_strategies=1)
        assert [(one.objective_ns, one.table) for one in found] == sorted(optima)[:4], seed


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="most_strategies"):
        solve_limited(random_table(0), 0)
