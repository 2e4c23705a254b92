"""ZeRO-1: whole parameters and gradients, the optimizer's states cut by rows; against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autopar.runtime.verify import GRADIENT_TOLERANCE, LOSS_TOLERANCE, WEIGHT_TOLERANCE

Ranks = Callable[..., list[Any]]

LLAMA = (
    "LlamaConfig(hidden_size=36, intermediate_size=50, num_hidden_layers=4, num_attention_heads=6, head_dim=6, "
    "num_key_value_heads=2, vocab_size=66, max_position_embeddings=64{more})"
)
PLANS: dict[str, tuple[str, list[str], int, dict[str, Any]]] = {
    # 50 and 66 rows over 4 ranks: the last rank's rows are fewer.
    "beside all others": (
        LLAMA.format(more=""),
        ["dp4-z1", "dp2-z1-tp2s", "dp4-z1-h2-r", "dp4-z3", "dp2-z1-tp2", "dp4"],
        4,
        {"micro_batches": 2},
    ),
    "tied over two stages": (
        LLAMA.format(more=", tie_word_embeddings=True"),
        ["dp2-z1", "tp2", "dp2-z1", "dp2-z2", "dp2-z1-r", "dp2-z1"],
        4,
        {"pp": 2, "layers_per_stage": [2, 4], "micro_batches": 2},
    ),
    "tied in one stage, three ranks": (
        LLAMA.format(more=", tie_word_embeddings=True"),
        ["dp3-z1", "dp3-z1", "dp3-z3", "dp3-z1", "dp3", "dp3-z1"],
        3,
        {"global_batch": 6},
    ),
}
SLOW = ("tied in one stage, three ranks",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in PLANS])
def test_sharded_optimizer_states_equal_one_process(name: str, ranks: Ranks) -> None:
    source, strategies, size, shape = PLANS[name]
    for found in ranks("compare_with_one_process", size, source=source, strategies=strategies, **shape):
        assert found["loss"] <= LOSS_TOLERANCE, found
        assert found["norm"] <= LOSS_TOLERANCE, found
        assert found["gradient"] <= GRADIENT_TOLERANCE, found
        assert found["weight"] <= WEIGHT_TOLERANCE, found


def test_a_loop_of_the_users_own_accumulates_into_the_rows(ranks: Ranks) -> None:
    source, strategies, size, _ = PLANS["beside all others"]
    for found in ranks("own_loop", size, source=source, strategies=strategies):
        assert found["loss"] <= LOSS_TOLERANCE, found
        assert found["gradient"] <= GRADIENT_TOLERANCE, found


SMALL = "LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)"


def test_a_rank_keeps_its_rows_of_the_states_only(ranks: Ranks) -> None:
    whole = ranks("optimizer_jobs:state_bytes", 2, source=SMALL, strategies=["dp2"] * 4)[0]
    for found in ranks("optimizer_jobs:state_bytes", 2, source=SMALL, strategies=["dp2-z1"] * 4):
        assert found["parameters"] == found["with rows"] == whole["parameters"]
        assert found["moments"] == whole["moments"] / 2 == whole["parameters"]
        assert found["gradients"] == whole["gradients"] / 2
