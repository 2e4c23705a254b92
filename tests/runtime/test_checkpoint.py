"""Checkpoints: written by one plan, read by another, on other numbers of ranks; the next steps are the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

Ranks = Callable[..., list[Any]]

TIED = (
    "GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=67, n_positions=64, tie_word_embeddings=True, "
    "resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)"
)
PLANS: dict[str, tuple[int, list[str], dict[str, Any]]] = {
    "one rank": (1, ["dp1"] * 6, {}),
    "sharded": (4, ["dp4-z3", "dp4-z3", "dp4-z2", "dp4", "dp4-z3-r", "dp4-z3"], {"micro_batches": 2}),
    "tensor parallel": (4, ["dp4", "tp4", "dp2-tp2", "dp2-z3-tp2s", "tp4s", "dp4"], {}),
    "optimizer sharded": (4, ["dp4-z1", "dp2-z1-tp2", "dp4-z1-h2", "dp2-z3-tp2s", "dp4-z1-r", "dp4-z1"], {}),
    "stages": (4, ["dp2-z3", "dp2", "tp2", "dp2-z3", "tp2s", "dp2-z3"],
               {"pp": 2, "layers_per_stage": [3, 3], "micro_batches": 2}),
    "two ranks": (2, ["dp2", "tp2", "dp2-z3", "tp2", "dp2", "dp2"], {}),
    "eight ranks": (8, ["dp4-z2", "dp2-tp2", "dp4-z3", "tp4", "dp2-z3-tp2s", "dp4-z2"],
                    {"pp": 2, "layers_per_stage": [2, 4], "micro_batches": 2}),
    "vocabulary": (4, ["dp2-z3-tp2", "tp4", "dp2-tp2", "dp4-z3", "dp4", "dp2-z3-tp2"], {}),
}  # fmt: skip
SAMPLED = [("stages", "vocabulary")]


def roundtrip(writer: str, reader: str, ranks: Ranks, folder: Path) -> None:
    size, strategies, shape = PLANS[writer]
    written = ranks("save_after_two_steps", size, source=TIED, folder=str(folder), strategies=strategies, **shape)
    size, strategies, shape = PLANS[reader]
    for found in ranks("resume", size, source=TIED, folder=str(folder), strategies=strategies, **shape):
        assert found["losses"] == pytest.approx(written[0]["losses"], rel=2e-6)
    assert [name for name in os.listdir(folder.parent) if name.startswith(".")] == []


@pytest.mark.parametrize(("writer", "reader"), SAMPLED)
def test_another_plan_goes_on_where_the_first_stopped(writer: str, reader: str, ranks: Ranks, tmp_path: Path) -> None:
    roundtrip(writer, reader, ranks, tmp_path / "checkpoint")


@pytest.mark.slow
@pytest.mark.parametrize(("writer", "reader"), sorted(set(product(PLANS, PLANS)) - set(SAMPLED)))
def test_every_plan_reads_every_other(writer: str, reader: str, ranks: Ranks, tmp_path: Path) -> None:
    roundtrip(writer, reader, ranks, tmp_path / "checkpoint")


def test_an_interrupted_save_leaves_the_previous_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    size, strategies, shape = PLANS["two ranks"]
    arguments = {"source": TIED, "folder": str(folder), "strategies": strategies, **shape}
    written = ranks("save_after_two_steps", size, **arguments)
    # A crash while writing the next one, and one between the two renames.
    (tmp_path / ".checkpoint.new").mkdir()
    (tmp_path / ".checkpoint.new" / "half").write_text("half")
    folder.rename(tmp_path / ".checkpoint.old")
    for found in ranks("resume", size, **arguments):
        assert found["losses"] == pytest.approx(written[0]["losses"], rel=2e-6)


def test_foreign_folders_are_refused_in_words(ranks: Ranks, tmp_path: Path) -> None:
    size, strategies, shape = PLANS["two ranks"]
    arguments: dict[str, Any] = {"folder": str(tmp_path / "checkpoint"), "strategies": strategies, **shape}
    for found in ranks("resume", size, source=TIED, **arguments):
        assert "is no checkpoint" in found["refused"]
    ranks("save_after_two_steps", size, source=TIED, **arguments)
    other = TIED.replace("n_embd=32", "n_embd=64")
    for found in ranks("resume", size, source=other, **arguments):
        assert "is a checkpoint of another model" in found["refused"]
