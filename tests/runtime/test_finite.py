"""Losses, gradients and weights that are not finite: all ranks stop together, before anything good is lost."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.errors import RunError
from autopar.runtime.finite import is_finite, refuse_loss

Ranks = Callable[..., list[Any]]

LLAMA = "LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)"


@pytest.mark.parametrize(
    ("strategies", "size", "bad_rank", "shape"),
    [
        (["dp2-z1", "tp2", "dp2-z3", "dp2"], 2, 1, {}),
        pytest.param(
            ["dp2", "dp2-z3", "tp2", "dp2-z1"],
            4,
            3,
            {"pp": 2, "layers_per_stage": [2, 2], "micro_batches": 2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_all_ranks_stop_and_what_was_saved_is_kept(
    strategies: list[str], size: int, bad_rank: int, shape: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    job = {"source": LLAMA, "strategies": strategies, "folder": str(tmp_path / "good"), "bad_rank": bad_rank}
    first, *others = ranks("finite_jobs:poisoned", size, **job, **shape)
    assert all(other == first for other in others)
    said = first["said"]
    for way in ("loss", "forward")[: 1 if shape else 2]:
        assert f"RunError: the loss is not finite in step 3: nan over 56 labels, first on rank {bad_rank}" in said[way]
    assert said.get("no label", "0.0") == "0.0"
    # The failed call of train_step was the third.
    assert f"RunError: the gradient is not finite in step 4: first of {_first(shape)}" in said["gradient"]
    assert f"on rank {bad_rank}" in said["gradient"]
    for way in ("save", "save beside", "export"):
        assert f"is not saved: {_first(shape)}" in said[way]
        assert "is not finite" in said[way]
    assert first["unchanged"]
    assert first["kept"]


def _first(shape: dict[str, Any]) -> str:
    return "model.layers.1" if shape else "model.embed_tokens.weight"


def test_a_run_that_diverges_saves_nothing(ranks: Ranks, tmp_path: Path) -> None:
    job: dict[str, Any] = {
        "source": LLAMA.replace("vocab_size=64", "vocab_size=256"),
        "folder": str(tmp_path / "good"),
    }
    job |= {"strategies": ["dp2-z1", "dp2", "dp2-z3", "dp2"], "rate": 1e20}
    for found in ranks("finite_jobs:run_that_diverges", 2, **job):
        assert found["said"].startswith("RunError: "), found
        assert "is not finite" in found["said"]
        assert found["kept"]
        assert found["done"] < 4


def test_what_is_finite() -> None:
    assert is_finite(torch.tensor([1, 2]))
    assert is_finite(torch.zeros(0))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        numbers = torch.randn(3, 4).to(dtype)
        assert is_finite(numbers)
        for bad in (math.nan, math.inf, -math.inf):
            wrong = numbers.clone()
            wrong[1, 2] = bad
            assert not is_finite(wrong)


def test_a_finite_loss_asks_nobody() -> None:
    refuse_loss(3.0, 2.0, 3.0, step=1)
    with pytest.raises(RunError, match="no label"):
        refuse_loss(0.0, 0.0, 0.0, step=1)
