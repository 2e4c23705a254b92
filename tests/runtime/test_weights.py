"""Plain safetensors files: written by one plan, read by another and by transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autopar.runtime.models import build_model

Ranks = Callable[..., list[Any]]

TIED = "GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=64, n_positions=64, tie_word_embeddings=True)"
STAGES = (["dp2-z1", "dp2", "tp2", "dp2-z3", "tp2s", "dp2-z1"], {"pp": 2, "layers_per_stage": [3, 3],
          "micro_batches": 2})  # fmt: skip
FLAT = (["dp4-z3", "dp2-tp2", "dp4-z1", "tp4", "dp4-z2", "dp4-z3"], {})


def test_weights_pass_from_plan_to_plan_and_to_transformers(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    for found in ranks(
        "weights_jobs:export_and_import", 4, source=TIED, folder=str(folder), writer=STAGES, reader=FLAT
    ):
        assert found["error"] == 0.0
        assert "holds no weights" in found["said"]
    model = build_model(TIED)
    assert found["names"] == sorted(name for name, _ in model.named_parameters())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    model.config.save_pretrained(folder)
    again = type(model).from_pretrained(folder)
    want = dict(model.named_parameters())
    assert all(bool((want[name] == value).all()) for name, value in again.named_parameters())
