"""What this process is doing with its model: its last operation, and when it last got on. For `watching` to tell."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_TORCH, _OURS = ("/torch/",), ("/autopar/runtime/", "/autopar/profiler/")
_FOREIGN = (*_TORCH, f"{Path(threading.__file__).parent}/threading.py", "<frozen")
_BACKWARD = "_engine_run_backward"
"""The function of torch that a backward is in, whoever called it."""


@dataclass(kw_only=True)
class Activity:
    """The record of one process.

    operation: the one it is in, or the last one where `inside` is False; begun: how many it has begun; beat_s: when
    one began, ended or got on; backward_follows: whether a backward that may wait for others comes outside of any;
    grows: a folder whose growth is getting on.
    """

    operation: str = "nothing yet"
    inside: bool = False
    begun: int = 0
    beat_s: float = 0.0
    backward_follows: bool = False
    grows: Path | None = None
    grown_bytes: int = 0

    @contextmanager
    def during(self, operation: str, *, grows: Path | None = None) -> Iterator[None]:
        """While inside, this process is in an operation, which may wait for other ranks. It may lie in another."""
        outer = self.operation, self.inside, self.grows
        self.operation, self.inside, self.grows = operation, True, grows
        self.backward_follows = False
        self.begun += 1
        self.beat()
        try:
            yield
        finally:
            self.operation, self.inside, self.grows = (*outer,) if outer[1] else (operation, False, None)
            self.beat()

    def beat(self) -> None:
        """It gets on."""
        self.beat_s = time.monotonic()

    def silent_s(self) -> float:
        """Seconds since it last got on."""
        if self.grows is not None:
            size_bytes = _size_bytes(self.grows)
            if size_bytes != self.grown_bytes:
                self.grown_bytes = size_bytes
                self.beat()
        return time.monotonic() - self.beat_s


activity = Activity()
"""The one of this process. Its main thread writes, the watching thread reads."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the main thread is: the innermost frames in words; in_backward: of torch; in_torch, in_ours: innermost."""

    words: str
    in_backward: bool
    in_torch: bool
    in_ours: bool


def place() -> Place:
    """Where the main thread is just now."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return Place(words="", in_backward=False, in_torch=False, in_ours=False)
    stack = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    inner = stack[0]
    own = [one for one in stack if not any(part in one.filename for part in _FOREIGN)][:2]
    named = dict.fromkeys(f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in (inner, *own))
    return Place(
        words=", called in ".join(named),
        in_backward=any(one.name == _BACKWARD for one in stack),
        in_torch=any(part in inner.filename for part in _TORCH),
        in_ours=any(part in inner.filename for part in _OURS),
    )


def _size_bytes(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.iterdir())
    except OSError:
        return 0
