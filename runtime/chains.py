"""Which modules of a model are its blocks: the repeated ones of its lists, one list or several that run in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.errors import InputError

Lists = tuple[tuple[str, ...], ...]
"""The dotted paths of the blocks of each list."""


@dataclass(frozen=True, kw_only=True)
class _List:
    path: str
    size: int
    module: nn.Module

    def paths(self) -> tuple[str, ...]:
        return tuple(f"{self.path}.{name}" for name, _ in self.module.named_children())


def find_lists(model: nn.Module) -> tuple[Lists, ...]:
    """The ways to take the model for lists of blocks, the finest first; InputError when there is none.

    A list is an outermost nn.ModuleList (without any: an nn.Sequential) whose children are of one class, and holds at
    least a quarter of the parameters of the largest one. Where its children are themselves little more than such
    lists (as the stages of a hierarchical model are), those are tried first.
    """
    coarse = _lists_in(model, "", nn.ModuleList) or _lists_in(model, "", nn.Sequential, least=2)
    if not coarse:
        raise InputError(
            f"{type(model).__name__} has no chain of blocks",
            why="no nn.ModuleList whose children are all of one class and have parameters",
            fix="keep the repeated blocks of the model in one nn.ModuleList",
        )
    largest = max(found.size for found in coarse)
    coarse = [found for found in coarse if 4 * found.size >= largest]
    ways = [tuple(found.paths() for found in coarse)]
    fine = [inner for found in coarse for inner in _inner_lists(found)]
    if fine != coarse:
        ways.insert(0, tuple(found.paths() for found in fine))
    return tuple(ways)


def _lists_in(module: nn.Module, path: str, kind: type[nn.Module], least: int = 1) -> list[_List]:
    """The outermost lists inside a module."""
    found: list[_List] = []
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        blocks = list(child.children())
        if isinstance(child, kind) and len(blocks) >= least and len({type(block) for block in blocks}) == 1:
            size = sum(p.numel() for p in child.parameters())
            if size:
                found.append(_List(path=child_path, size=size, module=child))
                continue
        found += _lists_in(child, child_path, kind, least)
    return found


def _inner_lists(outer: _List) -> list[_List]:
    """One list in each child of a list, where those hold most of its parameters; otherwise the list itself."""
    inner: list[_List] = []
    for path, child in zip(outer.paths(), outer.module.children(), strict=True):
        found = _lists_in(child, path, nn.ModuleList)
        if len(found) != 1:
            return [outer]
        inner += found
    return inner if 2 * sum(found.size for found in inner) > outer.size else [outer]


def own_settings(blocks: Sequence[nn.Module]) -> list[tuple[Any, ...]]:
    """For each block of one list the whole numbers that it was built with, beside shapes: what its forward may ask.

    A number that counts the blocks (layer_idx) is left out.
    """
    settings = [_settings(block) for block in blocks]
    counts = {
        name
        for name in set().union(*settings)
        if any(word in name.rpartition(".")[2].lower() for word in ("idx", "index", "layer", "number"))
        and len({found.get(name, 0) - place for place, found in enumerate(settings)}) == 1
    }
    return [tuple(sorted((k, v) for k, v in found.items() if k not in counts)) for found in settings]


def _settings(block: nn.Module) -> dict[str, int]:
    return {
        f"{path}.{name}": value
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int) and not name.startswith("_") and name != "training"
    }
