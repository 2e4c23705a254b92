"""Launching: results in rank order, errors as they were raised, and nothing left behind, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import InputError, RunError, UsageError
from autopar.runtime.launch import Job, inside_torchrun, launch, pid_path

TARGETS = Path(__file__).with_name("launch_targets.py")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(("autopar", "torchelastic"))] == []


def alive(pid: int) -> bool:
    """True when the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_gone(pids: list[int]) -> None:
    until = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    assert [pid for pid in pids if alive(pid)] == []


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_every_rank_returns_its_result(nproc: int) -> None:
    events: list[dict[str, Any]] = []
    results = launch(f"{TARGETS}:add_up", {"first": 1}, nproc=nproc, timeout_s=60, progress=events.append)
    assert [r["rank"] for r in results] == list(range(nproc))
    assert {r["total"] for r in results} == {nproc * (nproc + 1) / 2}
    assert {r["cwd"] for r in results} == {os.getcwd()}
    assert {r["threads"] for r in results} == {1}
    assert not any(r["transformers"] for r in results)
    assert sorted(e["rank"] for e in events) == list(range(nproc))
    assert len({e["pid"] for e in events}) == nproc
    assert_gone([e["pid"] for e in events])


@pytest.mark.slow
def test_two_launches_at_once(tmp_path: Path) -> None:
    code = (
        "from autopar.runtime.launch import launch\n"
        f"print(launch({str(TARGETS) + ':add_up'!r}, {{'first': 0}}, nproc=2, timeout_s=90)[1]['total'])"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=_env(), stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in both] == ["1.0", "1.0"]


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_no_rank_connects_before_all_are_forked(tmp_path: Path) -> None:
    """One forked while the agent's store serves another inherits locks as taken."""
    from autopar.runtime.worker import wait_until_forked

    job = Job(target="", payload={}, nproc=2, device="cpu", threads_per_rank=1, timeout_s=1, folder=str(tmp_path))
    waiting = threading.Thread(target=wait_until_forked, args=(job,), daemon=True)
    pid_path(job.folder, 0).touch()
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    pid_path(job.folder, 1).touch()
    waiting.join(10)
    assert not waiting.is_alive()


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_our_error_comes_back_as_it_was(rank: int) -> None:
    with pytest.raises(InputError) as caught:
        launch(f"{TARGETS}:refuse", {"rank": rank}, nproc=2, timeout_s=60)
    assert (caught.value.what, caught.value.why) == ("the text is empty", "0 bytes")
    assert caught.value.fix == "give another --text"


def test_a_bug_names_its_rank_and_keeps_its_traceback() -> None:
    with pytest.raises(RunError) as caught:
        launch(f"{TARGETS}:bug", {"rank": 1}, nproc=2, timeout_s=60)
    assert "rank 1 failed" in caught.value.what
    assert "KeyError" in caught.value.what
    assert 'raise KeyError("no such layer")' in caught.value.why


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_rank_is_named(rank: int) -> None:
    with pytest.raises(RunError, match=f"rank {rank} was killed by SIGKILL"):
        launch(f"{TARGETS}:killed", {"rank": rank}, nproc=3, timeout_s=60)


@pytest.mark.slow
def test_a_rank_without_a_result_is_named() -> None:
    with pytest.raises(RunError, match="rank 1 was not running"):
        launch(f"{TARGETS}:leaves", {}, nproc=2, timeout_s=6)


@pytest.mark.slow
def test_a_result_that_is_not_json_is_a_bug() -> None:
    with pytest.raises(RunError, match="not JSON serializable"):
        launch(f"{TARGETS}:not_json", {}, nproc=1, timeout_s=60)


@pytest.mark.parametrize("target", ["nowhere.py:x", pytest.param(f"{TARGETS}:nothing", marks=pytest.mark.slow)])
def test_a_target_that_does_not_exist(target: str) -> None:
    with pytest.raises(InputError, match=r"nowhere|nothing"):
        launch(target, {}, nproc=1, timeout_s=60)


@pytest.mark.parametrize("timeout_s", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_a_sleeping_rank_is_named_with_its_stack_and_ended(timeout_s: int) -> None:
    events: list[dict[str, Any]] = []
    with pytest.raises(RunError, match=f"not done after {timeout_s} s") as caught:
        launch(f"{TARGETS}:asleep", {}, nproc=2, timeout_s=timeout_s, progress=events.append)
    if timeout_s == 20:  # long enough to have started, on a busy machine too
        assert caught.value.what.startswith("rank 0 not")
        assert "in asleep" in caught.value.why
        assert len(events) == 1
    for event in events:
        assert_gone(event["pids"])


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_parent_ends_the_ranks(number: int, code: int, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys\n"
        "from autopar.runtime.launch import launch\n"
        "try:\n"
        f"    launch({str(TARGETS) + ':asleep'!r}, {{}}, nproc=2, timeout_s=90,\n"
        "           progress=lambda e: print(*e['pids'], flush=True))\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(130)\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], env=_env(), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert all(map(alive, pids))
        parent.send_signal(number)
        assert parent.wait(timeout=20) == code
    assert_gone(pids)
    until = time.monotonic() + 5  # after SIGKILL the agent removes the folder
    while list(tmp_path.glob("autopar-*")) and time.monotonic() < until:
        time.sleep(0.02)


@pytest.mark.slow
def test_the_progress_function_may_fail() -> None:
    pids: list[int] = []

    def fail(event: dict[str, Any]) -> None:
        pids.append(event["pid"])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        launch(f"{TARGETS}:add_up", {"first": 1}, nproc=2, timeout_s=60, progress=fail)
    assert_gone(pids)


@pytest.mark.slow
def test_inside_torchrun_it_runs_here(tmp_path: Path) -> None:
    script = tmp_path / "inside.py"
    script.write_text(
        "from autopar.runtime.launch import Job, inside_torchrun, launch, pid_path\n"
        "assert inside_torchrun()\n"
        f"print([r['total'] for r in launch({str(TARGETS) + ':add_up'!r}, {{'first': 1}}, nproc=2, timeout_s=60)])\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, f"--log-dir={tmp_path}/logs", str(script)],
        env=_env(),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        cwd=tmp_path,
    )
    assert done.stdout.count("[3.0, 3.0]") == 2, done.stderr


def test_inside_torchrun_another_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not inside_torchrun()
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="2 processes are asked for inside a launch of 4"):
        launch(f"{TARGETS}:add_up", {}, nproc=2, timeout_s=60)


def test_no_ranks_is_a_callers_bug() -> None:
    with pytest.raises(ValueError, match="nproc"):
        launch("a:b", {}, nproc=0, timeout_s=1)


@pytest.mark.parametrize("timeout_s", [0.0, float("inf"), float("nan")])
def test_no_time_is_a_callers_bug(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s"):
        launch("a:b", {}, nproc=1, timeout_s=timeout_s)


def test_launching_does_not_import_torch() -> None:
    code = "import sys, autopar.runtime.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=_env(), check=False).returncode == 0
