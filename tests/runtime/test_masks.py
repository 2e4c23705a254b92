"""Padded batches under plans that move samples and cut sequences, against one process; faults that are caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Ranks = Callable[..., list[Any]]

SIZES = "hidden_size=32, intermediate_size=48, num_hidden_layers={layers}, num_attention_heads=4, vocab_size=64"
GROUPED = SIZES.format(layers=4) + ", num_key_value_heads=2"
LLAMA = f"LlamaConfig({GROUPED})"
GPT2 = "GPT2Config(n_embd=32, n_layer={layers}, n_head=4, vocab_size=67, n_positions=64)"
MISTRAL = f"MistralConfig({GROUPED}, sliding_window=5)"
GEMMA2 = f"Gemma2Config({GROUPED}, head_dim=8, sliding_window=5)"
GEMMA3 = (
    f"Gemma3TextConfig({SIZES.format(layers=3)}, num_key_value_heads=2, head_dim=8, sliding_window=5, "
    "layer_types=['sliding_attention', 'full_attention', 'full_attention'])"
)
BLOOM = "BloomConfig(hidden_size=32, n_layer=4, n_head=4, vocab_size=64)"
ATTENDING = "tests/runtime/masked_model.py:attending(blocks=4)"

EVERY = ["right", "one", "left", "rows"]
TWO_BY_TWO = ["dp4", "tp2-cp2", "sp2-cp2", "cp4", "dp2-tp2s", "dp4"]
STAGES = {"pp": 2, "layers_per_stage": [3, 3], "micro_batches": 2}

CASES: dict[str, tuple[str, list[str], int, dict[str, Any]]] = {
    "rows of nothing but padding": (
        ATTENDING.replace("4", "3"),
        ["dp2", "tp2", "sp2-r", "cp2", "dp2"],
        2,
        {"kinds": ["left", "rows"]},
    ),
    "a mask of one's own": (ATTENDING, ["dp2", "tp2", "sp2", "cp2", "dp2-z3", "dp2"], 2, {"kinds": EVERY}),
    "dropped where nothing is padded": (
        GPT2.format(layers=3),
        ["dp2", "tp2", "cp2", "sp2", "dp2"],
        2,
        {"kinds": ["one", "rows"], "micro_batches": 2},
    ),
    "beside rotary positions": (
        LLAMA,
        ["dp4", "dp2-tp2s", "tp2-cp2", "dp2-z3-sp2-r", "cp4", "dp4"],
        4,
        {"kinds": EVERY, "sequence": 16, "micro_batches": 2},
    ),
    "positions given": (LLAMA, TWO_BY_TWO, 4, {"kinds": ["positions", "left"], "sequence": 16}),
    "fused weights": (
        GPT2.format(layers=4),
        [*TWO_BY_TWO[:4], "dp2-tp2s", "dp4"],
        4,
        {"kinds": EVERY, "sequence": 16},
    ),
    "additive": (GPT2.format(layers=4), TWO_BY_TWO, 4, {"kinds": EVERY, "form": "additive", "sequence": 16}),
    "4-D of truths": (LLAMA, TWO_BY_TWO, 4, {"kinds": EVERY, "form": "4-D bool", "sequence": 16}),
    "2-D of truths": (LLAMA, TWO_BY_TWO, 4, {"kinds": EVERY, "form": "bool", "sequence": 16}),
    "a window": (MISTRAL, TWO_BY_TWO, 4, {"kinds": EVERY, "sequence": 16, "micro_batches": 2}),
    "windows in turn": (
        GEMMA3,
        ["dp4", "tp2-cp2", "dp2-cp2", "dp2-tp2s", "dp4"],
        4,
        {"kinds": ["left", "rows"], "sequence": 16},
    ),
    "windows, eager": (
        GEMMA2,
        ["dp4", "tp4", "dp2-tp2", "dp4-z3", "dp2-tp2s", "dp4"],
        4,
        {"kinds": ["left", "rows"], "sequence": 16},
    ),
    "biases of distance": (BLOOM, ["dp4", "tp4", "dp2-tp2", "dp4-z3", "dp2-tp2-r", "dp4"], 4, {"kinds": EVERY}),
    "in stages": (MISTRAL, ["dp2", "cp2", "sp2", "tp2", "tp2s", "dp2"], 4, {**STAGES, "kinds": EVERY, "sequence": 16}),
    "in stages of a V": (
        GPT2.format(layers=4),
        ["dp2", "tp2", "sp2", "cp2", "tp2s", "dp2"],
        4,
        {**STAGES, "layers_per_stage": [2, 1, 1, 2], "micro_batches": 4, "schedule": "zbv", "kinds": ["one", "left"]},
    ),
}
QUICK = ("rows of nothing but padding", "dropped where nothing is padded")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in CASES])
def test_padding_equals_one_process(name: str, ranks: Ranks) -> None:
    source, strategies, size, shape = CASES[name]
    shape = {"global_batch": 4 * size, **shape}
    for found in ranks("mask_jobs:padded_equals_one_process", size, source=source, strategies=strategies, **shape):
        assert found["agrees"], found


@pytest.mark.parametrize(
    ("plant", "source"),
    [
        ("own samples", ATTENDING),
        ("other columns", ATTENDING),
        pytest.param("own places", GPT2.format(layers=4), marks=pytest.mark.slow),
    ],
)
def test_a_mask_taken_wrongly_is_caught(plant: str, source: str, ranks: Ranks) -> None:
    job = {"source": source, "strategies": ["dp2", "tp2", "cp2", "dp2", "dp2", "dp2"], "kinds": ["left"]}
    for found in ranks("mask_jobs:padded_equals_one_process", 2, plant=plant, **job):
        assert not found["agrees"]
        # Layers are tried again before the first padded batch.
        wrong = plant == "own samples" or "RunError: the sequence-parallel plan of " in found["error"]
        assert wrong, found


def test_ranks_that_differ_in_their_masks_are_refused_alike(ranks: Ranks) -> None:
    source, strategies = ATTENDING.replace(")", ", drops=True)"), ["dp2", "dp2", "tp2", "dp2", "dp2", "dp2"]
    for found in ranks("mask_jobs:padded_equals_one_process", 2, source=source, strategies=strategies, kinds=["one"]):
        assert "the ranks of a stage have different inputs of their blocks" in found["error"]
        assert "rank 1: NoneType" in found["error"]
