"""Trainings in which some rank meets numbers that are not finite: what the tests run on real ranks."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.runtime import train
from autopar.runtime.gradients import local_piece
from autopar.runtime.parallel import ParallelModel
from tests.runtime.rank_jobs import make_plan
from tests.runtime.saving_jobs import _started, _steps


def poisoned(source: str, strategies: list[str], folder: str, bad_rank: int, **shape: Any) -> dict[str, Any]:
    """Two steps and a checkpoint, then what each way of meeting such numbers says; with what is left of the files."""
    wrapped, optimizer = _started(source, strategies, shape, seed=0)
    _steps(wrapped, optimizer, (0, 1))
    wrapped.save(folder, optimizer)
    files, said = _files(folder), {}
    rank, stages = dist.get_rank(), shape.get("pp", 1) > 1
    batch = wrapped.shard_batch({name: torch.randint(64, (8, 8)) for name in ("input_ids", "labels")})
    before = _bits(wrapped)

    def loss(output: Any, batch: Any) -> Any:
        total, count = own(output, batch)
        return (total * float("nan") if rank == bad_rank else total), count

    last = wrapped._stages()[-1]
    own = last.loss
    last.loss = loss
    said["loss"] = _words(lambda: wrapped.train_step(batch))
    if not stages:
        said["forward"] = _words(lambda: wrapped(**batch))
    last.loss = own
    wrapped.zero_grad()
    if not stages:
        # A call without a label, as one of several of a step may be, adds nothing.
        wrapped(**{**batch, "labels": torch.full_like(batch["labels"], -100)})["loss"].backward()
        said["no label"] = str(sum(float(g.abs().sum()) for e in wrapped.held if (g := e.local_grad) is not None))
        wrapped.zero_grad()
    wrapped.train_step(batch)
    grads = [grad for entry in wrapped.held if (grad := entry.local_grad) is not None]
    if rank == bad_rank:
        grads[0].view(-1)[0] = float("inf")
    said["gradient"] = _words(lambda: wrapped.clip_grad_norm_(1.0))
    unchanged = _bits(wrapped) == before
    wrapped.zero_grad()
    with torch.no_grad():
        if rank == bad_rank:
            local_piece(wrapped.held[0].stepped).view(-1)[0] = float("nan")
    said["save"] = _words(lambda: wrapped.save(folder, optimizer))
    wrapped.save(folder, optimizer, wait=False)
    said["save beside"] = _words(wrapped.wait_for_save)
    said["export"] = _words(lambda: wrapped.export(Path(folder).with_name("weights")))
    return {"said": said, "unchanged": unchanged, "kept": _files(folder) == files}


def run_that_diverges(source: str, strategies: list[str], folder: str, rate: float, **shape: Any) -> dict[str, Any]:
    """`autopar run --save` over a good checkpoint, with a learning rate at which the weights leave what is finite."""
    plan = make_plan(source, strategies, world=dist.get_world_size(), **shape).dumps()
    job = {"plan": plan, "text": None, "steps": 4, "save": folder}
    train.train_rank(job, lambda event: None)
    files, done = _files(folder), list[int]()
    with mock.patch.dict(train.LEARNING_RATE, {"adamw": rate}):
        said = _words(lambda: train.train_rank(job, lambda event: done.append(event["done"])))
    return {"said": said, "kept": _files(folder) == files, "done": done[-1]}


def _words(act: Any) -> str:
    try:
        act()
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _bits(wrapped: ParallelModel) -> str:
    pieces = [local_piece(entry.parameter).detach().contiguous() for entry in wrapped.held]
    return hashlib.sha256(b"".join(piece.numpy().tobytes() for piece in pieces)).hexdigest()


def _files(folder: str) -> dict[str, bytes]:
    dist.barrier()
    found = {str(path): path.read_bytes() for path in sorted(Path(folder).parent.rglob("*")) if path.is_file()}
    dist.barrier()
    return found
