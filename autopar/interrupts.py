"""What Ctrl-C does to a command: at once before the work begins, by unwinding while it goes on."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from time import monotonic

from autopar.progress import Report, progress

INTERRUPTED = 130
"""The exit code of a command that was interrupted."""

_ENDING_S = 3.0


def leave_at_once(number: int, frame: object) -> None:
    """The handler until a command works: there is nothing to keep, and an import may swallow a KeyboardInterrupt."""
    os.write(2, b"interrupted: nothing was begun\n")
    os._exit(INTERRUPTED)


class _Interrupt:
    """The handler of Ctrl-C during work: KeyboardInterrupt, but not again while what it started is being ended."""

    def __init__(self) -> None:
        self._last_s = -_ENDING_S

    def __call__(self, number: int, frame: object) -> None:
        if monotonic() - self._last_s >= _ENDING_S:
            self._last_s = monotonic()
            raise KeyboardInterrupt


@contextlib.contextmanager
def step(name: str) -> Iterator[Report]:
    """The progress of a long step; from here on Ctrl-C unwinds."""
    if signal.getsignal(signal.SIGINT) is leave_at_once:
        signal.signal(signal.SIGINT, _Interrupt())
    with progress(name) as report:
        yield report


@contextlib.contextmanager
def interrupt_stops() -> Iterator[Callable[[], bool]]:
    """A function that turns true at the first Ctrl-C, while inside; a second one interrupts as usual."""
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
