"""One table and many against brute force over cuts and strategies, and the properties of the objective."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from autopar.errors import RunError
from autopar.price import INFEASIBLE, CostTables, score
from autopar.solvers import excess_bytes, leanest, leanest_of, solve_pipeline, solve_table
from autopar.solvers.brute import brute_leanest, brute_table
from autopar.solvers.canonical import segments
from autopar.solvers.segment import Engine
from tests.solvers.random_tables import random_table


@cache
def expected_of(seed: int, layers: int, columns: int) -> int | None:
    best = brute_table(random_table(seed, layers=layers, columns=columns))
    return None if best is None else best[0]


def check_equals_brute_force(seed: int, engine: Engine, *, layers: int = 5, columns: int = 3) -> str:
    tables = random_table(seed, layers=layers, columns=columns)
    expected = expected_of(seed, layers, columns)
    found = solve_table(tables, engine=engine)
    if expected is None:
        assert (found.status, found.strategies, found.lower_bound_ns) == ("infeasible", None, INFEASIBLE), seed
        return found.status
    assert found.layers_per_stage is not None, seed
    assert found.strategies is not None
    result = score(tables, found.layers_per_stage, found.strategies)
    assert result.fits, seed
    assert result.objective_ns == expected == found.lower_bound_ns, seed
    assert found.status == "optimal"
    return "labels" if found.labels else "optimal"


def test_equals_brute_force(engine: Engine) -> None:
    # Both engines see thousands more in the slow suite.
    seeds = range(520 if engine == "numpy" else 160)
    results = [check_equals_brute_force(seed, engine) for seed in seeds]
    assert results.count("infeasible") < 0.6 * len(seeds)
    assert results.count("labels") > 0.04 * len(seeds)


@pytest.mark.slow
def test_equals_brute_force_on_many(engine: Engine) -> None:
    for seed in range(1000, 3000):
        check_equals_brute_force(seed, engine, layers=6, columns=3)


def test_leanest_equals_brute_force() -> None:
    for seed in range(120):
        tables = random_table(seed)
        found, expected = leanest(tables), brute_leanest(tables)
        assert (found is None) == (expected is None), seed
        if found is not None:
            assert excess_bytes(tables, found[2]) == expected, seed
            assert found[2] == score(tables, found[0], found[1])


def objective(tables: CostTables, engine: Engine) -> float:
    found = solve_table(tables, engine=engine)
    if found.layers_per_stage is None or found.strategies is None:
        return float("inf")
    return score(tables, found.layers_per_stage, found.strategies).objective_ns


def test_more_memory_never_hurts(engine: Engine) -> None:
    for seed in range(15):
        tables = random_table(seed, layers=8, columns=5)
        values = [
            objective(replace(tables, budget_bytes=tuple(int(b * factor) for b in tables.budget_bytes)), engine)
            for factor in (0.5, 0.8, 0.9, 1.0, 1.1, 1.5, 3.0)
        ]
        assert values == sorted(values, reverse=True), seed


def columns(tables: CostTables, keep: np.ndarray) -> CostTables:  # type: ignore[type-arg]
    return replace(
        tables,
        strategies=tuple(tables.strategies[int(s)] for s in keep),
        time_ns=tables.time_ns[:, keep],
        state_bytes=tables.state_bytes[:, keep],
        saved_bytes=tables.saved_bytes[:, keep],
        transient_bytes=tables.transient_bytes[:, keep],
        transition_ns=tables.transition_ns[keep[:, None], keep],
        entry_ns=tables.entry_ns[keep],
        exit_ns=tables.exit_ns[keep],
        layout=tables.layout[keep],
    )


def test_strategies_another_never_hurts_and_order_changes_nothing(engine: Engine) -> None:
    for seed in range(30):
        tables = random_table(seed, layers=8, columns=5)
        count = len(tables.strategies)
        value = objective(tables, engine)
        order = np.random.default_rng(seed).permutation(count)
        assert objective(columns(tables, order), engine) == value, seed
        if count > 1:
            assert value <= objective(columns(tables, np.arange(count - 1)), engine), seed


def test_an_upper_bound_cuts_off_and_loses_nothing(engine: Engine) -> None:
    for seed in range(50):
        tables = random_table(seed)
        value = objective(tables, engine)
        if value == float("inf"):
            continue
        assert solve_table(tables, upper_bound_ns=int(value), engine=engine).lower_bound_ns == value
        below = solve_table(tables, upper_bound_ns=int(value) - 1, engine=engine)
        assert below.strategies is None
        assert below.lower_bound_ns <= value


def test_shortlist_equals_sorting_every_table(engine: Engine) -> None:
    for seed in range(8):
        tables = [random_table(97 * seed + place, layers=4) for place in range(12)]
        optima = [(found[0], place) for place, one in enumerate(tables) if (found := brute_table(one)) is not None]
        for size in (1, 3, 20):
            found = solve_pipeline(tables, shortlist=size, engine=engine)
            assert [(one.objective_ns, one.table) for one in found] == sorted(optima)[:size], seed
            assert all(one.lower_bound_ns == min(optima)[0] for one in found)
            assert all(one.choice.status == "optimal" for one in found)


def test_each_table_counts_below_its_own_limit(engine: Engine) -> None:
    for seed in range(8):
        tables = [random_table(97 * seed + place, layers=4) for place in range(12)]
        optima = {place: found[0] for place, one in enumerate(tables) if (found := brute_table(one)) is not None}
        limits = [optima.get(place, 5) + place % 2 for place in range(12)]
        found = solve_pipeline(tables, shortlist=20, limits_ns=limits, engine=engine)
        assert sorted(one.table for one in found) == [place for place in optima if place % 2], seed
        assert all(one.objective_ns == optima[one.table] for one in found)
        assert all(one.lower_bound_ns <= min(optima.values()) for one in found)


def test_a_shortlist_of_ties_goes_by_place() -> None:
    tables = [random_table(3)] * 5
    assert [one.table for one in solve_pipeline(tables, shortlist=3)] == [0, 1, 2]


def test_nothing_fits_anywhere() -> None:
    tables = [replace(random_table(seed), budget_bytes=(0,) * random_table(seed).stages) for seed in (1, 2, 3, 4)]
    tables = [replace(one, state_bytes=one.state_bytes + 5) for one in tables]
    assert solve_pipeline(tables) == ()
    found = leanest_of(tables)
    assert found is not None
    assert excess_bytes(tables[found[0]], found[1][2]) == min(
        e for one in tables if (e := brute_leanest(one)) is not None
    )


def big_table(*, tied: bool = False, jitter: bool = False) -> CostTables:
    """34 layers, 12 strategies in 3 layouts, 4 stages, budgets that bind."""
    rng = np.random.default_rng(5)
    units, count = 34, 12
    kinds = np.arange(units) if jitter else np.array([0] + [1] * (units - 2) + [2])
    layout = np.repeat(np.arange(3), 4)
    fast = np.sort(rng.integers(2 * 10**6, 4 * 10**6, (units, count)), axis=1)
    lean = -np.sort(-rng.integers(10**8, 10**9, (units, count)), axis=1)
    moves = np.array([[0, 3, 9], [3, 0, 3], [9, 3, 0]]) * 10**5
    values = random_table(0)
    return replace(
        values,
        stages=4,
        micro_batches=8,
        strategies=tuple(random_table(0).strategies[:1] * count),
        time_ns=fast[kinds],
        state_bytes=lean[kinds],
        saved_bytes=(lean // 3)[kinds],
        transient_bytes=rng.integers(0, 10**9, (units, count))[kinds],
        transition_ns=moves[layout[:, None], layout],
        entry_ns=moves[0][layout],
        exit_ns=moves[0][layout],
        p2p_ns=10**5,
        layout=layout,
        in_flight=(4, 3, 2, 1),
        budget_bytes=(int(0.75 * lean.mean() * units / 2),) * 4,
        tied=tied,
    )


@pytest.mark.parametrize("tied", [False, True])
def test_runs_of_equal_layers_come_in_few_segments(tied: bool) -> None:
    tables = big_table(tied=tied)
    found = solve_table(tables)
    assert found.layers_per_stage is not None
    assert found.strategies is not None
    assert found.status == "optimal"
    assert segments(found.layers_per_stage, found.strategies) <= 4 * 4
    assert found == solve_table(tables)


def test_a_stopped_search_says_how_far_it_is() -> None:
    tables = [big_table(), big_table(jitter=True), big_table(tied=True)]
    best = solve_pipeline(tables)
    with pytest.raises(RunError, match="stopped"):
        solve_pipeline(tables, stop=lambda: True)
    with pytest.raises(RunError, match="stopped"):
        solve_pipeline(tables, deadline=time.monotonic() - 1.0)
    for allowed in (5, 20):
        calls = iter(range(10**9))
        try:
            found = solve_pipeline(tables, stop=lambda calls=calls, allowed=allowed: next(calls) >= allowed)
        except RunError:
            continue
        assert found[0].lower_bound_ns <= best[0].objective_ns <= found[0].objective_ns
        assert found[0].score.fits


def test_both_engines_agree_in_every_field() -> None:
    for tables in [
        *(random_table(seed, layers=9, columns=6) for seed in range(30)),
        big_table(),
        big_table(tied=True),
    ]:
        assert solve_table(tables, engine="numba") == solve_table(tables, engine="numpy")


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="shortlist"):
        solve_pipeline([], shortlist=0)
    with pytest.raises(ValueError, match="unit of time"):
        solve_table(replace(random_table(0), time_ns=np.full_like(random_table(0).time_ns, 2**50)))


def test_results_do_not_depend_on_the_hash_seed() -> None:
    code = (
        "from tests.solvers.test_pipeline import big_table\n"
        "from autopar.solvers import solve_pipeline\n"
        "print(solve_pipeline([big_table(), big_table(tied=True)]))\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "77")
    }
    assert len(printed) == 1
