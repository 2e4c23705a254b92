"""The order of the steps of a search: enumerate, tabulate, solve, simulate the finalists, choose.

Every legal number of stages, of micro-batches and schedule makes one table. The tables are solved twice: with memory
bounded from below, which leaves no plan out and so gives a valid lower bound, and with memory bounded from above,
where every choice fits. The finalists of both are simulated, those over the budget are dropped, and the fastest
simulated one is the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import autopar
from autopar.axes import RankMesh, divisors
from autopar.errors import InfeasibleError, InputError, RunError
from autopar.legality import why_batch_illegal, why_schedule_illegal
from autopar.measured import ClusterFile, ModelFile
from autopar.plan import Certificate, Plan, PlanCluster, PlanModel
from autopar.predict import predict
from autopar.price import INFEASIBLE, CostTables, score
from autopar.request import Request, Schedule
from autopar.solvers.lean import leanest_of
from autopar.solvers.pipeline import solve_pipeline
from autopar.tables import tables
from autopar.units import MIB, format_bytes

SOLVER = "labels"
SHORTLIST = 8
ROUNDS = 6
"""How often a finalist of the lower memory bound that does not fit makes way for a leaner one."""
MOST_MICRO_BATCHES = 1024
"""More micro-batches than this are tried only when the request names them."""

Progress = Callable[[str, int, int], None]
"""Told a phase (tables, solve, simulate), how many of its steps are done, and how many there are."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """One way to cut the machine and the batch."""

    pp: int
    num_micro_batches: int
    schedule: Schedule


@dataclass(frozen=True, kw_only=True)
class Finalist:
    """A simulated candidate with its prediction and certificate, and whether its worst rank is within the budget."""

    plan: Plan
    fits: bool


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
) -> SearchResult:
    """The best plan for a measured model on a measured cluster.

    deadline: a moment of `time.monotonic()`; stop: asked now and then; after either the best so far is returned, with
    its gap. The same input gives the same plan, byte for byte, unless stopped.
    Raises InputError when nothing is legal or the files do not fit the request, InfeasibleError (with `leanest`, a
    Plan) when nothing fits the budget, RunError when stopped before anything was found.
    """
    tell: Progress = progress or (lambda phase, done, total: None)
    budget_bytes = request.memory_bytes or cluster_file.cluster.memory_bytes
    _check_files(model_file, cluster_file, request)
    legal, skipped = cuts(model_file, cluster_file, request)
    if not legal:
        raise InputError(
            "no plan is legal for this request",
            why=_first("; ", skipped),
            fix="change the global batch, the number of stages or the number of micro-batches",
        )
    tried, lower, upper, reasons = _tabulate(model_file, cluster_file, request, legal, tell)

    found: dict[tuple[Cut, tuple[int, ...], tuple[int, ...]], Finalist] = {}

    def add(table: int, layers_per_stage: tuple[int, ...], strategies: tuple[int, ...]) -> Finalist:
        key = tried[table], layers_per_stage, strategies
        if key not in found:
            objective_ns = score(upper[table], layers_per_stage, strategies).objective_ns
            plan = _plan(model_file, cluster_file, request, upper[table], *key, objective_ns)
            found[key] = Finalist(plan=plan, fits=_peak(plan) <= budget_bytes)
        return found[key]

    def propose(made: dict[int, CostTables], step: int) -> tuple[dict[int, Finalist], int]:
        """The simulated best choices of these tables by place, and the lower bound over all of them."""
        tell("solve", step, ROUNDS + 2)
        places = list(made)
        try:
            choices = solve_pipeline([made[p] for p in places], shortlist=SHORTLIST, deadline=deadline, stop=stop)
        except RunError:
            if not any(finalist.fits for finalist in found.values()):
                raise
            return {}, 0
        proposed = {}
        for i, one in enumerate(choices):
            assert one.choice.layers_per_stage is not None
            assert one.choice.strategies is not None
            place = places[one.table]
            proposed[place] = add(place, one.choice.layers_per_stage, one.choice.strategies)
            tell("simulate", i + 1, len(choices))
        return proposed, choices[0].lower_bound_ns if choices else INFEASIBLE

    propose(dict(enumerate(upper)), 0)
    asked, bound_ns = dict(enumerate(lower)), 0
    for step in range(ROUNDS + 1):
        proposed, round_ns = propose(asked, step + 1)
        bound_ns = bound_ns if step else round_ns
        best_ns = min((_objective(f.plan) for f in found.values() if f.fits), default=INFEASIBLE)
        # A table whose choice does not fit is asked again for one that is leaner by as much.
        asked = {
            place: _with_less(asked[place], _peak(f.plan) - budget_bytes)
            for place, f in proposed.items()
            if not f.fits and _objective(f.plan) < best_ns
        }
        if not asked:
            break
    tell("solve", ROUNDS + 2, ROUNDS + 2)

    if not any(finalist.fits for finalist in found.values()):
        for made in (upper, lower):
            lean = leanest_of(made)
            if lean is not None:
                add(lean[0], *lean[1][:2])
    if not any(finalist.fits for finalist in found.values()):
        raise _nothing_fits([f.plan for f in found.values()], budget_bytes, proven=bound_ns == INFEASIBLE)
    certified = [replace(f, plan=_certified(f.plan, bound_ns)) for f in found.values()]
    certified.sort(key=lambda f: (not f.fits, *_rank(f.plan)))
    return SearchResult(plan=certified[0].plan, finalists=tuple(certified), skipped=(*skipped, *reasons))


def cuts(
    model_file: ModelFile, cluster_file: ClusterFile, request: Request
) -> tuple[tuple[Cut, ...], tuple[str, ...]]:
    """The legal ways to cut machine and batch, and the reasons why the others are not; both in a fixed order."""
    cluster, layers = cluster_file.cluster, len(model_file.model.layers)
    found: list[Cut] = []
    skipped: list[str] = []
    counts = request.num_micro_batches or [m for m in divisors(request.global_batch) if m <= MOST_MICRO_BATCHES]
    for pp in request.pp or divisors(cluster.world_size):
        if cluster.world_size % pp:
            skipped.append(f"pp {pp} does not divide the {cluster.world_size} ranks")
            continue
        if pp > layers:
            skipped.append(f"pp {pp} is more than the {layers} layers of the model, embed and head included")
            continue
        mesh = RankMesh.of(world_size=cluster.world_size, pp=pp, ranks_per_node=cluster.ranks_per_node)
        for count in counts:
            # One stage runs its micro-batches one after another, whatever the schedule is called.
            for schedule in request.schedules if pp > 1 else request.schedules[:1]:
                reason = why_batch_illegal(request.global_batch, count, mesh)
                if reason is None and pp > 1:
                    reason = why_schedule_illegal(schedule, pp=pp, num_micro_batches=count)
                if reason is None:
                    found.append(Cut(pp=pp, num_micro_batches=count, schedule=schedule))
                else:
                    skipped.append(f"pp {pp}: {reason}")
    return tuple(found), tuple(dict.fromkeys(skipped))


def _check_files(model_file: ModelFile, cluster_file: ClusterFile, request: Request) -> None:
    """InputError when the profile was made for something else than what is asked."""
    layers, cluster = model_file.layers, cluster_file.cluster
    asked = (("sequence", request.sequence), ("dtype", request.dtype), ("device", cluster.device))
    for name, wanted in asked:
        profiled = getattr(layers, name)
        if profiled != wanted:
            raise InputError(
                f"the model's profile is for another {name}",
                why=f"it was measured with {name} {profiled}, the request is for {wanted}",
                fix="profile the model again with `autopar profile model`",
            )
    if request.global_batch >= 1 << 32:
        raise InputError(
            f"a global batch of {request.global_batch} is absurd",
            why="it must be below 2^32 samples",
            fix="give the samples of one optimizer step",
        )


def _tabulate(
    model_file: ModelFile, cluster_file: ClusterFile, request: Request, legal: Sequence[Cut], tell: Progress
) -> tuple[list[Cut], list[CostTables], list[CostTables], list[str]]:
    """The cuts that have a legal strategy for every layer, their tables (lower, upper), and why others have none."""
    tried: list[Cut] = []
    made: dict[str, list[CostTables]] = {"lower": [], "upper": []}
    failures: list[tuple[Cut, InputError]] = []
    sides: tuple[Literal["lower", "upper"], ...] = ("lower", "upper")
    for i, cut in enumerate(legal):
        try:
            pair = [
                tables(
                    model_file.model,
                    model_file.layers,
                    cluster_file.cluster,
                    cluster_file.links,
                    request,
                    pp=cut.pp,
                    num_micro_batches=cut.num_micro_batches,
                    schedule=cut.schedule,
                    memory=side,
                )
                for side in sides
            ]
        except InputError as error:
            failures.append((cut, error))
            continue
        tried.append(cut)
        for side, one in zip(sides, pair, strict=True):
            made[side].append(one)
        tell("tables", i + 1, len(legal))
    if not tried:
        # The reason of a cut whose stages are as wide as the pins says more than "occupies 4 ranks, a stage has 2".
        widths = {pin.strategy.ranks for pin in request.pins}
        world = cluster_file.cluster.world_size
        raise next((error for cut, error in failures if world // cut.pp in widths), failures[0][1])
    reasons = [f"pp {cut.pp}, {cut.num_micro_batches} micro-batches: {error.why}" for cut, error in failures]
    return tried, made["lower"], made["upper"], list(dict.fromkeys(reasons))


def _plan(
    model_file: ModelFile,
    cluster_file: ClusterFile,
    request: Request,
    made: CostTables,
    cut: Cut,
    layers_per_stage: tuple[int, ...],
    strategies: tuple[int, ...],
    objective_ns: int,
) -> Plan:
    """The plan of a choice, with its prediction and, so far, a certificate without a bound."""
    model, cluster = model_file.model, cluster_file.cluster
    plan = Plan(
        model=PlanModel(
            name=model.name, source=model.source, fingerprint=model.fingerprint, profile=model_file.fingerprint
        ),
        cluster=PlanCluster(
            name=cluster.name,
            device=cluster.device,
            world_size=cluster.world_size,
            ranks_per_node=cluster.ranks_per_node,
            memory_bytes=cluster.memory_bytes,
            profile=cluster_file.fingerprint,
        ),
        request=request,
        pp=cut.pp,
        schedule=cut.schedule,
        num_micro_batches=cut.num_micro_batches,
        layers_per_stage=layers_per_stage,
        strategies=tuple(made.strategies[s] for s in strategies),
        certificate=Certificate(objective_ns=objective_ns, lower_bound_ns=0, status="gap", solver=SOLVER),
        versions={"autopar": autopar.__version__},
    )
    predicted = predict(plan, model, model_file.layers, cluster, cluster_file.links)
    return replace(plan, predicted=predicted)


def _with_less(made: CostTables, less_bytes: int) -> CostTables:
    return replace(made, budget_bytes=tuple(max(0, budget - less_bytes) for budget in made.budget_bytes))


def _peak(plan: Plan) -> int:
    assert plan.predicted is not None
    return plan.predicted.memory[plan.predicted.worst_rank].peak_bytes


def _objective(plan: Plan) -> int:
    assert plan.certificate is not None
    return plan.certificate.objective_ns


def _rank(plan: Plan) -> tuple[float, int, int, int, str]:
    """Fastest simulated first; then fewer stages, fewer micro-batches, less memory."""
    assert plan.predicted is not None
    return plan.predicted.step_s, plan.pp, plan.num_micro_batches, _peak(plan), plan.dumps()


def _certified(plan: Plan, bound_ns: int) -> Plan:
    objective_ns = _objective(plan)
    return replace(
        plan,
        certificate=Certificate(
            objective_ns=objective_ns,
            lower_bound_ns=min(bound_ns, objective_ns),
            status="optimal" if bound_ns >= objective_ns else "gap",
            solver=SOLVER,
        ),
    )


def _nothing_fits(failed: Sequence[Plan], budget_bytes: int, *, proven: bool) -> InfeasibleError:
    """What is missing: the leanest plan, its worst rank with its parts, and the memory that would do."""
    plan = min(failed, key=lambda one: (_peak(one), *_rank(one)))
    assert plan.predicted is not None
    rank = plan.predicted.worst_rank
    peak_bytes, parts = _peak(plan), plan.predicted.memory[rank].parts_bytes
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    error = InfeasibleError(
        f"No plan fits{'' if proven else ' among those tried'}: the leanest needs {format_bytes(peak_bytes)} on stage "
        f"{rank // plan.mesh.ranks_per_stage} (rank {rank}), the budget is {format_bytes(budget_bytes)}: "
        f"{format_bytes(peak_bytes - budget_bytes)} are missing.",
        why=listed,
        fix=f"--memory {-(-peak_bytes // MIB)}MiB fits this plan; or more ranks, a smaller global batch, or shorter "
        "sequences",
    )
    error.leanest = plan
    return error


def _first(separator: str, texts: Sequence[str], count: int = 3) -> str:
    """The first few texts, and how many were left out."""
    more = [f"and {len(texts) - count} more"] if len(texts) > count else []
    return separator.join([*texts[:count], *more])
