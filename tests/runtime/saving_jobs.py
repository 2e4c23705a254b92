"""Checkpoints written, read, written beside the training and broken off: what the tests run on real ranks."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from autopar.errors import AutoparError
from autopar.runtime import saving
from autopar.runtime.gradients import whole
from autopar.runtime.models import build_model
from autopar.runtime.parallel import ParallelModel, parallelize
from autopar.runtime.saving import _entries
from tests.runtime.rank_jobs import make_plan


def save_after_two_steps(source: str, folder: str, strategies: list[str], **shape: Any) -> dict[str, Any]:
    """Two AdamW steps, a checkpoint, and the losses of two more steps; with marks of what was saved."""
    wrapped, optimizer = _started(source, strategies, shape, seed=0)
    _steps(wrapped, optimizer, (0, 1))
    wrapped.save(folder, optimizer)
    marks = _marks(wrapped, optimizer)
    return {"marks": marks, "losses": _steps(wrapped, optimizer, (2, 3))}


def resume(source: str, folder: str, strategies: list[str], seed: int = 1, **shape: Any) -> dict[str, Any]:
    """The losses of the two steps after a checkpoint, from a model that began with other weights; with its marks."""
    wrapped, optimizer = _started(source, strategies, shape, seed=seed)
    try:
        wrapped.load(folder, optimizer)
    except AutoparError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    marks = _marks(wrapped, optimizer)
    return {"marks": marks, "losses": _steps(wrapped, optimizer, (2, 3))}


def resume_each(source: str, folders: list[str], strategies: list[str], **shape: Any) -> list[dict[str, Any]]:
    """`resume` for one folder after the other."""
    return [resume(source, folder, strategies, **shape) for folder in folders]


def _marks(wrapped: ParallelModel, optimizer: Any) -> dict[str, str]:
    """A hash of every bit of each whole parameter and optimizer state that this rank has a part in, by its key."""
    found = {}
    for key, entry, tensor in _entries(wrapped.held, optimizer):
        full = (whole(entry, tensor) if tensor.dim() else tensor).contiguous()
        found[key] = hashlib.sha256(full.cpu().numpy().tobytes()).hexdigest()
    return found


def _started(
    source: str, strategies: list[str], shape: dict[str, Any], seed: int, build: Any = build_model
) -> tuple[ParallelModel, Any]:
    plan = make_plan(source, strategies, world=dist.get_world_size(), **shape)
    wrapped = parallelize(build(source, seed=seed).eval(), plan)
    return wrapped, torch.optim.AdamW(wrapped.param_groups(), lr=1e-2 if seed == 0 else 0.5, eps=1e-5)


def _steps(wrapped: ParallelModel, optimizer: Any, steps: tuple[int, ...]) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(64, (wrapped.plan.request.global_batch, 8), generator=generator)
        batch = wrapped.shard_batch({"input_ids": tokens, "labels": tokens})
        losses.append(float(wrapped.train_step(batch)))
        wrapped.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def save_while_training(source: str, folder: str, strategies: list[str], **shape: Any) -> dict[str, Any]:
    """Two steps, a checkpoint in a thread that is kept from writing until two more steps are done; their losses."""
    wrapped, optimizer = _started(source, strategies, shape, seed=0)
    _steps(wrapped, optimizer, (0, 1))
    written, go_on = dcp.save, threading.Event()

    def late(*args: Any, **kwargs: Any) -> Any:
        assert go_on.wait(60)
        return written(*args, **kwargs)

    dcp.save = late
    try:
        wrapped.save(folder, optimizer, wait=False)
        losses = _steps(wrapped, optimizer, (2, 3))
        there = Path(folder).exists()
        go_on.set()
        wrapped.wait_for_save()
    finally:
        dcp.save = written
    return {"losses": losses, "there_before": there, "files": sorted(os.listdir(Path(folder).parent))}


def save_where_nobody_can(source: str, folder: str, strategies: list[str], wait: bool, **shape: Any) -> list[str]:
    """The errors of saving into a folder that cannot be made: at once, at the next save, at the wait; then none."""
    wrapped, optimizer = _started(source, strategies, shape, seed=0)
    _steps(wrapped, optimizer, (0,))
    bad, good = str(Path(folder) / "file" / "checkpoint"), str(Path(folder) / "good")
    if dist.get_rank() == 0:
        (Path(folder) / "file").write_text("no folder")
    dist.barrier()

    def words(act: Callable[[], None]) -> str:
        try:
            act()
        except AutoparError as error:
            return f"{type(error).__name__}: {error.what}"
        return ""

    return [
        words(lambda: wrapped.save(bad, optimizer, wait=wait)),
        words(lambda: wrapped.save(good, optimizer, wait=wait)),
        words(lambda: wrapped.save(bad, optimizer, wait=wait)),
        words(wrapped.wait_for_save),
        words(lambda: wrapped.save(good, optimizer, wait=wait)),
        words(wrapped.wait_for_save),
    ]


def save_without_room(source: str, folder: str, strategies: list[str], **shape: Any) -> str:
    """The error of a save whose files may not be longer than some bytes, as on a full disk."""
    wrapped, optimizer = _started(source, strategies, shape, seed=0)
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    dist.barrier()
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, usual[1]))
    try:
        wrapped.save(folder, optimizer)
    except AutoparError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    return ""


def die_while_saving(
    source: str, folder: str, strategies: list[str], moment: str, wait: bool, **shape: Any
) -> dict[str, Any]:
    """Two steps, a checkpoint, the losses of two more into a file beside it, and a SIGKILL in the next save."""
    wrapped, optimizer = _started(source, strategies, shape, seed=0)
    _steps(wrapped, optimizer, (0, 1))
    wrapped.save(folder, optimizer)
    losses = _steps(wrapped, optimizer, (2, 3))
    if dist.get_rank() == 0:
        Path(folder).with_name("losses").write_text(repr(losses))
    dist.barrier()
    _MOMENTS[moment]()
    wrapped.save(folder, optimizer, wait=wait)
    wrapped.wait_for_save()
    return {}


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _while_writing() -> None:
    """The last rank dies with half of its files written."""
    write = dcp.FileSystemWriter.write_data

    def half(self: Any, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            plan.items[:] = plan.items[: len(plan.items) // 2]
            write(self, plan, planner).wait()
            _die()
        return write(self, plan, planner)

    dcp.FileSystemWriter.write_data = half  # type: ignore[method-assign]


def _before_the_facts() -> None:
    """Rank 0 dies when all tensors are written."""
    saving.write_file = lambda *args: _die()  # type: ignore[attr-defined]


def _between_the_renames() -> None:
    """Rank 0 dies when the previous checkpoint is out of the way and the new one not yet in its place."""
    _die_at_rename(2)


def _after_the_renames() -> None:
    """Rank 0 dies before the previous checkpoint is removed."""
    saving.shutil.rmtree = lambda *args, **kwargs: _die() if Path(args[0]).exists() else None  # type: ignore[attr-defined]


def _die_at_rename(number: int) -> None:
    rename, count = Path.rename, 0

    def counted(self: Path, target: Any) -> Any:
        nonlocal count
        count += 1
        if count == number:
            _die()
        return rename(self, target)

    Path.rename = counted  # type: ignore[method-assign]


_MOMENTS = {
    "while writing": _while_writing,
    "before the facts": _before_the_facts,
    "between the renames": _between_the_renames,
    "after the renames": _after_the_renames,
}


def save_with_faults(source: str, folder: str, strategies: list[str], **shape: Any) -> dict[str, list[str]]:
    """What a save and a wait for it say where something fails on one rank alone; at last, without a fault."""
    wrapped, optimizer = _started(source, strategies, shape, seed=0)
    _steps(wrapped, optimizer, (0,))
    rank, said = dist.get_rank(), {}

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("planted")

    faults = {
        "making room": (0, saving, "_make_room"),
        "copying": (1, saving, "is_finite"),
        "the facts": (0, saving, "write_file"),
        "torch": (1, dcp.FileSystemWriter, "prepare_local_plan"),
        "none": (-1, saving, "_make_room"),
    }
    for name, (bad_rank, home, function) in faults.items():
        kept = getattr(home, function)
        if rank == bad_rank:
            setattr(home, function, fail)
        try:
            said[name] = [_said(lambda: wrapped.save(folder, optimizer))]
            wrapped.save(folder, optimizer, wait=False)
            said[name].append(_said(wrapped.wait_for_save))
        finally:
            setattr(home, function, kept)
    return said


def load_with_faults(source: str, folder: str, strategies: list[str], **shape: Any) -> dict[str, str]:
    """What a load says of a checkpoint that one rank cannot read, or that is damaged; at last, of a whole one."""
    from autopar.runtime import checkpoint

    wrapped, optimizer = _started(source, strategies, shape, seed=0)
    _steps(wrapped, optimizer, (0,))
    wrapped.save(folder, optimizer)
    rank, said = dist.get_rank(), {}

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("planted")

    for name in ("read_file", "_wanted", "_put"):
        kept = getattr(checkpoint, name)
        if rank == 1:
            setattr(checkpoint, name, fail)
        try:
            said[name] = _said(lambda: wrapped.load(folder, optimizer))
        finally:
            setattr(checkpoint, name, kept)
    for pattern in ("__1_0.distcp", ".metadata"):
        file = Path(folder) / pattern
        whole = file.read_bytes()
        dist.barrier()
        if rank == 0:
            file.write_bytes(whole[: len(whole) // 2])
        dist.barrier()
        said[pattern] = _said(lambda: wrapped.load(folder, optimizer))
        dist.barrier()
        if rank == 0:
            file.write_bytes(whole)
        dist.barrier()
    said["none"] = _said(lambda: wrapped.load(folder, optimizer))
    return said


def _said(act: Callable[[], None]) -> str:
    try:
        act()
    except (AutoparError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
