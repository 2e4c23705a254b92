"""The conflict that is named is one, and nothing in it is superfluous."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from autopar.solvers import irreducible


def test_every_named_demand_is_needed() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        demands = list(range(rng.randint(1, 7)))
        conflicts = [set(rng.sample(demands, rng.randint(1, len(demands)))) for _ in range(rng.randint(1, 4))]
        asked: list[tuple[int, ...]] = []

        def is_feasible(some: tuple[int, ...], conflicts=conflicts, asked=asked) -> bool:  # type: ignore[no-untyped-def]
            asked.append(some)
            return not any(conflict <= set(some) for conflict in conflicts)

        named = irreducible(demands, is_feasible)
        assert not is_feasible(named)
        assert all(is_feasible(fewer) for fewer in combinations(named, len(named) - 1))
        assert list(named) == sorted(named)
        assert len(asked) <= len(demands) + 4 + len(named)


def test_nothing_is_named_when_no_demand_is_to_blame() -> None:
    assert irreducible(["a", "b"], lambda some: False) == ()
    assert irreducible([], lambda some: False) == ()


def test_feasible_demands_are_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match="no conflict"):
        irreducible(["a"], lambda some: True)


def test_the_example_of_two_pins_and_a_budget() -> None:
    """Three layers of 4, 5 and 6 bytes within 10: the last two are too much, whatever the first."""
    assert irreducible([("a", 4), ("b", 5), ("c", 6)], lambda pins: sum(size for _, size in pins) <= 10) == (
        ("b", 5),
        ("c", 6),
    )
