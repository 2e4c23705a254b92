"""Checkpoints through torch.distributed.checkpoint that any plan, also for another number of ranks, reads again.

A checkpoint holds whole tensors under the model's own parameter names (and the optimizer's states beside them), each
written by one of the ranks that share it, so that neither stages nor slices of a plan show in the files. A folder is
replaced by renaming: a crash while saving leaves the previous checkpoint usable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from autopar.errors import AutoparError, InputError
from autopar.formats import from_plain, read_file
from autopar.runtime.activity import activity
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


@dataclass(frozen=True, kw_only=True)
class ModelForm:
    """What a checkpoint must agree with: the fingerprint, or the names (all of each) and shapes of the parameters."""

    fingerprint: str
    parameters: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]

    @classmethod
    def of(cls, model: nn.Module, fingerprint: str) -> ModelForm:
        """The form of a whole model."""
        names: dict[Tensor, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        return cls(fingerprint=fingerprint, parameters=tuple((tuple(n), tuple(p.shape)) for p, n in names.items()))

    def why_not(self, stored: Mapping[str, Any]) -> str:
        """Why stored tensors are not of this model, whatever their dtypes; empty where they are."""
        shapes = {k.removeprefix("model/"): tuple(v.size) for k, v in stored.items() if k.startswith("model/")}
        for names, shape in self.parameters:
            found = [shapes.pop(name) for name in names if name in shapes]
            if not found:
                return f"it lacks {names[0]}"
            if set(found) != {shape}:
                return f"{names[0]} is {found[0]} there, {shape} here"
        return f"this model has no {next(iter(shapes))}" if shapes else ""


def load_checkpoint(
    folder: str | os.PathLike[str],
    held: Sequence[HeldParameter],
    *,
    form: ModelForm,
    optimizer: torch.optim.Optimizer | None = None,
    parameters: bool = True,
) -> None:
    """Fill this rank's pieces from the checkpoint `folder`, whatever plan wrote it; a collective of the world.

    Numbers of another dtype (a plan of another precision wrote it) are converted. optimizer: its states and settings
    are replaced by the saved ones; parameters: False for these alone. Raises InputError, on every rank, when the
    folder is no checkpoint, is damaged, is of another model, or lacks an optimizer that was asked for.
    """
    source, batches = Path(folder), list[list[_Wanted]]()
    with raised_by_all():
        source, facts, stored = _looked_at(Path(folder), form)
        if optimizer is not None:
            if facts.optimizer != type(optimizer).__name__:
                raise InputError(
                    f"{folder} has no state of {type(optimizer).__name__}",
                    why=f"it was saved with {facts.optimizer or 'no optimizer'}",
                    fix="load without optimizer=, or with the optimizer that was saved",
                )
            for group in optimizer.param_groups:
                group.update(_read_settings(facts.settings))
        batches = _in_batches(_wanted(held, optimizer, stored, parameters))
    rounds = torch.tensor(len(batches))
    dist.all_reduce(rounds, op=dist.ReduceOp.MAX)
    for number in range(int(rounds)):
        batch = batches[number] if number < len(batches) else []
        state = {w.key: torch.empty(w.shape, dtype=w.dtype) for w in batch}
        with raised_by_all():
            try:
                dcp.load(state, checkpoint_id=source)
            except CheckpointException as error:
                raise InputError(
                    f"{folder} cannot be read", why=first_failure(error), fix="take a checkpoint that is whole"
                ) from None
            for w in batch:
                _put(w, state[w.key], optimizer)
        activity.beat()


def _looked_at(folder: Path, form: ModelForm) -> tuple[Path, CheckpointFacts, dict[str, Any]]:
    """Where the checkpoint lies, its facts, and the form of each stored tensor; InputError for another model's."""
    source = _readable(folder)
    facts = from_plain(
        CheckpointFacts, read_file(source / FACTS, CHECKPOINT_KIND, CHECKPOINT_SCHEMA), str(source / FACTS)
    )
    try:
        stored = dict(dcp.FileSystemReader(source).read_metadata().state_dict_metadata)
    except Exception as error:  # it is unpickled: anything may happen
        why = f"its .metadata cannot be read: {type(error).__name__}: {error}"
        raise InputError(f"{folder} cannot be read", why=why, fix="take a checkpoint that is whole") from None
    reason = "" if facts.fingerprint == form.fingerprint else form.why_not(stored)
    if reason:
        raise InputError(
            f"{folder} is a checkpoint of another model",
            why=f"{reason} (its parameters have the hash {facts.fingerprint}, this model's {form.fingerprint})",
            fix="load it into the model that it was saved from",
        )
    return source, facts, stored


@contextmanager
def raised_by_all(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Let an error inside be raised by every rank of the group (None: the world); also a barrier.

    Ours as it is, any other with its traceback on the rank that had it. Without this, the others would wait for it.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    said: list[tuple[str, str, str] | None] = [None] * dist.get_world_size(group)
    words = None
    if own is not None:
        words = f"{type(own).__name__}: {own}", "", ""
        if isinstance(own, AutoparError):
            words = own.what, own.why, own.fix
    dist.all_gather_object(said, words, group=group)
    if own is not None:
        raise own
    for rank, one in enumerate(said):
        if one is not None:
            what, why, fix = one
            raise InputError(what if why or fix else f"rank {rank} failed: {what}", why=why, fix=fix)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Wanted:
    """One tensor to read: its key and form in the checkpoint, and where it goes (field None: the parameter itself).

    like_parameter: it is stored in the dtype of its parameter, and becomes what that is here.
    """

    key: str
    entry: HeldParameter
    field: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    like_parameter: bool


def _wanted(
    held: Sequence[HeldParameter],
    optimizer: torch.optim.Optimizer | None,
    stored: dict[str, Any],
    parameters: bool,
) -> Iterator[_Wanted]:
    """What this rank reads. A copy of a tied parameter is stored under the name of the counted one."""
    for entry in held:
        name = _stored_name(entry, stored)
        fields: list[str | None] = [None] if parameters else []
        kept = stored[f"model/{name}"].properties.dtype
        if optimizer is not None:
            prefix = f"optimizer/{name}/"
            fields += sorted(key.removeprefix(prefix) for key in stored if key.startswith(prefix))
        for field in fields:
            key = f"model/{name}" if field is None else f"optimizer/{name}/{field}"
            facts = stored[key]
            dtype = facts.properties.dtype
            yield _Wanted(
                key=key, entry=entry, field=field, shape=tuple(facts.size), dtype=dtype, like_parameter=dtype == kept
            )


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
        value = piece(entry, full).to(parameter.device, parameter.dtype if wanted.like_parameter else None).clone()
    optimizer.state[parameter][wanted.field] = value


def _read_settings(text: str) -> dict[str, Any]:
    """The hyperparameters that `_settings` wrote; JSON has made lists of the tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(text).items()}


def beside(target: Path, suffix: str) -> Path:
    """Where a checkpoint lies while it is written ("new"), or the previous one while it is replaced ("old")."""
    whole = target.absolute()
    if not whole.name:
        raise InputError(f"{target} can be no checkpoint", why="it has no folder around it", fix="name a folder in it")
    return whole.with_name(f".{whole.name}.{suffix}")


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


def first_failure(error: CheckpointException) -> str:
    """The first rank that failed in torch's own saving or loading, and how, in a line."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {type(cause).__name__}: {cause}".splitlines()[0]
