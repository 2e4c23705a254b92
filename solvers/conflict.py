"""Which of several demands are to blame when together they leave nothing possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def irreducible(demands: Sequence[T], is_feasible: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """Demands that are infeasible together, of which any one could be dropped to make the rest feasible.

    By deletion filtering (Chinneck and Dravnieks 1991), in the order given, so that the later ones are named;
    empty when nothing is feasible even without demands. is_feasible must not turn False when demands are dropped.
    len(demands) + 2 calls of it at most. ValueError when all of them together are feasible.
    """
    kept = tuple(demands)
    if is_feasible(kept):
        raise ValueError("the demands are feasible together: there is no conflict to name")
    if kept and not is_feasible(()):
        return ()
    place = 0
    while place < len(kept):
        without = kept[:place] + kept[place + 1 :]
        if not without or is_feasible(without):
            place += 1
        else:
            kept = without
    return kept
