"""What each pipeline rank does in a step, in order: the action tables of every schedule.

They equal the tables of torch.distributed.pipelining (tests compare them over many sizes), whose classes the runtime
executes; nothing here needs torch. Bubbles are not written down: a rank waits for what an action needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain
from typing import Literal

from autopar.request import Schedule
from autopar.schedules import rank_stages, stage_rank

Kind = Literal["F", "B", "I", "W"]
"""Forward, whole backward, and its two parts: gradients of the inputs, gradients of the weights."""

Action = tuple[Kind, int, int]
"""What is done, for which stage, for which micro-batch."""


@lru_cache(maxsize=1024)
def actions(
    schedule: Schedule, pp: int, rank: int, micro_batches: int, stages_per_rank: int = 1
) -> tuple[Action, ...]:
    """What a pipeline rank does in a step, in order. One rank alone runs its micro-batches one after another."""
    stages = rank_stages(schedule, pp=pp, rank=rank, stages_per_rank=stages_per_rank)
    if pp == 1 or schedule in ("1f1b", "gpipe"):
        return _one_stage(stages[0], in_flight(schedule, pp, rank, micro_batches), micro_batches)
    if schedule == "looped-bfs":
        return _looped(stages, micro_batches)
    if schedule == "zbv":
        return _zbv(pp, rank, micro_batches)
    if schedule == "dualpipev":
        return _dualpipev(pp, rank, micro_batches)
    return _interleaved(stages, pp, rank, micro_batches, split=schedule == "interleaved-zero-bubble")


def in_flight(schedule: Schedule, pp: int, stage: int, micro_batches: int, stages_per_rank: int = 1) -> int:
    """The largest number of micro-batches of a stage between their forward and the end of their backward."""
    if pp == 1 or schedule == "1f1b":
        return min(pp - stage, micro_batches)
    if schedule == "gpipe":
        return micro_batches
    rank, live, most = stage_rank(schedule, pp=pp, stage=stage), 0, 0
    for kind, place, _ in actions(schedule, pp, rank, micro_batches, stages_per_rank):
        if place == stage and kind != "I":
            live += 1 if kind == "F" else -1
            most = max(most, live)
    return most


def _one_stage(stage: int, warm: int, count: int) -> tuple[Action, ...]:
    """1F1B with `warm` forwards ahead of the first backward; GPipe with as many as there are."""
    order: list[Action] = [("F", stage, m) for m in range(warm)]
    for m in range(count):
        order.append(("B", stage, m))
        if warm + m < count:
            order.append(("F", stage, warm + m))
    return tuple(order)


def _looped(stages: tuple[int, ...], count: int) -> tuple[Action, ...]:
    """Breadth first: all micro-batches of a stage before those of the next, and all the way back."""
    forwards: list[Action] = [("F", stage, m) for stage in stages for m in range(count)]
    return (*forwards, *(("B", stage, m) for _, stage, m in reversed(forwards)))


def _interleaved(stages: tuple[int, ...], pp: int, rank: int, count: int, *, split: bool) -> tuple[Action, ...]:
    """Rounds of about pp micro-batches through each of the rank's stages, then one forward, one backward by turns.

    split: backwards in two parts, the second `rank` backwards later, so that inputs' gradients are passed on early.
    """
    each, total = len(stages), count * len(stages)
    round_size = count // max(1, count // pp)

    def place(k: int, turn: int) -> tuple[int, int]:
        group, within = divmod(k, round_size * each)
        return stages[turn * (within // round_size) + (each - 1 if turn < 0 else 0)], group * round_size + (
            within % round_size
        )

    forwards: list[Action] = [("F", *place(k, 1)) for k in range(total)]
    backwards = [place(k, -1) for k in range(total)]
    warm = min((each - 1) * round_size + (1 if split else 2) * (pp - 1 - rank), total)
    order = forwards[:warm]
    for k, (stage, m) in enumerate(backwards):
        order += forwards[warm + k : warm + k + 1]
        order.append(("I" if split else "B", stage, m))
        if split and k >= rank:
            order.append(("W", *backwards[k - rank]))
    if split:
        order += [("W", *backwards[k]) for k in range(max(0, total - rank), total)]
    return tuple(order)


class _Chain:
    """An order in the making that counts the micro-batches of each kind and stage by itself."""

    def __init__(self) -> None:
        self.order: list[Action] = []
        self._next: dict[tuple[Kind, int], int] = {}
        self._owed: deque[tuple[int, int]] = deque()

    def add(self, kinds: Iterable[tuple[Kind, int]]) -> None:
        """The next micro-batch of each kind and stage; a whole backward counts as the first part of one."""
        for kind, stage in kinds:
            key: tuple[Kind, int] = ("I" if kind == "B" else kind, stage)
            m = self._next.get(key, 0)
            self._next[key] = m + 1
            self.order.append((kind, stage, m))
            if kind == "I":
                self._owed.append((stage, m))

    def settle(self) -> None:
        """The second part of the oldest backward that lacks it, if any does."""
        if self._owed:
            self.order.append(("W", *self._owed.popleft()))

    def count(self, kind: Kind, stage: int) -> int:
        """How many of a kind and stage there are."""
        return self._next.get((kind, stage), 0)


def _zbv(pp: int, rank: int, count: int) -> tuple[Action, ...]:
    """ZB-V (Qi 2024, section 6): fills as if there were 2 pp - 1 micro-batches or more, and skips the missing."""
    out, back, most = rank, 2 * pp - 1 - rank, max(2 * pp - 1, count)
    made = _Chain()
    made.add([("F", out)] * (2 * (pp - rank) - 1))
    made.add([("F", back), ("F", out)] * rank)
    made.add([("F", back), ("I", back), ("W", back)] * (pp - rank))
    while made.count("F", back) < made.count("F", out) or made.count("F", out) < most:
        if made.count("F", out) < most:
            made.add([("F", out)])
        made.add([("I", out), ("W", out), ("F", back), ("I", back), ("W", back)])
    made.add([("I", out), ("I", back)] * rank)
    made.add([("I", out), ("W", out)] * (pp - rank))
    for stage in (back, out):
        made.add([("W", stage)] * (made.count("I", stage) - made.count("W", stage)))
    return tuple(action for action in made.order if action[2] < count)


def _dualpipev(pp: int, rank: int, count: int) -> tuple[Action, ...]:
    """DualPipeV (DeepSeek 2025), its eight phases; pairs that may be overlapped stand one after the other."""
    out, back = rank, 2 * pp - 1 - rank
    behind = pp - 1 - rank
    made = _Chain()
    made.add([("F", out)] * (2 * behind))
    made.add([("F", out), ("F", back)] * (rank + 1))
    for _ in range(behind):
        made.add([("I", back)])
        made.settle()
        made.add([("F", back)])
    made.add([("F", out), ("B", back), ("F", back), ("B", out)] * (count - 2 * pp + rank + 1))
    made.add([("B", back), ("F", back), ("B", out)] * behind)
    # From half of the last backwards on, the weights' gradients wait.
    ends: list[int] = list(chain.from_iterable((back, out) for _ in range(rank + 1)))
    whole = 2 * ((rank + 1) // 2) + (0 if rank % 2 else 1)
    made.add([("B" if place < whole else "I", stage) for place, stage in enumerate(ends)])
    for _ in range(behind):
        made.settle()
        made.add([("I", out)])
    for _ in range(rank + 1):
        made.settle()
    return tuple(made.order)
