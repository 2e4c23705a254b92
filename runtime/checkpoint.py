"""Checkpoints through torch.distributed.checkpoint that any plan, also for another number of ranks, reads again.

A checkpoint holds whole tensors under the model's own parameter names (and the optimizer's states beside them), each
written by one of the ranks that share it, so that neither stages nor slices of a plan show in the files. A folder is
replaced by renaming: a crash while saving leaves the previous checkpoint usable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from autopar.errors import InputError
from autopar.formats import from_plain, read_file
from autopar.runtime.gradients import HeldParameter, local_piece, piece, set_parameter

CHECKPOINT_KIND, CHECKPOINT_SCHEMA = "autopar.checkpoint", 1
FACTS = "autopar.json"
_BATCH_BYTES = 1 << 30
"""Whole tensors are read in batches of about this size, which a rank holds beside its own pieces."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFacts:
    """What a checkpoint is of: the model's fingerprint, and the optimizer's class and settings, if it was saved."""

    fingerprint: str
    optimizer: str | None
    settings: str


def load_checkpoint(
    folder: str | os.PathLike[str],
    held: Sequence[HeldParameter],
    *,
    fingerprint: str,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Fill this rank's pieces from the checkpoint `folder`, whatever plan wrote it; a collective of the world.

    optimizer: its states and settings are replaced by the saved ones. Raises InputError when the folder is no
    checkpoint, is of another model, or lacks an optimizer that was asked for.
    """
    source = _readable(Path(folder))
    facts = from_plain(
        CheckpointFacts, read_file(source / FACTS, CHECKPOINT_KIND, CHECKPOINT_SCHEMA), str(source / FACTS)
    )
    if facts.fingerprint != fingerprint:
        raise InputError(
            f"{folder} is a checkpoint of another model",
            why=f"its parameters have the hash {facts.fingerprint}, this model's {fingerprint}",
            fix="load it into the model that it was saved from",
        )
    if optimizer is not None:
        if facts.optimizer != type(optimizer).__name__:
            raise InputError(
                f"{folder} has no state of {type(optimizer).__name__}",
                why=f"it was saved with {facts.optimizer or 'no optimizer'}",
                fix="load without optimizer=, or with the optimizer that was saved",
            )
        for group in optimizer.param_groups:
            group.update(_read_settings(facts.settings))
    stored = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
    batches = _in_batches(_wanted(held, optimizer, stored))
    rounds = torch.tensor(len(batches))
    dist.all_reduce(rounds, op=dist.ReduceOp.MAX)
    for number in range(int(rounds)):
        batch = batches[number] if number < len(batches) else []
        state = {w.key: torch.empty(w.shape, dtype=w.dtype) for w in batch}
        dcp.load(state, checkpoint_id=source)
        for w in batch:
            _put(w, state[w.key], optimizer)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Wanted:
    """One tensor to read: its key and form in the checkpoint, and where it goes (field None: the parameter itself)."""

    key: str
    entry: HeldParameter
    field: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype


def _wanted(
    held: Sequence[HeldParameter], optimizer: torch.optim.Optimizer | None, stored: dict[str, Any]
) -> Iterator[_Wanted]:
    """What this rank reads. A copy of a tied parameter is stored under the name of the counted one."""
    for entry in held:
        name = _stored_name(entry, stored)
        fields = [None]
        if optimizer is not None:
            prefix = f"optimizer/{name}/"
            fields += sorted(key.removeprefix(prefix) for key in stored if key.startswith(prefix))  # type: ignore[arg-type]
        for field in fields:
            key = f"model/{name}" if field is None else f"optimizer/{name}/{field}"
            facts = stored[key]
            yield _Wanted(key=key, entry=entry, field=field, shape=tuple(facts.size), dtype=facts.properties.dtype)


def _stored_name(entry: HeldParameter, stored: dict[str, Any]) -> str:
    for name in (entry.name, *entry.aliases):
        if f"model/{name}" in stored:
            return name
    raise InputError(
        f"the checkpoint lacks {entry.name}",
        why="it was saved from another model",
        fix="load the checkpoint of this model",
    )


def _in_batches(wanted: Iterable[_Wanted]) -> list[list[_Wanted]]:
    """What is wanted, in order, in parts of at most _BATCH_BYTES; a larger tensor is a part of its own."""
    batches: list[list[_Wanted]] = []
    filled_bytes = 0
    for w in wanted:
        size_bytes = w.dtype.itemsize * torch.Size(w.shape).numel()
        if not batches or (filled_bytes and filled_bytes + size_bytes > _BATCH_BYTES):
            batches.append([])
            filled_bytes = 0
        batches[-1].append(w)
        filled_bytes += size_bytes
    return batches


def _put(wanted: _Wanted, full: Tensor, optimizer: torch.optim.Optimizer | None) -> None:
    """Copy this rank's piece of a whole tensor into the parameter, or make it the optimizer's state."""
    entry, parameter = wanted.entry, wanted.entry.stepped
    if wanted.field is None:
        with torch.no_grad():
            local_piece(parameter).copy_(piece(entry, full))
            if entry.stands_in:
                set_parameter(entry, full)
        return
    assert optimizer is not None
    if not full.dim():
        value: Tensor = full.clone()  # two copies of a tied parameter would count one step twice
    else:
        value = piece(entry, full).to(parameter.device).clone()
    optimizer.state[parameter][wanted.field] = value


def _read_settings(text: str) -> dict[str, Any]:
    """The hyperparameters that `_settings` wrote; JSON has made lists of the tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(text).items()}


def beside(target: Path, suffix: str) -> Path:
    """Where a checkpoint lies while it is written ("new"), or the previous one while it is replaced ("old")."""
    return target.with_name(f".{target.name}.{suffix}")


def is_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is a checkpoint that `load_checkpoint` can try, rather than other files."""
    return any((found / FACTS).exists() for found in (Path(folder), beside(Path(folder), "old")))


def _readable(target: Path) -> Path:
    """The folder, or the previous one where a crash came between the two renames of a save."""
    for folder in (target, beside(target, "old")):
        if (folder / FACTS).exists():
            return folder
    raise InputError(f"{target} is no checkpoint", why=f"it has no {FACTS}", fix="give a folder that model.save wrote")


def raise_where_failed(failed: str, target: Path, group: dist.ProcessGroup | None = None) -> None:
    """Raise InputError on every rank of the group (None: the world) when a step failed on any; also a barrier."""
    said: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(said, failed, group=group)
    reasons = [words for words in said if words]
    if reasons:
        raise InputError(f"{target} cannot be saved", why=reasons[0], fix="make room there, or choose another folder")
