"""Simulated candidates of a search: what they need, how they rank, and what is proven of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.plan import Certificate, Plan

SOLVER = "labels"


@dataclass(frozen=True, kw_only=True)
class Finalist:
    """A simulated candidate with its prediction and certificate, and whether its worst rank is within the budget."""

    plan: Plan
    fits: bool


def peak_bytes(plan: Plan) -> int:
    """The predicted peak of the worst rank."""
    assert plan.predicted is not None
    return plan.predicted.memory[plan.predicted.worst_rank].peak_bytes


def step_s(plan: Plan) -> float:
    """The seconds of the simulated step."""
    assert plan.predicted is not None
    return plan.predicted.step_s


def objective_ns(plan: Plan) -> int:
    """What the solver minimised."""
    assert plan.certificate is not None
    return plan.certificate.objective_ns


def ranking(plan: Plan) -> tuple[float, int, int, int, tuple[object, ...]]:
    """Fastest simulated first; then fewer stages, fewer micro-batches, less memory, and any fixed order."""
    assert plan.predicted is not None
    rest = (plan.schedule, plan.layers_per_stage, tuple(strategy.short for strategy in plan.strategies))
    return plan.predicted.step_s, plan.pp, plan.num_micro_batches, peak_bytes(plan), rest


def certified(plan: Plan, bound_ns: int, *, solver: str = SOLVER, verified_by: tuple[str, ...] = ()) -> Plan:
    """The plan with what is proven of it: no plan has an objective below the bound."""
    found_ns = objective_ns(plan)
    return replace(
        plan,
        certificate=Certificate(
            objective_ns=found_ns,
            lower_bound_ns=min(bound_ns, found_ns),
            status="optimal" if bound_ns >= found_ns else "gap",
            solver=solver,
            verified_by=verified_by,
        ),
    )
