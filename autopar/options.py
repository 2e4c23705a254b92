"""Options of the command line that are more than one number or name: checked, so that a typo is a usage error."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import get_args

import typer

from autopar.errors import UsageError
from autopar.request import Schedule


def batches(text: str) -> str:
    """The numbers of `64` or `64,128` as they are; a usage error for others."""
    for part in (part.strip() for part in text.split(",")):
        is_number = part.isascii() and part.isdigit() and len(part) <= 10
        if not is_number or not 1 <= int(part) <= 1 << 30:
            raise typer.BadParameter(f"{part[:40]!r} is not in the range 1<=x<={1 << 30}")
    return text


def schedules(names: list[str] | None) -> list[str] | None:
    """The names of schedules as they are; a usage error for others."""
    for name in names or ():
        if name not in get_args(Schedule):
            raise typer.BadParameter(f"{name[:40]!r} is not one of {', '.join(get_args(Schedule))}")
    return names


def settings(texts: Sequence[str]) -> dict[str, object]:
    """The settings of `--set K=V`: each value a Python literal, otherwise a string."""
    found: dict[str, object] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UsageError(
                f"--set {text} is not a setting", why="the form is K=V", fix="write for example --set hidden_size=256"
            )
        try:
            found[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            found[key.strip()] = value.strip()
    return found


def usage_error(error: Exception) -> UsageError:
    """Our words for what typer found wrong with the command line."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "autopar"
    usage = context.get_usage().removeprefix("Usage: ") if context else "autopar COMMAND"
    what = error.format_message() if hasattr(error, "format_message") else str(error)
    return UsageError(what.rstrip("."), why=f"the usage is {' '.join(usage.split())}", fix=f"see {path} --help")
