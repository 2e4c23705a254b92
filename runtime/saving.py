"""Writing checkpoints: at once, or in a thread beside the training, on a process group of its own.

What is written is copied to host memory first, so that training may go on and change it. A folder is replaced by
renaming after all of it is written: a crash at any moment leaves this checkpoint or the previous one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from autopar.errors import InputError
from autopar.formats import dumps, to_plain, write_file
from autopar.runtime.activity import activity
from autopar.runtime.checkpoint import (
    CHECKPOINT_KIND,
    CHECKPOINT_SCHEMA,
    FACTS,
    CheckpointFacts,
    beside,
    first_failure,
    raise_where_failed,
)
from autopar.runtime.finite import is_finite, refuse_weights
from autopar.runtime.gradients import HeldParameter, whole


class CheckpointWriter:
    """Writes the checkpoints of one model, one after the other.

    writer of writers: this rank among those that hold the same layers, between which the writing is shared.
    """

    def __init__(self, *, fingerprint: str, writer: int, writers: int) -> None:
        self._fingerprint, self._writer, self._writers = fingerprint, writer, writers
        self._group: dist.ProcessGroup | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self.growing: Path | None = None
        """Where the thread writes, as far as it does."""

    def save(
        self,
        folder: str | os.PathLike[str],
        held: Sequence[HeldParameter],
        optimizer: torch.optim.Optimizer | None,
        *,
        wait: bool,
    ) -> None:
        """Write parameters, and the optimizer's states if given, as the checkpoint `folder`; a collective.

        wait: False returns when all is copied to host memory; a thread goes on writing. Raises InputError when the
        folder cannot be written: this one where it waits, otherwise the one before.
        """
        self.wait()
        copied = self._copied(held, optimizer)
        facts = CheckpointFacts(
            fingerprint=self._fingerprint,
            optimizer=type(optimizer).__name__ if optimizer else None,
            settings=_settings(optimizer),
        )
        if wait:
            _write(Path(folder), copied, facts, None)
            return
        if self._thread is None:
            # Training uses the other groups meanwhile: two threads must not share one.
            self._group = dist.new_group(backend="gloo")
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="autopar-checkpoint")
        self.growing = beside(Path(folder), "new")
        self._pending = self._thread.submit(partial(_write, Path(folder), copied, facts, self._group))

    def wait(self) -> None:
        """Return when nothing is being written any more; InputError, on every rank, where that failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _copied(self, held: Sequence[HeldParameter], optimizer: torch.optim.Optimizer | None) -> _Copied:
        """The whole tensors that this rank writes, in host memory; they share nothing with the model."""
        state: dict[str, Tensor] = {}
        bad = failed = ""
        for number, (key, entry, tensor) in enumerate(_entries(held, optimizer)):
            activity.beat()
            # Every rank takes part in putting a tensor together, one keeps it.
            full = whole(entry, tensor) if tensor.dim() else tensor.detach()
            if number % self._writers != self._writer or not entry.counted:
                continue
            try:
                state[key] = full.cpu().clone()
                if not bad and tensor is entry.stepped and tensor.requires_grad and not is_finite(full):
                    bad = entry.name
            except Exception as error:  # the others go on putting tensors together, and hear of it afterwards
                failed = failed or _said(error)
        return _Copied(state=state, bad=bad, failed=failed)


@dataclass(frozen=True, kw_only=True)
class _Copied:
    """What a rank writes; bad: the first trained parameter that is not finite; failed: why something is missing."""

    state: dict[str, Tensor]
    bad: str
    failed: str


def _write(target: Path, copied: _Copied, facts: CheckpointFacts, group: dist.ProcessGroup | None) -> None:
    """Write the files and put them in the place of the previous ones; a collective of the group (None: the world).

    Whatever fails on a rank, all hear of it.
    """
    refuse_weights(copied.bad, f"the checkpoint {target}", group)
    fresh, old = beside(target, "new"), beside(target, "old")
    failed = copied.failed
    try:
        if dist.get_rank() == 0 and not failed:
            _make_room(target, fresh)
    except Exception as error:
        failed = _said(error)
    raise_where_failed(failed, target, group)
    try:
        dcp.save(copied.state, checkpoint_id=fresh, process_group=group)
        if dist.get_rank() == 0:
            write_file(fresh / FACTS, dumps(CHECKPOINT_KIND, CHECKPOINT_SCHEMA, to_plain(facts)))
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)  # what a crash after the second rename left
                target.rename(old)
            fresh.rename(target)
            shutil.rmtree(old, ignore_errors=True)
    except CheckpointException as error:
        failed = first_failure(error)
    except Exception as error:
        failed = _said(error)
    raise_where_failed(failed, target, group)


def _said(error: Exception) -> str:
    """What failed, in a line."""
    words = str(error) if isinstance(error, OSError | InputError) else f"{type(error).__name__}: {error}"
    return (words.splitlines() or [""])[0] or type(error).__name__


def _entries(
    held: Sequence[HeldParameter], optimizer: torch.optim.Optimizer | None
) -> Iterator[tuple[str, HeldParameter, Tensor]]:
    """Every tensor to save with its key: the parameters, then the optimizer's states."""
    for entry in held:
        yield f"model/{entry.name}", entry, entry.stepped
    if optimizer is not None:
        for entry in held:
            for field, value in sorted(optimizer.state.get(entry.stepped, {}).items()):
                if isinstance(value, Tensor):
                    yield f"optimizer/{entry.name}/{field}", entry, value


def _settings(optimizer: torch.optim.Optimizer | None) -> str:
    """The hyperparameters of the first group as JSON; our groups differ only in what kind of tensors they hold."""
    if optimizer is None:
        return "{}"
    group = optimizer.param_groups[0]
    return json.dumps(
        {k: v for k, v in group.items() if isinstance(v, int | float | bool | str | list | tuple) and k != "params"}
    )


def _make_room(target: Path, fresh: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and not (target / FACTS).exists() and any(target.iterdir()):
        raise OSError("it is a folder of something else")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
