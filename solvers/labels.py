"""Exact choice for one segment: labels (memory, time) set layer by layer, pruned by the Lagrangian bound.

Labels of one layer that another label makes superfluous (no more memory, no more time however the chain goes on) are
dropped; labels whose bound says that they cannot beat the best known choice, too. The window of times that still
count starts small and grows, so that hard tables stay small. When even so the labels overflow (exactly linear
trade-offs are subset sums), times are rounded down and the error is certified.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autopar.price import Int
from autopar.solvers.dual import Dual, bound, slack_ns
from autopar.solvers.segment import FORBIDDEN, Float, Segment, distinct

FIRST_TRY = 4_000
MOST_LABELS = 300_000
"""Candidates of one layer: try the whole window up to the first, give up the exact search above the second."""
_ALL_PAIRS = 192
_FIRST_WINDOW = 1024
_LATER = np.triu(np.ones((_ALL_PAIRS, _ALL_PAIRS), dtype=bool), 1)
_ROUNDING = 1e-3


class LabelOverflowError(Exception):
    """More labels than the limit."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Solved:
    """The best choice of a segment, in absolute nanoseconds.

    lower_ns: no choice that fits is below (FORBIDDEN when nothing fits at all); upper_ns and path (option index of
    each layer): the best one found, None when nothing fits below the limit that was asked for; both agree unless the
    labels overflowed.
    """

    lower_ns: int
    upper_ns: int | None
    path: Int | None
    labels: int


def solve_segment(
    segment: Segment, *, below_ns: int = FORBIDDEN, dual: Dual | None = None, most_labels: int = MOST_LABELS
) -> Solved:
    """The least time of the segment within its budget; only choices with time < below_ns count.

    dual: what `bound` said for this below_ns or a higher one, if it is known. Exact for any transitions unless the
    labels overflow; then lower_ns < upper_ns by at most what was rounded.
    """
    base = segment.base_time_ns
    if dual is None:
        dual = bound(segment, below_ns - base)
    if not dual.possible:
        return Solved(lower_ns=FORBIDDEN, upper_ns=None, path=None, labels=0)
    best, path, labels, certified = below_ns - base, None, 0, below_ns - base
    if dual.path is not None and dual.upper_ns < best:
        best, path = dual.upper_ns, dual.path
    for index in np.argsort(dual.lower_ns, kind="stable"):
        lower, threshold, price = int(dual.lower_ns[index]), int(dual.thresholds[index]), float(dual.price[index])
        if lower >= best:
            break
        search = _Search(segment, threshold, price)
        try:
            found = search.least(lower, best, most_labels)
        except LabelOverflowError:
            found, lowest = _rounded(segment, search, lower, best, most_labels)
            certified = min(certified, lowest)
        labels += search.labels
        if found is not None:
            best, path = found
    return Solved(
        lower_ns=base + min(best, certified),
        upper_ns=None if path is None else base + best,
        path=path,
        labels=labels,
    )


class _Search:
    """Label setting in one segment under one threshold of the transient."""

    def __init__(self, segment: Segment, threshold: int, price: float) -> None:
        self.segment = segment
        self.labels = 0
        self.spare = segment.spare_bytes - threshold
        prices = np.array(sorted({0.0, 0.6 * price, price, 1.6 * price}))
        self.prices = prices
        options = []
        for kind in segment.kinds:
            allowed = np.flatnonzero(kind.transient_bytes <= threshold)
            t, g = kind.time_ns[allowed], kind.group[allowed]
            # Sorted by (group, memory, time): below the threshold an earlier one that is no slower dominates.
            allowed = allowed[~((t[:, None] <= t) & (g[:, None] == g) & _LATER[: len(t), : len(t)]).any(axis=0)]
            options.append((kind.time_ns[allowed], kind.memory_bytes[allowed], kind.group[allowed], allowed))
        self.options = options
        groups = segment.steps.shape[1]
        weight = np.full((len(prices), len(options), groups), np.inf)
        least = np.full((len(options), groups), FORBIDDEN, dtype=np.int64)
        for index, (t, m, g, _) in enumerate(options):
            np.minimum.at(least[index], g, m)
            for row, value in enumerate(prices):
                np.minimum.at(weight[row, index], g, t + value * m)
        if segment.compiled:
            from autopar.solvers.compiled import behind

            self.ahead, self.memory_ahead = behind(weight, least, segment.steps, segment.order, segment.step_order)
        else:
            self.ahead, self.memory_ahead = self._backward(weight, least)
        magnitude = float(np.max(self.ahead, where=np.isfinite(self.ahead), initial=0.0))
        self.slack = np.where(prices > 0, slack_ns(magnitude, float(prices[-1]) * max(1, self.spare)), 0.0)
        self._regret: dict[tuple[int, int], Int] = {}

    def _backward(self, weight: Float, least: Int) -> tuple[Float, Int]:
        """[L, R, C] time + price * memory and [L, C] memory that the layers after each need at least, by group."""
        # Memory is one more row, whose steps cost nothing: below 2^50, exact in float64.
        segment = self.segment
        closed = segment.steps >= FORBIDDEN
        rows = [np.where(closed, np.inf, segment.steps)] * len(weight) + [np.where(closed, np.inf, 0.0)]
        steps = np.stack(rows, axis=1)
        costs = np.concatenate([weight, np.where(least >= FORBIDDEN, np.inf, least)[None]]).transpose(1, 0, 2)
        ahead = [np.zeros(costs.shape[1:])]
        for layer in range(len(segment.order) - 1, 0, -1):
            cost = costs[segment.order[layer]] + ahead[-1]
            ahead.append((steps[segment.step_order[layer]] + cost[:, None, :]).min(axis=2))
        found = np.stack(ahead[::-1])
        memory = found[:, -1]
        return found[:, :-1], np.where(np.isinf(memory), FORBIDDEN, memory).astype(np.int64)

    def regret(self, layer: int) -> Int:
        """[C, C]: the most that starting in the first group can cost more than in the second, from this layer on."""
        segment = self.segment
        if layer + 1 == len(segment.order):
            groups = segment.steps.shape[1]
            return np.zeros((groups, groups), dtype=np.int64)
        key = (int(segment.step_order[layer + 1]), int(segment.order[layer + 1]))
        if key not in self._regret:
            step = segment.steps[key[0]][:, distinct(self.options[key[1]][2])]
            self._regret[key] = (step[:, None, :] - step[None, :, :]).max(axis=2)
        return self._regret[key]

    def least(self, lower: int, best: int, most_labels: int) -> tuple[int, Int] | None:
        """Time and path of the best choice below `best`, None when there is none. Raises LabelOverflowError."""
        try:
            return self.run(best, min(FIRST_TRY, most_labels))
        except LabelOverflowError:
            pass
        width = max(1, (best - lower) // _FIRST_WINDOW)
        while True:
            limit = min(best, lower + width + 1)
            found = self.run(limit, most_labels)
            if found is not None or limit == best:
                return found
            width *= 4

    def run(self, below: int, most: int) -> tuple[int, Int] | None:
        """Time and path of the best choice below `below`, None when there is none. Raises LabelOverflowError."""
        segment, prices = self.segment, self.prices
        limits = below - 0.5 + self.slack + prices * self.spare
        if segment.compiled:
            return self._run_compiled(below, limits, most)
        main = max(0, len(prices) - 2)
        others = [row for row in range(len(prices)) if row != main]
        price, limit, ahead = prices[others, None], limits[others, None], self.ahead[:, others]
        history: list[tuple[Int, Int]] = []
        memory = time = group = np.zeros(1, dtype=np.int64)
        for layer, kind in enumerate(segment.order):
            t, m, g, _ = self.options[kind]
            if len(memory) * len(t) > most:
                raise LabelOverflowError
            new_m = memory[:, None] + m
            new_t = time[:, None] + t
            if layer:
                new_t = new_t + segment.steps[segment.step_order[layer]][:, g][group]
            # The price of the dual drops the most; the other bounds see what is left.
            ok = new_m + self.memory_ahead[layer][g] <= self.spare
            ok &= new_t + prices[main] * new_m + self.ahead[layer][main, g] <= limits[main]
            parent, option = np.nonzero(ok)
            memory, time, group = new_m[ok], new_t[ok], g[option]
            order = np.flatnonzero((time + price * memory + ahead[layer][:, group] <= limit).all(axis=0))
            if not order.size:
                return None
            order = order[np.lexsort((time[order], memory[order]))]
            memory, time, group = memory[order], time[order], group[order]
            keep = self._undominated(memory, time, group, self.regret(layer))
            memory, time, group = memory[keep], time[keep], group[keep]
            order = order[keep]
            self.labels += len(order)
            history.append((parent[order], option[order]))
        last = int(time.argmin())
        least = int(time[last])
        path = np.empty(len(segment.order), dtype=np.int64)
        for layer in range(len(segment.order) - 1, -1, -1):
            parents, chosen = history[layer]
            path[layer] = self.options[segment.order[layer]][3][chosen[last]]
            last = int(parents[last])
        return (least, path) if least < below else None

    def _run_compiled(self, below: int, limits: Float, most: int) -> tuple[int, Int] | None:
        from autopar.solvers.compiled import NONE, OVERFLOW, set_labels

        segment = self.segment
        t, m, g, allowed = (np.concatenate(parts) for parts in zip(*self.options, strict=True))
        start = np.cumsum([0, *(len(option[0]) for option in self.options)])
        result, least, labels, chosen = set_labels(
            segment.order,
            segment.step_order,
            segment.steps,
            start,
            t,
            m,
            g,
            self.ahead,
            self.memory_ahead,
            self.prices,
            limits,
            self.spare,
            most,
        )
        self.labels += labels
        if result == OVERFLOW:
            raise LabelOverflowError
        if result == NONE or least >= below:
            return None
        return least, allowed[chosen]

    def _undominated(self, memory: Int, time: Int, group: Int, regret: Int) -> Int:
        """The labels (sorted by memory, then time) that no earlier one replaces whatever follows."""
        count = len(time)
        if count <= _ALL_PAIRS:
            no_later = time[:, None] + regret[group[:, None], group[None, :]] <= time[None, :]
            return np.flatnonzero(~(no_later & _LATER[:count, :count]).any(axis=0))
        replaced = np.full(count, FORBIDDEN, dtype=np.int64)
        for first in distinct(group):
            earliest = np.minimum.accumulate(np.where(group == first, time, FORBIDDEN))
            earliest = np.concatenate(([FORBIDDEN], earliest[:-1]))
            np.minimum(replaced, earliest + regret[first][group], out=replaced)
        return np.flatnonzero(replaced > time)


def _rounded(
    segment: Segment, exact: _Search, lower: int, best: int, most_labels: int
) -> tuple[tuple[int, Int] | None, int]:
    """A choice below `best` if one was found, and a certified lower bound, from times rounded down to a step.

    Every layer and every transition loses less than one step, so the bound is at most (2 L - 1) steps low.
    """
    share = _ROUNDING
    threshold = segment.spare_bytes - exact.spare
    while True:
        step = max(2, int(share * (segment.base_time_ns + lower) / (2 * len(segment.order))))
        if step > max(1, best):
            # Even without times there are too many: the Lagrangian bound is all that is known.
            return None, lower
        rough = replace(
            segment,
            kinds=tuple(replace(kind, time_ns=kind.time_ns // step) for kind in segment.kinds),
            steps=np.where(segment.steps >= FORBIDDEN, FORBIDDEN, segment.steps // step),
        )
        search = _Search(rough, threshold, float(exact.prices[-1]) / 1.6 / step)
        try:
            found = search.least(lower // step, best // step + 1, most_labels)
        except LabelOverflowError:
            share *= 8
            continue
        exact.labels += search.labels
        if found is None:
            return None, best
        certified = max(lower, found[0] * step)
        time_ns, _, _ = segment.total(found[1])
        return ((time_ns, found[1]) if time_ns < best else None), certified
