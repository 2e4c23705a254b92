"""A proof for tables with runs of equal layers: count the strategies of each run instead of naming layers.

The program is a relaxation of the table, so "nothing is at or below v" is a proof and anything else says nothing.
On each stage and run it decides how many layers take each strategy; the layouts in use are visited by a circuit in
some order, each once, and one of them once more at the end of its run. Transitions are replaced by their shortest
detours, for which such an order always exists: a later visit of a layout can be cut out of a path without cost, but
for the last.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar.price import INFEASIBLE, CostTables, Int
from autopar.solvers.canonical import equal_layers
from autopar.solvers.ilp import dominated
from autopar.solvers.segment import FORBIDDEN, groups_of


def nothing_at_or_below(tables: CostTables, at_most_ns: int, *, limit_s: float = 10.0) -> bool:
    """True when CP-SAT proves that every choice that fits costs more than at_most_ns; False proves nothing."""
    from ortools.sat.python import cp_model

    runs = equal_layers(tables)
    if tables.stages > len(tables.time_ns):
        return True
    model = cp_model.CpModel()
    counted = _Counted(tables, model, runs)
    if not all(counted.columns):
        return True
    times = [counted.stage(stage) for stage in range(tables.stages)]
    counted.cover()
    largest = model.new_int_var(0, max(0, at_most_ns), "")
    for time in times:
        model.add(largest >= time)
    model.add(sum(times) + (tables.micro_batches - 1) * largest <= at_most_ns)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_time_in_seconds = limit_s
    return bool(solver.status_name(solver.solve(model)) == "INFEASIBLE")


class _Counted:
    """The model, stage by stage. count[stage][run][s]: layers of the run that take strategy s on the stage."""

    def __init__(self, tables: CostTables, model: Any, runs: list[tuple[int, int]]) -> None:
        self.tables, self.model, self.runs = tables, model, runs
        self.group, steps = groups_of(tables.transition_ns[None])
        self.detour = _detours(steps[0])
        ok = tables.feasible & (tables.state_bytes != INFEASIBLE)
        ok &= (tables.saved_bytes != INFEASIBLE) & (tables.transient_bytes != INFEASIBLE)
        self.columns = []
        for first, _ in runs:
            held = tables.tied and first in (0, len(tables.time_ns) - 1)
            keep = ok[first] if held else ok[first] & ~dominated(tables, self.group, first)
            self.columns.append([int(s) for s in np.flatnonzero(keep)])
        self.count: list[list[dict[int, Any]]] = []
        self.on: list[list[Any]] = []

    def stage(self, stage: int) -> Any:
        """The time of a stage, after adding its variables and constraints."""
        tables, model = self.tables, self.model
        counts: list[dict[int, Any]] = []
        here: list[Any] = []
        time: list[Any] = []
        peak = model.new_int_var(0, max(0, tables.budget_bytes[stage]), "")
        size: list[Any] = [peak]
        for (first, end), columns in zip(self.runs, self.columns, strict=True):
            length = end - first
            count = {s: model.new_int_var(0, length, "") for s in columns}
            on = model.new_bool_var("")
            model.add(sum(count.values()) >= on)
            model.add(sum(count.values()) <= length * on)
            for s, number in count.items():
                time.append(int(tables.time_ns[first, s]) * number)
                kept = int(tables.state_bytes[first, s]) + tables.in_flight[stage] * int(tables.saved_bytes[first, s])
                size.append(kept * number)
                if tables.transient_bytes[first, s]:
                    some = model.new_bool_var("")
                    model.add(number <= length * some)
                    model.add(peak >= int(tables.transient_bytes[first, s]) * some)
            counts.append(count)
            here.append(on)
        model.add_bool_or(here)
        model.add(sum(size) <= tables.budget_bytes[stage])
        self.count.append(counts)
        self.on.append(here)
        time += self._moves(stage, counts)
        return sum(time)

    def _moves(self, stage: int, counts: list[dict[int, Any]]) -> list[Any]:
        """The circuit through the layouts in use; copy 1 of a layout is its second visit, at the end of a run."""
        tables, model = self.tables, self.model
        leaves, enters = stage < tables.stages - 1, stage > 0
        names = [
            (run, group, copy) for run, count in enumerate(counts) for group in self._groups(count) for copy in (0, 1)
        ]
        place = {name: index for index, name in enumerate(names, 1)}
        used = {name: model.new_bool_var("") for name in names}
        arcs = [(place[name], place[name], ~used[name]) for name in names]
        cost: list[Any] = []

        def arc(a: int, b: int, price: int) -> None:
            if price < FORBIDDEN:
                taken = model.new_bool_var("")
                arcs.append((a, b, taken))
                cost.append(price * taken)

        for run, group, copy in names:
            here = place[run, group, copy]
            if copy == 0:
                columns = [s for s in counts[run] if self.group[s] == group]
                number = sum(counts[run][s] for s in columns)
                length = self.runs[run][1] - self.runs[run][0]
                model.add(number <= length * used[run, group, 0])
                model.add(number >= used[run, group, 0] + used[run, group, 1])
                model.add_implication(used[run, group, 1], used[run, group, 0])
                arc(0, here, self._least(tables.entry_ns, group) if enters else 0)
                for other, to, again in names:
                    if other == run and to != group:
                        arc(here, place[other, to, again], int(self.detour[group, to]))
            for other, to, again in names:
                if other == run + 1 and again == 0:
                    arc(here, place[other, to, 0], int(self.detour[group, to]))
            arc(here, 0, self._least(tables.exit_ns, group) + tables.p2p_ns if leaves else 0)
        model.add_circuit(arcs)
        return cost

    def _groups(self, count: dict[int, Any]) -> list[int]:
        return sorted({int(self.group[s]) for s in count})

    def _least(self, cost: Int, group: int) -> int:
        least = int(cost[self.group == group].min())
        return FORBIDDEN if least == INFEASIBLE else least

    def cover(self) -> None:
        """Every layer is on one stage, stages follow each other, and tied ends agree."""
        tables, model = self.tables, self.model
        for run, (first, end) in enumerate(self.runs):
            model.add(sum(sum(counts[run].values()) for counts in self.count) == end - first)
        for stage, later in ((i, j) for j in range(tables.stages) for i in range(j)):
            for run, earlier in ((r, q) for r in range(len(self.runs)) for q in range(r)):
                model.add_bool_or([~self.on[stage][run], ~self.on[later][earlier]])
        if tables.tied and len(self.runs) > 1:
            embed, head = self.count[0][0], self.count[-1][-1]
            for s in sorted({*embed, *head}):
                model.add(embed.get(s, 0) == head.get(s, 0))


def _detours(step: Int) -> Int:
    """[C, C]: the cheapest way from layout to layout over any others; staying is free."""
    best = step.copy()
    np.fill_diagonal(best, 0)
    for middle in range(len(best)):
        best = np.minimum(best, best[:, middle, None] + best[None, middle, :])
    return np.asarray(np.minimum(best, FORBIDDEN))
