"""Seconds of one collective on one group of ranks, from measured curves.

Where the very group shape was measured: the medians, made non-decreasing in time and in bandwidth, piecewise linear
in log time over log size; constant below the smallest size, at constant bandwidth above the largest.
Otherwise t = alpha * steps + weight * size / bandwidth with

    weight  (n-1)/n   all-gather, reduce-scatter, all-to-all;  2(n-1)/n  all-reduce;  1  p2p
    steps   n-1 of a ring (2(n-1) for all-reduce, or 2 log2 n of a tree if fewer);  1  p2p

and alpha and 1/bandwidth fitted by least squares of the relative error over the measured curves of that collective,
inside and across nodes apart (design: cost model, section 1).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import ceil, exp, log, log2

from autopar.axes import RankMesh
from autopar.errors import InputError
from autopar.measured import Collective, Estimate, GroupShape, LinkCurve, LinkProfile, Origin

BUCKET_BYTES = 4 << 20
"""What travels together at the end of a step, where the bandwidth of a collective is near its best."""


def seconds(links: LinkProfile, collective: Collective, shape: GroupShape, size_bytes: float) -> Estimate:
    """Seconds of one collective; 0 for a group of one rank or nothing to send.

    The size counts as in LinkCurve. Never decreasing in the size. Origin: `measured` on a measured shape,
    `interpolated` where only the number of concurrent groups differs, else `fitted`. Raises InputError when no curve
    was measured at all.
    """
    if shape.ranks == 1 or size_bytes <= 0:
        return Estimate(seconds=0.0, origin="measured")
    knots, origin = _nearest(links, collective, shape)
    if knots is not None:
        return Estimate(seconds=_read(knots, size_bytes), origin=origin)
    return Estimate(seconds=_fitted_s(links, collective, shape, size_bytes), origin=origin)


@lru_cache(maxsize=4096)
def _nearest(links: LinkProfile, collective: Collective, shape: GroupShape) -> tuple[Knots | None, Origin]:
    """The curve of this group shape, or of one that differs in the concurrent groups only; None to be fitted."""
    knots = _cleaned_curves(links).get((collective, shape))
    if knots is not None:
        return knots, "measured"
    siblings = [
        (curve.shape.concurrent, curve.shape)
        for curve in links.curves
        if curve.collective == collective
        and (curve.shape.ranks, curve.shape.nodes, curve.shape.contiguous)
        == (shape.ranks, shape.nodes, shape.contiguous)
    ]
    if siblings:
        nearest = min(siblings, key=lambda entry: (abs(entry[0] - shape.concurrent), -entry[0]))[1]
        return _cleaned_curves(links)[collective, nearest], "interpolated"
    return None, "fitted"


@lru_cache(maxsize=4096)
def shape_of(mesh: RankMesh, names: tuple[str, ...], ranks_per_node: int) -> GroupShape:
    """The shape of the groups along these axes; those of all stages communicate at the same time.

    Of groups that span nodes, only those that leave the same node are concurrent: they alone share its cards.
    """
    first = mesh.group(0, names)
    shape = GroupShape.of((first,), ranks_per_node)
    concurrent = mesh.world_size // len(first)
    if shape.nodes > 1:
        concurrent = min(concurrent, max(1, ranks_per_node * shape.nodes // len(first)))
    return replace(shape, concurrent=concurrent)


@lru_cache(maxsize=256)
def boundary_shape(mesh: RankMesh, ranks_per_node: int) -> GroupShape:
    """The shape of the pairs over which activations go from one stage to the next."""
    width = mesh.ranks_per_stage
    shape = GroupShape.of(((0, width),), ranks_per_node)
    return replace(shape, concurrent=min(width, ranks_per_node) if shape.nodes > 1 else width)


Knots = tuple[tuple[float, float], ...]
"""(log bytes, log seconds), both slopes between neighbours within 0 .. 1."""


@lru_cache(maxsize=64)
def _cleaned_curves(links: LinkProfile) -> dict[tuple[Collective, GroupShape], Knots]:
    return {(curve.collective, curve.shape): cleaned(curve) for curve in links.curves}


def cleaned(curve: LinkCurve) -> Knots:
    """The curve in logarithms with time and bandwidth made non-decreasing; least squares by turns, then exact."""
    sizes = [log(size) for size in curve.size_bytes]
    times = [log(value) for value in curve.seconds]
    for _ in range(20):
        times = _isotonic(times)
        falling = _isotonic([x - t for x, t in zip(sizes, times, strict=True)])
        times = [x - f for x, f in zip(sizes, falling, strict=True)]
    for i in range(1, len(times)):
        times[i] = min(max(times[i], times[i - 1]), times[i - 1] + (sizes[i] - sizes[i - 1]))
    return tuple(zip(sizes, times, strict=True))


def _isotonic(values: list[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in least squares (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((value, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n)]
    return [mean for mean, count in pools for _ in range(count)]


def _read(knots: Knots, size_bytes: float) -> float:
    x = log(size_bytes)
    if x <= knots[0][0]:
        return exp(knots[0][1])
    for (x0, t0), (x1, t1) in pairwise(knots):
        if x <= x1:
            return exp(t0 + (t1 - t0) * (x - x0) / (x1 - x0))
    return exp(knots[-1][1] + x - knots[-1][0])


def _weight(collective: Collective, ranks: int) -> float:
    if collective == "p2p":
        return 1.0
    return (2.0 if collective == "all_reduce" else 1.0) * (ranks - 1) / ranks


def _steps(collective: Collective, ranks: int) -> int:
    if collective == "p2p":
        return 1
    if collective == "all_reduce":
        return min(2 * (ranks - 1), 2 * ceil(log2(ranks)))
    return ranks - 1


def _row(collective: Collective, shape: GroupShape, size_bytes: float) -> tuple[float, float]:
    # Groups that leave a node at the same time share its network cards.
    sharing = shape.concurrent if shape.nodes > 1 else 1
    return _steps(collective, shape.ranks), _weight(collective, shape.ranks) * size_bytes * sharing


def _fitted_s(links: LinkProfile, collective: Collective, shape: GroupShape, size_bytes: float) -> float:
    levels = (False, True) if shape.nodes > 1 else (False,)
    found = []
    for across in levels:
        alpha_s, s_per_byte = _fit(links, collective, across)
        steps, weighted = _row(collective, shape, size_bytes)
        found.append(alpha_s * steps + s_per_byte * weighted)
    # The larger of both levels: a group that spans more nodes is never predicted faster.
    return max(found)


@lru_cache(maxsize=256)
def _fit(links: LinkProfile, collective: Collective, across: bool) -> tuple[float, float]:
    """alpha_s and seconds per byte of a level, both >= 0; from the nearest curves there are."""
    pools = (
        [c for c in links.curves if c.collective == collective and (c.shape.nodes > 1) == across],
        [c for c in links.curves if c.collective == collective],
        list(links.curves),
    )
    pool = next((curves for curves in pools if curves), None)
    if pool is None:
        raise InputError(
            "the cluster file has no measured links",
            why="a plan for more than one rank needs the seconds of its collectives",
            fix="measure them with `autopar profile cluster`",
        )
    rows = [
        tuple(value / t for value in _row(curve.collective, curve.shape, size))
        for curve in pool
        for size, t in zip(curve.size_bytes, curve.seconds, strict=True)
    ]
    return _non_negative_least_squares([(a, b) for a, b in rows])


def _non_negative_least_squares(rows: list[tuple[float, float]]) -> tuple[float, float]:
    """x, y >= 0 with a*x + b*y nearest to 1 over all rows (a, b)."""
    aa, ab, bb = (sum(p * q for p, q in pairs) for pairs in _products(rows))
    a1, b1 = sum(a for a, _ in rows), sum(b for _, b in rows)
    det = aa * bb - ab * ab
    if det > 1e-12 * aa * bb:
        x, y = (a1 * bb - b1 * ab) / det, (b1 * aa - a1 * ab) / det
        if x >= 0 and y >= 0:
            return x, y
    only_x, only_y = a1 / aa, b1 / bb
    # The error of one variable alone is count - (sum)^2 / (sum of squares).
    return (only_x, 0.0) if a1 * only_x >= b1 * only_y else (0.0, only_y)


def _products(rows: list[tuple[float, float]]) -> tuple[list[tuple[float, float]], ...]:
    return [(a, a) for a, _ in rows], rows, [(b, b) for _, b in rows]
