"""The chain solver against brute force, its properties, and what it does at the edges."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from autopar.price import INFEASIBLE, Int
from autopar.solvers import ChainChoice, score_chain, solve_chain
from autopar.solvers.brute import brute_chain
from autopar.solvers.labels import MOST_LABELS
from autopar.solvers.segment import Engine, is_compiled
from tests.solvers.random_tables import random_chain

SEEDS = range(1000)


@cache
def expected_of(seed: int, layers: int, columns: int) -> int | None:
    best = brute_chain(*random_chain(seed, layers=layers, columns=columns))
    return None if best is None else best[0]


def check_equals_brute_force(seed: int, layers: int, columns: int, engine: Engine) -> ChainChoice:
    time_ns, memory, transition, budget = random_chain(seed, layers=layers, columns=columns)
    expected = expected_of(seed, layers, columns)
    found = solve_chain(time_ns, memory, transition, budget, engine=engine)
    if expected is None:
        assert (found.status, found.choice) == ("infeasible", None), seed
        return found
    assert found.choice is not None, seed
    assert found.objective_ns == found.lower_bound_ns == expected, seed
    assert found.status == "optimal"
    assert score_chain(time_ns, memory, transition, found.choice) == (found.objective_ns, found.memory_bytes)
    assert found.memory_bytes is not None
    assert found.memory_bytes <= budget
    return found


def test_equals_brute_force(engine: Engine) -> None:
    # Both engines see thousands more in the slow suite.
    seeds = SEEDS if engine == "numpy" else SEEDS[:300]
    results = [check_equals_brute_force(seed, 5, 4, engine) for seed in seeds]
    # The instances are worth something: most are feasible, many need the labels.
    assert sum(result.status == "optimal" for result in results) > 0.6 * len(seeds)
    assert sum(result.labels > 0 for result in results) > 0.12 * len(seeds)


@pytest.mark.slow
def test_equals_brute_force_on_many(engine: Engine) -> None:
    for seed in range(1000, 4000):
        check_equals_brute_force(seed, 6, 4, engine)


def objective(time_ns: Int, memory: Int, transition: Int, budget: int, engine: Engine) -> float:
    found = solve_chain(time_ns, memory, transition, budget, engine=engine)
    return float("inf") if found.objective_ns is None else found.objective_ns


def test_more_memory_never_hurts(engine: Engine) -> None:
    for seed in range(20):
        time_ns, memory, transition, _ = random_chain(seed, layers=9, columns=5)
        top = int(np.where(memory == INFEASIBLE, 0, memory).max(axis=1).sum())
        budgets = range(0, top + 2, max(1, top // 8))
        values = [objective(time_ns, memory, transition, budget, engine) for budget in budgets]
        assert values == sorted(values, reverse=True), seed


def test_another_strategy_never_hurts(engine: Engine) -> None:
    for seed in range(40):
        time_ns, memory, transition, budget = random_chain(seed, layers=10, columns=6)
        without = (
            objective(time_ns[:, :-1], memory[:, :-1], transition[..., :-1, :-1], budget, engine)
            if time_ns.shape[1] > 1
            else float("inf")
        )
        assert objective(time_ns, memory, transition, budget, engine) <= without, seed


def test_order_of_strategies_changes_nothing(engine: Engine) -> None:
    for seed in range(40):
        time_ns, memory, transition, budget = random_chain(seed, layers=10, columns=6)
        order = np.random.default_rng(seed).permutation(time_ns.shape[1])
        moved = transition[..., order[:, None], order]
        shuffled = objective(time_ns[:, order], memory[:, order], moved, budget, engine)
        assert shuffled == objective(time_ns, memory, transition, budget, engine), seed


def test_large_chains_agree_with_a_memory_grid(engine: Engine) -> None:
    for seed in range(6):
        rng = np.random.default_rng(seed)
        units, count = 20, 8
        time_ns = np.sort(rng.integers(1, 10**9, (units, count)), axis=1)
        memory = -np.sort(-rng.integers(0, 40, (units, count)), axis=1)
        transition = rng.integers(0, 10**7, (units, count, count))
        budget = int(memory.mean() * units)
        found = objective(time_ns, memory, transition, budget, engine)
        assert found == grid(time_ns, memory, transition, budget)


def grid(time_ns: Int, memory: Int, transition: Int, budget: int) -> int:
    """The plain dynamic program over every byte of the budget."""
    units, count = time_ns.shape
    far = 1 << 60
    best = np.full((budget + 1, count), far)
    for s in range(count):
        best[int(memory[0, s]) :, s] = time_ns[0, s]
    for layer in range(1, units):
        step = (best[:, :, None] + transition[layer][None]).min(axis=1)
        new = np.full_like(best, far)
        for s in range(count):
            size = int(memory[layer, s])
            new[size:, s] = step[: budget + 1 - size, s] + time_ns[layer, s]
        best = new
    return int(best[budget].min())


def test_an_exactly_linear_trade_off_is_bounded_not_missed(engine: Engine) -> None:
    rng = np.random.default_rng(0)
    memory = rng.integers(10**8, 10**9, (24, 12))
    time_ns = 10**9 + (10**9 - memory) // 10
    transition = np.zeros((12, 12), dtype=np.int64)
    budget = int(memory.mean() * 24) + 7
    found = solve_chain(time_ns, memory, transition, budget, most_labels=20_000, engine=engine)
    assert found.status == "gap"
    assert found.objective_ns is not None
    assert found.lower_bound_ns < found.objective_ns
    assert 0 < found.gap < 1e-3


def test_overflow_still_bounds_the_optimum(engine: Engine) -> None:
    gaps = 0
    for seed in range(60):
        time_ns, memory, transition, budget = random_chain(seed, layers=6, columns=4)
        found = solve_chain(time_ns, memory, transition, budget, most_labels=6, engine=engine)
        expected = brute_chain(time_ns, memory, transition, budget)
        assert (expected is None) == (found.choice is None), seed
        if expected is not None and found.objective_ns is not None:
            assert found.lower_bound_ns <= expected[0] <= found.objective_ns, seed
            assert (found.status == "optimal") == (found.lower_bound_ns == found.objective_ns)
            gaps += found.status == "gap"
    assert gaps > 0


def test_extreme_prices_per_byte_are_exact(engine: Engine) -> None:
    """One byte decides about almost 2^50 ns; float bounds lose whole nanoseconds there."""
    big = 2**46
    time_ns = np.array([[big + 1, 3, big + 7], [big + 2, 1, big + 5], [big + 4, 2, big + 3]], dtype=np.int64)
    memory = np.array([[2**40, 2**40 + 1, 0], [2**41, 2**41 + 1, 0], [7, 8, 0]], dtype=np.int64)
    transition = np.zeros((3, 3), dtype=np.int64)
    for budget in (0, 8, 2**40 + 7, 2**40 + 8, 2**41 + 2**40 + 8, 2**41 + 2**40 + 9, 2**41 + 2**40 + 10):
        found = solve_chain(time_ns, memory, transition, budget, engine=engine)
        expected = brute_chain(time_ns, memory, transition, budget)
        assert expected is not None
        assert found.objective_ns == expected[0] == found.lower_bound_ns


def test_both_engines_agree_in_every_field() -> None:
    for seed in range(60):
        chain = random_chain(seed, layers=14, columns=9)
        for most in (MOST_LABELS, 30):
            one, other = (
                replace(solve_chain(*chain, most_labels=most, engine=engine), elapsed_s=0.0)
                for engine in ("numpy", "numba")
            )
            assert one == other, seed


def test_nothing_fits() -> None:
    time_ns = np.ones((2, 2), dtype=np.int64)
    found = solve_chain(time_ns, time_ns * 5, np.zeros((2, 2), dtype=np.int64), 9)
    assert (found.status, found.choice, found.objective_ns, found.memory_bytes) == ("infeasible", None, None, None)
    assert solve_chain(time_ns, time_ns * 5, np.zeros((2, 2), dtype=np.int64), 10).status == "optimal"
    time_ns[1] = INFEASIBLE
    assert solve_chain(time_ns, np.zeros_like(time_ns), np.zeros((2, 2), dtype=np.int64), 9).status == "infeasible"


def test_the_first_transition_is_not_paid_and_layouts_are_checked() -> None:
    time_ns = np.array([[1, 9], [1, 9]], dtype=np.int64)
    moves = np.array([[[INFEASIBLE] * 2] * 2, [[4, 0], [0, 0]]], dtype=np.int64)
    found = solve_chain(time_ns, np.zeros_like(time_ns), moves, 0)
    assert (found.choice, found.objective_ns) == ((0, 0), 6)
    with pytest.raises(ValueError, match="layout class 0"):
        solve_chain(time_ns, np.zeros_like(time_ns), moves, 0, layout=np.array([0, 0]))
    same = solve_chain(time_ns, np.zeros_like(time_ns), moves, 0, layout=np.array([0, 1]))
    assert same.objective_ns == 6


@pytest.mark.parametrize(
    ("time_ns", "memory", "transition"),
    [
        (np.zeros((2, 2)), np.zeros((2, 2), int), np.zeros((2, 2), int)),
        (np.zeros((2, 2), int), np.zeros((2, 3), int), np.zeros((2, 2), int)),
        (np.zeros((2, 2), int), np.zeros((2, 2), int), np.zeros((3, 2, 2), int)),
        (np.full((2, 2), -1), np.zeros((2, 2), int), np.zeros((2, 2), int)),
        (np.full((2, 2), 2**50), np.zeros((2, 2), int), np.zeros((2, 2), int)),
        (np.zeros((0, 2), int), np.zeros((0, 2), int), np.zeros((2, 2), int)),
    ],
)
def test_wrong_tables_are_refused(time_ns: Int, memory: Int, transition: Int) -> None:
    with pytest.raises(ValueError, match=r"int64|S\]|negative|2\^50"):
        solve_chain(time_ns, memory, transition, 1)


def test_the_compiled_engine_is_optional_and_only_loaded_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = random_chain(3, layers=8, columns=5)
    code = (
        "import sys\n"
        "from autopar.solvers import solve_chain, solve_table\n"
        "from tests.solvers.random_tables import random_chain, random_table\n"
        "solve_chain(*random_chain(3)), solve_table(random_table(3))\n"
        "assert 'numba' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=Path(__file__).parents[2])
    monkeypatch.setattr("autopar.solvers.segment.find_spec", lambda name: None)
    is_compiled.cache_clear()
    assert not is_compiled("numba")
    assert solve_chain(*chain, engine="numba").choice == solve_chain(*chain).choice
    is_compiled.cache_clear()
    with pytest.raises(ValueError, match="engine"):
        solve_chain(*chain, engine="fortran")  # type: ignore[arg-type]
