"""Trainings in which one rank hangs, and the model that does so: what the tests run on real ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import RunError
from autopar.plan import Plan
from autopar.runtime import watching
from autopar.runtime.models import build_model
from autopar.runtime.parallel import ParallelModel, parallelize

GPT = "examples/gpt.py:build(width=32, heads=4, blocks=2, vocab=64, context=16)"
HUNG_S = 60.0


def ends_by_name(strategies: list[str], case: str, **shape: Any) -> dict[str, Any]:
    """The error that all ranks get when rank 1 hangs in some way, which here lets it go on."""
    from tests.runtime.rank_jobs import make_plan

    said: list[tuple[RunError, bool]] = []
    free = threading.Event()

    def end(error: RunError, speaks: bool) -> None:
        said.append((error, speaks))
        free.set()

    plan, real = make_plan(GPT, strategies, world=dist.get_world_size(), **shape), watching.Watch
    watching.Watch = lambda timeout_s, _: real(timeout_s, end)  # type: ignore[assignment, misc]
    try:
        wrapped = parallelize(build_model(GPT), plan, timeout_s=1.0)
    finally:
        watching.Watch = real  # type: ignore[misc]
    began = time.monotonic()
    train(wrapped, case, lambda: free.wait(HUNG_S))
    free.wait(HUNG_S)
    return {"said": [str(error) for error, _ in said], "speaks": [s for _, s in said], "s": time.monotonic() - began}


def train(wrapped: ParallelModel, case: str, hang: Any) -> None:
    """Three steps, in the third of which rank 1 hangs: in its own code, in the forward, or before the optimizer."""
    optimizer = torch.optim.AdamW(wrapped.param_groups())
    for step in range(3):
        hangs = step == 2 and dist.get_rank() == 1
        if hangs and case == "own code":
            reads_a_slow_file(hang)
        if hangs and case == "forward":
            block = next(iter(wrapped.stage.body.blocks().values()))
            block.register_forward_pre_hook(lambda *_: reads_a_slow_file(hang))
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(64, (wrapped.plan.request.global_batch, 8), generator=generator)
        batch = wrapped.shard_batch({"ids": tokens, "targets": tokens})
        if case == "backward":
            loss = wrapped(**batch)[1]
            if hangs:
                reads_a_slow_file(hang)
            loss.backward()
        else:
            wrapped.train_step(batch)
        if hangs and case == "before the optimizer":
            reads_a_slow_file(hang)
        wrapped.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


def reads_a_slow_file(hang: Any) -> None:
    hang()


def hang_for_good(payload: dict[str, Any], report: Any) -> None:
    """A target of `launch`: rank 1 sleeps, or is stopped as a debugger would, and the watch ends the processes."""
    plan = Plan.loads(payload["plan"])
    wrapped = parallelize(build_model(plan.model.source), plan, timeout_s=payload["timeout_s"])
    report({"pid": os.getpid()})
    stop = payload["case"] == "stopped"
    train(wrapped, "own code", lambda: os.kill(os.getpid(), signal.SIGSTOP) if stop else time.sleep(600))


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    hang_for_good(job, lambda event: None)
