"""All choices of a small table below an objective, for callers who know more of what fits than the table says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.price import CostTables, Int, score
from autopar.solvers.segment import FORBIDDEN, Float
from autopar.solvers.stages import equal_rows, lower_hull

MOST = 5000
"""So many beginnings of choices are kept at a time."""
PRICES = 12
"""Prices of a byte under which a beginning is compared with what is left of time and memory."""

Found = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Objective, layers of each stage, strategies."""


def all_below(tables: CostTables, below_ns: int, most: int = MOST) -> list[Found] | None:
    """The choices that fit the table with an objective < below_ns, in that order; None when they are too many.

    Beginnings of the chain grow by a layer at a time, all at once. One is dropped when its stage is over the budget or
    when a Lagrangian bound on the whole, at any of some prices of a byte, is not below below_ns. Transitions count as
    they are, the layers to come as if each found its best. O(layers * most * S * PRICES).
    """
    suffix = _Suffix(tables)
    units = len(tables.time_ns)
    feasible = tables.feasible & (tables.state_bytes < FORBIDDEN) & (tables.saved_bytes < FORBIDDEN)
    now = _Beginnings.nothing()
    for layer in range(units):
        grown = []
        options = np.flatnonzero(feasible[layer])
        for stage in range(tables.stages) if layer else (0,):
            if tables.stages - 1 - stage > units - 1 - layer:
                continue
            kept = tables.state_bytes[layer] + tables.in_flight[stage] * tables.saved_bytes[layer]
            if layer == 0 or stage > 0:
                grown.append(now.of_stage(stage - 1).crossed(tables, layer, stage, options, kept))
            if layer:
                grown.append(now.of_stage(stage).stayed(tables, layer, stage, options, kept))
        now = _joined(grown)
        if tables.tied and layer == units - 1 and layer:
            now = now.only(now.columns[:, 0] == now.columns[:, -1])
        now = now.only(now.held + now.peak <= np.array(tables.budget_bytes)[now.stage])
        for price in range(len(suffix.prices)):
            now = now.only(suffix.least_ns(now, layer, price) < below_ns)
        if len(now.stage) > most:
            return None
    found = []
    for stages, chosen in zip(now.stages.tolist(), now.columns.tolist(), strict=True):
        layers = tuple(stages.count(stage) for stage in range(tables.stages))
        result = score(tables, layers, tuple(chosen))
        if result.fits and result.objective_ns < below_ns:
            found.append((result.objective_ns, layers, tuple(chosen)))
    return sorted(found)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Beginnings:
    """The first layers of choices: of each its stage and column of every layer; nanoseconds and bytes of its last
    stage (held and the largest transient), of those before in sum, and of the slowest of them."""

    stages: Int
    columns: Int
    stage: Int
    time: Int
    held: Int
    peak: Int
    sum_ns: Int
    max_ns: Int
    sum_bytes: Int

    @classmethod
    def nothing(cls) -> _Beginnings:
        """The one beginning without layers, before stage 0."""
        zero, none = np.zeros(1, dtype=np.int64), np.zeros((1, 0), dtype=np.int64)
        return cls(
            stages=none, columns=none, stage=zero - 1, time=zero, held=zero, peak=zero, sum_ns=zero, max_ns=zero,
            sum_bytes=zero,
        )  # fmt: skip

    def only(self, which: NDArray[np.bool_]) -> _Beginnings:
        return _Beginnings(**{name: value[which] for name, value in vars(self).items()})

    def of_stage(self, stage: int) -> _Beginnings:
        return self.only(self.stage == stage)

    def stayed(self, tables: CostTables, layer: int, stage: int, options: Int, kept: Int) -> _Beginnings:
        """Each with one more layer on its stage, in every way."""
        one, s = self._crossing(options)
        moved = tables.transition_ns[one.columns[:, -1], s]
        return replace(
            one._with(stage, s),
            time=one.time + moved + tables.time_ns[layer, s],
            held=one.held + kept[s],
            peak=np.maximum(one.peak, tables.transient_bytes[layer, s]),
        ).only(moved < FORBIDDEN)

    def crossed(self, tables: CostTables, layer: int, stage: int, options: Int, kept: Int) -> _Beginnings:
        """Each with its stage ended and the next one begun by one layer, in every way."""
        one, s = self._crossing(options)
        ended = one.time
        ok = np.ones(len(s), dtype=bool)
        entry = np.zeros(len(s), dtype=np.int64)
        if stage:
            leaving, entry = tables.exit_ns[one.columns[:, -1]], tables.entry_ns[s]
            ok = (leaving < FORBIDDEN) & (entry < FORBIDDEN)
            ended = one.time + np.where(ok, leaving, 0) + tables.p2p_ns
        return replace(
            one._with(stage, s),
            time=tables.time_ns[layer, s] + np.where(ok, entry, 0),
            held=kept[s],
            peak=tables.transient_bytes[layer, s],
            sum_ns=one.sum_ns + ended,
            max_ns=np.maximum(one.max_ns, ended),
            sum_bytes=one.sum_bytes + one.held + one.peak,
        ).only(ok)

    def _crossing(self, options: Int) -> tuple[_Beginnings, Int]:
        count = len(self.stage)
        every = {name: np.repeat(value, len(options), axis=0) for name, value in vars(self).items()}
        return _Beginnings(**every), np.tile(options, count)

    def _with(self, stage: int, s: Int) -> _Beginnings:
        here = np.full(len(s), stage, dtype=np.int64)
        return replace(
            self,
            stage=here,
            stages=np.concatenate([self.stages, here[:, None]], axis=1),
            columns=np.concatenate([self.columns, s[:, None]], axis=1),
        )


def _joined(parts: list[_Beginnings]) -> _Beginnings:
    return _Beginnings(**{name: np.concatenate([vars(one)[name] for one in parts]) for name in vars(parts[0])})


class _Suffix:
    """What the layers to come cost at the least, at some prices of a byte, after each column of the layer before."""

    def __init__(self, tables: CostTables) -> None:
        self.tables = tables
        feasible = tables.feasible
        kept = tables.state_bytes + min(tables.in_flight) * np.where(feasible, tables.saved_bytes, 0)
        self.prices = _prices(tables, np.where(feasible, kept, 0))
        moves = np.where(tables.transition_ns < FORBIDDEN, tables.transition_ns, np.inf)
        if tables.stages > 1:
            exits, entries = (np.where(x < FORBIDDEN, x, np.inf) for x in (tables.exit_ns, tables.entry_ns))
            moves = np.minimum(moves, exits[:, None] + entries[None, :] + tables.p2p_ns)
        units, columns = tables.time_ns.shape
        self.rest: Float = np.zeros((len(self.prices), units, columns))
        for i, price in enumerate(self.prices):
            cost = np.where(feasible, tables.time_ns + price * kept, np.inf)
            for layer in range(units - 2, -1, -1):
                self.rest[i, layer] = (moves + (cost[layer + 1] + self.rest[i, layer + 1])[None, :]).min(axis=1)

    def least_ns(self, now: _Beginnings, layer: int, price: int) -> Float:
        """No choice that begins like this has a smaller objective, by this price."""
        tables = self.tables
        spare = now.sum_bytes + now.held + now.peak - sum(tables.budget_bytes)
        rest = self.rest[price, layer, now.columns[:, -1]]
        total = now.sum_ns + now.time + rest + self.prices[price] * spare
        slowest = np.maximum(np.maximum(now.max_ns, now.time), total / tables.stages)
        return np.asarray((total + (tables.micro_batches - 1) * slowest) * (1 - 1e-12) - 1)


def _prices(tables: CostTables, kept: Int) -> Float:
    """Prices of a byte: none, and slopes of what layers can trade memory for."""
    slopes = {0.0}
    ids = equal_rows(tables)
    for one in set(ids):
        layer = ids.index(one)
        row = tables.feasible[layer]
        for (m0, t0), (m1, t1) in pairwise(lower_hull(kept[layer, row], tables.time_ns[layer, row])):
            slopes.add((t0 - t1) / (m1 - m0))
    ordered = sorted(slopes)
    picked = np.unique(np.linspace(0, len(ordered) - 1, PRICES).round().astype(int))
    return np.asarray(np.array(ordered)[picked], dtype=np.float64)
