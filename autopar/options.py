"""What the commands have in common: options, checked so that a typo is a usage error, and the answer on stdout."""

from __future__ import annotations

import ast
import os
import shutil
import sys
from collections.abc import Sequence
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from autopar.errors import UsageError
from autopar.request import Schedule

if TYPE_CHECKING:
    from rich.console import RenderableType

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for machines.")]
Out = Annotated[Path, typer.Option("--output", "-o", help="The file to write.")]
Nproc = Annotated[int | None, typer.Option(min=1, max=256, help="How many local processes (default: GPUs, or 4).")]
Device = Annotated[Literal["cpu", "cuda"] | None, typer.Option(help="Where (default: cuda where there is one).")]
Seq = Annotated[
    int | None, typer.Option("--seq", min=1, max=1 << 24, help="Tokens of one sample (default: profiled, or 2048).")
]
Dtype = Annotated[str | None, typer.Option(help="fp32 (default), bf16 (with --for), ...")]
Steps = Annotated[int, typer.Option(min=1, max=1_000_000, help="How many optimizer steps.")]
Text = Annotated[Path | None, typer.Option(help="Text to train on (default: Python's own help topics).")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="K=V", help="A setting of MODEL.")]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.")]


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


def seconds(limit: float | None) -> float | None:
    """The limit as it is; a usage error for `nan`, which no range holds back."""
    if limit is not None and isnan(limit):
        raise typer.BadParameter("nan is not a number of seconds")
    return limit


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


def answer(text: str) -> None:
    """Print the result on stdout; inside torchrun only the first rank does."""
    if os.environ.get("RANK", "0") == "0":
        print(text.rstrip("\n"), flush=True)


def shown(*parts: RenderableType) -> str:
    """The parts as text, as wide and coloured as stdout is."""
    from autopar.report import render

    terminal = sys.stdout.isatty()
    return render(*parts, width=shutil.get_terminal_size().columns if terminal else None, color=terminal)
