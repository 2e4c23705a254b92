"""The order of forwards and backwards on each stage, and the event simulation of a step.

The orders equal what the schedules of torch.distributed.pipelining execute (a test compares them); nothing here needs
torch. A forward waits for the forward of the stage before, a backward for the backward of the stage after, each plus
one send; a stage does one thing at a time, in its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from autopar.request import Schedule

Action = tuple[Literal["F", "B"], int]
"""Forward or backward of a micro-batch."""


@lru_cache(maxsize=256)
def actions(schedule: Schedule, stages: int, stage: int, micro_batches: int) -> tuple[Action, ...]:
    """What a stage does in a step, in order.

    gpipe: all forwards, then all backwards; 1f1b: min(stages - stage, micro_batches) forwards, then by turns. One
    stage alone runs its micro-batches one after another under either name.
    """
    count = micro_batches
    warm = in_flight(schedule, stages, stage, count)
    order: list[Action] = [("F", m) for m in range(warm)]
    for m in range(count):
        order.append(("B", m))
        if warm + m < count:
            order.append(("F", warm + m))
    return tuple(order)


def in_flight(schedule: Schedule, stages: int, stage: int, micro_batches: int) -> int:
    """The largest number of micro-batches of a stage between their forward and the end of their backward."""
    if schedule == "gpipe" and stages > 1:
        return micro_batches
    return min(stages - stage, micro_batches)


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds of a stage: forward and backward of one micro-batch, and what follows its last backward."""

    forward_s: float
    backward_s: float
    tail_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One bar of the timeline; kind "tail" is gradient sync and optimizer, without a micro-batch (-1)."""

    start_s: float
    end_s: float
    stage: int
    micro_batch: int
    kind: Literal["F", "B", "tail"]


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A simulated step: its operations by start, its end, and the stage that ends last."""

    operations: tuple[Operation, ...]
    step_s: float
    last_stage: int

    def busy_s(self, stage: int) -> float:
        """Seconds in which a stage works."""
        return sum(op.end_s - op.start_s for op in self.operations if op.stage == stage)


def simulate(stages: Sequence[StageTimes], *, schedule: Schedule, micro_batches: int, send_s: float) -> Timeline:
    """The timeline of a step, in O(stages * micro-batches).

    The stages of equal end that end last: the first is named. Raises ValueError when nothing would run.
    """
    ends, clock = _ends(stages, schedule=schedule, micro_batches=micro_batches, send_s=send_s)
    operations: list[Operation] = []
    for stage, (times, done) in enumerate(zip(stages, ends, strict=True)):
        for (kind, m), (start_s, end_s) in done.items():
            operations.append(Operation(start_s=start_s, end_s=end_s, stage=stage, micro_batch=m, kind=kind))
        if times.tail_s:
            start_s = clock[stage] - times.tail_s
            operations.append(Operation(start_s=start_s, end_s=clock[stage], stage=stage, micro_batch=-1, kind="tail"))
    step_s = max(clock)
    operations.sort(key=lambda op: (op.start_s, op.stage, op.micro_batch))
    return Timeline(operations=tuple(operations), step_s=step_s, last_stage=clock.index(step_s))


def step(stages: Sequence[StageTimes], *, schedule: Schedule, micro_batches: int, send_s: float) -> tuple[float, int]:
    """The seconds of the simulated step and the stage that ends last: `simulate` without its operations."""
    clock = _ends(stages, schedule=schedule, micro_batches=micro_batches, send_s=send_s)[1]
    step_s = max(clock)
    return step_s, clock.index(step_s)


def _ends(
    stages: Sequence[StageTimes], *, schedule: Schedule, micro_batches: int, send_s: float
) -> tuple[list[dict[Action, tuple[float, float]]], list[float]]:
    """When each action of each stage starts and ends, and when each stage ends, its tail included."""
    count = len(stages)
    if count < 1 or micro_batches < 1:
        raise ValueError(f"nothing to simulate: {count} stages, {micro_batches} micro-batches")
    orders = [actions(schedule, count, stage, micro_batches) for stage in range(count)]
    done: list[dict[Action, tuple[float, float]]] = [{} for _ in range(count)]
    clock = [0.0] * count
    remaining = sum(map(len, orders))
    while remaining:
        before = remaining
        for stage, times in enumerate(stages):
            mine, order, now = done[stage], orders[stage], clock[stage]
            place = len(mine)
            while place < len(order):
                action = order[place]
                forward = action[0] == "F"
                source = stage - 1 if forward else stage + 1
                start = now
                if 0 <= source < count:
                    arrived = done[source].get(action)
                    if arrived is None:
                        break
                    start = max(now, arrived[1] + send_s)
                now = start + (times.forward_s if forward else times.backward_s)
                mine[action] = start, now
                place += 1
            clock[stage] = now
        remaining = sum(len(order) - len(mine) for order, mine in zip(orders, done, strict=True))
        if remaining == before:
            raise ValueError(f"the schedule {schedule} waits for itself")
    return done, [now + times.tail_s for now, times in zip(clock, stages, strict=True)]


def lower_bound_s(stages: Sequence[StageTimes], *, micro_batches: int, send_s: float) -> float:
    """Seconds that no 1F1B step goes below, tails left out.

    max over s of  sum_{j<s} (t_j + 2c) + max(M t_s, floor(M / (S-s)) R_s),  R_s = sum_{j>=s} t_j + 2c (S-1-s)
    (design: cost model, section 4: no violation in 4320 simulated cases, mean gap 4.7 %).
    """
    t = [times.forward_s + times.backward_s for times in stages]
    count, bound_s = len(t), 0.0
    for s in range(count):
        ahead_s = sum(t[:s]) + 2 * send_s * s
        round_s = sum(t[s:]) + 2 * send_s * (count - 1 - s)
        bound_s = max(bound_s, ahead_s + max(micro_batches * t[s], micro_batches // (count - s) * round_s))
    return bound_s
