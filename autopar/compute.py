"""Seconds of the forward and backward of one layer at a local number of samples, from measured points."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from autopar.measured import Estimate, LayerCost


def forward(cost: LayerCost, samples: float) -> Estimate:
    """Seconds of one forward of this layer with `samples` samples on one rank, tp collectives not included.

    Measured counts are read as they are (made non-decreasing), others lie on the line between their neighbours; beyond
    the ends the slope of the nearest pair or of the least-squares line goes on, whichever is steeper. Never negative,
    never decreasing in the samples. One measured count alone is scaled in proportion.
    """
    return _estimate(cost.samples, cost.forward_s, samples)


def backward(cost: LayerCost, samples: float) -> Estimate:
    """Seconds of one backward, without recompute; as `forward`."""
    return _estimate(cost.samples, cost.backward_s, samples)


def _estimate(counts: tuple[int, ...], values: tuple[float, ...], samples: float) -> Estimate:
    if samples <= 0:
        return Estimate(seconds=0.0, origin="measured")
    values = _non_decreasing(values)
    if samples in counts:
        return Estimate(seconds=values[counts.index(int(samples))], origin="measured")
    if len(counts) == 1:
        return Estimate(seconds=values[0] * samples / counts[0], origin="interpolated")
    points = list(zip(counts, values, strict=True))
    if samples < counts[0]:
        (n0, t0), (n1, t1) = points[:2]
        # Not below the proportional share: a line through two noisy points may cross zero.
        line = t0 - (t1 - t0) / (n1 - n0) * (n0 - samples)
        return Estimate(seconds=max(line, t0 * samples / n0), origin="interpolated")
    for (n0, t0), (n1, t1) in pairwise(points):
        if samples < n1:
            return Estimate(seconds=t0 + (t1 - t0) * (samples - n0) / (n1 - n0), origin="interpolated")
    slope = max(_slope(counts, values), (values[-1] - values[-2]) / (counts[-1] - counts[-2]))
    return Estimate(seconds=values[-1] + slope * (samples - counts[-1]), origin="interpolated")


@lru_cache(maxsize=4096)
def _non_decreasing(values: tuple[float, ...]) -> tuple[float, ...]:
    """The non-decreasing sequence nearest in least squares (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n)]
    return tuple(mean for mean, count in pools for _ in range(count))


def _slope(counts: tuple[int, ...], values: tuple[float, ...]) -> float:
    """The slope of the least-squares line, not below 0."""
    middle, mean = sum(counts) / len(counts), sum(values) / len(values)
    spread = sum((n - middle) ** 2 for n in counts)
    return max(0.0, sum((n - middle) * (t - mean) for n, t in zip(counts, values, strict=True)) / spread)
