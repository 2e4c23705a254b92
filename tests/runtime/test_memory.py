"""Peak memory of every rank: what the memory model predicts beside what trackers see in real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autopar.measured import ModelFile
from autopar.plan import Plan
from autopar.predict import rank_memory
from autopar.profiler.models import profile
from autopar.runtime.models import build_model

Ranks = Callable[..., list[Any]]

SOURCE = (
    "LlamaConfig(hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4, "
    "num_key_value_heads=2, vocab_size=256, max_position_embeddings=64)"
)
SEQUENCE, WORLD = 32, 4
PLANS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "replicated": (["dp4"] * 6, {"micro_batches": 2}),
    "optimizer sharded": (["dp4-z1"] * 6, {"micro_batches": 2}),
    "sharded": (["dp4-z3"] * 6, {"micro_batches": 2}),
    "kept whole between": (["dp4-z2"] * 6, {}),
    "tensor parallel": (["dp4", "tp4", "tp4", "dp2-tp2", "dp2-tp2", "dp4-z3"], {}),
    "all mixed, recomputed": (["dp4-z3", "dp2-z3-tp2", "tp4s-r", "dp4-z2-r", "dp4-r", "dp4-z3"], {"micro_batches": 2}),
    "two stages": (
        ["dp2", "dp2-z3", "tp2", "tp2s", "dp2-r", "dp2-z3"],
        {"pp": 2, "layers_per_stage": [3, 3], "micro_batches": 4},
    ),
    "two filled stages": (
        ["dp2-z3", "dp2-z3", "dp2-z2", "dp2-z3-r", "dp2", "dp2-z3"],
        {"pp": 2, "layers_per_stage": [4, 2], "micro_batches": 4, "schedule": "gpipe"},
    ),
    "four stages": (
        ["dp1", "dp1", "dp1-r", "dp1", "dp1", "dp1"],
        {"pp": 4, "layers_per_stage": [2, 1, 1, 2], "micro_batches": 4},
    ),
    "two stages a rank": (
        ["dp2", "dp2-z3", "tp2", "dp2-z2", "dp2-r", "dp2-z3"],
        {"pp": 2, "layers_per_stage": [2, 1, 1, 2], "micro_batches": 4, "schedule": "interleaved-1f1b"},
    ),
    **{
        schedule: (
            ["dp2", "dp2", "dp2", "dp2-r" if schedule == "looped-bfs" else "dp2", "dp2", "dp2"],
            {"pp": 2, "layers_per_stage": [2, 1, 1, 2], "micro_batches": 4, "schedule": schedule},
        )
        for schedule in ("looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev")
    },
}  # fmt: skip


SEVERAL = ("two stages a rank", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev")
SLOW = (*SEVERAL, "kept whole between", "two filled stages")


@pytest.fixture(scope="module")
def measured() -> ModelFile:
    """The profile of the model, memory traced in this process."""
    return profile(build_model(SOURCE), sequence=SEQUENCE, tp_degrees=(2, 4), samples=(1, 2))


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in PLANS])
def test_predicted_peak_is_within_five_percent_of_the_tracked_one(
    name: str, measured: ModelFile, ranks: Ranks
) -> None:
    strategies, shape = PLANS[name]
    results = ranks(
        "train", WORLD, source=SOURCE, strategies=strategies, global_batch=16, sequence=SEQUENCE, steps=4, **shape
    )
    plan = Plan.loads(results[0]["plan"])
    width = plan.mesh.ranks_per_stage
    for rank, result in enumerate(results):
        predicted = rank_memory(plan, rank // width, measured.model, measured.layers)
        error = predicted.peak_bytes / result["peak_memory_bytes"] - 1
        assert abs(error) <= 0.05, f"rank {rank}: {predicted} against {result['peak_memory_bytes']} ({error:+.1%})"
