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
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from autopar.errors import InputError
from autopar.formats import dumps, to_plain, write_file
from autopar.runtime.checkpoint import (
    CHECKPOINT_KIND,
    CHECKPOINT_SCHEMA,
    FACTS,
    CheckpointFacts,
    beside,
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
        state, bad = self._copied(held, optimizer)
        facts = CheckpointFacts(
            fingerprint=self._fingerprint,
            optimizer=type(optimizer).__name__ if optimizer else None,
            settings=_settings(optimizer),
        )
        if wait:
            _write(Path(folder), state, bad, facts, None)
            return
        if self._thread is None:
            # Training uses the other groups meanwhile: two threads must not share one.
            self._group = dist.new_group(backend="gloo")
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="autopar-checkpoint")
        self._pending = self._thread.submit(partial(_write, Path(folder), state, bad, facts, self._group))

    def wait(self) -> None:
        """Return when nothing is being written any more; InputError, on every rank, where that failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _copied(
        self, held: Sequence[HeldParameter], optimizer: torch.optim.Optimizer | None
    ) -> tuple[dict[str, Tensor], str]:
        """The whole tensors that this rank writes, in host memory; they share nothing with the model.

        And the first trained parameter among them with numbers that are not finite.
        """
        state: dict[str, Tensor] = {}
        bad = ""
        for number, (key, entry, tensor) in enumerate(_entries(held, optimizer)):
            # Every rank takes part in putting a tensor together, one keeps it.
            full = whole(entry, tensor) if tensor.dim() else tensor.detach()
            if number % self._writers == self._writer and entry.counted:
                state[key] = full.cpu().clone()
                if not bad and tensor is entry.stepped and tensor.requires_grad and not is_finite(full):
                    bad = entry.name
        return state, bad


def _write(
    target: Path, state: dict[str, Tensor], bad: str, facts: CheckpointFacts, group: dist.ProcessGroup | None
) -> None:
    """Write the files and put them in the place of the previous ones; a collective of the group (None: the world).

    bad: a parameter that is not finite; then nothing is written.
    """
    refuse_weights(bad, f"the checkpoint {target}", group)
    fresh, old = beside(target, "new"), beside(target, "old")
    failed = ""
    try:
        if dist.get_rank() == 0:
            _make_room(target, fresh)
    except OSError as error:
        failed = str(error)
    raise_where_failed(failed, target, group)
    try:
        dcp.save(state, checkpoint_id=fresh, process_group=group)
        if dist.get_rank() == 0:
            write_file(fresh / FACTS, dumps(CHECKPOINT_KIND, CHECKPOINT_SCHEMA, to_plain(facts)))
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)  # what a crash after the second rename left
                target.rename(old)
            fresh.rename(target)
            shutil.rmtree(old, ignore_errors=True)
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        failed = f"rank {rank}: {type(cause).__name__}: {cause}".splitlines()[0]
    except (OSError, InputError) as error:
        failed = str(error).splitlines()[0]
    raise_where_failed(failed, target, group)


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
