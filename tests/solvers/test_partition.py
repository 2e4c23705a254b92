"""Cutting a chain when every interval's cost is known, against all cuts."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np

from autopar.solvers.partition import Intervals, best_cuts, furthest, least_max, least_sums
from autopar.solvers.segment import FORBIDDEN


def intervals_of(costs: list[np.ndarray]) -> tuple[list[Intervals], np.ndarray, list[np.ndarray]]:  # type: ignore[type-arg]
    """The intervals of dense costs [a, b], each its own content; with `where` and the costs of the contents."""
    units = len(costs[0]) - 1
    where = np.arange((units + 1) ** 2, dtype=np.int32).reshape(units + 1, units + 1)
    flat = [np.append(cost.T.ravel(), FORBIDDEN) for cost in costs]
    everywhere = (0, units)
    return [Intervals.of(where, cost, everywhere, everywhere, FORBIDDEN) for cost in flat], where, flat


def test_every_way_to_cut() -> None:
    tight = 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        units, high, more = (
            int(rng.integers(1, 9)),
            int(rng.choice([3, 12, 1000, 1000])),
            int(rng.choice([0, 1, 1, 2, 15])),
        )
        stages = int(rng.integers(1, units + 1))
        # Stages differ: a layer can be cheap on one and dear on another.
        scales = rng.choice([1, 3, 30], stages)
        costs = [scale * rng.integers(0, high, (units + 1, units + 1)) for scale in scales]
        if rng.random() < 0.5:
            # As in a chain: the more layers, the longer.
            for cost in costs:
                total = np.concatenate([[0], np.cumsum(cost[0, 1:])])
                cost[:] = np.abs(total[None, :] - total[:, None]) + rng.integers(0, 3)
        for cost in costs:
            cost[rng.random(cost.shape) < 0.1] = FORBIDDEN
            cost[np.tril_indices(units + 1)] = FORBIDDEN
        values = {}
        for inner in combinations(range(1, units), stages - 1):
            parts = [int(cost[a, b]) for cost, (a, b) in zip(costs, pairwise((0, *inner, units)), strict=True)]
            if max(parts) < FORBIDDEN:
                values[0, *inner, units] = parts
        totals = {cuts: sum(parts) + more * max(parts) for cuts, parts in values.items()}
        best = min(totals.values(), default=None)
        stages_, where, flat = intervals_of(costs)
        for below in [FORBIDDEN, *([] if best is None else [best, best + 1])]:
            found = best_cuts(stages_, more + 1, below)
            if best is None or best >= below:
                assert found is None, seed
            else:
                assert found is not None, seed
                assert found.value == best == totals[found.cuts], seed
        bottleneck = min(map(max, values.values()), default=FORBIDDEN)
        found_max = least_max(stages_)
        if found_max is None:
            assert bottleneck == FORBIDDEN, seed
        else:
            assert found_max[0] == bottleneck == max(values[found_max[1]]), seed
        greedy = furthest(where, flat, FORBIDDEN - 1)
        assert greedy is None or greedy in values, seed
        greedy = furthest(where, flat, min(bottleneck, FORBIDDEN - 1))
        assert greedy is None or max(values[greedy]) == bottleneck, seed
        tight += greedy is not None
        before, after = least_sums(stages_)
        for cuts, parts in values.items():
            for stage, (a, b) in enumerate(pairwise(cuts)):
                assert before[stage][a] + parts[stage] + after[stage][b] <= sum(parts), seed
    assert tight > 100
