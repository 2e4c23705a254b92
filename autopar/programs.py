"""All actions of a step in one list in which each comes after what it waits for: what the simulation goes through."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from autopar.orders import Action, actions
from autopar.request import Schedule
from autopar.schedules import stage_rank

_KINDS = {"F": 0, "B": 1, "I": 2, "W": 3}
_CODES = 2 * len(_KINDS)


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """All actions of a step in an order in which each comes after what it waits for.

    Of each action: its rank, its code (what it costs: stage * 8 + kind * 2 + whether it gathers), and the place + 1
    of what it waits for, or 0. counts: how often each rank has each code.
    """

    acts: list[Action]
    ranks: list[int]
    codes: list[int]
    sources: list[int]
    counts: list[dict[int, int]]


@lru_cache(maxsize=64)
def program(schedule: Schedule, pp: int, stages_per_rank: int, micro_batches: int) -> Program:
    """The program of a schedule, in O(stages * micro-batches); ValueError when it waits for itself."""
    if pp < 1 or stages_per_rank < 1 or micro_batches < 1:
        raise ValueError(f"nothing to simulate: {pp} ranks, {stages_per_rank} stages, {micro_batches} micro-batches")
    last = pp * stages_per_rank - 1
    home = [stage_rank(schedule, pp=pp, stage=stage) for stage in range(last + 1)]
    todo = [actions(schedule, pp, rank, micro_batches, stages_per_rank) for rank in range(pp)]
    forwards, backwards = ([[0] * micro_batches for _ in home] for _ in range(2))
    whole = [False] * (last + 1)
    next_of = [0] * pp
    made = Program(acts=[], ranks=[], codes=[], sources=[], counts=[])
    orders_codes: list[list[int]] = [[] for _ in range(pp)]
    remaining, made_so_far = sum(map(len, todo)), 0
    while remaining:
        before = remaining
        for rank, order in enumerate(todo):
            place, codes = next_of[rank], orders_codes[rank]
            first = place
            while place < len(order):
                kind, stage, m = order[place]
                source = 0
                if kind == "F":
                    if stage and home[stage - 1] != rank:
                        source = forwards[stage - 1][m]
                        if not source:
                            break
                elif kind != "W" and stage < last and home[stage + 1] != rank:
                    source = backwards[stage + 1][m]
                    if not source:
                        break
                codes.append(stage * _CODES + _KINDS[kind] * 2 + (not whole[stage]))
                whole[stage] = kind == "F" or kind == "I"
                made.sources.append(source)
                made_so_far += 1
                if kind == "F":
                    forwards[stage][m] = made_so_far
                elif kind != "W":
                    backwards[stage][m] = made_so_far
                place += 1
            if place > first:
                made.acts.extend(order[first:place])
                made.ranks.extend([rank] * (place - first))
                made.codes.extend(codes[first:place])
                remaining -= place - first
                next_of[rank] = place
        if remaining == before:
            raise ValueError(f"the schedule {schedule} waits for itself")
    made.counts.extend(dict(Counter(codes)) for codes in orders_codes)
    return made
