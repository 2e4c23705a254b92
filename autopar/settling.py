"""The last word on small tables: every choice that could be better than the best, asked of the memory walk in turn."""

from __future__ import annotations

from collections.abc import Callable

from autopar.pool import Pool
from autopar.price import INFEASIBLE
from autopar.request import Schedule
from autopar.solvers.below import all_below
from autopar.solvers.quick import quick_bound
from autopar.solvers.segment import FORBIDDEN

SMALL = 400
"""Entries of tables that are settled: beyond, choices that differ in the order of equal layers are too many."""
ASKED = 3000
"""How many choices are asked whether they fit."""


def settle(pool: Pool, bound_ns: int, halted: Callable[[], bool]) -> int:
    """The lower bound over all plans that fit afterwards, INFEASIBLE for none; a better plan, if any, joins the pool.

    Choices are listed below a limit that rises from the bound to the best known objective, and asked in their order.
    A table whose choices below a limit are too many keeps the bound that it had. Cost: see `all_below`, and a memory
    walk for each choice.
    """
    best_ns = pool.best_ns()
    known: dict[int, int] = {}
    for place, floor_ns in enumerate(pool.made.floors_ns):
        if floor_ns < best_ns and bound_ns < best_ns:
            least_ns = max(bound_ns, quick_bound(pool.made.lower[place]))
            if least_ns < best_ns:
                known[place] = least_ns
    open_ = [place for place in known if pool.made.lower[place].time_ns.size <= SMALL]
    asked = 0
    for limit_ns in _limits_ns(bound_ns, best_ns) if open_ else ():
        listed: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = []
        for place in list(open_):
            found = None if halted() else all_below(pool.made.lower[place], limit_ns)
            if found is None:
                open_.remove(place)
            else:
                listed += [(ns, place, layers, columns) for ns, layers, columns in found if ns >= known[place]]
        for ns, place, layers, columns in sorted(listed):
            asked += 1
            if asked > ASKED or halted():
                return min(ns, *known.values())
            for schedule in _schedules(pool, place):
                if pool.fits(place, layers, columns, schedule):
                    pool.add(place, layers, columns, schedule)
                    known.update(dict.fromkeys(open_, ns))
                    return min(ns, *known.values())
        known.update({place: max(known[place], limit_ns) for place in open_})
    return min([best_ns, *known.values()])


def _limits_ns(bound_ns: int, best_ns: int) -> tuple[int, ...]:
    """Objectives from the bound to the best, in larger and larger steps."""
    if best_ns < INFEASIBLE:
        return tuple(best_ns - int((best_ns - bound_ns) * left) for left in (7 / 8, 1 / 2, 0))
    return (*(int(bound_ns * more) for more in (1.2, 2)), FORBIDDEN)


def _schedules(pool: Pool, place: int) -> tuple[Schedule, ...]:
    """The schedule of a table, and GPipe, which has none of its own where 1F1B is legal."""
    cut = pool.made.cuts[place]
    twin = cut.pp > 1 and cut.schedule == "1f1b" and "gpipe" in pool.request.schedules
    return (cut.schedule, "gpipe") if twin else (cut.schedule,)
