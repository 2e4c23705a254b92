"""Signals of the process that starts others: it must end them before it ends itself."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator


class _Terminated(BaseException):
    """SIGTERM came: unwinds as KeyboardInterrupt does."""


@contextlib.contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """While inside, SIGTERM unwinds the stack and only then ends the process, as it would have by default."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def raise_terminated(number: int, frame: object) -> None:
        raise _Terminated

    signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def signals_wait() -> Iterator[None]:
    """While inside, SIGINT and SIGTERM wait: a second Ctrl-C must not leave processes behind."""
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept)
