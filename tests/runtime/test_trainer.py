"""Hugging Face's Trainer over a plan: the losses of the plain one, its checkpoints, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Ranks = Callable[..., list[Any]]

SOURCE = "LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)"


@pytest.mark.parametrize(
    ("strategies", "optim", "padded"),
    [
        (["dp2-z1", "dp2-z3", "dp2", "dp2"], "adamw_torch", False),
        pytest.param(["dp2-z3", "tp2", "dp2-z1-r", "dp2"], "sgd", False, marks=pytest.mark.slow),
        pytest.param(["dp2-z3", "tp2", "cp2", "dp2"], "adamw_torch", True, marks=pytest.mark.slow),
    ],
)
def test_losses_norms_and_rates_are_those_of_one_process(
    strategies: list[str], optim: str, padded: bool, ranks: Ranks, tmp_path: Path
) -> None:
    job = {"source": SOURCE, "strategies": strategies, "folder": str(tmp_path), "optim": optim, "padded": padded}
    for found in ranks("trainer_jobs:losses_of_trainers", 2, micro_batches=2, **job):
        assert [row[0] for row in found["ours"]] == [1, 2, 3, 4, 5, 6]
        assert found["ours"] == [pytest.approx(row, rel=2e-4) for row in found["plain"]]
        assert found["again"][-3:] == [pytest.approx(row, rel=2e-4) for row in found["plain"][3:]]
        assert found["names"]
        assert found["moved"] == []
        assert found["weights"] <= 1e-4
        assert found["evaluated"] == pytest.approx(found["plainly evaluated"], rel=1e-2)


def test_what_cannot_work_is_refused_in_words(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks("trainer_jobs:refused_by_the_trainer", 2, source=SOURCE, folder=str(tmp_path)):
        assert "does not run pipelines" in found["stages"]
        assert "set per_device_train_batch_size=4 and gradient_accumulation_steps=1" in found["batch"]
        assert "the plan decides the precision" in found["bf16"]
        assert "the plan decides what is recomputed" in found["recompute"]
        assert "takes a model under a plan" in found["plain model"]
