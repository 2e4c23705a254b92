"""Batches that the ranks of a plan cannot run together: refused on every rank with a cure, and training goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Ranks = Callable[..., list[Any]]

GPT2 = "GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=67, n_positions=64)"
STAGES = {"pp": 2, "layers_per_stage": [2, 2], "micro_batches": 2}
CUT = "the sequence of the batch is 6 long, which the plan cannot cut"


@pytest.mark.parametrize(
    ("kind", "strategies", "size", "shape", "words"),
    [
        ("length", ["dp2", "cp2", "dp2", "dp2"], 2, {}, [CUT, "4 equal pieces", "the next length is 8"]),
        ("a mask on one rank", ["dp2", "tp2", "dp2", "dp2"], 2, {}, ["different batches", "rank 1: None", "a mask"]),
        ("a sample less", ["dp2", "tp2", "dp2", "dp2"], 2, {}, ["different batches", "rank 1: ((3, 8)"]),
        ("longer on one rank", ["dp2", "tp2", "dp2", "dp2"], 2, {}, ["different batches", "rank 1: ((4, 16)"]),
        pytest.param("length", ["dp2", "tp2", "cp2", "dp2"], 4, STAGES, [CUT], marks=pytest.mark.slow),
        pytest.param("length", ["dp4", "tp4s", "dp4", "dp4"], 4, {}, [CUT], marks=pytest.mark.slow),
        pytest.param("length", ["dp4", "sp4", "dp4", "dp4"], 4, {}, [CUT], marks=pytest.mark.slow),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_alike(
    kind: str, strategies: list[str], size: int, shape: dict[str, Any], words: list[str], ranks: Ranks
) -> None:
    first, *others = ranks("batch_jobs:refused", size, source=GPT2, strategies=strategies, kind=kind, **shape)
    assert set(first) == ({"train_step"} if "pp" in shape else {"train_step", "forward"})
    for said in first.values():
        assert all(word in said for word in words), said
    assert all(other == first for other in others)
