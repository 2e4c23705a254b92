"""The best way to cut a chain into stages when the cost of every stage interval is known."""

from __future__ import annotations

import numpy as np

from autopar.price import Int
from autopar.solvers.segment import FORBIDDEN


def best_cuts(costs: list[Int], micro_batches: int, below: int) -> tuple[int, tuple[int, ...]] | None:
    """The least sum_i T_i + (micro_batches - 1) * max_i T_i below `below`, and its P + 1 cuts; None without one.

    costs[i][a, b] (int64[U + 1, U + 1]): T_i of layers a..b-1 on stage i, FORBIDDEN where impossible. The Pareto set
    of (sum, max) is walked from the least sum down: after a partition with sum f and max x, a better one needs a sum
    >= f and a max below x. O(P U^2) per step, a few steps.
    """
    lowest = _least_max(costs)
    if lowest >= FORBIDDEN:
        return None
    best: tuple[int, tuple[int, ...]] | None = None
    limit = min(FORBIDDEN - 1, (below - 1) // micro_batches)
    while limit >= lowest:
        found = _least_sum(costs, limit)
        if found is None:
            break
        total, largest, cuts = found
        value = total + (micro_batches - 1) * largest
        if value < below:
            best, below = (value, cuts), value
        if micro_batches == 1 or total + (micro_batches - 1) * lowest >= below:
            break
        limit = min(largest - 1, (below - 1 - total) // (micro_batches - 1))
    return best


def _least_sum(costs: list[Int], limit: int) -> tuple[int, int, tuple[int, ...]] | None:
    """Sum, max and cuts of the partition of least sum with every stage <= limit."""
    reach = _start(costs)
    places = np.arange(len(reach))
    choices = []
    for cost in costs:
        sums = reach[:, None] + np.where(cost <= limit, cost, FORBIDDEN)
        first = sums.argmin(axis=0)
        choices.append(first)
        reach = np.minimum(sums[first, places], FORBIDDEN)
    if reach[-1] >= FORBIDDEN:
        return None
    cuts = [len(reach) - 1]
    largest = 0
    for cost, first in zip(reversed(costs), reversed(choices), strict=True):
        end = cuts[-1]
        begin = int(first[end])
        largest = max(largest, int(cost[begin, end]))
        cuts.append(begin)
    return int(reach[-1]), largest, tuple(reversed(cuts))


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
