from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.compute import backward, forward
from autopar.measured import LayerCost
from tests.pricing import layer_cost

COST = layer_cost("block", parameters=300, s_per_sample=1e-3, activation=64)


def _measured(counts: tuple[int, ...], values: tuple[float, ...]) -> LayerCost:
    return replace(COST, samples=counts, forward_s=values, backward_s=values)


def test_measured_counts_are_read_and_lines_are_followed() -> None:
    assert forward(COST, 4).seconds == COST.forward_s[2]
    assert forward(COST, 4).origin == "measured"
    for samples in (3, 6, 0.5, 16):
        estimate = forward(COST, samples)
        assert estimate.seconds == pytest.approx(2e-5 + 1e-3 * samples)
        assert estimate.origin == "interpolated"
    assert backward(COST, 2).seconds == COST.backward_s[1]


def test_one_measured_count_is_scaled() -> None:
    assert forward(_measured((4,), (2.0,)), 6).seconds == pytest.approx(3.0)


def test_noise_in_the_last_point_does_not_stop_growth() -> None:
    noisy = _measured((1, 2, 4, 8), (1.0, 2.0, 4.0, 3.9))
    assert forward(noisy, 16).seconds > 5


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 256), st.floats(0, 10)), min_size=1, max_size=6, unique_by=lambda p: p[0]),
    st.lists(st.floats(0, 1024), min_size=2, max_size=12).map(sorted),
)
def test_never_negative_and_never_decreasing(points: list[tuple[int, float]], asked: list[float]) -> None:
    points.sort()
    cost = _measured(tuple(n for n, _ in points), tuple(t for _, t in points))
    times = [forward(cost, samples).seconds for samples in asked]
    assert times[0] >= 0
    assert all(b >= a * (1 - 1e-9) for a, b in pairwise(times))
