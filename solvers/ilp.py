"""A second opinion: the table as an integer program, for HiGHS through pulp and for OR-Tools CP-SAT.

The chain is one path through nodes (layer l, stage i, strategy s):

    node[l, i, s] in {0, 1}                 layer l runs on stage i with strategy s
    inside[l, i, c, d], across[l, i] >= 0   the path goes on inside stage i from layout c to d, or to stage i + 1
    what enters a node or layout leaves it  (so stages are contiguous and none is empty)
    T_i = time of its nodes + transitions of its inside edges + entry, exit and p2p of its across edges
    sum over nodes (state + in_flight_i * saved) + Q_i <= budget_i,  Q_i >= transient of each layer on stage i
    X >= T_i,  minimise sum_i T_i + (micro_batches - 1) X

The form is layer-wise: equal layers are symmetric in it, so it is meant for small and middling tables
(autopar.solvers.counted is for long runs of equal layers).
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.price import INFEASIBLE, CostTables, Int, score
from autopar.solvers.segment import FORBIDDEN, groups_of

Terms = list[tuple[int, int]]
"""Coefficient and variable."""


@dataclass
class Program:
    """A linear program in whole numbers: variables from 0 to `upper`, rows `low <= sum <= high`.

    node[layer, stage, strategy]: the variable that says that the layer is there; whole: the variables that are 0 or 1,
    the others count nanoseconds or bytes.
    """

    upper: list[int] = field(default_factory=list)
    rows: list[tuple[Terms, int | None, int | None, str]] = field(default_factory=list)
    objective: Terms = field(default_factory=list)
    node: dict[tuple[int, int, int], int] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)

    def variable(self) -> int:
        """A new variable that is 0 or 1."""
        self.whole.add(len(self.upper))
        self.upper.append(1)
        return len(self.upper) - 1

    def amount(self, upper: int) -> int:
        """A new variable that counts nanoseconds or bytes."""
        self.upper.append(upper)
        return len(self.upper) - 1

    def row(self, terms: Terms, low: int | None, high: int | None, unit: str = "") -> None:
        """A new constraint; unit "ns" or "bytes" says how to scale it for floating-point solvers."""
        self.rows.append((terms, low, high, unit))


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a prover says: status "OPTIMAL", "FEASIBLE", "INFEASIBLE" or "UNKNOWN", and the choice it found, if any."""

    status: str
    layers_per_stage: tuple[int, ...] = ()
    strategies: tuple[int, ...] = ()

    def objective_ns(self, tables: CostTables) -> int | None:
        """What the choice adds up to; None when there is none, or it is not one that fits."""
        if not self.strategies:
            return None
        try:
            result = score(tables, self.layers_per_stage, self.strategies)
        except ValueError:
            return None
        return result.objective_ns if result.fits else None


def _answer(status: str, program: Program, tables: CostTables, chosen: Callable[[int], bool]) -> Answer:
    if status not in ("OPTIMAL", "FEASIBLE"):
        return Answer(status=status)
    places = sorted(place for place, one in program.node.items() if chosen(one))
    return Answer(
        status=status,
        layers_per_stage=tuple(sum(stage == i for _, stage, _ in places) for i in range(tables.stages)),
        strategies=tuple(s for _, _, s in places),
    )


def program_of(tables: CostTables) -> Program:
    """The integer program of one table."""
    units, count = tables.time_ns.shape
    stages = tables.stages
    group, steps = groups_of(tables.transition_ns[None])
    groups = range(steps.shape[1])
    program = Program()
    ok = tables.feasible & (tables.state_bytes != INFEASIBLE)
    ok &= (tables.saved_bytes != INFEASIBLE) & (tables.transient_bytes != INFEASIBLE)
    for layer in range(units):
        if not (tables.tied and layer in (0, units - 1)):
            ok[layer] &= ~dominated(tables, group, layer)
    largest = int(np.where(tables.time_ns == INFEASIBLE, 0, tables.time_ns).max(axis=1).sum())
    for move in (tables.transition_ns, tables.entry_ns, tables.exit_ns):
        largest += units * int(np.where(move == INFEASIBLE, 0, move).max(initial=0))
    largest += tables.p2p_ns
    node = {
        (layer, stage, s): program.variable()
        for layer in range(units)
        for stage in range(stages)
        for s in range(count)
        if ok[layer, s] and stage <= layer and stages - stage <= units - layer
    }
    program.node = node
    into: dict[int, Terms] = {one: [] for one in node.values()}
    out: dict[int, Terms] = {one: [] for one in node.values()}
    cost: list[Terms] = [[] for _ in range(stages)]
    for (layer, stage, s), one in node.items():
        cost[stage].append((int(tables.time_ns[layer, s]), one))
        if layer == 0 and stage == 0:
            into[one].append((1, one))
        if layer == units - 1 and stage == stages - 1:
            out[one].append((1, one))
    for layer in range(units - 1):
        for stage in range(stages):
            here = [(s, node[layer, stage, s]) for s in range(count) if (layer, stage, s) in node]
            inside = [(s, node[layer + 1, stage, s]) for s in range(count) if (layer + 1, stage, s) in node]
            next_ = [(s, node[layer + 1, stage + 1, s]) for s in range(count) if (layer + 1, stage + 1, s) in node]
            leaving: dict[int, Terms] = {c: [] for c in groups}
            entering: dict[int, Terms] = {c: [] for c in groups}
            for s, one in here:
                edge = program.variable()
                out[one].append((1, edge))
                leaving[int(group[s])].append((-1, edge))
            for s, one in inside:
                edge = program.variable()
                into[one].append((1, edge))
                entering[int(group[s])].append((-1, edge))
            for c in groups:
                for d in groups:
                    if leaving[c] and entering[d] and steps[0, c, d] < FORBIDDEN:
                        edge = program.variable()
                        leaving[c].append((1, edge))
                        entering[d].append((1, edge))
                        cost[stage].append((int(steps[0, c, d]), edge))
            across: Terms = []
            for s, one in here:
                if next_ and tables.exit_ns[s] != INFEASIBLE:
                    edge = program.variable()
                    out[one].append((1, edge))
                    across.append((1, edge))
                    cost[stage].append((int(tables.exit_ns[s]) + tables.p2p_ns, edge))
            for s, one in next_:
                if tables.entry_ns[s] != INFEASIBLE:
                    edge = program.variable()
                    into[one].append((1, edge))
                    across.append((-1, edge))
                    cost[stage + 1].append((int(tables.entry_ns[s]), edge))
            for balance in (across, *leaving.values(), *entering.values()):
                if balance:
                    program.row(balance, 0, 0)
    for (layer, stage, _), one in node.items():
        # The two ends of the path are their own source and sink.
        if not (layer == 0 and stage == 0):
            program.row([*into[one], (-1, one)], 0, 0)
        if not (layer == units - 1 and stage == stages - 1):
            program.row([*out[one], (-1, one)], 0, 0)
    for layer in range(units):
        chosen = [(1, one) for (place, _, _), one in node.items() if place == layer]
        program.row(chosen, 1, 1)
    _order_equal_layers(program, tables, group)
    _memory(program, tables, node)
    _objective(program, tables, cost, largest)
    if tables.tied and units > 1:
        for s in range(count):
            first, last = node.get((0, 0, s)), node.get((units - 1, stages - 1, s))
            terms = [(1, first)] if first is not None else []
            terms += [(-1, last)] if last is not None else []
            if terms:
                program.row(terms, 0, 0)
    return program


def _order_equal_layers(program: Program, tables: CostTables, group: Int) -> None:
    """Equal neighbours of one stage and layout take their strategies in column order: swapping them costs nothing."""
    parts = (tables.time_ns, tables.state_bytes, tables.saved_bytes, tables.transient_bytes)
    units, node = len(tables.time_ns), program.node
    for one in range(group.max() + 1):
        columns = np.flatnonzero(group == one)
        if len(np.unique(tables.entry_ns[columns])) > 1 or len(np.unique(tables.exit_ns[columns])) > 1:
            continue
        for layer in range(units - 1):
            held = tables.tied and (layer == 0 or layer + 1 == units - 1)
            if held or any((part[layer] != part[layer + 1]).any() for part in parts):
                continue
            for stage in range(tables.stages):
                here = [s for s in columns.tolist() if (layer, stage, s) in node and (layer + 1, stage, s) in node]
                for border in range(len(here) - 1):
                    later = [(1, node[layer, stage, s]) for s in here[border + 1 :]]
                    earlier = [(1, node[layer + 1, stage, s]) for s in here[: border + 1]]
                    program.row([*later, *earlier], None, 1)


def dominated(tables: CostTables, group: Int, layer: int) -> NDArray[np.bool_]:
    """[S]: strategies that another of the same layout matches in every number of this layer."""
    parts = (tables.time_ns, tables.state_bytes, tables.saved_bytes, tables.transient_bytes)
    rows = np.stack([*(part[layer] for part in parts), tables.entry_ns, tables.exit_ns])
    no_worse = (rows[:, :, None] <= rows[:, None, :]).all(axis=0) & (group[:, None] == group[None, :])
    earlier = np.triu(np.ones_like(no_worse), 1)
    return np.asarray((no_worse & (earlier | ~no_worse.T)).any(axis=0))


def _memory(program: Program, tables: CostTables, node: dict[tuple[int, int, int], int]) -> None:
    for stage in range(tables.stages):
        peak = program.amount(max(0, tables.budget_bytes[stage]))
        size: Terms = [(1, peak)]
        by_layer: dict[int, Terms] = {}
        for (layer, place, s), one in node.items():
            if place == stage:
                kept = int(tables.state_bytes[layer, s]) + tables.in_flight[stage] * int(tables.saved_bytes[layer, s])
                size.append((kept, one))
                by_layer.setdefault(layer, []).append((-int(tables.transient_bytes[layer, s]), one))
        program.row(size, None, tables.budget_bytes[stage], "bytes")
        for terms in by_layer.values():
            program.row([(1, peak), *terms], 0, None, "bytes")


def _objective(program: Program, tables: CostTables, cost: list[Terms], largest: int) -> None:
    slowest = program.amount(largest)
    program.objective = [(tables.micro_batches - 1, slowest)]
    for terms in cost:
        time = program.amount(largest)
        program.row([*terms, (-1, time)], 0, 0, "ns")
        program.row([(1, slowest), (-1, time)], 0, None, "ns")
        program.objective.append((1, time))


def cp_sat(tables: CostTables, *, at_most_ns: int | None = None, limit_s: float = 10.0) -> Answer:
    """What CP-SAT says of choices <= at_most_ns (any one will do), or of the best choice without it."""
    from ortools.sat.python import cp_model

    program = program_of(tables)
    model = cp_model.CpModel()
    variables = [model.new_int_var(0, upper, "") for upper in program.upper]
    for terms, low, high, _ in program.rows:
        total = cp_model.LinearExpr.weighted_sum([variables[one] for _, one in terms], [weight for weight, _ in terms])
        if not terms:
            # Nothing adds up to 0: CP-SAT takes no empty row.
            if (low or 0) > 0 or (high is not None and high < 0):
                return Answer(status="INFEASIBLE")
            continue
        least = cp_model.INT_MIN if low is None else low
        model.add_linear_constraint(total, least, cp_model.INT_MAX if high is None else high)
    objective = cp_model.LinearExpr.weighted_sum(
        [variables[one] for _, one in program.objective], [weight for weight, _ in program.objective]
    )
    if at_most_ns is None:
        model.minimize(objective)
    else:
        model.add(objective <= at_most_ns)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_time_in_seconds = limit_s
    status = solver.status_name(solver.solve(model))
    return _answer(status, program, tables, lambda one: bool(solver.value(variables[one])))


def highs(tables: CostTables, *, limit_s: float = 10.0) -> Answer:
    """What HiGHS, through pulp, says of the best choice, in floating point.

    Times and bytes are scaled to a few thousand, without which HiGHS is unreliable; `sol_status` is read because
    pulp's status is "Optimal" at a time limit, too.
    """
    with warnings.catch_warnings():
        # pulp 3.3 announces how pulp 4 will name its methods; 3.0 knows only these.
        warnings.simplefilter("ignore", DeprecationWarning)
        return _highs(tables, limit_s)


@functools.cache
def _silence_banner() -> None:
    """Make the first HiGHS object with standard output closed: its banner heeds no option and would spoil --json."""
    import highspy

    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            highspy.Highs()
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _highs(tables: CostTables, limit_s: float) -> Answer:
    import pulp

    _silence_banner()

    program = program_of(tables)
    problem = pulp.LpProblem("table", pulp.LpMinimize)
    unit = [""] * len(program.upper)
    for terms, _, _, kind in program.rows:
        for _, one in terms:
            if kind and one not in program.whole:
                unit[one] = kind
    largest = {kind: max([1, *(u for u, of in zip(program.upper, unit, strict=True) if of == kind)]) for kind in unit}
    scale = {"": 1.0, "ns": 1e4 / largest.get("ns", 1), "bytes": 1e4 / largest.get("bytes", 1)}
    variables = [
        pulp.LpVariable(f"v{index}", 0, upper if not of else upper * scale[of], cat="Continuous" if of else "Integer")
        for index, (upper, of) in enumerate(zip(program.upper, unit, strict=True))
    ]

    def total(terms: Terms, kind: str) -> Any:
        return pulp.lpSum((w * scale[kind] / scale[unit[one]]) * variables[one] for w, one in terms)

    problem += total(program.objective, "ns")
    for terms, low, high, kind in program.rows:
        if low is not None and low == high:
            problem += total(terms, kind) == low * scale[kind]
        elif high is not None:
            problem += total(terms, kind) <= high * scale[kind]
        else:
            problem += total(terms, kind) >= (low or 0) * scale[kind]
    problem.solve(pulp.HiGHS(msg=False, timeLimit=limit_s, gapRel=0, gapAbs=1e-9, threads=1))
    status = "UNKNOWN"
    if problem.sol_status == pulp.LpSolutionOptimal:
        status = "OPTIMAL"
    elif problem.status == pulp.LpStatusInfeasible:
        status = "INFEASIBLE"
    return _answer(status, program, tables, lambda one: (variables[one].value() or 0.0) > 0.5)
