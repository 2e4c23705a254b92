"""What is left of exactness when there are too many intervals to look at: certified bounds, and choices that fit."""

from __future__ import annotations

import pytest

from autopar.price import score
from autopar.solvers import partitions, solve_pipeline, solve_table
from tests.solvers.random_tables import random_table
from tests.solvers.test_pipeline import expected_of


def test_too_many_intervals_leave_a_gap_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "MOST_INTERVALS", 0)
    optimal = found = gaps = 0
    for seed in range(300):
        tables, best = random_table(seed, layers=5, columns=3), expected_of(seed, 5, 3)
        choice = solve_table(tables)
        assert choice.lower_bound_ns <= (float("inf") if best is None else best), seed
        if choice.layers_per_stage is None or choice.strategies is None:
            continue
        result = score(tables, choice.layers_per_stage, choice.strategies)
        assert best is not None, seed
        assert result.fits, seed
        assert choice.lower_bound_ns <= best <= result.objective_ns, seed
        assert (choice.status == "optimal") == (choice.lower_bound_ns == result.objective_ns), seed
        optimal, found, gaps = optimal + (result.objective_ns == best), found + 1, gaps + (choice.status == "gap")
    assert found > 100
    assert optimal > 0.5 * found
    assert gaps > 20


def test_a_bound_over_tables_holds_with_too_many_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "MOST_INTERVALS", 0)
    for seed in range(0, 240, 4):
        places = range(seed, seed + 4)
        best = min((one for place in places if (one := expected_of(place, 5, 3)) is not None), default=None)
        choices = solve_pipeline([random_table(place, layers=5, columns=3) for place in places])
        if choices:
            assert best is not None, seed
            assert choices[0].lower_bound_ns <= best <= choices[0].objective_ns, seed
