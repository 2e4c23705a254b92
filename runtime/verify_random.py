"""`autopar verify --random-plans`: seeded random legal plans for a model, each against one process."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from autopar.errors import AutoparError, InputError, RunError
from autopar.formats import from_plain
from autopar.plan import Plan
from autopar.random_plans import plan_words, random_plan
from autopar.runtime.batches import example_batch
from autopar.runtime.launch import Progress, launch
from autopar.runtime.models import build_model, import_model
from autopar.runtime.probing import probe
from autopar.runtime.spec import describe
from autopar.runtime.tiny import exact_dtype, tiny_source
from autopar.runtime.verify import Comparison, compare, worst_of

_PLAN_TIMEOUT_S, _START_TIMEOUT_S = 120.0, 180.0
_PLANS_OF_A_LAUNCH = 40
_PROBE_SAMPLES, _PROBE_TOKENS = 3, 8


@dataclass(frozen=True, kw_only=True)
class VerifiedPlan:
    """A random plan in words, its number in the draw, and how far it was from one process."""

    number: int
    plan: str
    comparison: Comparison


def draw_plans(source: str, *, nproc: int, count: int, seed: int) -> tuple[Plan, ...]:
    """`count` random legal plans on `nproc` ranks for a tiny replica of the model.

    Raises InputError where the model cannot be run so.
    """
    tiny = tiny_source(source, tp=nproc)
    dtype = exact_dtype(tiny)
    model = build_model(tiny, dtype=dtype)
    found = probe(model, example_batch(model, samples=_PROBE_SAMPLES, sequence=_PROBE_TOKENS))
    spec = describe(model, found, source=tiny, name="random", max_tp=nproc).spec
    try:
        drawn = [random_plan(spec, world=nproc, seed=seed, number=number) for number in range(count)]
    except ValueError as error:
        raise InputError("no plan can be drawn", why=str(error), fix="take another number of processes") from error
    return tuple(replace(plan, request=replace(plan.request, dtype=dtype)) for plan in drawn)


def verify_random(
    source: str, *, nproc: int, count: int, seed: int, progress: Progress | None = None
) -> tuple[VerifiedPlan, ...]:
    """How far each of `count` random plans is from one process, on `nproc` local ranks.

    All plans run in the same processes, one after the other. Raises RunError that names the plan when one fails, and
    what `launch` does. Cost: start-up of the ranks once, and about a second a plan and rank of a core.
    """
    plans = draw_plans(source, nproc=nproc, count=count, seed=seed)
    found: list[VerifiedPlan] = []
    for first in range(0, count, _PLANS_OF_A_LAUNCH):
        part = plans[first : first + _PLANS_OF_A_LAUNCH]
        results = launch(
            "autopar.runtime.verify_random:verify_plans_rank",
            {"plans": [plan.dumps() for plan in part], "first": first, "total": count, "seed": seed},
            nproc=nproc,
            timeout_s=_START_TIMEOUT_S + _PLAN_TIMEOUT_S * len(part),
            progress=progress,
        )
        for place, plan in enumerate(part):
            comparisons = [from_plain(Comparison, result[place], "verify") for result in results]
            found.append(VerifiedPlan(number=first + place, plan=plan_words(plan), comparison=worst_of(comparisons)))
    return tuple(found)


def prepare(payload: dict[str, Any]) -> None:
    """Load, once for all ranks, what building the model imports; `launch` calls it."""
    import_model(Plan.loads(payload["plans"][0]).model.source)


def verify_plans_rank(payload: dict[str, Any], report: Progress) -> list[dict[str, Any]]:
    """One rank's Comparison of each plan as plain data; the target of `launch`."""
    found = []
    for number, text in enumerate(payload["plans"], start=payload["first"]):
        plan = Plan.loads(text)
        report({"done": number, "total": payload["total"], "what": plan_words(plan)})
        try:
            found.append(asdict(compare(plan)))
        except Exception as error:
            said = f"{error.what}: {error.why}" if isinstance(error, AutoparError) else str(error)
            raise RunError(
                f"plan {number} of seed {payload['seed']} does not run: {plan_words(plan)}",
                why=f"{type(error).__name__}: {said}",
                fix="report this plan as a bug",
            ) from error
    return found
