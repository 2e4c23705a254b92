from __future__ import annotations

from itertools import pairwise
from math import exp

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopar.axes import RankMesh
from autopar.comm import cleaned, seconds, shape_of
from autopar.errors import InputError
from autopar.measured import COLLECTIVES, GroupShape, LinkCurve, LinkProfile
from tests.pricing import ALPHA_S, BYTES_PER_S, SIZES, cluster_file, curve, curve_s

PAIR = GroupShape(ranks=2, concurrent=2)


@st.composite
def noisy_curves(draw: st.DrawFn) -> LinkCurve:
    sizes = draw(st.lists(st.integers(1, 1 << 28), min_size=1, max_size=12, unique=True).map(sorted))
    times = draw(st.lists(st.floats(1e-6, 10.0), min_size=len(sizes), max_size=len(sizes)))
    return LinkCurve(collective="all_gather", shape=PAIR, size_bytes=tuple(sizes), seconds=tuple(times))


@settings(max_examples=200, deadline=None)
@given(noisy_curves(), st.lists(st.integers(1, 1 << 32), min_size=2, max_size=20).map(sorted))
def test_time_and_bandwidth_never_fall_with_size(noisy: LinkCurve, sizes: list[int]) -> None:
    links = LinkProfile(curves=(noisy,))
    times = [seconds(links, "all_gather", PAIR, size).seconds for size in sizes]
    for (m0, t0), (m1, t1) in pairwise(zip(sizes, times, strict=True)):
        assert t1 >= t0 * (1 - 1e-9)
        assert m1 / t1 >= m0 / t0 * (1 - 1e-9) or m1 <= noisy.size_bytes[0]


@settings(max_examples=200, deadline=None)
@given(noisy_curves())
@example(
    LinkCurve(collective="all_gather", shape=PAIR, size_bytes=(2, 8, 40, 127, 323), seconds=(1.0, 1e-6, 1.0, 1.0, 1.0))
)
def test_both_slopes_are_exact(noisy: LinkCurve) -> None:
    for (x0, t0), (x1, t1) in pairwise(cleaned(noisy)):
        assert t0 <= t1 <= t0 + (x1 - x0)


def test_a_collective_without_curves_is_fitted_from_the_others() -> None:
    """An all-reduce over two ranks moves twice what an all-gather does, in twice the steps."""
    links = LinkProfile(curves=(curve("all_gather", PAIR),))
    estimate = seconds(links, "all_reduce", PAIR, 1 << 22)
    assert estimate.seconds == pytest.approx(2 * seconds(links, "all_gather", PAIR, 1 << 22).seconds)
    assert estimate.origin == "fitted"


def test_measured_points_of_a_clean_curve_are_kept_and_the_ends_are_straight() -> None:
    links = LinkProfile(curves=(curve("all_gather", PAIR),))
    for size in SIZES:
        estimate = seconds(links, "all_gather", PAIR, size)
        assert estimate.seconds == pytest.approx(
            curve_s("all_gather", 2, size, alpha_s=ALPHA_S, bytes_per_s=BYTES_PER_S), rel=1e-9
        )
        assert estimate.origin == "measured"
    smallest = seconds(links, "all_gather", PAIR, SIZES[0]).seconds
    assert seconds(links, "all_gather", PAIR, 1).seconds == pytest.approx(smallest)
    largest = seconds(links, "all_gather", PAIR, SIZES[-1]).seconds
    assert seconds(links, "all_gather", PAIR, 8 * SIZES[-1]).seconds == pytest.approx(8 * largest)


def test_between_two_sizes_it_is_a_line_in_logarithms() -> None:
    links = LinkProfile(
        curves=(LinkCurve(collective="p2p", shape=PAIR, size_bytes=(100, 10000), seconds=(1e-3, 4e-3)),)
    )
    assert seconds(links, "p2p", PAIR, 1000).seconds == pytest.approx(2e-3)


def test_one_wild_point_moves_its_neighbours_little() -> None:
    times = list(curve("all_reduce", PAIR).seconds)
    times[3] *= 14
    wild = LinkCurve(collective="all_reduce", shape=PAIR, size_bytes=SIZES, seconds=tuple(times))
    knots = cleaned(wild)
    assert exp(knots[3][1]) < times[3] / 2
    assert exp(knots[-1][1]) == pytest.approx(times[-1], rel=0.2)


@pytest.mark.parametrize("collective", COLLECTIVES[:3])
@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_a_shape_that_was_not_measured_is_fitted(collective: str, ranks: int) -> None:
    """Rings only (2 ranks measured, where ring and tree agree) give back the constants that made the curves."""
    links = LinkProfile(curves=(curve(collective, PAIR),))  # type: ignore[arg-type]
    estimate = seconds(links, collective, GroupShape(ranks=ranks), 1 << 22)  # type: ignore[arg-type]
    steps = {"all_reduce": {3: 4, 4: 4, 8: 6}[ranks]}.get(collective, ranks - 1)
    rounds = 2 if collective == "all_reduce" else 1
    expected = steps * ALPHA_S + rounds * (ranks - 1) / ranks * (1 << 22) / BYTES_PER_S
    assert estimate.origin == "fitted"
    assert estimate.seconds == pytest.approx(expected, rel=1e-6)


def test_only_other_concurrency_is_interpolated_from_the_nearest() -> None:
    links = LinkProfile(curves=(curve("all_gather", PAIR), curve("all_gather", GroupShape(ranks=2, concurrent=8))))
    estimate = seconds(links, "all_gather", GroupShape(ranks=2, concurrent=1), 1 << 20)
    assert (estimate.origin, estimate.seconds) == (
        "interpolated",
        seconds(links, "all_gather", PAIR, 1 << 20).seconds,
    )


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 64), st.integers(1, 1 << 30), st.sampled_from(COLLECTIVES), st.floats(1e8, 1e10))
def test_a_group_over_more_nodes_is_never_faster(ranks: int, size: int, collective: str, fast: float) -> None:
    inside = curve(collective, PAIR, bytes_per_s=fast)  # type: ignore[arg-type]
    across = curve(collective, GroupShape(ranks=2, nodes=2), bytes_per_s=1e9)  # type: ignore[arg-type]
    links = LinkProfile(curves=(inside, across))
    near = seconds(links, collective, GroupShape(ranks=ranks, concurrent=3), size)  # type: ignore[arg-type]
    far = seconds(links, collective, GroupShape(ranks=ranks, nodes=2, concurrent=3), size)  # type: ignore[arg-type]
    assert far.seconds >= near.seconds * (1 - 1e-9) or ranks == 2


def test_nothing_to_send_costs_nothing() -> None:
    links = cluster_file().links
    assert seconds(links, "all_reduce", GroupShape(ranks=1), 1 << 20).seconds == 0.0
    assert seconds(links, "all_reduce", PAIR, 0).seconds == 0.0


def test_no_curves_is_the_users_error() -> None:
    with pytest.raises(InputError, match="no measured links"):
        seconds(LinkProfile(curves=()), "all_reduce", PAIR, 1)


def test_groups_of_all_stages_communicate_at_once() -> None:
    mesh = RankMesh.of(world_size=8, pp=2)
    assert shape_of(mesh, mesh.names[:1], 8) == GroupShape(ranks=2, contiguous=False, concurrent=4)
    assert shape_of(mesh, mesh.names, 8) == GroupShape(ranks=4, concurrent=2)
