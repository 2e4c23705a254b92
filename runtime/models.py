"""Models from MODEL strings, and batches that fit them. Nothing is ever downloaded.

A MODEL string is one of, each with optional overrides in brackets (keyword literals only):

    LlamaConfig(hidden_size=128, num_hidden_layers=4)   a Hugging Face config class
    path/to/folder, path/to/config.json(num_hidden_layers=2)   a saved Hugging Face config
    package.module:function(depth=4), path/to/file.py:function   a function that returns an nn.Module
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.runtime.hugging_face import build_hugging_face, is_hugging_face
from autopar.units import dtype_name

_FORMS = (
    "a Hugging Face config class such as LlamaConfig(hidden_size=128), a folder with config.json, a config.json, "
    "package.module:function or path/to/file.py:function"
)
_CALL = re.compile(r"(?P<base>.+?)\s*(?P<arguments>\(.*\))", re.DOTALL)
_IDS_NAMES = ("input_ids", "ids", "idx", "tokens", "x", "input", "inputs")
_LABEL_NAMES = ("labels", "targets", "target", "y")


@dataclass(frozen=True, kw_only=True)
class BatchForm:
    """How a language model takes its batch.

    ids, labels: the names of forward's parameters (labels None: the model computes no loss itself); shifted: whether
    the labels must already be the next tokens (Hugging Face models shift them themselves).
    """

    ids: str = "input_ids"
    labels: str | None = "labels"
    shifted: bool = False


def parse_source(text: str) -> tuple[str, dict[str, Any]]:
    """The part of a MODEL string before its brackets, and the overrides in them; InputError for anything else."""
    text = text.strip()
    match = None if Path(text).exists() else _CALL.fullmatch(text)
    if match is None:
        if not text:
            raise InputError("the MODEL is empty", why=f"it is {_FORMS}", fix="name a model")
        return text, {}
    fix = "write for example LlamaConfig(hidden_size=128, num_hidden_layers=4)"
    try:
        call = ast.parse(f"f{match['arguments']}", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{text!r} is not a MODEL", why=f"its brackets do not parse: {error}", fix=fix) from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise InputError(f"{text!r} is not a MODEL", why="the brackets hold only name=value", fix=fix)
    overrides: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in overrides:
            raise InputError(f"{text!r} is not a MODEL", why="each override is name=value, given once", fix=fix)
        try:
            overrides[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            why = f"the value of {keyword.arg} is not a literal (a number, string, list, True, None, ...)"
            raise InputError(f"{text!r} is not a MODEL", why=why, fix=fix) from None
    return match["base"], overrides


def canonical_source(text: str, overrides: Mapping[str, Any] | None = None) -> str:
    """The MODEL string with `overrides` merged into its brackets (the later value wins, the order is kept)."""
    base, given = parse_source(text)
    merged = {**given, **(overrides or {})}
    for name in merged:
        if not name.isidentifier():
            raise InputError(
                f"{name!r} is not the name of a setting", why="it is no identifier", fix="write name=value"
            )
    return f"{base}({', '.join(f'{name}={value!r}' for name, value in merged.items())})" if merged else base


def build_model(source: str, *, dtype: str = "float32", seed: int = 0, device: str = "cpu") -> nn.Module:
    """The model of a MODEL string in training mode, its weights drawn from `seed` (equal in every process).

    device "meta" gives shapes without storage. Raises InputError when the string names no model, the file, class or
    function does not exist, the function returns no nn.Module, or the config makes no model.
    """
    base, overrides = parse_source(source)
    kind = getattr(torch, dtype_name(dtype))
    devices = [] if device in ("cpu", "meta") else [device]
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(seed)
        if re.fullmatch(r"\w*Config", base, re.ASCII) or _is_config_path(base):
            model = build_hugging_face(base, overrides, kind)
        elif re.fullmatch(r".+:[A-Za-z_]\w*", base, re.DOTALL):
            model = _call(base, overrides).to(kind)
        else:
            raise _no_model(base)
    return model.train()


def _is_config_path(base: str) -> bool:
    return base.endswith(".json") or Path(base).is_dir()


def _no_model(base: str) -> InputError:
    if "(" in base:
        why, fix = "its bracket is not closed", "write for example LlamaConfig(hidden_size=128)"
        return InputError(f"{base!r} is not a MODEL", why=why, fix=fix)
    if "/" in base or Path(base).exists():
        why = f"no such file; a MODEL is {_FORMS}" if not Path(base).exists() else f"a MODEL is {_FORMS}"
        return InputError(f"{base} is not a MODEL", why=why, fix="check the path (nothing is downloaded)")
    near = difflib.get_close_matches(f"{base}Config".lower().replace("-", ""), ["llamaconfig", "gpt2config"], n=1)
    hint = {"llamaconfig": "LlamaConfig", "gpt2config": "GPT2Config"}[near[0]] if near else ""
    return InputError(
        f"{base!r} is not a MODEL",
        why=f"a MODEL is {_FORMS}",
        fix=f"did you mean {hint}?" if hint else "give one of these forms (weights are never needed or downloaded)",
    )


def _call(base: str, overrides: dict[str, Any]) -> nn.Module:
    home, _, name = base.rpartition(":")
    module = _load_file(Path(home)) if home.endswith(".py") or "/" in home else _load_module(home)
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
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise InputError(f"{base} raised an error", why=why, fix="call it by hand with the same arguments") from error
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{base} returned no nn.Module", why=f"it returned a {type(model).__name__}", fix="return the model"
        )
    return model


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"{path} does not exist", why="no such file", fix="check the path")
    name = f"autopar_model_{re.sub(r'[^0-9A-Za-z]', '_', str(path.resolve()))}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.resolve().parent) not in sys.path:  # as `python path/to/file.py` would have it
        sys.path.append(str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is not a Python file", why="its name does not end in .py", fix="name a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _not_importable(str(path), error) from error
    return module


def _load_module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path and "" not in sys.path:  # a console script does not have it
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise _not_importable(name, error) from error


def _not_importable(name: str, error: Exception) -> InputError:
    why = f"{type(error).__name__}: {error}"
    return InputError(f"{name} cannot be imported", why=why, fix="import it by hand, from this folder, and cure that")


def vocab_size(model: nn.Module) -> int | None:
    """The number of token ids: of the config where there is one, else rows of the first nn.Embedding, else None."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(size, int):
        return size
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
    first = next(tables, None)
    return None if first is None else first.num_embeddings


def max_sequence(model: nn.Module) -> int | None:
    """The longest sequence that a Hugging Face config allows; None where no config says so."""
    length = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return length if isinstance(length, int) else None


def batch_form(model: nn.Module) -> BatchForm:
    """How the model takes ids and labels: Hugging Face's way, or by the names of forward's parameters."""
    if is_hugging_face(model):
        return BatchForm()
    names = list(inspect.signature(model.forward).parameters)
    ids = next((name for name in _IDS_NAMES if name in names), names[0] if names else None)
    if ids is None:
        why = "its forward has no parameter"
        raise InputError(f"{type(model).__name__} takes no batch", why=why, fix="let forward take the token ids")
    return BatchForm(ids=ids, labels=next((n for n in _LABEL_NAMES if n in names and n != ids), None), shifted=True)


def example_batch(model: nn.Module, *, samples: int, sequence: int, seed: int = 0) -> dict[str, Tensor]:
    """A batch of random tokens that the model takes: ids and, where it takes them, labels, each [samples, sequence].

    The same arguments give the same batch. Raises InputError when the model has no vocabulary (then only the user
    knows its input) or the sequence is longer than its config allows.
    """
    size, longest = vocab_size(model), max_sequence(model)
    if size is None:
        raise InputError(
            f"{type(model).__name__} has no vocabulary",
            why="it has neither config.vocab_size nor an nn.Embedding, so no batch can be made up for it",
            fix="pass a batch as example=",
        )
    if longest is not None and sequence > longest:
        raise InputError(
            f"sequence {sequence} is too long for {type(model).__name__}",
            why=f"its max_position_embeddings is {longest}",
            fix=f"take a sequence of at most {longest}, or set max_position_embeddings={sequence}",
        )
    form = batch_form(model)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(size, (samples, sequence + 1), generator=generator)
    batch = {form.ids: tokens[:, :-1].contiguous()}
    if form.labels is not None:
        batch[form.labels] = (tokens[:, 1:] if form.shifted else tokens[:, :-1]).clone()
    return batch
