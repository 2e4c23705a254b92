"""The processes behind `launch`: one agent (torch's elastic launcher, as torchrun runs it) and its ranks."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from autopar.errors import AutoparError, InputError
from autopar.runtime.launch import (
    Device,
    Job,
    Progress,
    agent_path,
    events_path,
    pid_path,
    read_job,
    result_path,
    stack_path,
)
from autopar.runtime.loading import load_file
from autopar.runtime.watching import group_timeout, tell_first

Target = Callable[[dict[str, Any], Progress], Any]

_LINGER_S = 0.7


def main(job_file: str) -> None:
    """Be the agent: start the ranks of the job, wait for them, say which died. Exits 0, or 1 if any failed."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})  # blocked while we were started
    job = read_job(job_file)
    threading.Thread(target=_end_with_parent, args=(job.folder,), daemon=True).start()
    if job.device == "cpu":
        # Forked ranks find the target's imports done; an error here comes again, and is reported, in the ranks.
        with contextlib.suppress(Exception, SystemExit):  # a user's module may end the interpreter
            target = load_target(job.target)
            # A module may offer to import more, by what the job asks for.
            getattr(sys.modules[target.__module__], "prepare", _nothing_more)(job.payload)
    # We tell failures ourselves, and torch's log format imports all of dynamo (2.5 s) to print a traceback.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL + 1)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job.nproc,
        run_id="autopar",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",  # a free port, as torchrun --standalone takes
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.05,
        # CUDA cannot be used in a process forked from one that has asked for devices, as LaunchConfig does.
        start_method="fork" if job.device == "cpu" else "spawn",
        logs_specs=DefaultLogsSpecs(log_dir=os.path.join(job.folder, "elastic")),
        shutdown_timeout=1,
    )
    code = 0
    try:
        elastic_launch(config, rank_main)(job_file)
    except ChildFailedError as error:
        code = 1
        dead = [{"rank": rank, "exit_code": failure.exitcode} for rank, failure in error.failures.items()]
        _write_whole(agent_path(job.folder), dead)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing to tear down, and torch takes half a second over it


def _nothing_more(payload: dict[str, Any]) -> None:
    pass


def _end_with_parent(folder: str) -> None:
    """Wait until the parent is gone (its end of our stdin closes), then end the whole session and its files."""
    while os.read(0, 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def rank_main(job_file: str) -> None:
    """Be one rank: run the target in a process group, leave its result or error in the job's folder."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # the agent's handlers, inherited by fork, do not end a waiting rank
    job, rank = read_job(job_file), int(os.environ["RANK"])
    with open(stack_path(job.folder, rank), "w", encoding="utf-8") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        _write_whole(pid_path(job.folder, rank), os.getpid())
        wait_until_forked(job)
        with open(events_path(job.folder, rank), "a", encoding="utf-8", buffering=1) as events:

            def report(event: dict[str, Any]) -> None:
                events.write(json.dumps(event) + "\n")

            def record(error: BaseException) -> None:
                _write_whole(result_path(job.folder, rank), _error_record(error))

            tell_first(record)
            try:
                with process_group(job.device, job.threads_per_rank, job.timeout_s), _errors_recorded(job, rank):
                    value = load_target(job.target)(job.payload, report)
                    _write_whole(result_path(job.folder, rank), {"value": value})
            except BaseException as error:
                if not result_path(job.folder, rank).exists():
                    _write_whole(result_path(job.folder, rank), _error_record(error))
                # When a rank is killed, the others fail over the broken connection. They must not be seen dead first.
                time.sleep(0.0 if isinstance(error, AutoparError) else _LINGER_S)
                os._exit(1)


def wait_until_forked(job: Job) -> None:
    """Return when every rank of the job has started.

    A rank that connects makes the agent's store resolve its address in a thread. A rank forked in that moment inherits
    libc's lock as taken, and hangs in its own connection: 1 of 25 launches of 8 ranks did.
    """
    while not all(pid_path(job.folder, rank).exists() for rank in range(job.nproc)):
        time.sleep(0.002)


@contextlib.contextmanager
def _errors_recorded(job: Job, rank: int) -> Iterator[None]:
    """Write an error down before the group is left: leaving it makes the other ranks fail too."""
    try:
        yield
    except BaseException as error:
        _write_whole(result_path(job.folder, rank), _error_record(error))
        raise


def _error_record(error: BaseException) -> dict[str, Any]:
    record: dict[str, Any] = {"time": time.time()}
    if isinstance(error, AutoparError):
        kind = next(k.__name__ for k in type(error).__mro__ if k.__module__ == "autopar.errors")
        return {**record, "kind": kind, "what": error.what, "why": error.why, "fix": error.fix}
    lines = traceback.format_exception(error)
    return {**record, "what": f"{type(error).__name__}: {error}", "traceback": "".join(lines[-20:])}


def _write_whole(path: Path, value: Any) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    os.replace(temporary, path)


@contextlib.contextmanager
def process_group(device: Device, threads: int, timeout_s: float) -> Iterator[None]:
    """While inside, this process is a rank of the group that the environment describes, on its device."""
    torch.set_num_threads(threads)
    backend, where = "gloo", None
    if device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        if local >= torch.cuda.device_count():
            raise InputError(
                f"rank {local} has no GPU",
                why=f"this machine has {torch.cuda.device_count()}",
                fix="start fewer processes, or use --device cpu",
            )
        where = torch.device("cuda", local)
        torch.cuda.set_device(where)
        backend = "cpu:gloo,cuda:nccl"
    # The launcher's own time limit comes first; this one keeps a rank from outliving it.
    dist.init_process_group(backend, timeout=group_timeout(timeout_s), device_id=where)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def load_target(target: str) -> Target:
    """The function that "package.module:function" or "path/to/file.py:function" names; InputError otherwise."""
    where, _, name = target.rpartition(":")
    module = load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(
            f"{target!r} names no function", why=f"{where} has no function {name!r}", fix="check the name"
        )
    return function  # type: ignore[no-any-return]


def run_in_this_process(
    target: str, payload: dict[str, Any], *, device: Device, progress: Progress | None, threads: int
) -> list[Any]:
    """What the target returned on each rank of the launch that this process is already part of (on every rank)."""
    rank = int(os.environ["RANK"])

    def report(event: dict[str, Any]) -> None:
        if progress is not None:
            progress({**event, "rank": rank})

    with contextlib.ExitStack() as stack:
        if not dist.is_initialized():
            stack.enter_context(process_group(device, threads, 1800))
        value = load_target(target)(payload, report)
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values
