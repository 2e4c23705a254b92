"""Models from MODEL strings (`autopar.runtime.source`). Nothing is ever downloaded."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autopar.errors import InputError
from autopar.runtime.hugging_face import build_hugging_face, is_config_path, is_model_class
from autopar.runtime.loading import load_file
from autopar.runtime.recording import empty_weights
from autopar.runtime.source import FORMS, parse_source
from autopar.shipped import architectures
from autopar.units import dtype_name


def build_model(
    source: str, *, dtype: str = "float32", seed: int = 0, device: str = "cpu", stored: bool = True
) -> nn.Module:
    """The model of a MODEL string in training mode, its weights drawn from `seed` (equal in every process).

    device "meta" gives shapes without storage; stored: whether the weights need memory (fake tensors do not), so that
    a model larger than the machine is refused. Raises InputError when the string names no model, the file, class or
    function does not exist, the function returns no nn.Module, or the config makes no model.
    """
    refuse_shipped(source)
    base, overrides = parse_source(source)
    kind = getattr(torch, dtype_name(dtype))
    devices = [] if device in ("cpu", "meta") else [device]
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        if re.fullmatch(r"\w*Config", base, re.ASCII) or is_config_path(base) or is_model_class(base):
            model = build_hugging_face(base, overrides, kind, stored=stored)
        elif re.fullmatch(r".+:[A-Za-z_]\w*", base, re.DOTALL):
            model = _call(base, overrides)
            model = model.to(kind) if stored else _cast(model, kind)
        else:
            raise _no_model(base)
    return model.train()


def _cast(model: nn.Module, kind: torch.dtype) -> nn.Module:
    """The model with its floating-point tensors in this dtype, shared ones still shared.

    Module.to swaps tensors in place, which fake ones do not allow.
    """
    cast: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_floating_point():
                new = cast.setdefault(
                    id(parameter), nn.Parameter(parameter.detach().to(kind), parameter.requires_grad)
                )
                setattr(module, name, new)
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(kind))
    return model


def build_empty(source: str, *, dtype: str = "float32", seed: int = 0) -> nn.Module:
    """The model that `build_model` makes, without storage for its weights (see autopar.runtime.recording).

    With storage where it cannot be built otherwise. Raises as `build_model` does.
    """
    try:
        with empty_weights():
            return build_model(source, dtype=dtype, seed=seed, stored=False)
    except InputError:
        return build_model(source, dtype=dtype, seed=seed)


def import_model(source: str) -> None:
    """Import all that building the model of a MODEL string imports; cheap, since it is built without storage."""
    build_model(source, device="meta")


def refuse_shipped(source: str) -> None:
    """Raise InputError for the source of a plan that was made from shipped numbers: there is nothing to build."""
    if source.startswith("shipped:"):
        raise InputError(
            f"{source.removeprefix('shipped:')} cannot be built",
            why="its plan was made from shipped numbers, and no code of the model goes with them",
            fix="profile the model itself (autopar profile model MODEL), and search with that file",
        )


def _no_model(base: str) -> InputError:
    if "(" in base:
        why, fix = "its bracket is not closed", "write for example LlamaConfig(hidden_size=128)"
        return InputError(f"{base!r} is not a MODEL", why=why, fix=fix)
    is_there = os.path.exists(base)
    if "/" in base or is_there:
        why = f"a MODEL is {FORMS}" if is_there else f"no such file; a MODEL is {FORMS}"
        return InputError(f"{base} is not a MODEL", why=why, fix="check the path (nothing is downloaded)")
    if base in architectures():
        return InputError(
            f"{base} is a name of shipped numbers, not a MODEL",
            why="no code of the model goes with them",
            fix=f"plan with `search --model {base}` or `estimate {base}`; a MODEL is {FORMS}",
        )
    near = difflib.get_close_matches(f"{base}Config".lower().replace("-", ""), ["llamaconfig", "gpt2config"], n=1)
    hint = {"llamaconfig": "LlamaConfig", "gpt2config": "GPT2Config"}[near[0]] if near else ""
    return InputError(
        f"{base!r} is not a MODEL",
        why=f"a MODEL is {FORMS}",
        fix=f"did you mean {hint}?" if hint else "give one of these forms (weights are never needed or downloaded)",
    )


def _call(base: str, overrides: dict[str, Any]) -> nn.Module:
    home, _, name = base.rpartition(":")
    module = _load(home)
    function = getattr(module, name, None)
    if not callable(function):
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        near = difflib.get_close_matches(name, names, n=1)
        raise InputError(
            f"{home} has no function {name!r}",
            why=f"it defines {', '.join(names[:8]) or 'no function'}",
            fix=f"did you mean {home}:{near[0]}?" if near else "name a function that returns an nn.Module",
        )
    try:
        model = function(**overrides)
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {error}"
        raise InputError(f"{base} raised an error", why=why, fix="call it by hand with the same arguments") from error
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{base} returned no nn.Module", why=f"it returned a {type(model).__name__}", fix="return the model"
        )
    return model


def _load(home: str) -> ModuleType:
    """The module of a file or of a dotted name; InputError when it cannot be imported."""
    try:
        if home.endswith(".py") or "/" in home:
            return load_file(Path(home))
        if os.getcwd() not in sys.path and "" not in sys.path:  # a console script does not have it
            sys.path.append(os.getcwd())
        return importlib.import_module(home)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise _not_importable(home, error) from error


def _not_importable(name: str, error: BaseException) -> InputError:
    why = f"{type(error).__name__}: {error}"
    return InputError(f"{name} cannot be imported", why=why, fix="import it by hand, from this folder, and cure that")
