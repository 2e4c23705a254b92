"""Faults planted in the solver are caught by the comparison with brute force that the default suite runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from autopar.price import CostTables
from autopar.solvers import labels, partitions, stages, table
from tests.solvers.test_pipeline import check_equals_brute_force


def _other_layouts_count_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A label replaces one of another layout as if transitions were free."""

    def regret(self: Any, layer: int) -> Any:
        return np.zeros(self.segment.steps.shape[1:], dtype=np.int64)

    monkeypatch.setattr(labels._Search, "regret", regret)


def _one_micro_batch_less_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage counts one saved set less than its schedule keeps."""
    key = stages.StageCosts.key

    def faulty(self: Any, stage: int) -> stages.StageKey:
        in_flight, *rest = key(self, stage)
        return (max(1, in_flight - 1), *rest)

    monkeypatch.setattr(stages.StageCosts, "key", faulty)


def _bounds_a_little_too_high(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound of an interval is above what a choice can reach."""
    lower_bounds = stages.StageCosts.lower_bounds

    def faulty(self: Any, stage: int) -> Any:
        found = lower_bounds(self, stage)
        return np.where(found < stages.FORBIDDEN, found + found // 8 + 1, found)

    monkeypatch.setattr(stages.StageCosts, "lower_bounds", faulty)


def _the_transient_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What exists only while a layer works does not count."""
    kind_of = stages.kind_of

    def faulty(time: Any, memory: Any, transient: Any, group: Any, allowed: Any) -> Any:
        return kind_of(time, memory, np.zeros_like(transient), group, allowed)

    monkeypatch.setattr(stages, "kind_of", faulty)


def _the_horizon_never_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partitions above the first horizon are taken for none."""
    best = partitions.Partitions.best

    def faulty(self: Any, below: int) -> Any:
        if self._horizon < 0:
            self._widen(below)
        return best(self, min(below, self._horizon))

    monkeypatch.setattr(partitions.Partitions, "best", faulty)


def _the_fastest_that_fits_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest strategy that fits does not count as one."""
    may_fit = stages.may_fit

    def faulty(tables: CostTables, layer: int, in_flight: int) -> Any:
        found = may_fit(tables, layer, in_flight)
        return found & (tables.time_ns[layer] > tables.time_ns[layer][found].min(initial=0))

    monkeypatch.setattr(stages, "may_fit", faulty)


def _embed_and_head_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tied ends are searched at the first strategy alone."""
    end_strategies = table._end_strategies
    monkeypatch.setattr(table, "_end_strategies", lambda *args: end_strategies(*args)[:1])


@pytest.mark.parametrize(
    "plant",
    [
        _other_layouts_count_alike,
        _one_micro_batch_less_in_flight,
        _bounds_a_little_too_high,
        _the_transient_is_forgotten,
        _the_horizon_never_grows,
        _the_fastest_that_fits_is_left_out,
        _embed_and_head_differ,
    ],
)
def test_a_planted_fault_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    def compare() -> None:
        for seed in range(520):
            check_equals_brute_force(seed, "numpy")

    with pytest.raises(AssertionError):
        compare()
