"""The partitions of one table under the bounds of its intervals, looked at from the best one up.

A long chain in many stages has too many intervals to look at all. Those of partitions below a horizon are few; the
horizon starts just above a partition that is found greedily, and grows when nothing below it is left.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from autopar.solvers.partition import (
    MOST_INTERVALS,
    Cutting,
    Intervals,
    best_cuts,
    furthest,
    least_max,
    spread,
    within,
)
from autopar.solvers.quick import least_sum_ns
from autopar.solvers.segment import FORBIDDEN
from autopar.solvers.stages import StageCosts

_SLACK = 64
"""The horizon is this part of the greedy partition above it."""
_GREEDY = 8


class Partitions:
    """The ways to cut a table into stages, and the bounds of their stages, which are sharpened from outside."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs = costs
        tables = costs.tables
        self._more = tables.micro_batches - 1
        self._where = costs.contents.where
        self._bounds = [costs.bounds[costs.key(stage)] for stage in range(tables.stages)]
        self._sizes = np.append(costs.contents.size, 0)
        least = least_sum_ns(tables)
        self._least_sum = FORBIDDEN if least is None else least[0]
        self._horizon = -1
        self._stages: list[Intervals] | None = []
        self._greedy: list[tuple[int, ...]] = []

    @property
    def incomplete(self) -> bool:
        """Whether there are too many intervals to look at all partitions: then none proves that none is left."""
        return self._stages is None

    def contents(self, cuts: tuple[int, ...]) -> list[int]:
        """The content of each stage."""
        return [int(self._where[end, first]) for first, end in pairwise(cuts)]

    def best(self, below: int) -> Cutting | None:
        """The partition of least objective under the bounds as they are now; None when none is below `below`.

        With too many intervals: some partition, with 0 for all bounds.
        """
        while self._stages is not None:
            limit = min(below, self._horizon)
            self._stages = [one.at(cost) for one, cost in zip(self._stages, self._bounds, strict=False)]
            found = best_cuts(self._stages, self._more + 1, limit) if self._stages else None
            if found is not None:
                self._drop(found, limit)
            if found is not None or self._horizon >= below:
                return found
            self._widen(below)
        return self._greedily()

    def _drop(self, found: Cutting, limit: int) -> None:
        """Leave out the intervals of which every partition is at `limit` or above."""
        kept = []
        for one, through in zip(self._stages or (), found.through, strict=True):
            room = limit - 1 - self._more * found.least_max_ns - through
            keep = room >= 0
            if self._more:
                keep &= one.cost - found.least_max_ns <= room // self._more
            kept.append(one if keep.all() else one.only(keep))
        self._stages = kept

    def possible(self) -> bool:
        """Whether there may be a partition under the bounds; exact unless there are too many intervals."""
        if furthest(self._where, self._bounds, FORBIDDEN - 1) is not None:
            return True
        stages = self._within(FORBIDDEN - 1)
        return stages is None or least_max(stages) is not None

    def _greedily(self) -> Cutting | None:
        if len(self._greedy) < _GREEDY:
            cuts = self._spread()
            if cuts is None:
                return None
            self._greedy.append(cuts)
        nothing = [np.zeros(len(self._where), dtype=np.int64)] * len(self._bounds)
        return Cutting(value=0, cuts=self._greedy[-1], least_max_ns=0, before=nothing, after=nothing, through=nothing)

    def _widen(self, below: int) -> None:
        """Move the horizon up, to `below` at most, and gather the intervals of partitions under it."""
        cuts = self._spread()
        if cuts is None:
            self._horizon = below
        else:
            costs = [int(cost[one]) for cost, one in zip(self._bounds, self.contents(cuts), strict=True)]
            greedy = sum(costs) + self._more * max(costs)
            self._horizon = min(below, max(greedy + greedy // _SLACK, self._horizon + self._horizon // 8) + 1)
        self._stages = self._within((self._horizon - 1 - self._least_sum) // self._more if self._more else FORBIDDEN)

    def _within(self, limit: int) -> list[Intervals] | None:
        return within(self._where, self._sizes, self._bounds, limit, MOST_INTERVALS)

    def _spread(self) -> tuple[int, ...] | None:
        return spread(self._where, self._bounds, self._least_sum // (2 * len(self._bounds)))
