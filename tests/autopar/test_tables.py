"""Tables against the simulation and the walk of the very same plans: two ways to the same numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.measured import ModelFile
from autopar.plan import Plan, PlanCluster, PlanModel
from autopar.predict import predict, timeline
from autopar.price import INFEASIBLE, CostTables, score
from autopar.request import Schedule
from autopar.tables import shared_bytes, tables
from autopar.units import NS_PER_S
from tests.pricing import cluster_file, model_file, request

CLUSTER, MODEL = cluster_file(), model_file(3)


def _tables(
    pp: int = 1, count: int = 2, schedule: Schedule = "1f1b", file: ModelFile = MODEL, **more: Any
) -> CostTables:
    return tables(
        file.model,
        file.layers,
        CLUSTER.cluster,
        CLUSTER.links,
        more.pop("asked", request()),
        pp=pp,
        num_micro_batches=count,
        schedule=schedule,
        **more,
    )


def _plan(made: CostTables, layers: tuple[int, ...], chosen: tuple[int, ...]) -> Plan:
    return Plan(
        model=PlanModel(name="m", source="m", fingerprint="0" * 16),
        cluster=PlanCluster(name="c", device="cpu", world_size=4, ranks_per_node=4, memory_bytes=1 << 30),
        request=request(),
        pp=made.stages,
        schedule=made.schedule,
        num_micro_batches=made.micro_batches,
        layers_per_stage=layers,
        strategies=tuple(made.strategies[s] for s in chosen),
        versions={},
    )


@st.composite
def choices(draw: st.DrawFn) -> tuple[CostTables, CostTables, tuple[int, ...], tuple[int, ...]]:
    pp = draw(st.sampled_from((1, 2, 4)))
    schedule: Schedule = draw(st.sampled_from(("1f1b", "gpipe")))
    count = draw(st.sampled_from([m for m in (1, 2, 4, 8) if 16 // m % (4 // pp) == 0 and m >= pp]))
    upper, lower = (_tables(pp, count, schedule, memory=side) for side in ("upper", "lower"))
    spaces = [[s for s in range(len(upper.strategies)) if upper.feasible[layer, s]] for layer in range(5)]
    chosen = tuple(draw(st.sampled_from(row)) for row in spaces)
    ends = sorted(draw(st.lists(st.integers(1, 4), min_size=pp - 1, max_size=pp - 1, unique=True)))
    layers = tuple(b - a for a, b in zip([0, *ends], [*ends, 5], strict=True))
    return upper, lower, layers, chosen


def _predict(plan: Plan) -> Any:
    return predict(plan, MODEL.model, MODEL.layers, CLUSTER.cluster, CLUSTER.links)


@settings(max_examples=60, deadline=None)
@given(choices())
def test_one_stage_costs_what_the_table_says(
    drawn: tuple[CostTables, CostTables, tuple[int, ...], tuple[int, ...]],
) -> None:
    """With one stage the surrogate is the step itself, but for what all plans have and the rounding of each entry."""
    upper, _, layers, chosen = drawn
    if upper.stages == 1:
        predicted = _predict(_plan(upper, layers, chosen))
        step_ns = (predicted.step_s - predicted.parts_s["clip"]) * NS_PER_S
        objective_ns = score(upper, layers, chosen).objective_ns
        assert 0 <= objective_ns - step_ns <= 12 * upper.micro_batches


@settings(max_examples=80, deadline=None)
@given(choices())
def test_the_walk_lies_between_both_tables(
    drawn: tuple[CostTables, CostTables, tuple[int, ...], tuple[int, ...]],
) -> None:
    upper, lower, layers, chosen = drawn
    predicted = _predict(_plan(upper, layers, chosen))
    high, low = (score(made, layers, chosen) for made in (upper, lower))
    assert high.objective_ns == low.objective_ns
    budget = request().memory_bytes or CLUSTER.cluster.memory_bytes
    for stage in range(upper.stages):
        peak = predicted.memory[stage * 4 // upper.stages].peak_bytes
        # What stages keep at their ends is taken off the budget.
        kept_high = budget - upper.budget_bytes[stage]
        kept_low = budget - lower.budget_bytes[stage]
        assert low.stage_bytes[stage] + kept_low <= peak <= high.stage_bytes[stage] + kept_high


def test_the_lower_bound_counts_gradients_only_where_all_stages_repeat() -> None:
    """Two micro-batches on two stages: the first stage has no gradients yet when it holds the most activations."""
    upper, lower = (_tables(2, 2, memory=side) for side in ("upper", "lower"))
    plain = next(s for s, strategy in enumerate(upper.strategies) if strategy.short == "dp2")
    layers, chosen = (4, 1), (plain,) * 5
    peak = _predict(_plan(upper, layers, chosen)).memory[0].peak_bytes
    budget = CLUSTER.cluster.memory_bytes
    low, high = (score(t, layers, chosen).stage_bytes[0] + budget - t.budget_bytes[0] for t in (lower, upper))
    assert low <= peak <= high


@settings(max_examples=30, deadline=None)
@given(choices())
def test_parts_add_up_to_the_step(drawn: tuple[CostTables, CostTables, tuple[int, ...], tuple[int, ...]]) -> None:
    upper, _, layers, chosen = drawn
    plan = _plan(upper, layers, chosen)
    predicted = _predict(plan)
    assert sum(predicted.parts_s.values()) == pytest.approx(predicted.step_s)
    assert min(predicted.parts_s.values()) >= 0
    assert predicted.memory[predicted.worst_rank].peak_bytes == max(m.peak_bytes for m in predicted.memory)
    line = timeline(plan, MODEL.model, MODEL.layers, CLUSTER.cluster, CLUSTER.links)
    assert line.step_s == predicted.step_s


def test_layouts_share_their_transitions() -> None:
    made = _tables()
    count = len(made.strategies)
    for a in range(count):
        for b in range(count):
            if made.layout[a] == made.layout[b]:
                assert (made.transition_ns[a] == made.transition_ns[b]).all()
                assert made.transition_ns[a, b] == 0
    assert (made.transition_ns == made.transition_ns.T).all()


def test_pins_leave_one_column() -> None:
    from autopar.request import Pin

    made = _tables(asked=request(pins=(Pin.parse("*: dp2-z3-tp2"),)))
    row = [made.strategies[s].short for s in range(len(made.strategies)) if made.time_ns[1, s] != INFEASIBLE]
    assert row == ["dp2-z3-tp2"]


def test_the_budget_is_the_requests_or_the_clusters() -> None:
    assert _tables().budget_bytes == (1 << 30,)
    assert _tables(asked=request(memory_bytes=1 << 20)).budget_bytes == (1 << 20,)


def test_tied_parameters_count_once_on_one_stage() -> None:
    tied = model_file(tied=True)
    assert shared_bytes(tied.model, 3, 1) == tied.model.kind(0).parameter_bytes
    assert shared_bytes(tied.model, 3, 2) == shared_bytes(tied.model, 0, 1) == shared_bytes(MODEL.model, 4, 1) == 0
    assert _tables(file=tied).tied


def test_a_faster_network_never_costs_more() -> None:
    slow = _tables(pp=2)
    fast_links = cluster_file(bytes_per_s=1e11, alpha_s=1e-6).links
    fast = tables(
        MODEL.model,
        MODEL.layers,
        CLUSTER.cluster,
        fast_links,
        request(),
        pp=2,
        num_micro_batches=2,
        schedule="1f1b",
    )
    assert (fast.time_ns <= slow.time_ns).all()
    assert fast.p2p_ns < slow.p2p_ns
    assert (replace(fast).transition_ns <= slow.transition_ns).all()
