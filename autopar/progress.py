"""How far a long step is, on stderr: a bar with the time left on a terminal, plain lines otherwise."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from autopar.units import format_seconds

Report = Callable[[Mapping[str, Any]], None]
"""Takes an event: `done` of `total`, `what` is being done, a `warning` to show; others are for other readers."""

_QUIET_S = 2.0


@contextmanager
def progress(step: str, *, file: TextIO | None = None) -> Iterator[Report]:
    """A function that takes the events of this step, while inside; on stderr unless `file` is given.

    Inside torchrun only the first rank speaks.
    """
    out = file or sys.stderr
    if os.environ.get("RANK", "0") != "0":
        yield _silent
        return
    if out.isatty():
        with _bar(step, out) as report:
            yield report
        return
    started = time.monotonic()
    print(f"{step} ...", file=out, flush=True)
    yield _lines(step, out)
    print(f"{step}: done in {format_seconds(time.monotonic() - started)}", file=out, flush=True)


def _silent(event: Mapping[str, Any]) -> None:
    pass


def _lines(step: str, out: TextIO) -> Report:
    """Lines at least two seconds apart. The pace is that since the first event: starting up takes its own time."""
    begun: tuple[float, float] | None = None
    last = time.monotonic()

    def report(event: Mapping[str, Any]) -> None:
        nonlocal begun, last
        if "warning" in event:
            print(f"{step}: {event['warning']}", file=out, flush=True)
        now, counted = time.monotonic(), _counted(event)
        if counted is None:
            return
        done, total = counted
        if begun is None:
            begun = now, done
        if now - last < _QUIET_S or done >= total:
            return
        last = now
        left_s = time_left_s(done - begun[1], total - begun[1], now - begun[0])
        rest = "" if left_s is None else f", {format_seconds(left_s)} left"
        what = event.get("what")
        print(f"{step}: {done:g} of {total:g}{rest}{f' ({what})' if what else ''}", file=out, flush=True)

    return report


def time_left_s(done: float, total: float, elapsed_s: float) -> float | None:
    """Seconds to the end at the pace so far; None before anything is done."""
    return elapsed_s * (total - done) / done if 0 < done <= total else None


def _counted(event: Mapping[str, Any]) -> tuple[float, float] | None:
    """(done, total) of an event that counts. Of several ranks only the first speaks."""
    done, total = event.get("done"), event.get("total")
    if event.get("rank", 0) != 0 or not isinstance(done, int | float) or not isinstance(total, int | float):
        return None
    return done, total


@contextmanager
def _bar(step: str, out: TextIO) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.progress import TimeRemainingColumn as Left

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        Left(),
        TextColumn("{task.fields[what]}"),
    )
    with Progress(*columns, console=Console(file=out)) as bar:
        task = bar.add_task(step, total=None, what="")

        def report(event: Mapping[str, Any]) -> None:
            counted = _counted(event)
            if "warning" in event:
                bar.console.print(f"{step}: {event['warning']}", highlight=False, markup=False)
            if counted is not None:
                bar.update(task, completed=counted[0], total=counted[1], what=str(event.get("what", "")))

        yield report
        bar.update(task, what="done")
