"""Checkpoints written beside the training, and what a crash at each moment of a save leaves."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import InputError
from tests.runtime.test_checkpoint import PLANS, TIED

Ranks = Callable[..., list[Any]]

SIZE, STRATEGIES, SHAPE = PLANS["two ranks"]


def test_what_is_written_is_what_was_when_training_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    arguments = {"source": TIED, "folder": str(tmp_path / "checkpoint"), "strategies": STRATEGIES, **SHAPE}
    written = ranks("saving_jobs:save_while_training", SIZE, **arguments)
    assert not any(found["there_before"] for found in written)
    assert {tuple(found["files"]) for found in written} == {("checkpoint",)}
    for found in ranks("saving_jobs:resume", SIZE, **arguments):
        assert found["losses"] == pytest.approx(written[0]["losses"], rel=1e-6)


@pytest.mark.parametrize(
    ("wait", "failing"), [pytest.param(True, (0, 2), marks=pytest.mark.slow), pytest.param(False, (1, 3))]
)
def test_a_write_that_fails_is_said_on_every_rank(
    wait: bool, failing: tuple[int, ...], ranks: Ranks, tmp_path: Path
) -> None:
    arguments = {"source": TIED, "folder": str(tmp_path), "strategies": STRATEGIES, "wait": wait, **SHAPE}
    for said in ranks("saving_jobs:save_where_nobody_can", SIZE, **arguments):
        assert [number for number, words in enumerate(said) if words] == list(failing), said
        assert all("cannot be saved" in said[number] for number in failing)


def test_a_full_disk_is_named_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    arguments = {"source": TIED, "folder": str(tmp_path / "full"), "strategies": STRATEGIES, **SHAPE}
    for said in ranks("saving_jobs:save_without_room", SIZE, **arguments):
        assert "cannot be saved" in said
        assert "large" in said.lower(), said
    assert not (tmp_path / "full").exists()


def test_whatever_fails_on_one_rank_is_said_on_every_one(ranks: Ranks, tmp_path: Path) -> None:
    arguments = {"source": TIED, "folder": str(tmp_path / "kept"), "strategies": STRATEGIES, **SHAPE}
    first, second = ranks("saving_jobs:save_with_faults", SIZE, **arguments)
    assert first == second
    assert first.pop("none") == ["", ""]
    for name, words in first.items():
        assert all("cannot be saved" in one and "KeyError: 'planted'" in one for one in words), (name, words)
    first, second = ranks("saving_jobs:load_with_faults", SIZE, **arguments)
    assert first.pop("none") == second.pop("none") == ""
    for name in ("read_file", "_wanted", "_put"):
        assert first.pop(name).startswith("InputError: rank 1 failed: KeyError: 'planted'"), name
        assert second.pop(name) == "KeyError: 'planted'", name
    assert set(first) == {"__1_0.distcp", ".metadata"}
    for words in (*first.values(), *second.values()):
        assert "kept cannot be read" in words


MOMENTS = ("while writing", "before the facts", "between the renames", "after the renames")


@pytest.mark.slow
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_during_a_save_leaves_a_checkpoint(moment: str, wait: bool, ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    arguments = {"source": TIED, "folder": str(folder), "strategies": STRATEGIES, **SHAPE}
    with pytest.raises(AssertionError, match="rank"):
        ranks("saving_jobs:die_while_saving", SIZE, moment=moment, wait=wait, timeout_s=60, **arguments)
    resumed = ranks("saving_jobs:resume", SIZE, **arguments)
    losses = ast.literal_eval((tmp_path / "losses").read_text())
    for found in resumed:
        if moment == "after the renames":  # the new one, of four steps, is complete
            assert found["losses"][0] < losses[0]
        else:
            assert found["losses"] == pytest.approx(losses, rel=1e-6)
    # And the next save goes through what the crash left.
    ranks("saving_jobs:save_after_two_steps", SIZE, **arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "losses"]


def test_without_safetensors_the_error_says_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, "autopar.runtime.exporting", raising=False)
    with pytest.raises(InputError) as caught:
        importlib.import_module("autopar.runtime.exporting")
    assert caught.value.fix == "pip install 'autopar[hf]'"
