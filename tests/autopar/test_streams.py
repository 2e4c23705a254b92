"""Two streams of a rank against counts by hand and against both extremes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.streams import beside


def _spans(found: tuple[float, object]) -> list[tuple[str, int, float, float]]:
    return [(s.kind, s.layer, s.start_s, s.end_s) for s in found[1]]  # type: ignore[attr-defined]


def test_a_forward_by_hand() -> None:
    """The first gather is alone; the second runs beside layer 0, which ends later; the third takes longer than 1."""
    found = beside((2.0, 2.0, 1.0), (1.0, 1.0, 3.0), (0.0, 0.0, 0.0), depth=1)
    assert _spans(found) == [
        ("gather", 0, 0.0, 1.0),
        ("gather", 1, 1.0, 2.0),
        ("compute", 0, 1.0, 3.0),
        ("compute", 1, 3.0, 5.0),
        ("gather", 2, 3.0, 6.0),
        ("compute", 2, 6.0, 7.0),
    ]
    assert found[0] == 7.0


def test_a_backward_by_hand() -> None:
    """The reduce-scatter of layer 0 comes before the gather that follows it in the one queue; the last is alone."""
    found = beside((2.0, 2.0, 2.0), (1.0, 1.0, 1.0), (2.0, 2.0, 2.0), depth=1)
    assert _spans(found) == [
        ("gather", 0, 0.0, 1.0),
        ("gather", 1, 1.0, 2.0),
        ("compute", 0, 1.0, 3.0),
        ("reduce", 0, 3.0, 5.0),
        ("compute", 1, 3.0, 5.0),
        ("gather", 2, 5.0, 6.0),
        ("reduce", 1, 6.0, 8.0),
        ("compute", 2, 6.0, 8.0),
        ("reduce", 2, 8.0, 10.0),
    ]


def test_each_slows_the_other_while_both_run() -> None:
    """Compute 4 beside a gather of 2: until 1 + 2 * 1.5 both, then 2 more alone."""
    assert beside((0.0, 4.0, 0.0), (1.0, 0.0, 2.0), (0.0,) * 3, depth=2, slowdown=1.5)[0] == pytest.approx(1 + 3 + 2)


row = st.lists(st.tuples(st.floats(0, 3), st.floats(0, 3), st.floats(0, 3)), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(row, st.integers(0, 3), st.sampled_from((1.0, 1.3)))
def test_it_lies_between_nothing_hidden_and_all_hidden(
    drawn: list[tuple[float, float, float]], depth: int, slowdown: float
) -> None:
    computes, gathers, reduces = (tuple(column) for column in zip(*drawn, strict=True))
    took, spans = beside(computes, gathers, reduces, depth=depth, slowdown=slowdown)
    alone = sum(computes), sum(gathers) + sum(reduces)
    assert max(alone) - 1e-9 <= took <= sum(alone) * slowdown + 1e-9
    ends = {(s.kind, s.layer): s for s in spans}
    for stream in (("compute",), ("gather", "reduce")):
        own = sorted((s.start_s, s.end_s) for s in spans if s.kind in stream)
        assert all(b[0] >= a[1] - 1e-9 for a, b in pairwise(own))
    for i in range(len(drawn)):
        if ("gather", i) in ends:
            assert ends["compute", i].start_s >= ends["gather", i].end_s - 1e-9
        if ("reduce", i) in ends:
            assert ends["reduce", i].start_s >= ends["compute", i].end_s - 1e-9


@settings(max_examples=100, deadline=None)
@given(row)
def test_a_deeper_prefetch_of_a_forward_never_takes_longer(drawn: list[tuple[float, float, float]]) -> None:
    computes, gathers, _ = (tuple(column) for column in zip(*drawn, strict=True))
    nothing = (0.0,) * len(drawn)
    steps = [beside(computes, gathers, nothing, depth=depth)[0] for depth in range(4)]
    assert steps[0] == pytest.approx(sum(computes) + sum(gathers))
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(steps))
