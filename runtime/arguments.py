"""The arguments of one call, positional and named alike, by their key: a position or a keyword."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

Key = int | str | tuple[int | str, int]
"""A position or a keyword; with a second number, the place in the tuple or list that stands there."""


def named_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[int | str, Any]]:
    """All arguments with their position or keyword."""
    return [*enumerate(args), *kwargs.items()]


def tensor_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[Key, Tensor]]:
    """The tensors among the arguments, and those in tuples and lists among them, with their keys."""
    found: list[tuple[Key, Tensor]] = []
    for key, value in named_arguments(args, kwargs):
        if isinstance(value, Tensor):
            found.append((key, value))
        elif type(value) in (tuple, list):
            found += [((key, place), x) for place, x in enumerate(value) if isinstance(x, Tensor)]
    return found


def argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], key: Key) -> Any:
    """The argument of this key, None where there is none."""
    if isinstance(key, tuple):
        outer = argument(args, kwargs, key[0])
        return outer[key[1]] if type(outer) in (tuple, list) and key[1] < len(outer) else None
    if isinstance(key, int):
        return args[key] if key < len(args) else None
    return kwargs.get(key)


def replace_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], key: Key, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the one of this key replaced."""
    if isinstance(key, tuple):
        outer = argument(args, kwargs, key[0])
        return replace_argument(args, kwargs, key[0], type(outer)([*outer[: key[1]], value, *outer[key[1] + 1 :]]))
    if isinstance(key, int):
        return (*args[:key], value, *args[key + 1 :]), kwargs
    return args, {**kwargs, key: value}
