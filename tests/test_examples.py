"""The commands that examples/train.py names, run as they stand."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAMS = {"autopar": ["-m", "autopar"], "torchrun": ["-m", "torch.distributed.run"]}


def _commands() -> list[list[str]]:
    """The indented command lines of the docstring, the training last."""
    text = (ROOT / "examples" / "train.py").read_text().split('"""')[1]
    first, *rest = re.findall(r"^    ((?:autopar|torchrun) .*)$", text, re.MULTILINE)
    return [shlex.split(line) for line in [*rest, first.replace("[--steps 20]", "--steps 12")]]


def test_the_example_names_its_commands() -> None:
    assert [command[0] for command in _commands()] == ["autopar", "autopar", "autopar", "torchrun"]


@pytest.mark.slow
def test_the_example_trains_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for program, *arguments in _commands():
        done = subprocess.run(
            [sys.executable, *PROGRAMS[program], *arguments],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.5
