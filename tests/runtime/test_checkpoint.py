"""Checkpoints: written by one plan, read by another, on other numbers of ranks; the next steps are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from autopar.runtime.checkpoint import ModelForm

Ranks = Callable[..., list[Any]]
Saved = Callable[[str], tuple[Path, list[dict[str, Any]]]]

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
HALF: dict[str, tuple[int, list[str], dict[str, Any]]] = {
    "masters, sharded": (4, ["dp4-z3", "dp4-z2", "dp4-z3-r", "tp4", "dp2-z1-tp2", "dp4-z3"], {"dtype": "bfloat16"}),
    "masters, stages": (4, ["dp2-z1", "dp2-z1", "tp2s", "dp2-z3", "dp2", "dp2-z1"],
                        {"pp": 2, "layers_per_stage": [3, 3], "micro_batches": 2, "dtype": "bfloat16"}),
    "masters, two ranks": (2, ["dp2-z1", "tp2", "dp2-z3", "dp2", "dp2-z1", "dp2-z1"], {"dtype": "bfloat16"}),
}  # fmt: skip


def marks_of(found: list[dict[str, Any]]) -> dict[str, str]:
    """What all ranks hold together; the copy of a tied parameter on another stage is that of its other name."""
    joined: dict[str, str] = {}
    for one in found:
        for key, mark in one["marks"].items():
            key = key.replace("lm_head.weight", "transformer.wte.weight")
            assert joined.setdefault(key, mark) == mark, f"the ranks differ in {key}"
    return joined


def save(name: str, plans: dict[str, Any], ranks: Ranks, folder: Path) -> list[dict[str, Any]]:
    size, strategies, shape = plans[name]
    return ranks(
        "saving_jobs:save_after_two_steps", size, source=TIED, folder=str(folder), strategies=strategies, **shape
    )


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """The checkpoint of a plan, written once for all readers, and what its ranks said of it."""

    @cache
    def folder_of(name: str) -> tuple[Path, list[dict[str, Any]]]:
        folder = tmp_path_factory.mktemp("checkpoints") / "checkpoint"
        found = save(name, {**PLANS, **HALF}, ranks, folder)
        assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]
        return folder, found

    return folder_of


def check_reader(reader: str, writers: Iterable[str], ranks: Ranks, saved: Saved, tolerance: float) -> None:
    """One plan reads what each of the others saved: every bit of it, and the losses of the next steps."""
    size, strategies, shape = {**PLANS, **HALF}[reader]
    written = {name: saved(name) for name in writers}
    folders = [str(folder) for folder, _ in written.values()]
    results = ranks("saving_jobs:resume_each", size, source=TIED, folders=folders, strategies=strategies, **shape)
    worst = 0.0
    for number, (writer, (_, before)) in enumerate(written.items()):
        found = [result[number] for result in results]
        # Every bit of every parameter and state, whoever holds it.
        assert marks_of(found) == marks_of(before), (writer, reader)
        for one in found:
            assert one["losses"] == pytest.approx(before[0]["losses"], rel=tolerance), (writer, reader)
            worst = max(worst, *(abs(a / b - 1) for a, b in zip(one["losses"], before[0]["losses"], strict=True)))
    print(f"{reader} after {len(folders)} others: losses differ by {worst:.1e} at most")


@pytest.mark.parametrize("reader", ["vocabulary", "sharded"])
def test_another_plan_goes_on_where_the_first_stopped(reader: str, ranks: Ranks, saved: Saved) -> None:
    check_reader(reader, ["stages"], ranks, saved, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("reader", PLANS)
def test_every_plan_reads_every_other(reader: str, ranks: Ranks, saved: Saved) -> None:
    check_reader(reader, PLANS, ranks, saved, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("reader", HALF)
def test_masters_of_mixed_precision_go_from_plan_to_plan(reader: str, ranks: Ranks, saved: Saved) -> None:
    # The forward is rounded to 8 bits, by each plan at other places.
    check_reader(reader, HALF, ranks, saved, 1e-2)


@pytest.mark.parametrize(
    ("reader", "writer"),
    [
        ("two ranks", "masters, two ranks"),
        pytest.param("masters, two ranks", "two ranks", marks=pytest.mark.slow),
        pytest.param("masters, stages", "tensor parallel", marks=pytest.mark.slow),
        pytest.param("stages", "masters, sharded", marks=pytest.mark.slow),
    ],
)
def test_a_plan_of_another_precision_goes_on(reader: str, writer: str, ranks: Ranks, saved: Saved) -> None:
    # Masters are what float32 has: every bit is read; the forward of one of them is rounded to 8 bits.
    check_reader(reader, [writer], ranks, saved, 1e-2)


def test_names_and_shapes_tell_models_apart_whatever_their_dtypes() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(2, 3, bias=False)})
    model["b"].weight = model["a"].weight
    form = ModelForm.of(model, "")
    stored = {"model/a.weight": SimpleNamespace(size=(3, 2)), "model/a.bias": SimpleNamespace(size=(3,))}
    assert form.why_not({**stored, "optimizer/a.bias/exp_avg": SimpleNamespace(size=(3,))}) == ""
    tied = {"model/b.weight": stored["model/a.weight"], "model/a.bias": stored["model/a.bias"]}
    assert form.why_not(tied) == ""
    assert "lacks a.bias" in form.why_not({"model/a.weight": stored["model/a.weight"]})
    assert "is (4,) there, (3,) here" in form.why_not({**stored, "model/a.bias": SimpleNamespace(size=(4,))})
    assert "has no c" in form.why_not({**stored, "model/c": SimpleNamespace(size=(3,))})


def test_an_interrupted_save_leaves_the_previous_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    size, strategies, shape = PLANS["two ranks"]
    arguments = {"source": TIED, "folder": str(folder), "strategies": strategies, **shape}
    written = ranks("saving_jobs:save_after_two_steps", size, **arguments)
    # A crash while writing the next one, and one between the two renames.
    (tmp_path / ".checkpoint.new").mkdir()
    (tmp_path / ".checkpoint.new" / "half").write_text("half")
    folder.rename(tmp_path / ".checkpoint.old")
    for found in ranks("saving_jobs:resume", size, **arguments):
        assert found["losses"] == pytest.approx(written[0]["losses"], rel=2e-6)


def test_foreign_folders_are_refused_in_words(ranks: Ranks, tmp_path: Path) -> None:
    size, strategies, shape = PLANS["two ranks"]
    arguments: dict[str, Any] = {"folder": str(tmp_path / "checkpoint"), "strategies": strategies, **shape}
    for found in ranks("saving_jobs:resume", size, source=TIED, **arguments):
        assert "is no checkpoint" in found["refused"]
    ranks("saving_jobs:save_after_two_steps", size, source=TIED, **arguments)
    other = TIED.replace("n_embd=32", "n_embd=64")
    for found in ranks("saving_jobs:resume", size, source=other, **arguments):
        assert "is a checkpoint of another model" in found["refused"]
