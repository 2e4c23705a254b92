from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.axes import RankMesh, divisors
from autopar.legality import why_batch_illegal, why_illegal, why_not_runnable
from autopar.strategy import Strategy
from tests.draws import strategies_on
from tests.values import kind


@given(st.integers(1, 64), st.integers(1, 16), st.sampled_from((1, 2, 3, 4, 6, 8)))
def test_a_batch_is_legal_when_it_can_be_dealt_out(global_batch: int, micro_batches: int, ranks: int) -> None:
    """The judge deals whole samples to micro-batches, then to ranks, and counts the hands."""
    hands = [[0] * ranks for _ in range(micro_batches)]
    for sample in range(global_batch):
        place, micro = divmod(sample, micro_batches)
        hands[micro][place % ranks] += 1
    even = len({count for hand in hands for count in hand}) == 1
    assert (why_batch_illegal(global_batch, micro_batches, RankMesh.of(world_size=ranks)) is None) == even


def test_a_batch_that_does_not_divide_names_the_legal_ones() -> None:
    reason = why_batch_illegal(10, 1, RankMesh.of(world_size=4))
    assert reason is not None
    assert "legal global batches near it: [8, 12]" in reason
    assert why_batch_illegal(16, 3, RankMesh.of(world_size=4)) == "global batch 16 is not divisible by 3 micro-batches"


@given(st.sampled_from((1, 2, 3, 4, 6, 8)).flatmap(lambda r: st.tuples(st.just(r), strategies_on(r, runnable=True))))
def test_what_a_block_allows_is_legal(pair: tuple[int, Strategy]) -> None:
    ranks, strategy = pair
    block = kind(tp_degrees=divisors(ranks)[1:])
    assert why_illegal(strategy, block, RankMesh.of(world_size=ranks), micro_batch=24, sequence=48) is None


def _why(short: str, role: str = "block", **changes: int) -> str | None:
    sizes = {"micro_batch": 16, "sequence": 16} | changes
    return why_illegal(Strategy.parse(short), kind(role), RankMesh.of(world_size=4), **sizes)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (_why("dp8"), "occupies 8 ranks, a stage has 4"),
        (_why("dp4", micro_batch=10), "a micro-batch of 10 samples is not divisible by dp 4"),
        (_why("tp4s", "embed"), "embed runs data parallel, or vocabulary-parallel with tp"),
        (_why("dp4-r", "head"), "head is not recomputed"),
        (_why("tp4s", sequence=18), "sequence 18 is not divisible by tp 4"),
        (_why("dp2-sp2"), "nothing is known of the attention heads"),
        (_why("tp2s-sp2"), "sequence-parallel norms with sp or cp"),
        (_why("dp2-cp2"), "nothing is known of the attention heads"),
        (_why("dp2-ep2"), "expert parallelism"),
        (_why("dp4-rs", "head"), "head is not recomputed"),
    ],
)
def test_each_reason_names_its_numbers(reason: str | None, words: str) -> None:
    assert reason is not None
    assert words in reason


def test_fourteen_heads_on_tp_4_name_the_heads_and_the_legal_degrees() -> None:
    block = kind(tp_degrees=(2,))
    reason = why_illegal(Strategy(tp=4), block, RankMesh.of(world_size=4), micro_batch=4, sequence=16)
    assert reason is not None
    assert "heads 8, kv heads 4" in reason
    assert "legal degrees: 1, 2" in reason


@given(st.sampled_from((1, 2, 4, 6)).flatmap(lambda ranks: strategies_on(ranks, runnable=True)))
def test_what_the_runtime_can_run_has_no_reason(strategy: Strategy) -> None:
    assert why_not_runnable(strategy) is None
