"""What would make a request fit for which nothing fits: each way out is searched again, not guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autopar.errors import InfeasibleError, InputError, RunError
from autopar.finalists import peak_bytes, step_s
from autopar.measured import ClusterFile, LayerCost, Line, ModelFile, SelectiveCost
from autopar.plan import Plan
from autopar.request import OFFLOADED, SCHEDULES, Forbid, Pin, Request, Schedule
from autopar.searching import Progress, SearchResult, search_files
from autopar.solvers.conflict import irreducible
from autopar.solvers.pipeline import halting
from autopar.units import KIB, MIB, format_bytes, format_seconds
from autopar.work import ASSUMED_HOST_BYTES_PER_S

Asked = tuple[ModelFile, ClusterFile, Request]
Demand = tuple[str, Pin | Forbid | tuple[int, ...] | tuple[Schedule, ...]]
"""The name of an option and its value."""


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """A change of the request and the plan after it: one that fits, or the leanest one, when that still does not.

    note: what is not measured about it, or what the plan does differently.
    """

    change: str
    plan: Plan
    fits: bool = True
    note: str = ""

    def __str__(self) -> str:
        peak = format_bytes(peak_bytes(self.plan))
        note = f" ({self.note})" if self.note else ""
        if not self.fits:
            return f"{self.change} alone is not enough: still {peak}{note}"
        return f"{self.change}: step {format_seconds(step_s(self.plan))}, peak {peak}{note}"


def search_or_explain(
    model_file: ModelFile,
    cluster_file: ClusterFile,
    request: Request,
    *,
    progress: Progress | None = None,
    deadline: float | None = None,
    stop: Callable[[], bool] | None = None,
    verify: bool = False,
) -> SearchResult:
    """As `search_files`; when nothing fits, the InfeasibleError names the options in conflict and what would fit."""
    try:
        return search_files(
            model_file, cluster_file, request, progress=progress, deadline=deadline, stop=stop, verify=verify
        )
    except InfeasibleError as error:
        raise explained(error, model_file, cluster_file, request, stop=halting(deadline, stop)) from None


def explained(
    error: InfeasibleError,
    model_file: ModelFile,
    cluster_file: ClusterFile,
    request: Request,
    *,
    stop: Callable[[], bool] | None = None,
) -> InfeasibleError:
    """The error with the options in conflict, and the changes that help, cheapest first, as its fix."""
    found: list[Relaxation] = []
    conflict: tuple[Demand, ...] = ()
    try:
        conflict = conflicting(model_file, cluster_file, request, stop=stop)
        for one in relaxations(error, model_file, cluster_file, request, stop=stop):
            found.append(one)
    except RunError:
        pass  # stopped: what was found so far is told
    why = error.why
    if conflict:
        why += f"; without any one of these something fits: {', '.join(_words(demand) for demand in conflict)}"
    fix = "\n       ".join(str(one) for one in found) or error.fix
    better = InfeasibleError(error.what, why=why, fix=fix)
    better.leanest, better.relaxations = error.leanest, tuple(found)
    return better


def conflicting(
    model_file: ModelFile, cluster_file: ClusterFile, request: Request, *, stop: Callable[[], bool] | None = None
) -> tuple[Demand, ...]:
    """Options that leave nothing that fits, of which any one could be dropped; empty when the budget alone does."""

    def is_feasible(demands: tuple[Demand, ...]) -> bool:
        return _plan((model_file, cluster_file, _with(request, demands)), stop) is not None

    demands = _demands(request)
    if not demands or not is_feasible(()):
        return ()
    return irreducible(demands, is_feasible)


def relaxations(
    error: InfeasibleError,
    model_file: ModelFile,
    cluster_file: ClusterFile,
    request: Request,
    *,
    stop: Callable[[], bool] | None = None,
) -> Iterator[Relaxation]:
    """The changes after which something fits, the cheaper ones first; each was searched."""
    if isinstance(error.leanest, Plan):
        enough, shown = _rounded_up(peak_bytes(error.leanest))
        plan = _plan((model_file, cluster_file, replace(request, memory_bytes=enough)), stop)
        if plan is not None:
            yield Relaxation(change=f"--memory {shown}", plan=plan)
    demands = _demands(request)
    for kind in ("micro-batches", "pp", "schedule", "max-strategies", "forbid", "pin"):
        left = tuple(demand for demand in demands if demand[0] != kind)
        if len(left) < len(demands):
            plan = _plan((model_file, cluster_file, _with(request, left)), stop)
            if plan is not None:
                yield Relaxation(change=f"without --{kind}", plan=plan, note=_difference(request, plan))
    if demands:
        plan = _plan((model_file, cluster_file, _with(request, ())), stop)
        if plan is not None and len({name for name, _ in demands}) > 1:
            yield Relaxation(change="without any of these options", plan=plan, note=_difference(request, plan))
    cluster = cluster_file.cluster
    offloaded = OFFLOADED.get(request.optimizer)
    if offloaded is not None and cluster.device == "cuda":
        gb_per_s = ASSUMED_HOST_BYTES_PER_S[cluster.device] / 1e9
        note = f"--optimizer {offloaded}; assumed: {gb_per_s:.0f} GB/s between a rank and its host"
        asked = (model_file, cluster_file, replace(request, optimizer=offloaded))
        yield from _tried("optimizer states in host memory", asked, stop, note)

    def more_ranks() -> Iterator[Relaxation]:
        for factor in (2, 4, 8, 16):
            larger = replace(cluster, world_size=cluster.world_size * factor)
            note = "links between nodes extrapolated" if larger.world_size > cluster.ranks_per_node else ""
            change = f"{larger.world_size} ranks of the same memory"
            asked = (model_file, replace(cluster_file, cluster=larger), request)
            yield from _tried(change, asked, stop, note)

    fixed = all(kind.tokens for kind in model_file.model.kinds if kind.role == "block")

    def shorter() -> Iterator[Relaxation]:
        for divisor in () if fixed else (2, 4, 8, 16, 32):
            sequence = request.sequence // divisor
            if sequence:
                asked = (_shortened(model_file, sequence), cluster_file, replace(request, sequence=sequence))
                note = "scaled from the profile, linear in tokens"
                yield from _tried(f"--seq {sequence}", asked, stop, note)

    yield from _first_that_fits(more_ranks())
    yield from _first_that_fits(shorter())


def _first_that_fits(tried: Iterator[Relaxation]) -> Iterator[Relaxation]:
    """The first of these that fits; without one the leanest."""
    leanest: Relaxation | None = None
    for one in tried:
        if one.fits:
            yield one
            return
        if leanest is None or peak_bytes(one.plan) < peak_bytes(leanest.plan):
            leanest = one
    if leanest is not None:
        yield leanest


def _tried(change: str, asked: Asked, stop: Callable[[], bool] | None, note: str) -> Iterator[Relaxation]:
    """The change with what a search after it says; nothing when no plan is legal at all."""
    try:
        yield Relaxation(change=change, plan=search_files(*asked, stop=stop).plan, note=note)
    except InfeasibleError as error:
        if isinstance(error.leanest, Plan):
            yield Relaxation(change=change, plan=error.leanest, fits=False, note=note)
    except InputError:
        pass


def _plan(asked: Asked, stop: Callable[[], bool] | None) -> Plan | None:
    """The plan for a request; None when nothing fits or nothing is legal. Raises RunError when stopped."""
    found = next(_tried("", asked, stop, ""), None)
    return found.plan if found is not None and found.fits else None


def _demands(request: Request) -> tuple[Demand, ...]:
    """The options of a request that narrow the choice."""
    found: list[Demand] = [("pin", pin) for pin in request.pins]
    found += [("forbid", ban) for ban in request.forbids]
    found += [("pp", request.pp)] if request.pp else []
    found += [("micro-batches", request.num_micro_batches)] if request.num_micro_batches else []
    found += [("schedule", request.schedules)] if not set(SCHEDULES) <= set(request.schedules) else []
    found += [("max-strategies", (request.max_strategies,))] if request.max_strategies is not None else []
    return tuple(found)


def _with(request: Request, demands: tuple[Demand, ...]) -> Request:
    """The request with these options only."""
    kept = {name for name, _ in demands}
    every = tuple(dict.fromkeys((*SCHEDULES, *request.schedules)))
    return replace(
        request,
        pins=tuple(value for _, value in demands if isinstance(value, Pin)),
        forbids=tuple(value for _, value in demands if isinstance(value, Forbid)),
        pp=request.pp if "pp" in kept else (),
        num_micro_batches=request.num_micro_batches if "micro-batches" in kept else (),
        schedules=request.schedules if "schedule" in kept else every,
        max_strategies=request.max_strategies if "max-strategies" in kept else None,
    )


def _words(demand: Demand) -> str:
    name, value = demand
    return f"--{name} {', '.join(map(str, value))}" if isinstance(value, tuple) else f'--{name} "{value.short}"'


def _difference(request: Request, plan: Plan) -> str:
    """What the plan does that a narrower request did not allow."""
    found = [f"{plan.num_micro_batches} micro-batches", f"{plan.pp} stages"]
    if any(strategy.recompute != "none" for strategy in plan.strategies):
        found.append("with recompute")
    if plan.schedule not in request.schedules:
        found.append(plan.schedule)
    different = len(set(plan.strategies[1:-1]))
    if request.max_strategies is not None and different > request.max_strategies:
        found.append(f"{different} strategies in blocks")
    return ", ".join(found)


def _rounded_up(size_bytes: int) -> tuple[int, str]:
    """The size in whole MiB (KiB below 64 MiB), and as an option."""
    unit, name = (MIB, "MiB") if size_bytes >= 64 * MIB else (KIB, "KiB")
    count = -(-size_bytes // unit)
    return count * unit, f"{count}{name}"


def _shortened(model_file: ModelFile, sequence: int) -> ModelFile:
    """The profile at a shorter sequence: seconds and activations in proportion to the tokens, parameters as they are.

    Layers whose tokens the model fixes stay. Attention falls faster than that, so that the real step is shorter and
    the real peak no higher.
    """
    ratio = sequence / model_file.layers.sequence

    def scaled(line: Line) -> Line:
        return replace(line, per_sample=line.per_sample * ratio)

    def selective(cost: SelectiveCost | None) -> SelectiveCost | None:
        if cost is None:
            return None
        return replace(
            cost,
            saved_bytes=scaled(cost.saved_bytes),
            forward_peak_bytes=scaled(cost.forward_peak_bytes),
            backward_peak_bytes=scaled(cost.backward_peak_bytes),
            later_backward_peak_bytes=scaled(cost.later_backward_peak_bytes),
        )

    def shortened(cost: LayerCost) -> LayerCost:
        names = ("input", "output", "saved", "forward_peak", "backward_peak")
        lines = {f"{name}_bytes": scaled(getattr(cost, f"{name}_bytes")) for name in names}
        later = cost.later_backward_peak_bytes
        return replace(
            cost,
            later_backward_peak_bytes=later and scaled(later),
            selective=selective(cost.selective),
            forward_s=tuple(value * ratio for value in cost.forward_s),
            backward_s=tuple(value * ratio for value in cost.backward_s),
            flops=scaled(cost.flops),
            calls=tuple(replace(call, size_bytes=scaled(call.size_bytes)) for call in cost.calls),
            **lines,  # type: ignore[arg-type]
        )

    layers = model_file.layers
    fixed = {kind.name for kind in model_file.model.kinds if kind.tokens}
    costs = tuple(cost if cost.kind in fixed else shortened(cost) for cost in layers.costs)
    return replace(model_file, layers=replace(layers, sequence=sequence, costs=costs))
