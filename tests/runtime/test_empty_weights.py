"""Models built without storage: every rank holds, bit by bit, what it would hold of the plainly built model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.runtime.test_equality import LLAMA4, PLAIN

Ranks = Callable[..., list[Any]]

TIED = "GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=64, n_positions=64, tie_word_embeddings=True)"
PP2 = {"pp": 2, "layers_per_stage": [3, 3], "micro_batches": 2}
PLANS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "replicated": (["dp4"] * 6, {}),
    "zero 1": (["dp4-z1", "dp4-z1", "dp2-z1-tp2", "dp4-z1-h2", "dp4-z1", "dp4-z1"], {}),
    "zero 3": (["dp4-z3", "dp4-z3", "dp4-z2", "dp4-z3-h2", "dp2-z3-tp2s", "dp4-z3"], {}),
    "tensor parallel": (["dp4", "tp4", "dp2-tp2", "tp4s-r", "dp4", "dp4"], {}),
    "tied over two stages": (["dp2-z3", "tp2", "dp2-z1", "dp2", "tp2s", "dp2-z3"], PP2),
    "vocabulary parallel": (["tp4", "dp4", "dp4-z3", "tp4", "dp4", "tp4"], {}),
    "bfloat16": (["dp2-z1-tp2", "dp4-z1", "tp4", "dp4-z2", "dp4", "dp2-z1-tp2"], {"dtype": "bfloat16"}),
    "a vocabulary over two stages": (["tp2", "dp2-z3", "dp2", "dp2", "dp2-z1", "tp2"], PP2),
    "zbv": (["dp2-z2", *["dp2"] * 4, "dp2-z2"], {"pp": 2, "layers_per_stage": [2, 2, 1, 1], "micro_batches": 4,
                                                 "schedule": "zbv"}),
}  # fmt: skip
QUICK = [("tied over two stages", TIED), ("zero 3", PLAIN), ("vocabulary parallel", TIED)]


@pytest.mark.parametrize(
    ("plan", "source"),
    [
        pytest.param(plan, source, marks=[] if (plan, source) in QUICK else pytest.mark.slow)
        for plan in PLANS
        for source in (LLAMA4, TIED, PLAIN)
    ],
)
def test_a_rank_holds_what_it_would_hold_of_the_whole_model(plan: str, source: str, ranks: Ranks) -> None:
    strategies, shape = PLANS[plan]
    for found in ranks("empty_jobs:as_from_real_weights", 4, source=source, strategies=strategies, **shape):
        assert found["differ"] == []
        assert found["held"] > 0


@pytest.mark.parametrize("plan", ["ZeRO-3", pytest.param("two stages", marks=pytest.mark.slow)])
def test_no_rank_holds_more_than_its_share_and_a_layer(plan: str, ranks: Ranks) -> None:
    for empty, plain in ranks("empty_jobs:wrapping_peak", 4, plan=plan):
        assert empty["share_bytes"] == plain["share_bytes"]
        assert empty["share_bytes"] < 0.55 * empty["whole_bytes"]
        states_bytes = (12 * 9 + 3) * 5056  # one state of the generator is kept for each parameter
        assert empty["peak_bytes"] <= empty["share_bytes"] + empty["largest_layer_bytes"] + states_bytes
        assert plain["peak_bytes"] >= plain["whole_bytes"]


@pytest.mark.parametrize("loaded", ["weights", pytest.param("checkpoint", marks=pytest.mark.slow)])
def test_weights_come_from_files(loaded: str, ranks: Ranks) -> None:
    strategies, shape = PLANS["tied over two stages"]
    given = {"source": TIED, "strategies": strategies, **shape}
    for found in ranks("empty_jobs:as_from_real_weights", 4, loaded=loaded, **given):
        assert found["differ"] == []


@pytest.mark.slow
def test_another_shard_shows(ranks: Ranks) -> None:
    strategies, shape = PLANS["zero 3"]
    given = {"source": PLAIN, "strategies": strategies, **shape}
    for found in ranks("empty_jobs:as_from_real_weights", 4, plant="another shard", **given):
        assert found["differ"]


@pytest.mark.parametrize(
    ("plant", "source"),
    [("empty buffer", LLAMA4), pytest.param("broken tie", TIED, marks=pytest.mark.slow)],
)
def test_what_is_left_empty_or_untied_shows_in_the_gradients(plant: str, source: str, ranks: Ranks) -> None:
    given = {"source": source, "strategies": ["dp4"] * 6}
    for found in ranks("empty_jobs:against_one_process", 4, plant=plant, **given):
        assert not found["agrees"]


def test_ranks_that_were_seeded_differently_begin_as_rank_0(ranks: Ranks) -> None:
    assert ranks("empty_jobs:unequal_seeds", 2) == [0.0, 0.0]


def test_real_adapters_on_a_model_without_numbers(ranks: Ranks) -> None:
    assert ranks("empty_jobs:adapters", 2) == [[], []]


def test_a_model_from_the_meta_device_computes_its_buffers_again(ranks: Ranks) -> None:
    source = LLAMA4.replace("num_hidden_layers=4", "num_hidden_layers=2")
    assert ranks("empty_jobs:buffers_recomputed", 2, source=source) == [True, True]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no source", "on the meta device without a source"),
        ("written afterwards", "lm_head.weight was written after autopar.empty_weights ended"),
        ("empty buffer", "table is on the meta device"),
        ("other models", "the ranks built different models"),
        ("no such files", "holds no weights"),
    ],
)
def test_what_cannot_be_made_is_refused(case: str, words: str, ranks: Ranks) -> None:
    for said in ranks("empty_jobs:refused", 2, case=case):
        assert said.startswith("InputError")
        assert words in said
