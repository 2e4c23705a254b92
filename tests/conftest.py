"""Fixtures of the tests of the command line, and one thread a process: several ranks share few cores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from autopar.cli import main
from tests.command_line import Answer, Run
from tests.values import golden, measured

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with model.json, cluster.json, plan.json, and files that are broken in one way each."""
    model_file, cluster_file = measured()
    model_file.save(tmp_path / "model.json")
    cluster_file.save(tmp_path / "cluster.json")
    golden()["plan.json"].save(tmp_path / "plan.json")
    heads14, _ = measured(tp_degrees=(2,), tp_reason="heads 14, kv heads 2, width 1792")
    heads14.save(tmp_path / "heads14.json")
    for name in ("model", "cluster", "plan"):
        text = (tmp_path / f"{name}.json").read_text()
        (tmp_path / f"truncated-{name}.json").write_text(text[: len(text) // 2])
    text = (tmp_path / "cluster.json").read_text()
    (tmp_path / "world0.json").write_text(text.replace('"world_size": 4', '"world_size": 0'))
    (tmp_path / "negative.json").write_text(text.replace('"memory_bytes": 1073741824', '"memory_bytes": -1'))
    (tmp_path / "unknown.json").write_text(text.replace('"world_size"', '"wordl_size"'))
    (tmp_path / "foreign.json").write_text('{"hidden_size": 64, "model_type": "llama"}')
    (tmp_path / "empty.txt").write_text("")
    return tmp_path


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """A function that runs a command line in this process, in `folder`: quicker than `autopar`, the same words."""
    monkeypatch.chdir(folder)

    def run(arguments: Sequence[str]) -> Answer:
        with pytest.raises(SystemExit) as end:
            main(list(arguments))
        out, err = capfd.readouterr()
        return Answer(returncode=int(end.value.code or 0), stdout=out, stderr=err)

    return run
