"""The best way to cut a chain into stages when the cost of every stage interval is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.price import Int
from autopar.solvers.segment import FORBIDDEN

MOST_INTERVALS = 3_000_000
"""With more of them (some 100 MB) only greedy partitions are looked at."""
_CLOSE = 256
"""Where greedy partitions are not looked for any more: this part above what is known to be too small."""

Range = tuple[int, int]
"""The least and the largest of something."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Intervals:
    """Layers first..end-1 that may be one stage, ascending by end, then first; content: the number of their costs."""

    units: int
    first: Int
    end: Int
    content: Int
    cost: Int

    @classmethod
    def of(cls, where: NDArray[np.int32], cost: Int, firsts: Range, ends: Range, limit: int) -> Intervals:
        """Those that begin and end within these ranges and cost at most `limit`.

        where[b, a]: the content of layers a..b-1; cost[V + 1]: of each content, FORBIDDEN for the last, the empty one.
        """
        block = where[ends[0] : ends[1] + 1, firsts[0] : firsts[1] + 1]
        end, first = np.nonzero((cost <= min(limit, FORBIDDEN - 1))[block])
        content = block[end, first].astype(np.int64)
        return cls(
            units=len(where) - 1, first=first + firsts[0], end=end + ends[0], content=content, cost=cost[content]
        )

    def at(self, cost: Int) -> Intervals:
        """The same at other costs of the contents."""
        return Intervals(
            units=self.units, first=self.first, end=self.end, content=self.content, cost=cost[self.content]
        )

    def only(self, keep: NDArray[np.bool_]) -> Intervals:
        """Those that are kept."""
        return Intervals(
            units=self.units,
            first=self.first[keep],
            end=self.end[keep],
            content=self.content[keep],
            cost=self.cost[keep],
        )

    @cached_property
    def starts(self) -> Int:
        """The places at which another end begins."""
        return np.flatnonzero(np.diff(self.end, prepend=-1))

    def reached(self, values: Int) -> Int:
        """[U + 1]: the least of the values (one an interval) by end, FORBIDDEN where no interval ends."""
        found = np.full(self.units + 1, FORBIDDEN, dtype=np.int64)
        if len(values):
            found[self.end[self.starts]] = np.minimum(np.minimum.reduceat(values, self.starts), FORBIDDEN)
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Cutting:
    """The best partition: value, its P + 1 cuts, and what was learned on the way.

    least_max_ns: no partition has a smaller largest stage; before[i][a]: the least sum of the stages before i when i
    begins at a; after[i][b]: of those behind i when i ends at b; through[i]: the least sum of a partition with each
    interval of stage i.
    """

    value: int
    cuts: tuple[int, ...]
    least_max_ns: int
    before: list[Int]
    after: list[Int]
    through: list[Int]


def best_cuts(stages: Sequence[Intervals], micro_batches: int, below: int) -> Cutting | None:
    """The least sum_i T_i + (micro_batches - 1) * max_i T_i below `below`; None without one.

    The Pareto set of (sum, max) is walked from the least sum down: after a partition with sum f and max x, a better
    one needs a sum >= f and a max below x. Of equal ones the first found is returned. A few steps over the intervals
    that can be part of the answer.
    """
    least_largest = least_max(stages)
    if least_largest is None:
        return None
    lowest = least_largest[0]
    before, after = least_sums(stages)
    more = micro_batches - 1
    through = [b[one.first] + one.cost + a[one.end] for one, b, a in zip(stages, before, after, strict=True)]
    least = int(through[0].min())
    best: tuple[int, tuple[int, ...]] | None = None
    sums, chosen = list(through), list(stages)

    def narrow(limit: int) -> bool:
        """Drop the intervals above the limit, and those in partitions whose sum is too large; whether some stay."""
        most = below - more * lowest
        for i, one in enumerate(chosen):
            keep = (one.cost <= limit) & (sums[i] < most)
            if not keep.all():
                chosen[i], sums[i] = one.only(keep), sums[i][keep]
            if not len(chosen[i].cost):
                return False
        return True

    if more:
        # The other end of the set is close to the best for many micro-batches, and cuts off most of the walk.
        most = below - more * lowest
        kept = [one.only((one.cost <= lowest) & (sum_ < most)) for one, sum_ in zip(stages, through, strict=True)]
        found = least_sum(kept)
        if found is not None and found[0] + more * found[1] < below:
            below = found[0] + more * found[1]
            best = below, found[2]
    limit = (below - 1 - least) // more if more else FORBIDDEN
    while limit >= lowest and narrow(limit):
        found = least_sum(chosen)
        if found is None:
            break
        total, largest, cuts = found
        if total + more * largest < below:
            below = total + more * largest
            best = below, cuts
        if not more:
            break
        limit = min(largest - 1, (below - 1 - total) // more)
    if best is None:
        return None
    return Cutting(value=best[0], cuts=best[1], least_max_ns=lowest, before=before, after=after, through=through)


def least_sum(stages: Sequence[Intervals]) -> tuple[int, int, tuple[int, ...]] | None:
    """Sum, max and cuts of the partition of least sum; None when there is none."""
    found = _walk(stages, np.add, 0)
    if found is None:
        return None
    total, places = found
    largest = max(int(stage.cost[place]) for stage, place in zip(stages, places, strict=True))
    return total, largest, _cuts(stages, places)


def least_max(stages: Sequence[Intervals]) -> tuple[int, tuple[int, ...]] | None:
    """The least max_i T_i and its cuts; None when there is no partition."""
    found = _walk(stages, np.maximum, -FORBIDDEN)
    return None if found is None else (found[0], _cuts(stages, found[1]))


def _walk(stages: Sequence[Intervals], join: np.ufunc, least: int) -> tuple[int, list[int]] | None:
    """The least joined cost of a partition and its interval in each stage, the first of equal ones."""
    units = stages[0].units
    reach = _start(units, least)
    passed = []
    for stage in stages:
        joined = join(reach[stage.first], stage.cost)
        passed.append(joined)
        reach = stage.reached(joined)
    if reach[-1] >= FORBIDDEN:
        return None
    places, end = [], units
    for stage, joined in zip(reversed(stages), reversed(passed), strict=True):
        begin, stop = np.searchsorted(stage.end, [end, end + 1])
        places.append(int(begin) + int(joined[begin:stop].argmin()))
        end = int(stage.first[places[-1]])
    return int(reach[-1]), places[::-1]


def _cuts(stages: Sequence[Intervals], places: list[int]) -> tuple[int, ...]:
    return (0, *(int(stage.end[place]) for stage, place in zip(stages, places, strict=True)))


def least_sums(stages: Sequence[Intervals]) -> tuple[list[Int], list[Int]]:
    """before[i][a]: the least sum of the stages before i when i starts at a; after[i][b]: of those behind i."""
    units = stages[0].units
    before, after = [_start(units)], [_start(units)[::-1]]
    for stage in stages[:-1]:
        before.append(stage.reached(before[-1][stage.first] + stage.cost))
    for stage in reversed(stages[1:]):
        left = np.full(units + 1, FORBIDDEN, dtype=np.int64)
        np.minimum.at(left, stage.first, stage.cost + after[-1][stage.end])
        after.append(left)
    return before, after[::-1]


def within(
    where: NDArray[np.int32], sizes: Int, costs: Sequence[Int], limit: int, most: int
) -> list[Intervals] | None:
    """The intervals of each stage that cost at most `limit` and leave room for the other stages; None for over `most`.

    where and costs (of each stage) as for `Intervals.of`; sizes[V + 1]: layers of each content.
    """
    units, stages = len(where) - 1, len(costs)
    longest = [int(sizes[cost <= min(limit, FORBIDDEN - 1)].max(initial=0)) for cost in costs]
    latest, earliest = [0], [units]
    for stage in range(stages - 1):
        latest.append(min(units - (stages - 1 - stage), latest[-1] + longest[stage]))
        earliest.append(max(stages - 1 - stage, earliest[-1] - longest[stages - 1 - stage]))
    places = [*zip(reversed(earliest[1:]), latest[1:], strict=True)]
    found: list[Intervals] = []
    count = 0
    for cost, firsts, ends in zip(costs, [(0, 0), *places], [*places, (units, units)], strict=True):
        found.append(Intervals.of(where, cost, firsts, ends, limit))
        count += len(found[-1].cost)
        if count > most:
            return None
    return found


def furthest(where: NDArray[np.int32], costs: Sequence[Int], limit: int) -> tuple[int, ...] | None:
    """Cuts in which each stage takes as many layers as cost at most `limit`; None when that does not reach the end.

    where and costs as for `within`. O(P U).
    """
    units, stages = len(where) - 1, len(costs)
    cuts = [0]
    for stage, cost in enumerate(costs):
        first = cuts[-1]
        last = units - (stages - 1 - stage)
        lowest = last if stage == stages - 1 else first + 1
        open_ = np.flatnonzero(cost[where[lowest : last + 1, first]] <= limit)
        if not open_.size:
            return None
        cuts.append(lowest + int(open_[-1]))
    return tuple(cuts)


def spread(where: NDArray[np.int32], costs: Sequence[Int], low: int) -> tuple[int, ...] | None:
    """Cuts whose largest stage is about as small as can be, found greedily; None when none is found.

    low: below which no largest stage is looked for.
    """
    best: tuple[int, ...] | None = None
    high = FORBIDDEN - 1
    while best is None or high - low > 1 + abs(low) // _CLOSE:
        limit = high if best is None else (low + high) // 2
        cuts = furthest(where, costs, limit)
        if cuts is None:
            if best is None:
                return None
            low = limit
            continue
        best = cuts
        stages = zip(costs, pairwise(cuts), strict=True)
        high = min(limit - 1, max(int(cost[where[end, first]]) for cost, (first, end) in stages))
    return best


def _start(units: int, least: int = 0) -> Int:
    reach = np.full(units + 1, FORBIDDEN, dtype=np.int64)
    reach[0] = least
    return reach
