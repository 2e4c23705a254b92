"""Every rank tells the others what it is doing, so that one that hangs ends all of them, by its name.

A thread in each rank puts its state into the store of the process group every few seconds. A rank that has waited in
an operation for the time limit looks at the states of all: if none has got on for so long, it names those that the
others wait for, and every rank ends with the same error. The main thread may be held inside a collective or in foreign
code, where no exception reaches it: the process ends at once, as it does when torch's own watchdog ends it. Files are
replaced by renaming, so that this leaves the last checkpoint usable.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import ceil, isfinite
from typing import Any

import torch.distributed as dist

from autopar.errors import InputError, RunError
from autopar.runtime.activity import activity, place

EXIT_CODE = RunError.exit_code
_KEY = "autopar/watch"
_SHOWN = 8
_ANSWERS_S = 3.0
"""A rank that says nothing for so long, on a busy machine too, does not answer."""

Ending = Callable[[RunError, bool], None]
"""Ends the process by an error; whether this rank is the one that tells it in full."""


@dataclass(frozen=True, kw_only=True)
class State:
    """What a rank last said: `told` counts how often it has; waits: it is where it may wait for others."""

    told: int
    silent_s: float
    begun: int
    operation: str
    waits: bool
    where: str
    outside: bool


def group_timeout(timeout_s: float) -> timedelta:
    """The limit of process groups that leaves the first word to the watch."""
    return timedelta(seconds=min(1.2 * timeout_s + 120, 1e8))


class Watch:
    """The watch of one world; `end` ends the process when a rank hangs."""

    def __init__(self, timeout_s: float, end: Ending | None = None) -> None:
        self.timeout_s = timeout_s
        self._world = dist.group.WORLD
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        # A connection of its own: the main thread may be waiting in the store's.
        self._store: Any = self._world.get_group_store().clone()
        self._end = end or _end_process
        self._told = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autopar-watch", daemon=True)
        self._thread.start()

    @property
    def poll_s(self) -> float:
        """Seconds between two words of a rank."""
        return min(10.0, max(0.1, self.timeout_s / 20))

    @property
    def is_current(self) -> bool:
        """Whether the world that it watches is still that of this process."""
        return self._thread.is_alive() and dist.is_initialized() and dist.group.WORLD is self._world

    def stop(self) -> None:
        """Return when its thread has ended, or soon."""
        self._stopped.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self.poll_s) and dist.is_initialized() and dist.group.WORLD is self._world:
                mine = self._tell()
                if self._store.check([f"{_KEY}/end"]):
                    self._finish(json.loads(self._store.get(f"{_KEY}/end")))
                    return
                if mine.waits and mine.silent_s > self.timeout_s and self._look():
                    return
        except (RuntimeError, OSError):
            return  # the store is gone with the process that holds it: the world ends, and not by hanging

    def _tell(self) -> State:
        self._told += 1
        at = place()
        mine = State(
            told=self._told,
            silent_s=activity.silent_s(),
            begun=activity.begun,
            operation=activity.operation,
            waits=activity.inside or (activity.backward_follows and at.in_backward),
            where=at.words,
            outside=not at.in_torch and not at.in_ours,
        )
        self._store.set(f"{_KEY}/{self._rank}", json.dumps(asdict(mine)))
        return mine

    def _states(self) -> dict[int, State]:
        keys = [f"{_KEY}/{rank}" for rank in range(self._size)]
        return {r: State(**json.loads(self._store.get(key))) for r, key in enumerate(keys) if self._store.check([key])}

    def _look(self) -> bool:
        """End the world if no rank gets on; whether it did."""
        before = self._states()
        for _ in range(max(3, ceil(_ANSWERS_S / self.poll_s))):
            if self._stopped.wait(self.poll_s):
                return True
            mine = self._tell()  # the others look, too
        now = self._states()
        silent = {rank for rank, state in now.items() if rank in before and state.told == before[rank].told}
        answering = [state for rank, state in now.items() if rank not in silent]
        if not mine.waits or min(state.silent_s for state in answering) <= self.timeout_s:
            return False
        error = hang_error(now, silent, size=self._size, timeout_s=self.timeout_s)
        words = {"what": error.what, "why": error.why, "fix": error.fix, "by": self._rank}
        # The first one's words are those of all.
        said = self._store.compare_set(f"{_KEY}/end", "", json.dumps(words))
        self._finish(json.loads(said))
        return True

    def _finish(self, words: dict[str, Any]) -> None:
        by = words.pop("by")
        if self._rank in (0, by):
            self._stopped.wait(2.5 * self.poll_s)  # the others read it from a store that this process may hold
        self._end(RunError(words.pop("what"), **words), by == self._rank)


def hang_error(states: Mapping[int, State], silent: set[int], *, size: int, timeout_s: float) -> RunError:
    """The error that names the ranks that the others wait for, and what each was doing last.

    states: of the ranks that ever told one; silent: of those, the ranks that do so no more.
    """
    found, what = _suspects(states, silent, size)
    named = f"rank {found[0]} hangs" if len(found) == 1 else f"ranks {', '.join(map(str, found[:_SHOWN]))} hang"
    if len(found) == size:
        named = f"all {size} ranks wait for each other"
    lines = [_words(rank, states.get(rank), silent) for rank in (*found[:_SHOWN], *_others(states, found))]
    return RunError(
        f"{named}: {what}",
        why=f"no rank has got on for {timeout_s:g} s\n" + "\n".join(f"    {line}" for line in lines),
        fix="look where it is; where it only takes long, allow more: parallelize(timeout_s=), `run --timeout`",
    )


def _suspects(states: Mapping[int, State], silent: set[int], size: int) -> tuple[Sequence[int], str]:
    """The ranks that the others wait for, and why they are taken for them: the strongest sign that any rank shows."""
    missing = [rank for rank in range(size) if rank not in states]
    if missing:
        return missing, "it has not come to autopar.parallelize"
    if silent:
        return sorted(silent), f"it answers no more, last known in {states[min(silent)].operation}"
    away = [rank for rank, state in states.items() if not state.waits]
    if away:
        return sorted(away), f"its last operation was {states[min(away)].operation}, which is done"
    fewest = min(state.begun for state in states.values())
    behind = sorted(rank for rank, state in states.items() if state.begun == fewest)
    if len(behind) == size:
        behind = sorted(rank for rank, state in states.items() if state.outside) or behind
    return behind, f"it is in {states[behind[0]].operation}"


def _others(states: Mapping[int, State], found: Sequence[int]) -> list[int]:
    return [rank for rank in sorted(states) if rank not in found][:_SHOWN]


def _words(rank: int, state: State | None, silent: set[int]) -> str:
    if state is None:
        return f"rank {rank} never said anything"
    verb = "was last heard" if rank in silent else "waits" if state.waits else "is past"
    return f"rank {rank} {verb} in {state.operation}, at {state.where}".replace("is past in", "is past")


_tell_first: list[Callable[[RunError], None]] = []
_watches: list[Watch] = []


def _end_process(error: RunError, speaks: bool) -> None:
    for tell in _tell_first:
        tell(error)
    words = error if speaks else f"this rank ends with the others: {error.what}"
    print(f"error: {words}", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)


def tell_first(tell: Callable[[RunError], None]) -> None:
    """Let `tell` have the error before this process ends by it."""
    _tell_first.append(tell)


def check_timeout(timeout_s: object) -> None:
    """Raise InputError for what is no time limit."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise InputError(
            f"timeout_s is {timeout_s!r}",
            why="it is the seconds after which ranks that wait for one that hangs end",
            fix="give a number above 0, or leave it out",
        )


def watch(timeout_s: float, end: Ending | None = None) -> None:
    """Begin to watch the ranks of this world, or change the limit.

    A world of one rank, or of ranks that do not exist, is not watched, nor is any for an infinite limit.
    """
    current = [one for one in _watches if one.is_current]
    for one in current:
        one.timeout_s = timeout_s
    if current or not isfinite(timeout_s) or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        return
    for old in _watches:
        old.stop()
    made = Watch(timeout_s, end)
    _watches[:] = [made]
    atexit.register(made.stop)  # a thread must not be in the store while the interpreter ends
