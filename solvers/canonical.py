"""The plainest form of a choice: equal layers may swap strategies at no cost, so they are grouped."""

from __future__ import annotations

from itertools import pairwise

from autopar.price import CostTables, score


def segments(layers_per_stage: tuple[int, ...], strategies: tuple[int, ...]) -> int:
    """The number of runs of one strategy, counted within stages."""
    first, count = 0, 0
    for layers in layers_per_stage:
        part = strategies[first : first + layers]
        count += 1 + sum(a != b for a, b in pairwise(part))
        first += layers
    return count


def canonical(tables: CostTables, layers_per_stage: tuple[int, ...], strategies: tuple[int, ...]) -> tuple[int, ...]:
    """Strategies that cost exactly the same with as few segments as regrouping runs of equal layers gives.

    Inside each run of equal layers of a stage the strategies are grouped, in column order and in order of their
    first place, starting with that of the layer before; a regrouping is taken when `score` says that objective and
    fit are the same. O(runs * layers).
    """
    best = strategies
    before = score(tables, layers_per_stage, best)
    for first, end in _runs(tables, layers_per_stage):
        part = best[first:end]
        if len(set(part)) < 2:
            continue
        orders = [sorted(set(part)), sorted(set(part), reverse=True), list(dict.fromkeys(part))]
        if first and best[first - 1] in part:
            orders.append([best[first - 1], *(s for s in sorted(set(part)) if s != best[first - 1])])
        if end < len(best) and best[end] in part:
            orders.append([*(s for s in sorted(set(part)) if s != best[end]), best[end]])
        for order in orders:
            regrouped = tuple(s for s in order for _ in range(part.count(s)))
            trial = (*best[:first], *regrouped, *best[end:])
            if segments(layers_per_stage, trial) >= segments(layers_per_stage, best):
                continue
            if tables.tied and trial[0] != trial[-1]:
                continue
            after = score(tables, layers_per_stage, trial)
            if after.fits and after.objective_ns <= before.objective_ns:
                best = trial
    return best


def _runs(tables: CostTables, layers_per_stage: tuple[int, ...]) -> list[tuple[int, int]]:
    arrays = (tables.time_ns, tables.state_bytes, tables.saved_bytes, tables.transient_bytes)
    runs: list[tuple[int, int]] = []
    first = 0
    for layers in layers_per_stage:
        for layer in range(first, first + layers):
            equal = layer > first and all((array[layer] == array[layer - 1]).all() for array in arrays)
            if equal:
                runs[-1] = (runs[-1][0], layer + 1)
            else:
                runs.append((layer, layer + 1))
        first += layers
    return runs


def equal_layers(tables: CostTables) -> list[tuple[int, int]]:
    """The runs of equal layers of the chain, as first and end; tied ends are runs of their own."""
    units = len(tables.time_ns)
    runs = _runs(tables, (units,))
    if tables.tied and units > 1:
        runs = [
            part
            for first, end in runs
            for part in ((first, min(end, 1)), (max(first, 1), min(end, units - 1)), (max(first, units - 1), end))
            if part[0] < part[1]
        ]
    return runs
