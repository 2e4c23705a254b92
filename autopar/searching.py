"""The order of the steps of a search: enumerate, tabulate, solve, polish, simulate the finalists, choose.

Every legal number of stages, of micro-batches and schedule makes three tables, of equal times: with memory bounded
from below, which leaves no plan out and so gives a valid lower bound; estimated; and bounded from above, where every
choice fits. Whether a choice fits is in the end what the memory walk says. The best choices of the tables, and better
neighbours of them, are simulated, and the fastest one that fits is the plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from autopar.cuts import check_files, cut_tables, legal_cuts
from autopar.errors import InfeasibleError, InputError, RunError
from autopar.finalists import Finalist, certified, objective_ns, peak_bytes, ranking
from autopar.legality import why_schedule_not_runnable
from autopar.measured import ClusterFile, ModelFile
from autopar.plan import Plan
from autopar.polish import ASKED, Columns, Cuts, leaner, polish
from autopar.pool import Pool
from autopar.price import INFEASIBLE, CostTables, OutOfRange
from autopar.refuted import lean_first, without
from autopar.request import Request
from autopar.schedules import PLAIN
from autopar.settling import settle
from autopar.solvers.lean import leanest, leanest_of
from autopar.solvers.pipeline import halting, solve_pipeline, solve_table
from autopar.solvers.quick import quick_bound
from autopar.solvers.segment import FORBIDDEN
from autopar.tables import Memory
from autopar.units import KIB, MIB, format_bytes
from autopar.virtual import virtual_plans

SIDES: tuple[Memory, ...] = ("lower", "near", "upper")
SHORTLIST, SHORTLIST_LARGE = 5, 4
WITHIN = 0.25
"""How much worse than the best a table's choice may be to be simulated: more than the objective and a step differ."""
CLOSE = 0.01
"""In large tables, what is left to gain by more questions that is not worth them."""
FAR = 0.1
"""What is left to gain, near the cliff, that the leanest choices and distant ones are worth trying for."""
ROUNDS = 4
"""How often a choice of a table that does not fit makes way for a leaner one."""
POLISHED, POLISHED_LARGE = 3, 2
"""Of how many choices the neighbours are tried, when none is proven optimal; in large tables one a table."""
EACH = 8
"""Of how many tables the leanest choices, and then the neighbours of the best one, are tried near the cliff."""
Progress = Callable[[str, int, int], None]
"""Told a phase (tables, solve, polish), how many of its steps are done, and how many there are."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best plan, all simulated candidates (fitting first, then fastest), and why other cuts were not tried."""

    plan: Plan
    finalists: tuple[Finalist, ...]
    skipped: tuple[str, ...]


def search_files(
    model_file: ModelFile,
    cluster_file: ClusterFile,
    request: Request,
    *,
    progress: Progress | None = None,
    deadline: float | None = None,
    stop: Callable[[], bool] | None = None,
    verify: bool = False,
) -> SearchResult:
    """The best plan for a measured model on a measured cluster.

    verify: let other provers check the bound and write their names into the certificate; deadline: a moment of
    `time.monotonic()`; stop: asked now and then; after either the best so far is returned, with its gap. The same
    input gives the same plan, byte for byte, unless stopped.
    Raises InputError when nothing is legal or the files do not fit the request, InfeasibleError (with `leanest`, a
    Plan) when nothing fits the budget, RunError when stopped before anything was found.
    """
    tell: Progress = progress or (lambda phase, done, total: None)
    check_files(model_file, cluster_file, request)
    legal, skipped = legal_cuts(model_file, cluster_file, request)
    if not legal:
        more = [f"and {len(skipped) - 3} more"] if len(skipped) > 3 else []
        raise InputError(
            "no plan is legal for this request",
            why="; ".join([*skipped[:3], *more]),
            fix="change the global batch, the number of stages or the number of micro-batches",
        )

    halted = halting(deadline, stop)
    made, reasons = cut_tables(
        model_file, cluster_file, request, legal, lambda done, total: tell("tables", done, total), halted
    )
    pool = Pool(model_file=model_file, cluster_file=cluster_file, request=request, made=made)
    try:
        bound_ns = _propose(pool, tell, deadline, stop)
    except OutOfRange:
        raise InputError(
            f"a global batch of {request.global_batch} is too large to plan for",
            why="a step may take more than 2^50 ns (13 days) or 2^50 bytes by the profile",
            fix="give a smaller global batch, or check the profiles for absurd numbers",
        ) from None
    if bound_ns < INFEASIBLE:
        _polish(pool, bound_ns, tell, halted)
        bound_ns = settle(pool, bound_ns, halted)
        _add_twins(pool)
    if not any(finalist.fits for finalist in pool.found.values()):
        raise _nothing_fits(pool, proven=bound_ns == INFEASIBLE)
    provers = _provers(pool, bound_ns, tell, halted) if verify else ()
    found = [
        replace(f, plan=certified(f.plan, bound_ns, verified_by=provers))
        for f in pool.found.values()
        if f.plan.pp == 1 or f.plan.schedule in request.schedules
    ]
    if not set(PLAIN).issuperset(request.schedules):
        plans = virtual_plans(made, request, pool.budget_bytes, base=pool.plan, priced=pool.priced, halted=halted)
        found += [Finalist(plan=plan, fits=True) for plan in plans]
    found.sort(key=lambda f: (not f.fits, *ranking(f.plan)))
    if not any(f.fits for f in found):
        unrunnable = [why_schedule_not_runnable(s, request.dtype) for s in request.schedules]
        raise InfeasibleError(
            f"No plan under {', '.join(request.schedules)} fits among those tried",
            why="; ".join(
                [
                    "under 1f1b or gpipe there is one that fits",
                    *filter(None, () if request.allow_unrunnable else unrunnable),
                ]
            ),
            fix="allow these with --schedule, or give more memory or other micro-batches",
        )
    return SearchResult(plan=found[0].plan, finalists=tuple(found), skipped=(*skipped, *reasons))


def _propose(pool: Pool, tell: Progress, deadline: float | None, stop: Callable[[], bool] | None) -> int:
    """The lower bound over all plans that fit, INFEASIBLE for none; the best choices of the tables join the pool.

    The tables whose memory is bounded from below say which cuts matter; only for those whose choice does not fit are
    the other tables, and leaner choices, asked. When nothing fits yet, all cuts are.
    """
    made, most = pool.made, pool.request.max_strategies
    solve = partial(
        solve_pipeline,
        shortlist=SHORTLIST if not made.is_large else SHORTLIST_LARGE,
        deadline=deadline,
        stop=stop,
        within=WITHIN,
        max_strategies=most,
    )
    steps = 3 + 4 * ROUNDS
    done = itertools.count()

    def ask(places: Sequence[int], tables: Sequence[CostTables], **limits: Any) -> dict[int, CostTables]:
        """The tables whose choice does not fit and is below the best that fits, to be asked again for less."""
        tell("solve", min(next(done), steps), steps)
        proposed = {}
        for one in solve(tables, **limits):
            assert one.choice.layers_per_stage is not None
            assert one.choice.strategies is not None
            place = places[one.table]
            pool.bounding = pool.bounding or replace(one, table=place)
            cuts, columns = one.choice.layers_per_stage, one.choice.strategies
            found = pool.add(place, cuts, columns)
            if (
                not found.fits
                and not made.is_large
                and (leaner := lean_first(tables[one.table], cuts, columns)) != columns
            ):
                again = pool.add(place, cuts, leaner)
                if peak_bytes(again.plan) < peak_bytes(found.plan):
                    found, columns = again, leaner
            proposed[place] = tables[one.table], (cuts, columns), found
            bounds.append(one.lower_bound_ns)
        best_ns = pool.best_ns()
        return {
            place: less(table, choice, f.plan)
            for place, (table, choice, f) in proposed.items()
            if not f.fits and objective_ns(f.plan) < best_ns and peak_bytes(f.plan) > pool.budget_bytes
        }

    def less(table: CostTables, choice: tuple[Cuts, Columns], plan: Plan) -> CostTables:
        # In large tables few questions are asked, and less memory everywhere gets to a choice that fits sooner.
        if made.is_large:
            return table.with_less(peak_bytes(plan) - pool.budget_bytes)
        return without(table, *choice, pool.refutations(plan))

    def near_ns(place: int) -> int:
        # The simulated step may prefer what is a little worse.
        return int(min(FORBIDDEN, pool.best_ns(place) * (1 + CLOSE)))

    def refine(places: Sequence[int], memory: Memory, limit_ns: Callable[[int], int]) -> None:
        asked = {place: made.table(memory, place) for place in places if place not in barren}
        for turn in range(ROUNDS):
            now, known = asked, len(bounds)
            asked = now and ask([*now], [*now.values()], limits_ns=[limit_ns(place) for place in now])
            if turn == 0 and len(bounds) == known:
                barren.update(now)  # limits only fall, and the bound from above holds less than the estimate

    bounds, barren = list[int](), set[int]()
    bound_ns = 0
    try:
        asked = ask(range(len(made.cuts)), made.lower, floors_ns=made.floors_ns)
        bound_ns = bounds[0] if bounds else INFEASIBLE
        unsure = {key[0]: objective_ns(f.plan) for key, f in pool.found.items() if key[0] in asked}
        for _ in range(ROUNDS - 1):
            asked = asked and ask([*asked], [*asked.values()])
        for memory in SIDES[1:]:
            worth_ns = pool.best_ns() * (1 - (CLOSE if made.is_large else 0))
            refine([place for place, least_ns in unsure.items() if least_ns < worth_ns], memory, near_ns)
        for memory in SIDES[1:]:
            far = not made.is_large and pool.best_ns() * (1 - CLOSE) > bound_ns
            if bounds and (far or pool.best_ns() == INFEASIBLE):
                best_ns = pool.best_ns()
                hopeful = [place for place, floor_ns in enumerate(made.floors_ns) if floor_ns < best_ns]
                refine(hopeful, memory, lambda place, best_ns=best_ns: best_ns)  # type: ignore[misc]
    except RunError:
        if pool.best_ns() == INFEASIBLE:
            _add_leanest(pool)
        if pool.best_ns() == INFEASIBLE:
            raise
    tell("solve", steps, steps)
    return bound_ns


def _polish(pool: Pool, bound_ns: int, tell: Progress, halted: Callable[[], bool]) -> None:
    """Better neighbours of the best choices join the pool."""
    if pool.best_ns() * (1 - (CLOSE if pool.made.is_large else 0)) > bound_ns:
        far = pool.best_ns() * (1 - FAR) > bound_ns
        if pool.best_ns() == INFEASIBLE or (far and not pool.made.is_large):
            _add_leanest(pool)
        each = far and not pool.made.is_large
        if each:
            _add_leanest_of_each(pool, halted)
        most, asked = (POLISHED_LARGE, ASKED // 2) if pool.made.is_large else (POLISHED, ASKED)
        worst_ns = INFEASIBLE if far else pool.best_ns() * (1 + WITHIN)
        starts: list[tuple[int, Cuts, Columns]] = []
        for found_ns, table, layers_per_stage, strategies, _ in sorted(
            (objective_ns(f.plan), *key) for key, f in pool.found.items() if f.fits
        ):
            is_new = all(table != other for other, _, _ in starts)
            wanted = len(starts) < most and (is_new or not pool.made.is_large)
            if found_ns <= worst_ns and (wanted or (each and is_new and len(starts) < EACH)):
                starts.append((table, layers_per_stage, strategies))
        for i, (table, layers_per_stage, strategies) in enumerate(starts):
            tell("polish", i, len(starts))
            fits = partial(pool.fits, table)
            better = polish(
                pool.made.lower[table], layers_per_stage, strategies, fits=fits, asked=asked, halted=halted
            )
            pool.add(table, *better)
        tell("polish", len(starts), len(starts))


def _add_twins(pool: Pool) -> None:
    """The best choices under 1f1b join the pool under gpipe, which has no tables of its own."""
    if set(pool.request.schedules) >= {"1f1b", "gpipe"}:
        fitting = sorted((objective_ns(f.plan), *key) for key, f in pool.found.items() if f.fits)
        for _, table, layers_per_stage, strategies, schedule in fitting[:SHORTLIST]:
            if schedule == "1f1b" and pool.made.cuts[table].pp > 1:
                pool.add(table, layers_per_stage, strategies, "gpipe")


def _add_leanest(pool: Pool) -> None:
    """The leanest choice of each side joins the pool, in small tables with neighbours: they may be all that fits."""
    for memory in SIDES:
        lean = leanest_of([pool.made.table(memory, place) for place in range(len(pool.made.cuts))])
        if lean is not None:
            pool.add(lean[0], *lean[1][:2])
    if pool.made.is_large or not pool.found or pool.best_ns() < INFEASIBLE:
        return
    _, (table, cuts, columns, _) = min((peak_bytes(f.plan), key) for key, f in pool.found.items())
    pool.add(table, cuts, leaner(pool.made.lower[table], columns, lambda one: pool.peak_bytes(table, cuts, one)))


def _add_leanest_of_each(pool: Pool, halted: Callable[[], bool]) -> None:
    """The leanest choices of the tables that may hold the best join the pool, with neighbours where they do not fit.

    Near the cliff a table that looks slower than another may be the only one of which much fits.
    """
    hopeful = sorted((floor_ns, place) for place, floor_ns in enumerate(pool.made.floors_ns))
    for floor_ns, place in hopeful[:EACH]:
        for memory in SIDES:
            lean = leanest(pool.made.table(memory, place))
            if lean is None or floor_ns >= pool.best_ns() or halted():
                continue
            cuts, columns, _ = lean
            if not pool.add(place, cuts, columns).fits:
                peak = partial(pool.peak_bytes, place, cuts)
                pool.add(place, cuts, leaner(pool.made.lower[place], columns, peak))


def _provers(pool: Pool, bound_ns: int, tell: Progress, halted: Callable[[], bool]) -> tuple[str, ...]:
    """Who agrees that no plan is below the bound: in every table that could hold one, not only in the best.

    Nobody where the number of strategies is limited, which these programs do not express.
    """
    from autopar.solvers.certificate import certify

    if pool.bounding is None or pool.bounding.lower_bound_ns < bound_ns or pool.request.max_strategies is not None:
        return ()
    open_ = [place for place, one in enumerate(pool.made.lower) if quick_bound(one) < bound_ns]
    places = list(dict.fromkeys((pool.bounding.table, *open_)))
    names: tuple[str, ...] | None = None
    for i, place in enumerate(places):
        tell("verify", i, len(places))
        if halted() or names == ():
            return ()
        if place == pool.bounding.table:
            choice = replace(pool.bounding.choice, lower_bound_ns=bound_ns)
        else:
            choice = solve_table(pool.made.lower[place])
            if choice.status == "gap" or choice.lower_bound_ns < bound_ns:
                return ()
        agree = certify(pool.made.lower[place], choice)
        names = agree if names is None else tuple(name for name in names if name in agree)
    tell("verify", len(places), len(places))
    return names or ()


def _nothing_fits(pool: Pool, *, proven: bool) -> InfeasibleError:
    """What is missing: the leanest plan, its worst rank with its parts, and the memory that would do."""
    _add_leanest(pool)
    plan = min((f.plan for f in pool.found.values()), key=lambda one: (peak_bytes(one), *ranking(one)))
    budget_bytes = pool.budget_bytes
    assert plan.predicted is not None
    rank = plan.predicted.worst_rank
    peak, parts = peak_bytes(plan), plan.predicted.memory[rank].parts_bytes
    enough = f"{-(-peak // MIB)}MiB" if peak >= 64 * MIB else f"{-(-peak // KIB)}KiB"
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    error = InfeasibleError(
        f"No plan fits{'' if proven else ' among those tried'}: the leanest needs {format_bytes(peak)} on stage "
        f"{rank // plan.mesh.ranks_per_stage} (rank {rank}), the budget is {format_bytes(budget_bytes)}: "
        f"{format_bytes(peak - budget_bytes)} are missing.",
        why=listed,
        fix=f"--memory {enough} fits this plan; or more ranks, a smaller global batch, or shorter sequences",
    )
    error.leanest = plan
    return error
