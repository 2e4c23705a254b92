"""Vocabulary parallelism: cross-entropy, gradients and steps against one process; faults that must be caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autopar.errors import InputError
from autopar.runtime.batches import example_batch
from autopar.runtime.models import build_model
from autopar.runtime.probing import probe

Ranks = Callable[..., list[Any]]

LLAMA = (
    "LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, "
    "num_key_value_heads=2, vocab_size={words}, max_position_embeddings=64{more})"
)
GPT2 = "GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=67, n_positions=64)"
PLAIN = "examples/gpt.py:build(width=32, heads=4, blocks=2, vocab=67, context=16)"
GEMMA2 = (
    "Gemma2Config(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, "
    "num_key_value_heads=2, vocab_size=67, head_dim=8)"
)
STAGES = {"pp": 2, "layers_per_stage": [2, 2], "micro_batches": 2}

PLANS: dict[str, tuple[str, list[str], int, dict[str, Any]]] = {
    "tied over two stages, padded": (GPT2, ["tp2", "dp2-z3", "tp2s", "tp2"], 4, STAGES),
    "other degrees at the ends": (PLAIN, ["dp2-z3-tp2", "tp4", "dp2-z3-tp2", "tp4"], 4, {"micro_batches": 2}),
    "sharded and tied": (
        LLAMA.format(words=67, more=", tie_word_embeddings=True"),
        ["dp2-z2-tp2", "dp2-tp2", "dp4-z3", "dp2-z2-tp2"],
        4,
        {"micro_batches": 2},
    ),
    "a vocabulary that divides": (LLAMA.format(words=64, more=""), ["tp4", "dp4", "dp4", "dp2-z3-tp2"], 4, {}),
    "scaled lookups, a soft cap": (GEMMA2, ["dp2-tp2", "tp4", "dp4-z3", "dp2-tp2"], 4, {}),
    "words to be padded away": (LLAMA.format(words=67, more=", pad_token_id=3"), ["tp4", "dp4", "dp4", "tp4"], 4, {}),
    "three by two ranks, in halves": (
        LLAMA.format(words=67, more=""),
        ["dp4-z3-h2-tp3", "dp12-z3", "dp6-tp2", "dp2-z3-tp6"],
        12,
        {"global_batch": 12},
    ),
}
SLOW = tuple(PLANS)[1:]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in PLANS])
def test_a_cut_vocabulary_equals_one_process(name: str, ranks: Ranks) -> None:
    source, strategies, size, shape = PLANS[name]
    for found in ranks("compare_with_one_process", size, source=source, strategies=strategies, **shape):
        assert found["agrees"], found


@pytest.mark.parametrize("words", [5, 67])
def test_losses_as_models_write_them(words: int, ranks: Ranks) -> None:
    """Five words on four ranks leave one rank without any."""
    for found in ranks("vocabulary_jobs:cross_entropies", 4, words=words):
        for name, errors in found.items():
            assert max(errors) < 1e-6, (name, errors)


def test_what_needs_all_words_is_refused(ranks: Ranks) -> None:
    for found in ranks("vocabulary_jobs:refused_on_sharded_logits", 4):
        assert [words.split(maxsplit=1)[0] for words in found[:4]] == ["softmax", "add", "getitem", "flatten"]
        assert "label smoothing" in found[4]
        assert "must be the second dimension" in found[5]


def test_a_maximum_over_own_words_only_is_caught(ranks: Ranks) -> None:
    for found in ranks("vocabulary_jobs:local_maximum", 4, source=PLAIN, strategies=["dp4", "dp4", "dp4", "tp4"]):
        assert "RunError: vocabulary parallelism is wrong at the output of the head" in found


def test_a_norm_that_is_not_summed_over_the_vocabulary_ranks_is_caught(ranks: Ranks) -> None:
    arguments = {"source": PLAIN, "strategies": ["dp4", "dp4", "dp4", "dp2-tp2"]}
    for found in ranks("compare_with_one_process", 4, plant="forgotten axis", steps=1, **arguments):
        assert not found["agrees"]
        assert found["layer"] == "head"
        assert found["parameter"].startswith("norm.")


def test_the_ends_of_a_vocabulary_are_found() -> None:
    found = {}
    for source in (GPT2, PLAIN, GEMMA2, "BertConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, "
                   "num_attention_heads=4, vocab_size=67)"):  # fmt: skip
        model = build_model(source)
        try:
            seen = probe(model, example_batch(model, samples=3, sequence=8))
        except InputError:
            continue
        found[type(model).__name__] = (seen.lookup.path, seen.projection.path, seen.projection.words)
    assert found["GPT2LMHeadModel"] == ("transformer.wte", "lm_head", 67)
    assert found["GPT"] == ("tokens", "head", 67)
    assert found["Gemma2ForCausalLM"] == ("model.embed_tokens", "lm_head", 67)
