from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import InputError
from autopar.strategy import Strategy
from tests.draws import any_strategies


@given(any_strategies)
def test_the_short_form_parses_back(strategy: Strategy) -> None:
    assert Strategy.parse(strategy.short) == strategy


@given(any_strategies, any_strategies)
def test_two_strategies_never_share_a_short_form(one: Strategy, other: Strategy) -> None:
    assert (one.short == other.short) == (one == other)


@pytest.mark.parametrize(
    ("short", "strategy"),
    [
        ("dp1", Strategy()),
        ("dp4-z3-tp2s-r", Strategy(dp=4, zero=3, tp=2, sequence_norms=True, recompute="full")),
        ("dp8-z3-h4", Strategy(dp=8, zero=3, shard=4)),
        ("tp4", Strategy(tp=4)),
        ("dp2-sp2-cp3-ep5-rs", Strategy(dp=2, sp=2, cp=3, ep=5, recompute="selective")),
    ],
)
def test_the_documented_forms(short: str, strategy: Strategy) -> None:
    assert Strategy.parse(short) == strategy
    assert strategy.short == short


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-r",
        "dp",
        "dp0",
        "tp-1",
        "z3",
        "dp4-z4",
        "dp4-h2",
        "dp4-z3-h3",
        "dp4-z3-h4",
        "tp1s",
        "dp1-z3",
        "dp2 tp2",
        "tp4-dp2",
        "pp2",
        "dp4-z3-r-r",
        "dp²",
        "DP4",
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        Strategy.parse(text)
    assert "is not a strategy" in caught.value.what
    assert caught.value.why
    assert caught.value.fix


@given(st.text("dptsceprhz0123456789-", max_size=16))
def test_no_text_breaks_the_parser(text: str) -> None:
    with contextlib.suppress(InputError):
        assert Strategy.parse(Strategy.parse(text).short) == Strategy.parse(text)


def test_ranks_and_shards_by_hand() -> None:
    strategy = Strategy.parse("dp8-z3-h4-tp2")
    assert (strategy.ranks, strategy.state_shards) == (16, 4)
    assert Strategy.parse("dp8-z2").state_shards == 8
    assert Strategy.parse("dp8").state_shards == 1


@pytest.mark.parametrize("fields", [{"dp": 0}, {"tp": 1.5}, {"recompute": "some"}, {"zero": 4, "dp": 2}, {"zero": 1}])
def test_a_contradiction_is_a_callers_bug(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"Strategy\."):
        Strategy(**fields)  # type: ignore[arg-type]
