"""All choices of a table below an objective, against brute force."""

from __future__ import annotations

import pytest

from autopar.solvers import below
from autopar.solvers.below import all_below
from autopar.solvers.brute import every_choice
from tests.solvers.random_tables import random_table


def test_equals_brute_force() -> None:
    counts = []
    for seed in range(120):
        tables = random_table(seed, layers=5, columns=4)
        fitting = sorted((r.objective_ns, layers, s) for layers, s, r in every_choice(tables) if r.fits)
        for share in (0.3, 1.0) if fitting else ():
            limit_ns = fitting[int((len(fitting) - 1) * share)][0]
            expected = [one for one in fitting if one[0] < limit_ns]
            assert all_below(tables, limit_ns, most=1 << 20) == expected, seed
            counts.append(len(expected))
    assert sum(count > 10 for count in counts) > 40


def test_a_bound_that_is_too_high_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(below, "_prices", lambda tables, kept: _prices(tables, kept) * 0 - 1.0)
    with pytest.raises(AssertionError):
        test_equals_brute_force()


_prices = below._prices


def test_too_many_are_not_listed() -> None:
    tables = next(t for t in map(random_table, range(100)) if sum(r.fits for _, _, r in every_choice(t)) > 50)
    assert all_below(tables, 1 << 60, most=10) is None
