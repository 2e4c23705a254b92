"""What a user hands to the runtime, looked at before a rank acts on it: of the right kind, or an InputError."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.plan import Plan

if TYPE_CHECKING:
    from autopar.runtime.gradients import HeldParameter


def check_kind(name: str, value: object, kinds: type | tuple[type, ...], wanted: str, fix: str) -> None:
    """Raise InputError for an argument of another kind than wanted."""
    if not isinstance(value, kinds):
        raise InputError(
            f"{name} must be {wanted}", why=f"it is {value!r:.80} of type {type(value).__name__}", fix=fix
        )


def check_model_and_plan(
    model: object, plan: object, loss: object, example: Mapping[str, Tensor] | None, weights: object
) -> None:
    """Raise InputError for arguments of `parallelize` that are of another kind."""
    check_kind("model", model, nn.Module, "an nn.Module", "give autopar.parallelize(model, plan)")
    check_kind("plan", plan, Plan, "a Plan", "give autopar.Plan.load(file) or what autopar.search returned")
    if loss is not None and not callable(loss):
        check_kind("loss", loss, (), "a function of (output, batch)", "leave it out for the model's own loss")
    if example is not None:
        check_batch("example", example)
    if weights is not None:
        check_folder("weights", weights)


def check_batch(name: str, batch: object) -> None:
    """Raise InputError for what is no batch: tensors by the names of the forward's arguments."""
    fix = "give tensors by name, such as {'input_ids': ..., 'labels': ...}"
    check_kind(name, batch, Mapping, "a mapping of names to tensors", fix)
    assert isinstance(batch, Mapping)
    if not batch:
        raise InputError(f"{name} is empty", why="it has no tensor", fix=fix)
    for key, value in batch.items():
        check_kind(f"{name}[{key!r}]", value, Tensor, "a tensor", fix)
        if not value.dim():
            raise InputError(f"{name}[{key!r}] has no dimension", why="the first one counts samples", fix=fix)


def check_folder(name: str, folder: object) -> None:
    """Raise InputError for what is no path, or an empty one, which would be the current folder."""
    check_kind(name, folder, (str, os.PathLike), "a path", "give the path of a folder")
    path = os.fspath(folder)  # type: ignore[call-overload]
    if not isinstance(path, str) or not path or "\0" in path:
        raise InputError(f"{name} must be a path", why=f"it is {path!r:.80}", fix="give the path of a folder")


def check_optimizer(optimizer: Any, held: Iterable[HeldParameter]) -> None:
    """Raise InputError for what is no optimizer, or steps nothing of this rank's part: its states would be lost."""
    fix = "make it of model.param_groups()"
    check_kind("optimizer", optimizer, torch.optim.Optimizer, "a torch optimizer", fix)
    trained = {id(entry.stepped) for entry in held if entry.stepped.requires_grad}
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if trained and not trained & stepped:
        why = "none of its parameters is one that model.param_groups() gave"
        raise InputError("the optimizer does not step this model", why=why, fix=fix)


def check_norm(max_norm: object) -> None:
    """Raise InputError for what gradients cannot be clipped to."""
    is_number = isinstance(max_norm, int | float) and not isinstance(max_norm, bool)
    if not is_number or not max_norm > 0:  # type: ignore[operator]
        raise InputError(f"max_norm is {max_norm!r}", why="it is the largest norm", fix="give a number above 0")
