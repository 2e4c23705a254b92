"""The Lagrangian bound of a segment: a price per byte, found by cutting the lower hull of (memory, time).

The largest transient of a segment is a threshold: with threshold x only options with transient <= x are allowed and
the budget shrinks by x. The best over all thresholds is the exact optimum, so all of them are bounded at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.price import Int
from autopar.solvers.segment import FORBIDDEN, Float, Segment, distinct

_MAX_CUTS = 60


@dataclass(frozen=True, kw_only=True, eq=False)
class Dual:
    """Per threshold that may still hold the optimum: lower bound and price; and the best choice seen on the way.

    Everything is relative to the segment's base. thresholds[J], lower_ns[J] (no choice under the threshold is below
    it), price[J] in ns per byte; upper_ns and path (option of each layer), None when no choice was seen. possible:
    False when it is certain that nothing fits.
    """

    thresholds: Int
    lower_ns: Int
    price: Float
    upper_ns: int
    path: Int | None
    possible: bool

    @property
    def least_ns(self) -> int:
        """No choice of the segment is below it (relative); FORBIDDEN when nothing fits."""
        return min([self.upper_ns, *(int(lower) for lower in self.lower_ns)]) if self.possible else FORBIDDEN


def thresholds_of(segment: Segment) -> Int:
    """The transients that can be the largest of a choice that fits, ascending."""
    needed = max(int(kind.transient_bytes.min()) for kind in segment.kinds)
    values = distinct(np.concatenate([kind.transient_bytes for kind in segment.kinds]))
    return np.asarray(values[(values >= needed) & (values <= segment.spare_bytes)])


def slack_ns(*magnitudes: float) -> float:
    """How far a float64 bound of sums of this size can be off."""
    return 2.0**-44 * max(magnitudes)


def bound(segment: Segment, below_ns: int) -> Dual:
    """The dual of the segment; only choices with relative time < below_ns count. O(cuts * L * thresholds * C^2)."""
    thresholds = thresholds_of(segment)
    if not thresholds.size:
        return _closed(below_ns, None, possible=False)
    walk = _Walk(segment, thresholds)
    best_ns, best_path = below_ns, None

    fast = walk.go(np.zeros(len(thresholds)))
    alive = fast.value < best_ns
    fits = alive & (fast.memory <= walk.spare)
    if fits.any():
        winner = int(np.where(fits, fast.value, np.inf).argmin())
        best_ns, best_path = int(fast.time[winner]), walk.path(fast, winner)
        alive &= fast.value < best_ns
    if not alive.any():
        return _closed(best_ns, best_path, possible=True)
    lean = walk.go(None)
    leanest_fits = (lean.memory <= walk.spare) & np.isfinite(lean.value)
    keep = np.flatnonzero(alive & leanest_fits)
    if not keep.size:
        return _closed(best_ns, best_path, possible=bool(leanest_fits.any()))
    walk = _Walk(segment, thresholds[keep])
    fast, lean = fast.only(keep), lean.only(keep)
    lower, price = fast.value.copy(), np.zeros(len(keep))
    for _ in range(_MAX_CUTS):
        rate = (lean.time - fast.time) / (fast.memory - lean.memory)
        rate = np.maximum(rate, 0.0)
        cut = walk.go(rate)
        slack = np.array([slack_ns(abs(v), r * b) for v, r, b in zip(cut.value, rate, walk.spare, strict=True)])
        value = cut.value - rate * walk.spare - slack
        better = value > lower
        lower[better], price[better] = value[better], rate[better]
        on_line = cut.value >= fast.time + rate * fast.memory - slack - 0.25
        inside = cut.memory <= walk.spare
        lean = lean.mixed(cut, inside & ~on_line)
        fast = fast.mixed(cut, ~inside & ~on_line)
        if on_line.all():
            break
    bounds = np.ceil(lower - 0.01).astype(np.int64)
    for index in range(len(keep)):
        # No choice under a threshold is below its bound.
        for time_ns, path in walk.crossings(fast, lean, index) if bounds[index] < best_ns else ():
            if time_ns < best_ns:
                best_ns, best_path = time_ns, path
    open_ = bounds < best_ns
    return Dual(
        thresholds=thresholds[keep][open_],
        lower_ns=bounds[open_],
        price=price[open_],
        upper_ns=best_ns,
        path=best_path,
        possible=True,
    )


def _closed(upper_ns: int, path: Int | None, *, possible: bool) -> Dual:
    none = np.zeros(0, dtype=np.int64)
    return Dual(thresholds=none, lower_ns=none, price=np.zeros(0), upper_ns=upper_ns, path=path, possible=possible)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Found:
    """Shortest paths, one per threshold: value[J], time[J] and memory[J] (float, exact integers), columns[L, J]."""

    value: Float
    time: Float
    memory: Float
    group: Int
    place: Int

    def only(self, keep: Int) -> _Found:
        return _Found(
            value=self.value[keep],
            time=self.time[keep],
            memory=self.memory[keep],
            group=self.group[:, keep],
            place=self.place[:, keep],
        )

    def mixed(self, other: _Found, take: NDArray[np.bool_]) -> _Found:
        return _Found(
            value=np.where(take, other.value, self.value),
            time=np.where(take, other.time, self.time),
            memory=np.where(take, other.memory, self.memory),
            group=np.where(take, other.group, self.group),
            place=np.where(take, other.place, self.place),
        )


class _Walk:
    """Shortest paths through a segment for many thresholds at once."""

    def __init__(self, segment: Segment, thresholds: Int) -> None:
        grid = segment.grid
        self.segment, self.grid = segment, grid
        self.order = segment.order
        self.spare = (segment.spare_bytes - thresholds).astype(np.float64)
        self.steps = np.where(segment.steps >= FORBIDDEN, np.inf, segment.steps).astype(np.float64)
        self.free = np.where(segment.steps >= FORBIDDEN, np.inf, 0.0)
        allowed = grid.transient_bytes[None] <= thresholds[:, None, None, None]
        self.time = np.where(allowed, grid.time_ns[None], np.inf)
        self.memory = np.where(allowed, grid.memory_bytes[None], np.inf)
        self.rows = np.arange(len(thresholds))

    def go(self, rate: Float | None) -> _Found:
        """Shortest paths for time + rate * memory; for memory alone when rate is None."""
        if rate is None:
            weight, steps = self.memory, self.free
        else:
            weight, steps = self.time + rate[:, None, None, None] * self.grid.memory_bytes[None], self.steps
        if self.segment.compiled:
            from autopar.solvers.compiled import shortest

            value, time, memory, group, place = shortest(
                weight,
                self.grid.time_ns,
                self.grid.memory_bytes,
                steps,
                self.steps,
                self.order,
                self.segment.step_order,
            )
            return _Found(value=value, time=time, memory=memory, group=group, place=place)
        place = weight.argmin(axis=3)
        least = weight.min(axis=3)
        order, step_order = self.order, self.segment.step_order
        f = least[:, order[0]]
        back = []
        for layer in range(1, len(order)):
            g = f[:, :, None] + steps[step_order[layer]]
            back.append(g.argmin(axis=1))
            f = g.min(axis=1) + least[:, order[layer]]
        now = f.argmin(axis=1)
        group = np.empty((len(order), len(self.rows)), dtype=np.int64)
        group[-1] = now
        for layer in range(len(order) - 1, 0, -1):
            now = back[layer - 1][self.rows, now]
            group[layer - 1] = now
        where = place[self.rows, order[:, None], group]
        time = self.grid.time_ns[order[:, None], group, where].sum(axis=0)
        time = time + self.steps[step_order[1:, None], group[:-1], group[1:]].sum(axis=0)
        memory = self.grid.memory_bytes[order[:, None], group, where].sum(axis=0)
        return _Found(value=f.min(axis=1), time=time, memory=memory, group=group, place=where)

    def path(self, found: _Found, index: int) -> Int:
        """The option of each layer."""
        return np.asarray(self.grid.option[self.order, found.group[:, index], found.place[:, index]])

    def crossings(self, fast: _Found, lean: _Found, index: int) -> list[tuple[int, Int]]:
        """The best choices that fit among: lean, the first k layers of one path with the rest of the other."""
        order, spare, grid = self.order, self.spare[index], self.grid
        options, times, memories = [], [], []
        for found in (fast, lean):
            group, place = found.group[:, index], found.place[:, index]
            options.append((group, place))
            times.append(grid.time_ns[order, group, place])
            memories.append(grid.memory_bytes[order, group, place])
        found_paths = [(int(lean.time[index]), self.path(lean, index))]
        if len(order) < 2:
            return found_paths
        step = self.segment.step_order[1:]
        for a, b in ((0, 1), (1, 0)):
            ga, gb = options[a][0], options[b][0]
            inner_a = self.steps[step, ga[:-1], ga[1:]]
            inner_b = self.steps[step, gb[:-1], gb[1:]]
            head = np.cumsum(times[a])[:-1] + np.concatenate([[0.0], np.cumsum(inner_a)[:-1]])
            tail_steps = np.concatenate([np.cumsum(inner_b[::-1])[::-1][1:], [0.0]])
            tail = np.cumsum(times[b][::-1])[::-1][1:] + tail_steps
            time = head + self.steps[step, ga[:-1], gb[1:]] + tail
            memory = np.cumsum(memories[a])[:-1] + np.cumsum(memories[b][::-1])[::-1][1:]
            time = np.where(memory <= spare, time, np.inf)
            cut = int(time.argmin())
            if np.isfinite(time[cut]):
                joined = np.concatenate(
                    [
                        self.path(fast if a == 0 else lean, index)[: cut + 1],
                        self.path(fast if b == 0 else lean, index)[cut + 1 :],
                    ]
                )
                found_paths.append((int(time[cut]), joined))
        return found_paths
