"""Ulysses and context parallelism: blocks on parts of the sequence against one process; faults that are caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.model import Attention
from autopar.runtime.batches import example_batch
from autopar.runtime.models import build_model
from autopar.runtime.probing import probe
from autopar.runtime.spec import describe
from autopar.runtime.tensor_parallel import derive

Ranks = Callable[..., list[Any]]

LLAMA = (
    "LlamaConfig(hidden_size=48, intermediate_size=48, num_hidden_layers=4, num_attention_heads={heads}, "
    "num_key_value_heads={kv}, head_dim=8, vocab_size=64, max_position_embeddings=64)"
)
LLAMA4 = LLAMA.format(heads=4, kv=4)
GPT2 = "GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=67, n_positions=64)"
PLAIN = "examples/gpt.py:build(width=32, heads=4, blocks=2, vocab=67, context=16)"
STAGES = {"pp": 2, "layers_per_stage": [2, 2], "micro_batches": 2}

PLANS: dict[str, tuple[str, list[str], int, dict[str, Any]]] = {
    "on two ranks": (PLAIN, ["dp2", "sp2", "cp2-r", "dp2"], 2, {"micro_batches": 2}),
    "sharded, and beside tensor parallelism": (GPT2, ["dp2-tp2", "dp2-z3-sp2", "tp2-cp2", "dp2-tp2"], 4, {}),
    "keys and values gathered": (
        LLAMA.format(heads=4, kv=2),
        ["dp4", "cp4", "sp2-cp2", "dp2-z3-cp2-r", "tp2-cp2", "dp4-z2"],
        4,
        {"micro_batches": 2, "sequence": 16},
    ),
    "every kind of neighbour": (
        LLAMA4,
        ["dp2-z3-tp2", "dp2-z3-sp2", "tp2-sp2", "dp4-z3", "dp2-sp2-r", "dp4"],
        4,
        {"micro_batches": 2},
    ),
    "split backwards, both ends on one rank": (
        GPT2,
        ["tp2", "sp2", "cp2", "tp2"],
        4,
        {"pp": 2, "layers_per_stage": [1, 1, 1, 1], "micro_batches": 4, "schedule": "zbv"},
    ),
    "in stages": (GPT2, ["tp2", "sp2", "sp2-r", "tp2"], 4, STAGES),
    "all of the heads": (PLAIN, ["dp4", "sp4", "dp2-z1-sp2", "dp4-z2"], 4, {}),
    "next to sequence-parallel norms": (
        LLAMA.format(heads=8, kv=4),
        ["dp4", "dp2-z2-sp2", "dp2-tp2s", "sp4", "tp4", "dp4"],
        4,
        {"sequence": 16},
    ),
    "three by two ranks, in halves": (
        LLAMA.format(heads=12, kv=6),
        ["dp12", "dp4-z3-h2-sp3", "dp2-sp3-cp2", "dp2-tp3-sp2", "dp4-cp3", "dp12"],
        12,
        {"global_batch": 12, "sequence": 12},
    ),
}
SLOW = tuple(PLANS)[1:]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in PLANS])
def test_a_cut_sequence_equals_one_process(name: str, ranks: Ranks) -> None:
    source, strategies, size, shape = PLANS[name]
    for found in ranks("compare_with_one_process", size, source=source, strategies=strategies, **shape):
        assert found["agrees"], found


def test_an_exchange_is_the_whole_cut_otherwise(ranks: Ranks) -> None:
    for found in ranks("sequence_jobs:exchanged", 4, heads=8, length=12):
        assert max(found.values()) == 0.0, found


@pytest.mark.parametrize(
    ("fault", "strategy"),
    [
        ("own part only", "sp2"),
        pytest.param("wrong order", "sp2", marks=pytest.mark.slow),
        ("later parts as own", "cp2"),
    ],
)
def test_a_wrong_exchange_is_caught(fault: str, strategy: str, ranks: Ranks) -> None:
    arguments = {"source": PLAIN, "strategies": ["dp2", strategy, "dp2", "dp2"], "fault": fault}
    for found in ranks("sequence_jobs:faulty", 2, **arguments):
        assert "RunError: the sequence-parallel plan of Block is wrong at" in found


@pytest.mark.slow
def test_rotary_places_in_one_piece_are_caught(ranks: Ranks) -> None:
    arguments = {"source": LLAMA4, "strategies": ["dp2", "cp2", *["dp2"] * 4], "fault": "places in one piece"}
    for found in ranks("sequence_jobs:faulty", 2, **arguments):
        assert "RunError: the sequence-parallel plan of LlamaDecoderLayer is wrong at" in found


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_attention_in_parts_is_torchs_own(size: int, ranks: Ranks) -> None:
    """Output and gradients, keys gathered or around the ring; every rank has as many scores, under a mask half of all.

    Scores in squares of a piece of the sequence: 2 n pieces of keys for the 2 of a rank's queries.
    """
    for kv_heads in (2, 4):
        for found in ranks("sequence_jobs:attended", size, heads=4, kv_heads=kv_heads, piece=3):
            assert {form: scores for form, (_, scores) in found.items()} == {
                f"causal {causal}, around {around}": 2 * size * (1 if causal else 2)
                for causal in (False, True)
                for around in (False, True)
            }
            assert max(error for error, _ in found.values()) <= 1e-12


def test_later_parts_taken_for_own_are_seen(ranks: Ranks) -> None:
    fault = "later parts as own"
    for place, found in enumerate(ranks("sequence_jobs:attended", 2, heads=4, kv_heads=2, piece=3, fault=fault)):
        for form, (error, _) in found.items():
            assert (error > 0.1) == ("causal True" in form), (place, form)


AROUND = {
    "on two ranks": (PLAIN, ["dp2", "cp2", "cp2-r", "dp2"], 2),
    "rotary": (LLAMA.format(heads=4, kv=2), ["dp2", "cp2", "dp2-z3", "cp2-r", "dp2", "dp2"], 2),
    "in the ring of four": (LLAMA4, ["dp4", "cp4", "dp2-z2-cp2", "tp2-cp2", "sp2-cp2", "dp4"], 4),
    "of both ends": (GPT2, ["dp4", "dp2-cp2", "cp4", "dp4"], 4),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "on two ranks")) for n in AROUND])
def test_around_the_ring_equals_one_process(name: str, ranks: Ranks) -> None:
    source, strategies, size = AROUND[name]
    job = {"source": source, "strategies": strategies, "sequence": 16, "micro_batches": 2}
    for found in ranks("sequence_jobs:around_equals_one_process", size, steps=2, **job):
        assert found["agrees"], found


def test_a_gradient_that_is_not_summed_over_the_sequence_is_caught(ranks: Ranks) -> None:
    arguments = {"source": PLAIN, "strategies": ["dp2", "sp2", "dp2", "dp2"]}
    for found in ranks("compare_with_one_process", 2, plant="forgotten axis", steps=1, **arguments):
        assert not found["agrees"]
        assert found["layer"] == "0"


class Block(nn.Module):
    """An attention over the whole sequence, by hand or by torch, and whatever a test adds."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind, self.qkv, self.out = kind, nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.view(*x.shape[:2], 2, 8).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.kind == "by hand":
            y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        else:
            y = nn.functional.scaled_dot_product_attention(q, k, v)
        if self.kind == "a mean over the sequence":
            x = x - x.mean(1, keepdim=True)
        if self.kind == "a shift":
            x = torch.roll(x, 1, 1)
        return x + self.out(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("by hand", "matmul (2, 2, 6, 6) needs the whole sequence"),
        ("a mean over the sequence", "mean (2, 1, 16) needs the whole sequence"),
        ("a shift", "roll (2, 6, 16) needs the whole sequence"),
    ],
)
def test_what_needs_the_whole_sequence_is_refused_by_name(kind: str, words: str) -> None:
    derivation = derive(Block(kind), (torch.randn(2, 6, 16),), {})
    assert derivation.why_no_cut_sequence() == words
    with pytest.raises(InputError, match="sp 2 with cp 1 is not possible for Block"):
        derivation.plan((), sp=2)


def test_heads_that_do_not_divide_are_refused() -> None:
    derivation = derive(Block(), (torch.randn(2, 6, 16),), {})
    assert derivation.why_no_cut_sequence() is None
    with pytest.raises(InputError, match="heads=2"):
        derivation.plan((), sp=3)


def test_a_described_model_knows_its_heads() -> None:
    model = build_model(LLAMA4)
    kind = describe(model, probe(model, example_batch(model, samples=3, sequence=8)), max_tp=2).spec.kind(1)
    assert kind.attention is not None
    assert kind.attention.heads == 4
    assert kind.attention.kv_heads == 4
    assert kind.sequence_reason == ""
    assert isinstance(kind.attention, Attention)
