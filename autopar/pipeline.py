"""The event simulation of a step: every rank works through its own order, waits for what it needs, then ends the step.

A forward waits for the forward of the stage before, a backward (or its first part) for that of the stage after, each
plus one send where they stand on different ranks. A rank does one thing at a time. After its last action it sums its
gradients; then all ranks wait for one another (loss and gradient norm are global), and each runs its optimizer.

Ranks that share cores compute faster while others wait: `Sharing` says how fast, and the simulation then follows the
speeds from event to event. Otherwise the end of every action is a longest path, found in one pass over a table that
depends on schedule and sizes alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.orders import Kind
from autopar.programs import Program, program
from autopar.request import Schedule
from autopar.schedules import stage_rank
from autopar.sharing import Sharing, shared_bars

ASSUMED_INPUT_PART = 0.5
"""Assumed: the share of a backward that the gradients of the inputs take; each product of it has two equal halves."""


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds of a stage for one micro-batch on one rank.

    forward_s, backward_s: all of it; waiting_forward_s, waiting_backward_s: the part of them in which the rank waits
    for collectives and computes nothing; gather_s: what a forward or backward takes longer that finds the parameters
    of ZeRO-2 layers sharded (the first forward, and what follows a backward). Of a backward in two parts the first
    takes the collectives and ASSUMED_INPUT_PART of the rest.
    """

    forward_s: float
    backward_s: float
    waiting_forward_s: float = 0.0
    waiting_backward_s: float = 0.0
    gather_s: float = 0.0

    def seconds(self, first: bool) -> tuple[tuple[float, float], ...]:
        """(all, thereof waiting) of F, B, I and W, each warm and with its gather; `first`: no inputs' gradients.

        torch runs the whole backward of the first stage in its second part.
        """
        whole, waits = self.backward_s, self.waiting_backward_s
        later = (whole - waits) * (1 - ASSUMED_INPUT_PART)
        rows = [(self.forward_s, self.waiting_forward_s), (whole, waits)]
        rows += [(0.0, 0.0), (whole, waits)] if first else [(whole - later, waits), (later, 0.0)]
        return tuple(
            pair
            for all_s, wait_s in rows
            for pair in ((all_s, wait_s), (all_s + self.gather_s, wait_s + self.gather_s))
        )


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a step ends, in seconds: gradient sync and optimizer of each pipeline rank (empty for none), and, over ranks
    that wait for one another, the sync of tied weights on the first and last stage, and the global reductions.
    """

    sync_s: tuple[float, ...] = ()
    tied_s: float = 0.0
    clip_s: float = 0.0
    optimizer_s: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One bar of the timeline; micro_batch and stage are -1 for what ends the step."""

    start_s: float
    end_s: float
    rank: int
    stage: int
    micro_batch: int
    kind: Literal["F", "B", "I", "W", "sync", "tied", "clip", "optimizer"]


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A simulated step; last_rank: the pipeline rank that the others wait for before the end of the step; ready_s:
    when it is ready for that; busy_s: its seconds in actions.
    """

    step_s: float
    last_rank: int
    ready_s: float
    busy_s: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A simulated step: its operations by start, its end, and the pipeline rank that the others wait for."""

    operations: tuple[Operation, ...]
    step_s: float
    last_rank: int

    def busy_s(self, rank: int) -> float:
        """Seconds in which a rank works."""
        return sum(op.end_s - op.start_s for op in self.operations if op.rank == rank)


def step(
    stages: Sequence[StageTimes],
    *,
    schedule: Schedule,
    micro_batches: int,
    send_s: float,
    pp: int | None = None,
    ending: Ending | None = None,
    sharing: Sharing | None = None,
) -> StepTime:
    """`simulate` without its operations, in O(stages * micro-batches)."""
    made, pp = _program(stages, schedule, micro_batches, pp)
    table = _table(stages)
    if sharing is not None and sharing.matters:
        bars = shared_bars(made, table, pp, send_s, sharing)
        clock, busy = [0.0] * pp, [0.0] * pp
        for rank, (start, end) in zip(made.ranks, bars, strict=True):
            clock[rank] = end
            busy[rank] += end - start
    else:
        lengths, clock, arrived = [all_s for all_s, _ in table], [0.0] * pp, [0.0]
        arrive = arrived.append
        for rank, code, source in zip(made.ranks, made.codes, made.sources, strict=True):
            now = clock[rank]
            wait = arrived[source]
            now = (wait if wait > now else now) + lengths[code]
            clock[rank] = now
            arrive(now + send_s)
        busy = [sum(count * lengths[code] for code, count in found.items()) for found in made.counts]
    ready = _ready(clock, stages, schedule, pp, ending)
    last = ready.index(max(ready))
    step_s = ready[last] + _after(ending)
    return StepTime(step_s=step_s, last_rank=last, ready_s=ready[last], busy_s=busy[last])


def simulate(
    stages: Sequence[StageTimes],
    *,
    schedule: Schedule,
    micro_batches: int,
    send_s: float,
    pp: int | None = None,
    ending: Ending | None = None,
    sharing: Sharing | None = None,
) -> Timeline:
    """The timeline of a step: `stages` in the order of the chain, on `pp` ranks (one stage a rank when None).

    Of ranks that the others wait for the first is named. Raises ValueError when nothing would run.
    """
    made, pp = _program(stages, schedule, micro_batches, pp)
    table = _table(stages)
    if sharing is not None and sharing.matters:
        bars = shared_bars(made, table, pp, send_s, sharing)
    else:
        bars = []
        clock, arrived = [0.0] * pp, [0.0]
        for rank, code, source in zip(made.ranks, made.codes, made.sources, strict=True):
            start = max(clock[rank], arrived[source])
            clock[rank] = start + table[code][0]
            bars.append((start, clock[rank]))
            arrived.append(clock[rank] + send_s)
    clock = [0.0] * pp
    found = []
    for rank, (kind, stage, m), (start, end) in zip(made.ranks, made.acts, bars, strict=True):
        found.append(Operation(start_s=start, end_s=end, rank=rank, stage=stage, micro_batch=m, kind=kind))
        clock[rank] = end
    ready = _ready(clock, stages, schedule, pp, ending)
    found += _ending_bars(clock, ready, _ends(stages, schedule, pp), ending or Ending())
    found.sort(key=lambda op: (op.start_s, op.rank, op.end_s, op.stage, op.micro_batch))
    last = ready.index(max(ready))
    return Timeline(operations=tuple(found), step_s=ready[last] + _after(ending), last_rank=last)


@dataclass(frozen=True, kw_only=True)
class CriticalPath:
    """What a step waits for, without its ending: how often which (kind, stage), how many sends, and its seconds."""

    seconds: float
    actions: dict[tuple[Kind, int], int]
    sends: int


def critical_path(
    stages: Sequence[StageTimes], *, schedule: Schedule, micro_batches: int, send_s: float, pp: int | None = None
) -> CriticalPath:
    """The longest path of a step, in O(stages * micro-batches); of equal ones that over the rank's own actions.

    seconds = sum of the actions' seconds + sends * send_s.
    """
    made, pp = _program(stages, schedule, micro_batches, pp)
    lengths = [all_s for all_s, _ in _table(stages)]
    clock, last_of, ends, before = [0.0] * pp, [0] * pp, [0.0], [0]
    for place, (rank, code, source) in enumerate(zip(made.ranks, made.codes, made.sources, strict=True), 1):
        now, arrived = clock[rank], ends[source] + send_s
        by_send = bool(source) and arrived > now
        now = (arrived if by_send else now) + lengths[code]
        before.append(-source if by_send else last_of[rank])
        clock[rank], last_of[rank] = now, place
        ends.append(now)
    seconds = max(clock)
    place, sends = last_of[clock.index(seconds)], 0
    found: Counter[tuple[Kind, int]] = Counter()
    while place:
        kind, stage, _ = made.acts[place - 1]
        found[kind, stage] += 1
        sends += before[place] < 0
        place = abs(before[place])
    return CriticalPath(seconds=seconds, actions=dict(found), sends=sends)


def _program(
    stages: Sequence[StageTimes], schedule: Schedule, micro_batches: int, pp: int | None
) -> tuple[Program, int]:
    pp = len(stages) if pp is None else pp
    if not stages or pp < 1 or len(stages) % pp:
        raise ValueError(f"nothing to simulate: {len(stages)} stages on {pp} ranks")
    return program(schedule, pp, len(stages) // pp, micro_batches), pp


def _table(stages: Sequence[StageTimes]) -> list[tuple[float, float]]:
    """Per code of a program: seconds, and seconds of waiting among them."""
    return [pair for place, times in enumerate(stages) for pair in times.seconds(place == 0)]


def _ends(stages: Sequence[StageTimes], schedule: Schedule, pp: int) -> tuple[int, int]:
    """The ranks of the first and the last stage."""
    return stage_rank(schedule, pp=pp, stage=0), stage_rank(schedule, pp=pp, stage=len(stages) - 1)


def _ready(
    clock: Sequence[float], stages: Sequence[StageTimes], schedule: Schedule, pp: int, ending: Ending | None
) -> list[float]:
    """When each rank has the sums of its gradients."""
    if ending is None:
        return list(clock)
    ready = [now + s for now, s in zip(clock, ending.sync_s, strict=True)] if ending.sync_s else list(clock)
    if ending.tied_s:
        first, last = _ends(stages, schedule, pp)
        ready[first] = ready[last] = max(ready[first], ready[last]) + ending.tied_s
    return ready


def _after(ending: Ending | None) -> float:
    """Seconds from when the last rank is ready."""
    return 0.0 if ending is None else ending.clip_s + max(ending.optimizer_s, default=0.0)


def _ending_bars(
    clock: Sequence[float], ready: Sequence[float], ends: tuple[int, int], ending: Ending
) -> list[Operation]:
    """What each rank does after its last action."""
    found, ready_s = [], max(ready)
    for rank, now in enumerate(clock):
        sync_s = ending.sync_s[rank] if ending.sync_s else 0.0
        own_s = ending.optimizer_s[rank] if ending.optimizer_s else 0.0
        tied_s = ending.tied_s if rank in ends else 0.0
        clip_s = ready_s + ending.clip_s
        bars: tuple[tuple[Literal["sync", "tied", "clip", "optimizer"], float, float], ...] = (
            ("sync", now, now + sync_s),
            ("tied", ready[rank] - tied_s, ready[rank]),
            ("clip", ready_s, clip_s),
            ("optimizer", clip_s, clip_s + own_s),
        )
        for kind, start_s, end_s in bars:
            if end_s > start_s:
                found.append(Operation(start_s=start_s, end_s=end_s, rank=rank, stage=-1, micro_batch=-1, kind=kind))
    return found


def lower_bound_s(stages: Sequence[StageTimes], *, micro_batches: int, send_s: float) -> float:
    """Seconds that no 1F1B step goes below, its ending left out.

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
