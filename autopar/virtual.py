"""Plans with several stages on a rank, or with backwards in two parts, from the choices for one stage a rank.

Not one more dimension of the solver: the tables of 1F1B say, for each number of pipeline ranks and micro-batches,
which strategies are best and fit; the chain is then cut evenly in time into the stages of the schedule, and the cuts
are moved while the simulated step gets shorter. Whether it fits is what the memory walk of that very schedule says;
where it does not, layers of the ranks over their budget take leaner strategies, least time a byte first.
Approximations: strategies are chosen for the cuts of 1F1B, leaner ones by the tables' own numbers; only the best
tables by the work of a rank are tried. The lower bound is the work of a rank without any waiting, with strategies
that the schedule allows and whose shares fit into all ranks together, so that such a plan is never called optimal; how
far both are from the best of all plans: docs/strategies.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np

from autopar.cuts import CutTables
from autopar.finalists import certified, peak_bytes, step_s
from autopar.legality import why_schedule_illegal, why_schedule_not_runnable, why_sharding_illegal
from autopar.orders import in_flight
from autopar.plan import Plan
from autopar.polish import Columns, Cuts
from autopar.price import INFEASIBLE, CostTables
from autopar.request import Request, Schedule
from autopar.schedules import PLAIN, SPLIT_BACKWARD
from autopar.solvers.lean import leanest
from autopar.solvers.pipeline import solve_table
from autopar.solvers.quick import least_sum_ns
from autopar.units import NS_PER_S

MOST_TABLES, MOST_LARGE_TABLES = 8, 3
ROUNDS = 16
"""How often a choice that does not fit makes way for a leaner one."""
MOVES = 40
"""How many other cuts of a plan are simulated."""
STAGES_PER_RANK = (1, 2, 4)


def virtual_plans(
    made: CutTables,
    request: Request,
    budget_bytes: int,
    *,
    base: Callable[[int, Cuts, Columns], Plan],
    priced: Callable[[Plan], Plan],
    halted: Callable[[], bool],
) -> Iterator[Plan]:
    """The plans that fit under the schedules of the request beyond GPipe and 1F1B, each the best of its kind.

    base: the plan of a choice of a table under 1F1B, without prediction; priced: a plan with its prediction.
    """
    places = [place for place, cut in enumerate(made.cuts) if cut.pp > 1]
    for schedule in (s for s in request.schedules if s not in PLAIN):
        ranked = sorted((least_ns(made, place, schedule, budget_bytes), place) for place in places)
        floor_ns = min((least for least, _ in ranked), default=0)
        for least, place in ranked[: MOST_LARGE_TABLES if made.is_large else MOST_TABLES]:
            cut = made.cuts[place]
            for per_rank in STAGES_PER_RANK:
                reason = why_schedule_illegal(
                    schedule, pp=cut.pp, num_micro_batches=cut.num_micro_batches, stages_per_rank=per_rank
                )
                if not request.allow_unrunnable:
                    reason = reason or why_schedule_not_runnable(schedule, request.dtype)
                if halted() or reason or least == INFEASIBLE or per_rank * cut.pp > len(made.lower[place].time_ns):
                    continue
                table = allowed(made.lower[place], schedule)
                plan = _fitting(table, place, schedule, per_rank, budget_bytes, base=base, priced=priced)
                if plan is not None and _few_enough(plan, request.max_strategies):
                    step_ns = int(step_s(plan) * NS_PER_S)
                    assert plan.certificate is not None
                    objective = replace(plan.certificate, objective_ns=step_ns, lower_bound_ns=0)
                    bound_ns = min(floor_ns, step_ns - 1)
                    yield certified(replace(plan, certificate=objective), bound_ns, solver="simulation")


def least_ns(made: CutTables, place: int, schedule: Schedule, budget_bytes: int) -> int:
    """No plan of this cut under the schedule is faster, INFEASIBLE where none fits.

    A rank does its part of all layers for every micro-batch, without waiting: the P-th part of the least sum of what
    fits into all ranks together. Each holds its shares and its gradients when its last backward is over.
    """
    table, prices = allowed(made.lower[place], schedule), made.prices(place)
    nothing = np.zeros_like(table.time_ns)
    bare = replace(
        table,
        time_ns=np.where(table.feasible, prices.waited_ns, INFEASIBLE),
        state_bytes=prices.ending_bytes(),
        saved_bytes=nothing,
        transient_bytes=nothing,
        p2p_ns=0,
        in_flight=(0,) * table.stages,
        budget_bytes=(budget_bytes,) * table.stages,
    )
    found = least_sum_ns(bare)
    if found is None:
        return INFEASIBLE
    total, slowest = found
    return table.micro_batches * max(-(-total // table.stages), slowest)


def allowed(table: CostTables, schedule: Schedule) -> CostTables:
    """The table without the strategies that the schedule forbids.

    Nor recompute where backwards are split: it runs, but torch keeps what it recomputed, and peaks are then predicted
    2 to 27 % too low (measured: two stages a rank on two pipeline ranks).
    """
    split = schedule in SPLIT_BACKWARD
    illegal = [
        why_sharding_illegal(strategy, schedule) is not None or (split and strategy.recompute != "none")
        for strategy in table.strategies
    ]
    time_ns = table.time_ns.copy()
    time_ns[:, illegal] = INFEASIBLE
    return replace(table, time_ns=time_ns)


def _fitting(
    table: CostTables,
    place: int,
    schedule: Schedule,
    per_rank: int,
    budget_bytes: int,
    *,
    base: Callable[[int, Cuts, Columns], Plan],
    priced: Callable[[Plan], Plan],
) -> Plan | None:
    """The plan of the best choice of a table, with leaner strategies until it fits; None when it never does."""
    choice = solve_table(table)
    layers, columns = choice.layers_per_stage, choice.strategies
    if layers is None or columns is None:
        lean = leanest(table)
        if lean is None:
            return None
        layers, columns, _ = lean
    for _ in range(ROUNDS):
        times = [int(row[column]) for row, column in zip(table.time_ns, columns, strict=True)]
        cuts = even_cuts(times, table.stages * per_rank)
        plan = priced(replace(base(place, layers, columns), schedule=schedule, layers_per_stage=cuts))
        if peak_bytes(plan) <= budget_bytes:
            return _moved(plan, budget_bytes, priced)
        leaner = _leaner(table, columns, plan, budget_bytes)
        if leaner == columns:
            return None
        columns = leaner
    return None


def _leaner(table: CostTables, columns: Columns, plan: Plan, budget_bytes: int) -> Columns:
    """Cheaper strategies in memory on the ranks over the budget, those first that cost least time a byte.

    By the numbers of the table, with the saved sets that the schedule keeps alive; one change a layer.
    """
    assert plan.predicted is not None
    found, last = list(columns), len(columns) - 1
    for rank in range(plan.pp):
        over_bytes = plan.predicted.memory[rank * plan.mesh.ranks_per_stage].peak_bytes - budget_bytes
        changes: list[tuple[float, int, int, int]] = []
        for stage in plan.stages_of_rank(rank) if over_bytes > 0 else ():
            live = in_flight(plan.schedule, plan.pp, stage, plan.num_micro_batches, plan.stages_per_rank)
            for layer in plan.stage_layers(stage):
                now, feasible = columns[layer], table.feasible[layer]
                both = table.tied and layer in (0, last)
                if both:
                    feasible = table.feasible[0] & table.feasible[last]
                needed = table.state_bytes[layer] + live * table.saved_bytes[layer]
                spared = needed[now] - needed
                more_ns = table.time_ns[layer] - table.time_ns[layer, now]
                for side in (layer - 1, layer + 1):
                    if 0 <= side <= last:
                        moves = table.transition_ns[columns[side]]
                        more_ns = more_ns + moves - moves[now]
                for column in np.flatnonzero(feasible & (spared > 0)).tolist():
                    changes.append((more_ns[column] / spared[column], layer, column, int(spared[column])))
        changed: set[int] = set()
        for _, layer, column, spared_bytes in sorted(changes):
            if over_bytes > 0 and layer not in changed:
                for other in (0, last) if table.tied and layer in (0, last) else (layer,):
                    found[other] = column
                    changed.add(other)
                over_bytes -= spared_bytes
    return tuple(found)


def _few_enough(plan: Plan, most: int | None) -> bool:
    return most is None or len(set(plan.strategies[1:-1])) <= most


def even_cuts(times: list[int], stages: int) -> Cuts:
    """How many layers each of so many stages takes, in order, so that the longest takes least; O(layers^2 stages)."""
    ends = [0, *accumulate(times)]
    best = [(ends[n], 0) if n else (INFEASIBLE, 0) for n in range(len(ends))]
    steps = []
    for stage in range(2, stages + 1):
        now = [(INFEASIBLE, 0)] * len(ends)
        for n in range(stage, len(ends)):
            now[n] = min((max(best[m][0], ends[n] - ends[m]), m) for m in range(stage - 1, n))
        steps.append([m for _, m in now])
        best = now
    cuts = [len(times)]
    for row in reversed(steps):
        cuts.append(row[cuts[-1]])
    return tuple(b - a for a, b in pairwise([0, *reversed(cuts)]))


def _moved(plan: Plan, budget_bytes: int, priced: Callable[[Plan], Plan]) -> Plan:
    """The plan with its cuts moved by a layer while the simulated step gets shorter."""
    left, better = MOVES, True
    while better and left > 0:
        better = False
        for cut, step in ((cut, step) for cut in range(plan.num_stages - 1) for step in (-1, 1)):
            layers = np.array(plan.layers_per_stage)
            layers[cut] += step
            layers[cut + 1] -= step
            if layers.min() < 1 or left <= 0:
                continue
            left -= 1
            found = priced(replace(plan, layers_per_stage=tuple(layers.tolist())))
            if step_s(found) < step_s(plan) and peak_bytes(found) <= budget_bytes:
                plan, better = found, True
    return plan
