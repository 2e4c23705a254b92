"""Better neighbours of a choice, where "fits" is asked of the memory walk rather than read from a table.

The tables bound memory from both sides; between them lie choices that no table can tell apart. This walks downhill
through them: each step takes the neighbour of least objective that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, combinations, pairwise, product

import numpy as np
from numpy.typing import NDArray

from autopar.price import CostTables, Int, score

PAIRS_UP_TO = 100
"""Neighbours that differ in two layers are tried while layers * strategies does not exceed this."""
ASKED = 64
"""How many neighbours of one choice are asked whether they fit."""
LEANER = 200
"""How many neighbours of the leanest choice are tried for a leaner one."""

Cuts = tuple[int, ...]
Columns = tuple[int, ...]


def polish(
    tables: CostTables,
    layers_per_stage: Cuts,
    strategies: Columns,
    *,
    fits: Callable[[Cuts, Columns], bool],
    asked: int = ASKED,
    halted: Callable[[], bool] = lambda: False,
) -> tuple[Cuts, Columns]:
    """A choice that fits and has no better neighbour that fits among those asked, starting from one that fits.

    Neighbours differ in one layer, in all equal layers of one strategy, in one layer at a cut, and in small tables in
    any two layers. tables: with memory bounded from below; what does not fit them is not asked of `fits`.
    O(layers * strategies) in numpy a step, and `asked` questions at most. Stops early when `halted`.
    """
    current = layers_per_stage, strategies
    best_ns = score(tables, *current).objective_ns
    while not halted():
        better = list(_better_singles(tables, *current, best_ns, asked))
        better += [
            (objective_ns, choice)
            for choice in (*neighbours(tables, *current), *moved_cuts(tables, *current, best_ns))
            if (summed := score(tables, *choice)).fits and (objective_ns := summed.objective_ns) < best_ns
        ]
        better.sort()
        found = None
        for entry in better[:asked]:
            if halted():
                break
            if fits(*entry[1]):
                found = entry
                break
        if found is None:
            break
        best_ns, current = found
    return current


def _better_singles(
    tables: CostTables, layers_per_stage: Cuts, strategies: Columns, best_ns: int, most: int
) -> Iterator[tuple[int, tuple[Cuts, Columns]]]:
    """The `most` best choices below best_ns that differ in one layer, and those as good; with their objectives.

    Tied ends are left out.
    """
    chosen, stage = np.array(strategies), np.repeat(np.arange(tables.stages), layers_per_stage)
    units = len(chosen)
    feasible = tables.feasible.copy()
    feasible[np.arange(units), chosen] = False
    if tables.tied:
        feasible[[0, -1]] = False
    time = np.where(feasible, tables.time_ns, 0) - tables.time_ns[np.arange(units), chosen][:, None]
    starts = np.concatenate([[True], stage[1:] != stage[:-1]])
    ends = np.concatenate([starts[1:], [True]])
    for layer in range(units):
        s = chosen[layer]
        if not starts[layer]:
            row = tables.transition_ns[chosen[layer - 1]]
            time[layer] += row - row[s]
        elif layer:
            time[layer] += tables.entry_ns - tables.entry_ns[s]
        if not ends[layer]:
            row = tables.transition_ns[:, chosen[layer + 1]]
            time[layer] += row - row[s]
        elif layer < units - 1:
            time[layer] += tables.exit_ns - tables.exit_ns[s]
    stage_ns = np.array(score(tables, layers_per_stage, strategies).stage_ns)
    others = np.array([np.delete(stage_ns, i).max(initial=0) for i in range(tables.stages)])
    changed = stage_ns[stage][:, None] + time
    objective = stage_ns.sum() + time + (tables.micro_batches - 1) * np.maximum(others[stage][:, None], changed)
    wanted = feasible & (objective < best_ns)
    wanted &= _may_fit(tables, stage, chosen)
    better = objective[wanted]
    if better.size > most:
        wanted &= objective <= np.partition(better, most - 1)[most - 1]
    for layer, s in np.argwhere(wanted):
        yield (
            int(objective[layer, s]),
            (layers_per_stage, (*strategies[:layer], int(s), *strategies[layer + 1 :])),
        )


def _may_fit(tables: CostTables, stage: Int, chosen: Int) -> NDArray[np.bool_]:
    """bool[U, S]: whether the stage of a layer still fits in this table after the layer takes another strategy."""
    units = np.arange(len(chosen))
    kept = tables.state_bytes + np.array(tables.in_flight)[stage][:, None] * tables.saved_bytes
    now, peak = kept[units, chosen], tables.transient_bytes[units, chosen]
    others = np.array([peak[(stage == stage[u]) & (units != u)].max(initial=0) for u in units])
    total = np.bincount(stage, weights=now).astype(np.int64)[stage][:, None] - now[:, None] + kept
    needed = total + np.maximum(others[:, None], tables.transient_bytes)
    return np.asarray(needed <= np.array(tables.budget_bytes)[stage][:, None])


def neighbours(tables: CostTables, layers_per_stage: Cuts, strategies: Columns) -> Iterator[tuple[Cuts, Columns]]:
    """The legal choices of these cuts that differ a little from this one in more than one layer; some come twice."""
    feasible, last = tables.feasible, len(strategies) - 1
    options = [[s for s in range(len(tables.strategies)) if row[s]] for row in feasible]
    groups: list[tuple[int, ...]] = []
    alike: dict[tuple[bytes, int], list[int]] = {}
    for unit, s in enumerate(strategies):
        groups.append((0, last) if tables.tied and unit in (0, last) else (unit,))
        alike.setdefault((tables.time_ns[unit].tobytes(), s), []).append(unit)
    singles = list(dict.fromkeys(groups))
    groups = [*(units for units in singles if len(units) > 1), *(tuple(u) for u in alike.values() if len(u) > 1)]
    time, chosen = tables.time_ns, np.array(strategies)
    # All that a change of layouts can save: a group that gets slower by more than that cannot be better.
    moves_ns = int(tables.transition_ns[chosen[:-1], chosen[1:]].sum())
    moves_ns += tables.stages * int(tables.entry_ns.max() + tables.exit_ns.max())
    for group in groups:
        slowest_ns = int(time[group[0], strategies[group[0]]]) + moves_ns // len(group)
        for s in options[group[0]]:
            if time[group[0], s] > slowest_ns and len(set(group) - {0, last}) > 0:
                continue
            if s != strategies[group[0]] and all(feasible[unit, s] for unit in group):
                yield layers_per_stage, _with(strategies, dict.fromkeys(group, s))
    if len(strategies) * len(tables.strategies) <= PAIRS_UP_TO:
        for one, two in combinations(singles, 2):
            for a, b in product(options[one[0]], options[two[0]]):
                if a != strategies[one[0]] and b != strategies[two[0]]:
                    changed = {**dict.fromkeys(one, a), **dict.fromkeys(two, b)}
                    if all(feasible[unit, s] for unit, s in changed.items()):
                        yield layers_per_stage, _with(strategies, changed)


def moved_cuts(
    tables: CostTables, layers_per_stage: Cuts, strategies: Columns, best_ns: int
) -> Iterator[tuple[Cuts, Columns]]:
    """The choices below best_ns with one cut moved by a layer. O(stages) each."""
    chosen = np.array(strategies)
    times = [0, *accumulate(tables.time_ns[np.arange(len(chosen)), chosen].tolist())]
    moves = [0, *accumulate(tables.transition_ns[chosen[:-1], chosen[1:]].tolist())]

    def stage_ns(stage: int, first: int, end: int) -> int:
        total = int(times[end] - times[first] + moves[end - 1] - moves[first])
        if stage > 0:
            total += int(tables.entry_ns[strategies[first]])
        if stage < tables.stages - 1:
            total += int(tables.exit_ns[strategies[end - 1]]) + tables.p2p_ns
        return total

    ends = [0, *accumulate(layers_per_stage)]
    now = [stage_ns(stage, *span) for stage, span in enumerate(pairwise(ends))]
    for stage in range(len(layers_per_stage) - 1):
        for moved in (-1, 1):
            cut = ends[stage + 1] + moved
            if not ends[stage] < cut < ends[stage + 2]:
                continue
            two = [stage_ns(stage, ends[stage], cut), stage_ns(stage + 1, cut, ends[stage + 2])]
            then = now[:stage] + two + now[stage + 2 :]
            if sum(then) + (tables.micro_batches - 1) * max(then) < best_ns:
                ends_then = [*ends[: stage + 1], cut, *ends[stage + 2 :]]
                yield tuple(b - a for a, b in pairwise(ends_then)), strategies


def _with(strategies: Columns, changed: dict[int, int]) -> Columns:
    return tuple(changed.get(unit, s) for unit, s in enumerate(strategies))


def leaner(tables: CostTables, columns: Columns, peak: Callable[[Columns], int], asked: int = LEANER) -> Columns:
    """Neighbours of a choice that need less, one layer changed after the other, as long as `peak` may be asked.

    Tables cannot say what lies around a layer's own numbers, such as the gather buffers of its neighbours.
    """
    least, last = peak(columns), len(columns) - 1
    for layer in (0, last, *range(1, last)):
        also = {0, last} if tables.tied and layer in (0, last) else {layer}
        for column in np.flatnonzero(tables.feasible[[*also]].all(axis=0)).tolist():
            changed = tuple(column if i in also else now for i, now in enumerate(columns))
            asked -= 1
            if asked >= 0 and changed != columns and (found := peak(changed)) < least:
                least, columns = found, changed
    return columns
