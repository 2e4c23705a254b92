"""Models from MODEL strings (`autopar.runtime.source`), and batches that fit them. Nothing is ever downloaded."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.runtime.hugging_face import build_hugging_face, is_hugging_face
from autopar.runtime.source import FORMS, canonical_source, parse_source
from autopar.units import dtype_name

__all__ = [
    "BatchForm",
    "batch_form",
    "build_model",
    "canonical_source",
    "example_batch",
    "max_sequence",
    "parse_source",
    "vocab_size",
]

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
        why = f"no such file; a MODEL is {FORMS}" if not Path(base).exists() else f"a MODEL is {FORMS}"
        return InputError(f"{base} is not a MODEL", why=why, fix="check the path (nothing is downloaded)")
    near = difflib.get_close_matches(f"{base}Config".lower().replace("-", ""), ["llamaconfig", "gpt2config"], n=1)
    hint = {"llamaconfig": "LlamaConfig", "gpt2config": "GPT2Config"}[near[0]] if near else ""
    return InputError(
        f"{base!r} is not a MODEL",
        why=f"a MODEL is {FORMS}",
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
    except (Exception, SystemExit) as error:
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
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _not_importable(str(path), error) from error
    return module


def _load_module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path and "" not in sys.path:  # a console script does not have it
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise _not_importable(name, error) from error


def _not_importable(name: str, error: BaseException) -> InputError:
    why = f"{type(error).__name__}: {error}"
    return InputError(f"{name} cannot be imported", why=why, fix="import it by hand, from this folder, and cure that")


def vocab_size(model: nn.Module) -> int | None:
    """The number of token ids: of the config where there is one, else rows of the nn.Embedding that looks them up.

    None where there is neither. With several embeddings (positions, types) one small forward tells which it is.
    """
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(size, int):
        return size
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if not tables:
        return None
    table = tables[0] if len(tables) == 1 else _looked_up(model, tables)
    return int(table.num_embeddings)


def _looked_up(model: nn.Module, tables: list[nn.Embedding]) -> nn.Embedding:
    """The first table that gets the ids themselves; the first of all when the model does not run on its own."""
    form = batch_form(model)
    found: list[nn.Embedding] = []

    def see(module: nn.Module, args: tuple[Any, ...]) -> None:
        # The ids are all 0: positions would begin 0, 1.
        if isinstance(module, nn.Embedding) and args and args[0].shape == (1, 2) and not bool(args[0].any()):
            found.append(module)

    handles = [table.register_forward_pre_hook(see) for table in tables]
    was_training = model.training
    ids = torch.zeros(1, 2, dtype=torch.long, device=tables[0].weight.device)
    batch = {name: ids for name in (form.ids, form.labels) if name is not None}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model.eval()(**batch)
    except Exception:  # it may need more inputs than these; what ran before that still counts
        pass
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return (found or tables)[0]


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
