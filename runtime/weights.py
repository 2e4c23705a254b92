"""Where the numbers of a model come from that was built without storage, and how each rank takes its own part of them.

Whole parameters are made or read one at a time, and of each a rank keeps its piece: no rank ever holds the model.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.runtime.activity import activity
from autopar.runtime.agreeing import agree
from autopar.runtime.checkpoint import ModelForm, is_checkpoint, load_checkpoint, raised_by_all
from autopar.runtime.gradients import HeldParameter, local_piece, piece, set_parameter
from autopar.runtime.hugging_face import recompute_buffers
from autopar.runtime.recording import recorded, written_since
from autopar.runtime.replaying import View, made

_BUILD_FIX = "build the model inside `with autopar.empty_weights():`, or pass weights= a folder of safetensors"


@dataclass(frozen=True, kw_only=True, eq=False)
class Weights:
    """The sources of a model's parameters by name.

    recorded: how they were initialised (see autopar.runtime.recording); given: those that were real; folder: a
    checkpoint or safetensors, which come first.
    """

    recorded: dict[str, View] = field(default_factory=dict)
    given: dict[str, Tensor] = field(default_factory=dict)
    folder: str | os.PathLike[str] | None = None

    def fill(self, held: Sequence[HeldParameter], *, form: ModelForm) -> None:
        """Give every parameter that this rank holds its value, one whole tensor at a time; a collective."""
        if self.folder is not None and is_checkpoint(self.folder):
            load_checkpoint(self.folder, held, form=form)
            return
        with raised_by_all():
            self._read(held)

    def _read(self, held: Sequence[HeldParameter]) -> None:
        rest = held
        if self.folder is not None:
            # safetensors comes with transformers only.
            from autopar.runtime.exporting import import_weights, weight_files

            files = weight_files(self.folder)
            here = {e.name for e in held if e.name not in self.given or files.keys() & {e.name, *e.aliases}}
            import_weights(self.folder, [e for e in held if e.name in here])
            rest = [e for e in held if e.name not in here]
        for entry in rest:
            put_weight(entry, self.given[entry.name] if entry.name in self.given else made(self.recorded[entry.name]))


def put_weight(entry: HeldParameter, full: Tensor) -> None:
    """Make `full` the value of a parameter, of which this rank keeps its piece; InputError for another shape."""
    activity.beat()
    if full.is_floating_point() != entry.stepped.is_floating_point():
        raise InputError(
            f"{entry.name} is {full.dtype} in the file",
            why=f"the model has it as {entry.stepped.dtype}, and numbers of a quantised model mean something else",
            fix="give the weights of this model, not quantised",
        )
    mine, target = piece(entry, full), local_piece(entry.stepped)
    if mine.shape != target.shape:
        raise InputError(
            f"{entry.name} has another shape in the file",
            why=f"{tuple(full.shape)} there; this rank's piece would be {tuple(mine.shape)}, is {tuple(target.shape)}",
            fix="give the weights of this model",
        )
    with torch.no_grad():
        target.copy_(mine)
        if entry.stands_in:
            set_parameter(entry, full)


def take_weights(model: nn.Module, folder: str | os.PathLike[str] | None, device: torch.device) -> Weights:
    """The sources of the parameters of a model that has some on the meta device; then all of them are.

    Its buffers are real afterwards and on `device`. A collective: where ranks would begin differently, rank 0's
    values are taken. Raises InputError when a parameter or buffer has no source.
    """
    kind = type(model).__name__
    known, given, lacking = {}, {}, []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if written_since(parameter):
            why = "it had no storage any more, so that nothing was written"
            fix = "set weights inside `with autopar.empty_weights():`"
            raise InputError(f"{name} was written after autopar.empty_weights ended", why=why, fix=fix)
        view = recorded(parameter)
        if view is not None:
            known[name] = view
        elif not parameter.is_meta:
            given[name] = parameter.detach()
        elif folder is None:
            lacking.append(name)
    if lacking:
        what = f"{len(lacking)} parameters of {kind} are on the meta device without a source: {', '.join(lacking[:4])}"
        raise InputError(what, why="they have shapes and no numbers, and no weights= were given", fix=_BUILD_FIX)
    if folder is None:
        agree(known.values())
    _give_up_storage(model)
    _make_buffers(model, device)
    return Weights(recorded=known, given=given, folder=folder)


def _give_up_storage(model: nn.Module) -> None:
    """Put the real parameters of the model on the meta device too, shared ones still shared."""
    stands: dict[int, nn.Parameter] = {}
    for owner in model.modules():
        for leaf, p in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if not p.is_meta:
                empty = torch.empty_like(p, device="meta")
                setattr(owner, leaf, stands.setdefault(id(p), nn.Parameter(empty, p.requires_grad)))


def _make_buffers(model: nn.Module, device: torch.device) -> None:
    recompute_buffers(model)
    for path, owner in model.named_modules():
        for leaf, buffer in list(owner.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.is_meta:
                raise InputError(
                    f"the buffer {path}.{leaf} is on the meta device",
                    why="it has a shape and no numbers, and nothing says how they are computed",
                    fix="build the model inside `with autopar.empty_weights():`, which leaves buffers real",
                )
            if buffer.device != device:
                setattr(owner, leaf, buffer.to(device))


def make_room(stages: Sequence[nn.Module], device: torch.device) -> None:
    """Give the parameters of the stages that are on the meta device storage on `device`, shared ones the same."""
    rooms: dict[int, nn.Parameter] = {}
    for owner in (module for stage in stages for module in stage.modules()):
        for leaf, p in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if p.is_meta:
                if id(p) not in rooms:
                    rooms[id(p)] = nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
                setattr(owner, leaf, rooms[id(p)])
    if rooms:
        for stage in stages:
            stage.to(device)  # moves nothing: fully_shard pads its shards now, and not under views of them
