"""The best way to cut a chain into stages when the cost of every stage interval is known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.price import Int
from autopar.solvers.segment import FORBIDDEN


def best_cuts(costs: list[Int], micro_batches: int, below: int) -> tuple[int, tuple[int, ...]] | None:
    """The least sum_i T_i + (micro_batches - 1) * max_i T_i below `below`, and its P + 1 cuts; None without one.

    costs[i][a, b] (int64[U + 1, U + 1]): T_i of layers a..b-1 on stage i, FORBIDDEN where impossible. The Pareto set
    of (sum, max) is walked from the least sum down: after a partition with sum f and max x, a better one needs a sum
    >= f and a max below x. Of equal ones the first found is returned. O(P U^2) once, then a few steps over the
    intervals that can be part of the answer.
    """
    lowest = _least_max(costs)
    if lowest >= FORBIDDEN:
        return None
    before, after = least_sums(costs)
    intervals = [_Intervals.of(*stage) for stage in zip(costs, before, after, strict=True)]
    more = micro_batches - 1
    best: tuple[int, tuple[int, ...]] | None = None
    if more:
        # The other end of the set is close to the best for many micro-batches, and cuts off most of the walk.
        found = _least_sum([stage.within(lowest, below - more * lowest) for stage in intervals])
        if found is not None and found[0] + more * found[1] < below:
            below = found[0] + more * found[1]
            best = below, found[2]
    limit = (below - 1 - int(intervals[0].through.min())) // more if more else FORBIDDEN
    while limit >= lowest:
        intervals = [stage.within(limit, below - more * lowest) for stage in intervals]
        found = _least_sum(intervals)
        if found is None:
            break
        total, largest, cuts = found
        if total + more * largest < below:
            below = total + more * largest
            best = below, cuts
        if not more:
            break
        limit = min(largest - 1, (below - 1 - total) // more)
    return best


@dataclass(frozen=True, kw_only=True, eq=False)
class _Intervals:
    """The intervals first..end-1 of one stage that still matter, by end, then first.

    through: the least sum of a partition with that interval.
    """

    units: int
    first: Int
    end: Int
    cost: Int
    through: Int

    @classmethod
    def of(cls, cost: Int, before: Int, after: Int) -> _Intervals:
        """All that are possible."""
        through = before[:, None] + cost + after[None, :]
        end, first = np.nonzero(through.T < FORBIDDEN)
        return cls(units=len(before) - 1, first=first, end=end, cost=cost[first, end], through=through[first, end])

    def within(self, limit: int, most: int) -> _Intervals:
        """Those of at most `limit` in partitions whose sum is below `most`."""
        keep = np.flatnonzero((self.cost <= limit) & (self.through < most))
        return _Intervals(
            units=self.units,
            first=self.first[keep],
            end=self.end[keep],
            cost=self.cost[keep],
            through=self.through[keep],
        )


def _least_sum(intervals: list[_Intervals]) -> tuple[int, int, tuple[int, ...]] | None:
    """Sum, max and cuts of the partition of least sum of these intervals."""
    units = intervals[0].units
    reach = np.full(units + 1, FORBIDDEN, dtype=np.int64)
    reach[0] = 0
    passed = []
    for stage in intervals:
        if not len(stage.cost):
            return None
        sums = reach[stage.first] + stage.cost
        passed.append(sums)
        start = np.flatnonzero(np.diff(stage.end, prepend=-1))
        reach = np.full(units + 1, FORBIDDEN, dtype=np.int64)
        reach[stage.end[start]] = np.minimum(np.minimum.reduceat(sums, start), FORBIDDEN)
    total = int(reach[-1])
    if total >= FORBIDDEN:
        return None
    cuts, largest = [units], 0
    for stage, sums in zip(reversed(intervals), reversed(passed), strict=True):
        begin, stop = np.searchsorted(stage.end, [cuts[-1], cuts[-1] + 1])
        place = int(begin) + int(sums[begin:stop].argmin())
        largest = max(largest, int(stage.cost[place]))
        cuts.append(int(stage.first[place]))
    return total, largest, tuple(reversed(cuts))


def least_max(costs: list[Int]) -> tuple[int, tuple[int, ...]] | None:
    """The least max_i costs[i], and its cuts; None when every partition meets a FORBIDDEN interval."""
    reach = _start(costs, least=-FORBIDDEN)
    choices = []
    for cost in costs:
        sums = np.maximum(reach[:, None], cost)
        choices.append(sums.argmin(axis=0))
        reach = sums.min(axis=0)
    if reach[-1] >= FORBIDDEN:
        return None
    cuts = [len(reach) - 1]
    for first in reversed(choices):
        cuts.append(int(first[cuts[-1]]))
    return int(reach[-1]), tuple(reversed(cuts))


def least_sums(costs: list[Int]) -> tuple[list[Int], list[Int]]:
    """before[i][a]: the least sum of the stages before i when i starts at a; after[i][b]: of those behind i."""
    before, after = [_start(costs)], [_start(costs)[::-1]]
    for cost in costs[:-1]:
        before.append(np.minimum((before[-1][:, None] + cost).min(axis=0), FORBIDDEN))
    for cost in reversed(costs[1:]):
        after.append(np.minimum((cost + after[-1][None, :]).min(axis=1), FORBIDDEN))
    return before, after[::-1]


def _least_max(costs: list[Int]) -> int:
    found = least_max(costs)
    return FORBIDDEN if found is None else found[0]


def _start(costs: list[Int], least: int = 0) -> Int:
    reach = np.full(costs[0].shape[0], FORBIDDEN, dtype=np.int64)
    reach[0] = least
    return reach
