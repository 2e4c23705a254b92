"""Trainings some part of which takes longer than predicted: what the tests run on real ranks."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from autopar.plan import Prediction, RankMemory
from autopar.runtime.models import build_model
from autopar.runtime.parallel import parallelize
from tests.runtime.rank_jobs import make_plan

SLOW_S = 0.6


def slow_in(source: str, strategies: list[str], slow: str, forward: bool = False, **shape: Any) -> dict[str, Any]:
    """What the check after the third of four steps says, and how often, where one part takes SLOW_S longer."""
    world = dist.get_world_size()
    plan = make_plan(source, strategies, world=world, **shape)
    parts = dict.fromkeys(("compute", "tp_communication", "bubble", "p2p", "gradient_sync", "optimizer"), 0.001)
    if slow == "nothing":
        parts["compute"] = 10.0
    memory = (RankMemory(peak_bytes=1 << 30, parts_bytes={"parameters": 1 << 30}),) * world
    predicted = Prediction(step_s=10.0 if slow == "nothing" else 0.006, parts_s=parts, memory=memory, worst_rank=1)
    wrapped = parallelize(build_model(source), replace(plan, predicted=predicted))
    optimizer = torch.optim.AdamW(wrapped.param_groups())
    seen: list[logging.LogRecord] = []
    keep = logging.Handler(logging.INFO)
    keep.emit = seen.append  # type: ignore[method-assign]
    log = logging.getLogger("autopar")
    log.addHandler(keep)
    if slow == "optimizer":
        optimizer.register_step_pre_hook(lambda *_: time.sleep(SLOW_S))  # after those of all optimizers
    if slow == "a block" and dist.get_rank() == world - 1:
        block = next(iter(wrapped.stage.body.blocks().values()))
        block.register_forward_pre_hook(lambda *_: time.sleep(SLOW_S))
    try:
        for step_number in range(4):
            tokens = torch.randint(64, (8, 8), generator=torch.Generator().manual_seed(step_number))
            batch = wrapped.shard_batch({"ids": tokens, "targets": tokens})
            if forward:
                wrapped(**batch)[1].backward()
            else:
                wrapped.train_step(batch)
            if slow == "own code":
                time.sleep(SLOW_S)
            wrapped.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        log.removeHandler(keep)
    check = wrapped.step_check
    return {
        "words": check.words,
        "off": check.is_off,
        "logged": [(record.levelname, record.getMessage()) for record in seen],
        "over": check.is_over,
    }
