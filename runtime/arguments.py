"""The arguments of one call, positional and named alike, by their key: a position or a keyword."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def named_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[int | str, Any]]:
    """All arguments with their position or keyword."""
    return [*enumerate(args), *kwargs.items()]


def argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], key: int | str) -> Any:
    """The argument at a position or under a keyword, None where there is none."""
    if isinstance(key, int):
        return args[key] if key < len(args) else None
    return kwargs.get(key)


def replace_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], key: int | str, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the one at `key` (position or keyword) replaced."""
    if isinstance(key, int):
        return (*args[:key], value, *args[key + 1 :]), kwargs
    return args, {**kwargs, key: value}
