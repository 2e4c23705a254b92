"""Better neighbours of a choice, where "fits" is asked of the memory walk rather than read from a table.

The tables bound memory from both sides; between them lie choices that no table can tell apart. This walks downhill
through them: each step takes the neighbour of least objective that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, product

from autopar.price import CostTables, score

PAIRS_UP_TO = 100
"""Neighbours that differ in two layers are tried while layers * strategies does not exceed this."""

Cuts = tuple[int, ...]
Columns = tuple[int, ...]


def polish(
    tables: CostTables,
    layers_per_stage: Cuts,
    strategies: Columns,
    *,
    fits: Callable[[Cuts, Columns], bool],
    halted: Callable[[], bool] = lambda: False,
) -> tuple[Cuts, Columns]:
    """A choice that fits and has no better neighbour that fits, starting from one that fits.

    Neighbours differ in one layer, in all equal layers of one strategy, in one layer at a cut, and in small tables in
    any two layers. O(layers * strategies) scores a step, each O(layers). Stops early when `halted`.
    """
    current = layers_per_stage, strategies
    best_ns = score(tables, *current).objective_ns
    while not halted():
        better = sorted(
            (objective_ns, choice)
            for choice in neighbours(tables, *current)
            if (objective_ns := score(tables, *choice).objective_ns) < best_ns
        )
        found = next((entry for entry in better if fits(*entry[1])), None)
        if found is None:
            break
        best_ns, current = found
    return current


def neighbours(tables: CostTables, layers_per_stage: Cuts, strategies: Columns) -> Iterator[tuple[Cuts, Columns]]:
    """The legal choices that differ a little from this one; some may come twice."""
    feasible, last = tables.feasible, len(strategies) - 1
    options = [[s for s in range(len(tables.strategies)) if row[s]] for row in feasible]
    groups: list[tuple[int, ...]] = []
    alike: dict[tuple[bytes, int], list[int]] = {}
    for unit, s in enumerate(strategies):
        groups.append((0, last) if tables.tied and unit in (0, last) else (unit,))
        alike.setdefault((feasible[unit].tobytes(), s), []).append(unit)
    singles = list(dict.fromkeys(groups))
    groups = singles + [tuple(units) for units in alike.values() if len(units) > 1]
    for group in groups:
        for s in options[group[0]]:
            if s != strategies[group[0]] and all(feasible[unit, s] for unit in group):
                yield layers_per_stage, _with(strategies, dict.fromkeys(group, s))
    if len(strategies) * len(tables.strategies) <= PAIRS_UP_TO:
        for one, two in combinations(singles, 2):
            for a, b in product(options[one[0]], options[two[0]]):
                if a != strategies[one[0]] and b != strategies[two[0]]:
                    changed = {**dict.fromkeys(one, a), **dict.fromkeys(two, b)}
                    if all(feasible[unit, s] for unit, s in changed.items()):
                        yield layers_per_stage, _with(strategies, changed)
    for stage in range(len(layers_per_stage) - 1):
        for moved in (-1, 1):
            cuts = list(layers_per_stage)
            cuts[stage] += moved
            cuts[stage + 1] -= moved
            if min(cuts) > 0:
                yield tuple(cuts), strategies


def _with(strategies: Columns, changed: dict[int, int]) -> Columns:
    return tuple(changed.get(unit, s) for unit, s in enumerate(strategies))
