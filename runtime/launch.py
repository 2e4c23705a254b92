"""Local processes that run one function on every rank, through torch's own launcher. Never imports torch itself.

The parent starts one agent (`autopar.runtime.worker`), which starts the ranks. They share one session, so that one
signal ends them all, and one temporary folder, through which results, progress and errors come back.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from autopar import errors
from autopar.errors import AutoparError, RunError, UsageError
from autopar.formats import from_plain
from autopar.runtime.signals import signals_wait, sigterm_unwinds

Progress = Callable[[dict[str, Any]], None]
Device = Literal["cpu", "cuda"]

HANG_TIMEOUT_S = 1200.0
"""When ranks that wait for one that hangs end: below torch's own limits for gloo (1800 s), which know no names, and
above any first step that was seen."""

_POLL_S = 0.05
# After the results or the first failure: time for the ranks to end in order, and to say who was killed.
_SETTLE_S = 3.0
_TERM_S = 1.0  # between SIGTERM and SIGKILL
_BOOT = "import sys; sys.path[:] = sys.argv[2:]; from autopar.runtime.worker import main; main(sys.argv[1])"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the ranks are to do: `target(payload, report)`; `folder` takes their files."""

    target: str
    payload: dict[str, Any]
    nproc: int
    device: Device
    threads_per_rank: int
    timeout_s: float
    folder: str


def result_path(folder: str, rank: int) -> Path:
    """Where a rank leaves its result or its error, whole or not at all."""
    return Path(folder) / f"rank-{rank}.json"


def events_path(folder: str, rank: int) -> Path:
    """Where a rank appends its progress, one JSON object a line."""
    return Path(folder) / f"rank-{rank}.events"


def pid_path(folder: str, rank: int) -> Path:
    """Where a rank says which process it is."""
    return Path(folder) / f"rank-{rank}.pid"


def stack_path(folder: str, rank: int) -> Path:
    """Where a rank writes the stack it is in when it gets SIGUSR1."""
    return Path(folder) / f"rank-{rank}.stack"


def agent_path(folder: str) -> Path:
    """Where the agent says which ranks died: `[{"rank", "exit_code"}]`."""
    return Path(folder) / "agent.json"


def job_path(folder: str) -> Path:
    """Where the job is described."""
    return Path(folder) / "job.json"


def read_job(path: str | os.PathLike[str]) -> Job:
    """The job that a file describes."""
    return from_plain(Job, json.loads(Path(path).read_text(encoding="utf-8")), str(path))


def inside_torchrun() -> bool:
    """True when this process is already a rank of torchrun (or of srun with RANK, WORLD_SIZE and MASTER_ADDR set)."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def launch(
    target: str,
    payload: Mapping[str, Any],
    *,
    nproc: int,
    timeout_s: float,
    device: Device = "cpu",
    progress: Progress | None = None,
    threads_per_rank: int = 1,
    renewed: bool = False,
) -> list[Any]:
    """What `target(payload, report)` returned on each of `nproc` ranks, in rank order.

    target: "package.module:function" or "path/to/file.py:function"; payload and results are JSON types. On every rank
    the process group is up (gloo on CPU, NCCL for CUDA tensors) and its device set. `report(event)` hands an object to
    `progress` here, with the rank added to it. Where the target's module has a function `prepare(payload)`, that is
    called once before the ranks are forked (CPU), to load what they can share. Inside torchrun the target runs in this
    very process.

    Raises what the first failing rank raised if that is an AutoparError; RunError when a rank raised anything else (a
    bug: with its traceback), was killed, or was not done after `timeout_s` (start-up counts), which begin anew with
    every event of a rank if `renewed`. However it ends, also by Ctrl-C or SIGTERM, no process and no file is left
    behind.

    Cost: one `import torch` in the agent (2-3 s); on CPU the ranks are forked from it, on CUDA each imports its own.
    """
    if nproc < 1:
        raise ValueError(f"nproc must be >= 1, not {nproc}")
    if not 0 < timeout_s < 1e9:
        raise ValueError(f"timeout_s must be positive and finite, not {timeout_s}")
    if inside_torchrun():
        return _run_here(target, payload, nproc, device, progress, threads_per_rank)
    with sigterm_unwinds():
        folder = tempfile.mkdtemp(prefix="autopar-")
        agent: subprocess.Popen[bytes] | None = None
        try:
            job = Job(
                target=target,
                payload=dict(payload),
                nproc=nproc,
                device=device,
                threads_per_rank=threads_per_rank,
                timeout_s=timeout_s,
                folder=folder,
            )
            job_path(folder).write_text(json.dumps(asdict(job)), encoding="utf-8")
            with signals_wait():
                agent = _start_agent(job)
            _watch(job, agent, _Events(job, progress), renewed)
            return _collect(job)
        finally:
            with signals_wait():
                if agent is not None:
                    _end(agent)
                shutil.rmtree(folder, ignore_errors=True)


def _start_agent(job: Job) -> subprocess.Popen[bytes]:
    env = {**os.environ}
    env.setdefault("OMP_NUM_THREADS", str(job.threads_per_rank))
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(job.folder) / "inductor"))  # goes with the folder
    # A host name that does not resolve would cost gloo seconds, or the run.
    loopback = next((name for _, name in _interfaces() if name in ("lo", "lo0")), None)
    if loopback is not None:
        env.setdefault("GLOO_SOCKET_IFNAME", loopback)
    path = [entry or os.getcwd() for entry in sys.path]
    with open(Path(job.folder) / "log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(job_path(job.folder)), *path],
            stdin=subprocess.PIPE,  # stays open for our lifetime: the agent ends itself when it closes
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
        )


def _interfaces() -> list[tuple[int, str]]:
    with contextlib.suppress(OSError):
        return socket.if_nameindex()
    return []


def _watch(job: Job, agent: subprocess.Popen[bytes], events: _Events, renewed: bool) -> None:
    """Pass events on until all ranks are done or one has failed, then let the agent end; RunError when time is up."""
    deadline = time.monotonic() + job.timeout_s
    waiting, failed = set(range(job.nproc)), False
    while agent.poll() is None and waiting and not failed:
        time.sleep(_POLL_S)
        if events.forward() and renewed:
            deadline = time.monotonic() + job.timeout_s
        for rank in sorted(waiting):
            record = _record(job, rank)
            if record is not None:
                waiting.remove(rank)
                failed |= "value" not in record
        if waiting and not failed and time.monotonic() > deadline:
            raise _timeout(job, sorted(waiting))
    with contextlib.suppress(subprocess.TimeoutExpired):
        agent.wait(_SETTLE_S)
    events.forward()


class _Events:
    """The progress lines that the ranks have written so far, each handed on once."""

    def __init__(self, job: Job, progress: Progress | None) -> None:
        self._job, self._progress = job, progress
        self._offsets = [0] * job.nproc

    def forward(self) -> bool:
        """Hand every new whole line to the progress function; whether there was one."""
        seen = False
        for rank, offset in enumerate(self._offsets):
            try:
                with open(events_path(self._job.folder, rank), "rb") as file:
                    file.seek(offset)
                    text = file.read()
            except FileNotFoundError:
                continue
            whole = text[: text.rfind(b"\n") + 1]
            self._offsets[rank] += len(whole)
            seen |= bool(whole)
            for line in whole.splitlines():
                if self._progress is not None:
                    self._progress({**json.loads(line), "rank": rank})
        return seen


def _record(job: Job, rank: int) -> dict[str, Any] | None:
    try:
        return dict(json.loads(result_path(job.folder, rank).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None


def _collect(job: Job) -> list[Any]:
    """The results in rank order, or the error of the rank that failed first."""
    found = {rank: _record(job, rank) for rank in range(job.nproc)}
    records = {rank: record for rank, record in found.items() if record is not None}
    killed = [dead for dead in _dead(job) if dead["exit_code"] < 0]
    failed = sorted((r["time"], rank) for rank, r in records.items() if "value" not in r)
    if killed:
        raise _killed(killed[0]["rank"], -killed[0]["exit_code"])
    if failed:
        rank = failed[0][1]
        raise _as_error(rank, records[rank])
    if len(records) < job.nproc:
        missing = sorted(set(range(job.nproc)) - set(records))
        raise RunError(
            f"{_ranks(missing)} ended without a result",
            why=_tail(Path(job.folder) / "log") or "the launcher wrote nothing",
            fix="run again; if it persists, report it as a bug",
        )
    return [records[rank]["value"] for rank in range(job.nproc)]


def _dead(job: Job) -> list[dict[str, int]]:
    try:
        return list(json.loads(agent_path(job.folder).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return []


def _as_error(rank: int, record: Mapping[str, Any]) -> AutoparError:
    kind = getattr(errors, record.get("kind", ""), None)
    if isinstance(kind, type) and issubclass(kind, AutoparError):
        return kind(record["what"], why=record["why"], fix=record["fix"])
    return RunError(
        f"rank {rank} failed: {record['what']}",
        why="a bug; its traceback:\n" + record["traceback"],
        fix="if the code is yours, correct it there; otherwise report it with this text",
    )


def _killed(rank: int, number: int) -> RunError:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    why = {
        "SIGKILL": "the system does this when memory runs out",
        "SIGSEGV": "native code crashed",
        "SIGABRT": "native code gave up; it does so when ranks exchange tensors of different sizes",
    }.get(name, "something outside autopar sent it")
    fix = "use less memory per rank, or fewer ranks"
    if name == "SIGABRT":
        fix = "see that the model does the same on every rank; if it does, report it as a bug"
    return RunError(f"rank {rank} was killed by {name}", why=why, fix=fix)


def _timeout(job: Job, missing: list[int]) -> RunError:
    where = []
    for rank in missing:
        stack = _stack(job.folder, rank)
        where.append(f"rank {rank} was in:\n{stack}" if stack else f"rank {rank} was not running")
    return RunError(
        f"{_ranks(missing)} not done after {job.timeout_s:g} s",
        why="\n".join(where),
        fix="allow more time, or look where the rank waits",
    )


def _stack(folder: str, rank: int) -> str:
    """The Python stack in which the rank is just now (innermost first), or nothing."""
    path = stack_path(folder, rank)
    try:
        os.kill(int(pid_path(folder, rank).read_text()), signal.SIGUSR1)
    except (FileNotFoundError, ValueError, ProcessLookupError):
        return ""
    until = time.monotonic() + 0.5
    while time.monotonic() < until and not (path.exists() and path.stat().st_size):
        time.sleep(0.02)
    time.sleep(0.02)
    return _tail(path, lines=8, head=True)


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def _tail(path: Path, lines: int = 20, head: bool = False) -> str:
    try:
        text = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(text[:lines] if head else text[-lines:])


def _end(agent: subprocess.Popen[bytes]) -> None:
    """End the agent and all of its session; returns when none of them runs any more."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        if (agent.poll() is None) and _signal(agent.pid, signal.SIGTERM):
            agent.wait(_TERM_S)
    _signal(agent.pid, signal.SIGKILL)
    agent.wait()
    until = time.monotonic() + 5.0  # orphans go when init has reaped them
    while _signal(agent.pid, 0) and time.monotonic() < until:
        time.sleep(0.01)
    if agent.stdin is not None:
        agent.stdin.close()


def _signal(group: int, number: int) -> bool:
    """Signal a process group; False when it has no process any more."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # macOS says EPERM of a group of zombies
        return False
    return True


def _run_here(
    target: str,
    payload: Mapping[str, Any],
    nproc: int,
    device: Device,
    progress: Progress | None,
    threads_per_rank: int,
) -> list[Any]:
    world = os.environ["WORLD_SIZE"]
    if world != str(nproc):
        raise UsageError(
            f"{nproc} processes are asked for inside a launch of {world}",
            why="WORLD_SIZE is set: this process is already one of torchrun's or of SLURM's",
            fix=f"ask for {world}, or start it outside torchrun",
        )
    from autopar.runtime.worker import run_in_this_process

    return run_in_this_process(target, dict(payload), device=device, progress=progress, threads=threads_per_rank)
