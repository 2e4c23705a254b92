"""The wrapped model as a user meets it: own loops, refusals in words, equal starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import InputError
from autopar.runtime.models import build_model
from tests.runtime.rank_jobs import make_plan

Ranks = Callable[..., list[Any]]

LLAMA = "LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, vocab_size=64)"
PLAIN = "examples/gpt.py:build(width=32, heads=4, blocks=4, vocab=64, context=16)"


@pytest.mark.parametrize("source", [pytest.param(LLAMA, marks=pytest.mark.slow), PLAIN])
def test_own_loop_with_accumulation_has_the_gradients_of_one_process(source: str, ranks: Ranks) -> None:
    strategies = ["dp4-z3", "dp2-z3-tp2", "tp4", "dp4", "dp2-tp2s-r", "dp4"]
    for found in ranks("own_loop", 4, source=source, strategies=strategies):
        assert found["loss"] <= 1e-5
        assert found["gradient"] <= 1e-4


@pytest.mark.parametrize(
    ("case", "size", "words"),
    [
        ("another model", 2, "the plan was made for another model"),
        ("another world", 2, "the plan is for 4 ranks, 2 are running"),
        ("uneven heads", 3, "tp 3 does not divide LlamaDecoderLayer (heads 4"),
        ("unused parameter", 2, "got no gradient in the first step: model.layers.0.mlp.spare.weight"),
        ("a batch of another size", 2, "the plan gives each rank 4 of 8"),
        ("rows not cut", 2, "the wrapping and the plan disagree"),
        ("forward of a pipeline", 2, "a pipelined model has no forward of its own"),
    ],
)
def test_refusals_say_why_on_every_rank(case: str, size: int, words: str, ranks: Ranks) -> None:
    for said in ranks("refused", size, case=case):
        assert words in said


def test_differently_seeded_ranks_start_from_the_weights_of_the_first(ranks: Ranks) -> None:
    for found in ranks("unequal_start", 2):
        assert found["loss"] == pytest.approx(found["expected"], rel=1e-6)


def test_sampler_deals_the_dataset_once_over_the_ranks_of_a_stage(ranks: Ranks) -> None:
    places = ranks("sampled", 4)
    assert sorted(places[0] + places[1]) == list(range(16))
    assert places[2:] == places[:2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
def test_a_plan_for_gpus_is_refused_where_there_are_none() -> None:
    plan = make_plan(PLAIN, ["dp1"] * 6, world=1)
    away = dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, device="cuda"))
    with pytest.raises(InputError, match="torch sees none here"):
        autopar.parallelize(build_model(PLAIN), away)
