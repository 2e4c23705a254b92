"""A rank that hangs ends all of them within the stated time, by its name and its last operation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import InputError, RunError
from autopar.runtime.activity import Activity, place
from autopar.runtime.launch import launch
from autopar.runtime.watching import State, check_timeout, hang_error
from tests.runtime.hang_jobs import GPT
from tests.runtime.rank_jobs import make_plan

Ranks = Callable[..., list[Any]]

JOBS = Path(__file__).with_name("hang_jobs.py")
ROOT = Path(__file__).resolve().parents[2]
WAITS = State(told=9, silent_s=30.0, begun=7, operation="train_step 3", waits=True, where="x.py:1 f", outside=False)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("own code", "rank 1 hangs: its last operation was optimizer.step, which is done"),
        pytest.param("forward", "rank 1 hangs: it is in train_step 3", marks=pytest.mark.slow),
        pytest.param("backward", "rank 1 hangs: its last operation was forward, step 3", marks=pytest.mark.slow),
        pytest.param(
            "before the optimizer", "rank 1 hangs: its last operation was train_step 3", marks=pytest.mark.slow
        ),
    ],
)
def test_the_rank_that_hangs_is_named_on_all(case: str, words: str, ranks: Ranks) -> None:
    found = ranks("hang_jobs:ends_by_name", 3, case=case, strategies=["dp3"] * 4, global_batch=9)
    for one in found:
        (said,) = one["said"]
        assert words in said, said
        assert "reads_a_slow_file" in said
        assert "no rank has got on for 1 s" in said
        assert one["s"] < 20  # 1.5 times the limit, and three steps on a busy machine
    assert sum(speaks for one in found for speaks in one["speaks"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("case", "words"), [("asleep", "its last operation was"), ("stopped", "it answers no more")])
def test_a_launched_world_ends(case: str, words: str) -> None:
    plan = make_plan(GPT, ["dp3"] * 4, world=3, global_batch=9).dumps()
    pids: list[int] = []
    began = time.monotonic()
    with pytest.raises(RunError, match="rank 1 hangs") as caught:
        launch(
            f"{JOBS}:hang_for_good",
            {"plan": plan, "timeout_s": 4.0, "case": case},
            nproc=3,
            timeout_s=120,
            progress=lambda event: pids.append(event["pid"]),
        )
    assert words in str(caught.value)
    assert time.monotonic() - began < 60
    assert len(pids) == 3
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.slow
def test_a_world_of_torchrun_ends(tmp_path: Path) -> None:
    job = {"plan": make_plan(GPT, ["dp2"] * 4, world=2).dumps(), "timeout_s": 4.0, "case": "asleep"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, f"--log-dir={tmp_path}/logs", str(JOBS), json.dumps(job)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode
    assert done.stderr.count("error: rank 1 hangs: its last operation was optimizer.step") == 1, done.stderr


@pytest.mark.parametrize(
    ("states", "silent", "words"),
    [
        ({0: WAITS, 1: replace(WAITS, waits=False)}, set(), "rank 1 hangs: its last operation was train_step 3"),
        ({0: WAITS, 1: replace(WAITS, begun=6, operation="save")}, set(), "rank 1 hangs: it is in save"),
        ({0: WAITS, 1: replace(WAITS, outside=True)}, set(), "rank 1 hangs: it is in train_step 3"),
        ({0: replace(WAITS, waits=False), 1: WAITS}, {1}, "rank 1 hangs: it answers no more, last known in"),
        ({0: WAITS}, set(), "rank 1 hangs: it has not come to autopar.parallelize"),
        ({0: WAITS, 1: WAITS}, set(), "all 2 ranks wait for each other: it is in train_step 3"),
    ],
)
def test_who_is_waited_for(states: dict[int, State], silent: set[int], words: str) -> None:
    said = str(hang_error(states, silent, size=2, timeout_s=5.0))
    assert words in said
    assert "for 5 s" in said


def test_where_a_process_is() -> None:
    at = place()
    assert "activity.py" in at.words
    assert "test_watching.py" in at.words
    assert (at.in_backward, at.in_torch, at.in_ours) == (False, False, True)


def test_an_operation_within_another_and_a_growing_file_are_getting_on(tmp_path: Path) -> None:
    record = Activity()
    with record.during("save", grows=tmp_path):
        with record.during("inner"):
            assert (record.operation, record.begun) == ("inner", 2)
        assert (record.operation, record.inside) == ("save", True)
        record.beat_s -= 100
        assert record.silent_s() > 99
        (tmp_path / "file").write_text("more")
        assert record.silent_s() < 50
    assert (record.operation, record.inside) == ("save", False)


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), True, "5", None])
def test_no_time_is_refused(timeout_s: Any) -> None:
    with pytest.raises(InputError, match="timeout_s is"):
        check_timeout(timeout_s)
