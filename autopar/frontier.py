"""The best step at every memory budget, and what a change of the machine does to a plan."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from autopar.errors import InfeasibleError, InputError, RunError
from autopar.finalists import peak_bytes, step_s
from autopar.measured import ClusterFile, ModelFile
from autopar.plan import Plan
from autopar.predict import predict
from autopar.request import Request
from autopar.searching import search_files
from autopar.units import MIB, parse_bytes

_CHANGE = re.compile(
    r"\s*(?:(links|compute|memory)\s*\*\s*([0-9.]+)|memory\s*([+-])\s*([0-9.]+\s*[KMGT]?i?B?))\s*", re.A
)


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Plans by memory, the one that needs most first; each is the best that was found for every budget from its own
    peak to just below the peak of the one before. complete: the last one is the leanest of all."""

    plans: tuple[Plan, ...]
    complete: bool


def frontier(
    model_file: ModelFile,
    cluster_file: ClusterFile,
    request: Request,
    *,
    progress: Callable[[str, int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Frontier:
    """The memory/throughput frontier from the budget of the request down to where nothing fits.

    Searches again and again with one byte less than the last plan needs, so that no breakpoint of the search is passed
    over; plans that a leaner one beats in simulated time are left out. Each point has its certificate: exact where
    that says optimal, within its gap elsewhere (near the leanest plan). When stopped, what was found so far.
    Raises InfeasibleError when nothing fits the budget of the request.
    """
    budget_bytes = request.memory_bytes or cluster_file.cluster.usable_bytes
    result = search_files(model_file, cluster_file, replace(request, memory_bytes=budget_bytes), stop=stop)
    found, complete, seen = [result.plan], False, list(result.finalists)
    while not (stop is not None and stop()):
        if progress is not None:
            progress("frontier", (budget_bytes - peak_bytes(found[-1])) // MIB, budget_bytes // MIB)
        less = replace(request, memory_bytes=peak_bytes(found[-1]) - 1)
        try:
            result = search_files(model_file, cluster_file, less, stop=stop)
            found.append(result.plan)
            seen += result.finalists
        except InfeasibleError:
            complete = True
            break
        except RunError:
            break
    # What one search simulated in passing may beat what another chose.
    plans = [one.plan for one in seen if peak_bytes(one.plan) <= budget_bytes]
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda one: (peak_bytes(one), step_s(one), one.pp, one.num_micro_batches)):
        if not kept or step_s(plan) < step_s(kept[-1]):
            kept.append(replace(plan, request=replace(request, memory_bytes=peak_bytes(plan))))
    return Frontier(plans=tuple(reversed(kept)), complete=complete)


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A plan now, the same plan after a change (fits: within the changed budget), and the best plan then, if any."""

    change: str
    now: Plan
    then: Plan
    fits: bool
    best: Plan | None


def what_if(
    model_file: ModelFile,
    cluster_file: ClusterFile,
    request: Request,
    change: str,
    *,
    now: Plan | None = None,
    stop: Callable[[], bool] | None = None,
) -> WhatIf:
    """What a change such as "links*0.5" does: the plan of today priced after it, beside the best plan after it.

    now: the plan of today, searched when not given.
    Raises InputError for a change that is none, InfeasibleError when nothing fits today.
    """
    changed = changed_conditions(model_file, cluster_file, request, change)
    now = now or search_files(model_file, cluster_file, request, stop=stop).plan
    new_model, new_cluster, new_request = changed
    after = predict(now, new_model.model, new_model.layers, new_cluster.cluster, new_cluster.links)
    then = replace(now, request=new_request, predicted=after, certificate=None)
    try:
        best = search_files(*changed, stop=stop).plan
    except InfeasibleError:
        best = None
    budget_bytes = new_request.memory_bytes or new_cluster.cluster.usable_bytes
    return WhatIf(change=change.strip(), now=now, then=then, fits=peak_bytes(then) <= budget_bytes, best=best)


def changed_conditions(
    model_file: ModelFile, cluster_file: ClusterFile, request: Request, change: str
) -> tuple[ModelFile, ClusterFile, Request]:
    """The files and the request after a change: links*F and compute*F are speeds, memory*F, memory+SIZE, memory-SIZE
    the budget of a rank; several are separated by commas. InputError for anything else."""
    for part in change.split(","):
        match = _CHANGE.fullmatch(part)
        factor = _number(match[2]) if match and match[2] else None
        if match is None or (match[2] and not factor):
            raise InputError(
                f"{part.strip()!r} is not a change",
                why="the forms are links*F, compute*F, memory*F, memory+SIZE and memory-SIZE, F above 0",
                fix='write for example --what-if "links*0.5" or --what-if "memory-2GiB"',
            )
        if match[1] == "links" and factor:
            links = cluster_file.links
            curves = tuple(
                replace(curve, seconds=tuple(value / factor for value in curve.seconds)) for curve in links.curves
            )
            cluster_file = replace(cluster_file, links=replace(links, curves=curves))
        elif match[1] == "compute" and factor:
            layers = model_file.layers
            costs = tuple(
                replace(
                    cost,
                    forward_s=tuple(value / factor for value in cost.forward_s),
                    backward_s=tuple(value / factor for value in cost.backward_s),
                )
                for cost in layers.costs
            )
            model_file = replace(model_file, layers=replace(layers, costs=costs))
        else:
            size = request.memory_bytes or cluster_file.cluster.usable_bytes
            size = round(size * factor) if factor else size + int(f"{match[3]}1") * parse_bytes(match[4])
            if size < 1:
                raise InputError(
                    f"{part.strip()!r} leaves no memory", why=f"the budget would be {size} B", fix="take off less"
                )
            request = replace(request, memory_bytes=size)
    return model_file, cluster_file, request


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < 1e6 else None
