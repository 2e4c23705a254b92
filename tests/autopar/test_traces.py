"""Memory over time against the walk's peaks; the trace against the simulation."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.layer_memory import Unit
from autopar.legality import why_schedule_illegal
from autopar.memory import walk, walk_stages
from autopar.orders import Action, actions
from autopar.plan import Plan, PlanCluster, PlanModel, RankMemory
from autopar.predict import predict, timeline
from autopar.request import Schedule
from autopar.traces import chrome_trace, memory_over_time
from tests.autopar.test_memory import PLAIN, units
from tests.pricing import cluster_file, model_file, request, strategies
from tests.torch_schedules import CLASS_NAMES

MODEL, CLUSTER = model_file(6), cluster_file()


def plan(schedule: Schedule, *shorts: str, count: int = 4) -> Plan:
    """Eight layers on two pipeline ranks of two."""
    layers = (4, 4) if schedule in ("1f1b", "gpipe") else (2, 2, 2, 2)
    return Plan(
        model=PlanModel(name="m", source="m", fingerprint="0" * 16),
        cluster=PlanCluster(name="c", device="cpu", world_size=4, ranks_per_node=4, memory_bytes=1 << 30),
        request=request(16),
        pp=2,
        schedule=schedule,
        num_micro_batches=count,
        layers_per_stage=layers,
        strategies=strategies(*(shorts or ("dp2",) * 8)),
        versions={},
    )


@pytest.mark.parametrize("schedule", CLASS_NAMES)
@pytest.mark.parametrize("shorts", ["dp2 " * 8, "dp2-z2 dp2 tp2 dp2-z2 dp2-z2 tp2s dp2 dp2-z2"])
def test_the_highest_moment_is_the_peak(schedule: Schedule, shorts: str) -> None:
    chosen = plan(schedule, *shorts.split())
    found = predict(chosen, MODEL.model, MODEL.layers, CLUSTER.cluster, CLUSTER.links)
    assert sum(found.parts_s.values()) == pytest.approx(found.step_s)
    assert min(found.parts_s.values()) >= 0
    line = timeline(chosen, MODEL.model, MODEL.layers, CLUSTER.cluster, CLUSTER.links)
    assert line.step_s == pytest.approx(found.step_s, rel=1e-12)
    for rank, moments in enumerate(memory_over_time(chosen, MODEL, CLUSTER)):
        assert max(m.memory.peak_bytes for m in moments) == found.memory[2 * rank].peak_bytes
        starts = [m.operation.start_s for m in moments]
        assert starts == sorted(starts)
        assert all(sum(m.memory.parts_bytes.values()) == m.memory.peak_bytes for m in moments)
        # The first forward holds less than the last, and the end no activation at all.
        assert moments[-1].memory.parts_bytes["activations"] == 0


def test_ranks_that_share_cores_fill_their_bubbles() -> None:
    """Four ranks on two cores: two stages of two are predicted faster than if all four always computed, one is not."""
    slow = CLUSTER.cluster
    quick = replace(slow, compute_speedup=(2.0, 2.0, 1.4, 1.0))
    for schedule in CLASS_NAMES:
        before, after = (
            predict(plan(schedule), MODEL.model, MODEL.layers, cluster, CLUSTER.links) for cluster in (slow, quick)
        )
        assert before.step_s / 2 < after.step_s < before.step_s
        assert after.parts_s["compute"] < before.parts_s["compute"]
        assert sum(after.parts_s.values()) == pytest.approx(after.step_s)
    one = replace(plan("1f1b"), pp=1, layers_per_stage=(8,), strategies=strategies(*["dp4"] * 8))
    steps = [predict(one, MODEL.model, MODEL.layers, cluster, CLUSTER.links).step_s for cluster in (slow, quick)]
    assert steps[0] == steps[1]
    # Layers measured by two processes at once take twice as long when four compute.
    alone = replace(MODEL.layers, processes=2)
    twice = predict(one, MODEL.model, alone, quick, CLUSTER.links)
    assert twice.parts_s["compute"] == pytest.approx(
        2.0 * predict(one, MODEL.model, MODEL.layers, quick, CLUSTER.links).parts_s["compute"]
    )
    assert sum(twice.parts_s.values()) == pytest.approx(twice.step_s)


def test_the_trace_has_each_action_each_send_and_the_memory() -> None:
    trace = json.loads(chrome_trace(plan("zbv"), MODEL, CLUSTER))
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    named = [bar["name"].split()[0] for bar in bars]
    assert {kind: named.count(kind) for kind in "FIW"} == {"F": 16, "I": 16, "W": 16}
    # Stages 0-1 and 2-3 stand on two ranks, 1-2 on one: two boundaries, both ways, four micro-batches.
    assert named.count("send") == 2 * 2 * 4
    line = timeline(plan("zbv"), MODEL.model, MODEL.layers, CLUSTER.cluster, CLUSTER.links)
    assert max(bar["ts"] + bar["dur"] for bar in bars) == pytest.approx(line.step_s * 1e6)
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    assert len(counters) == 2 * (2 * 4 * 3 + 1)


def test_collectives_lie_within_their_actions() -> None:
    chosen = plan("1f1b", "dp2", *["dp2-z3"] * 6, "dp2")
    events = json.loads(chrome_trace(chosen, MODEL, CLUSTER))["traceEvents"]
    actions_at = [
        (e["pid"], e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["name"][:2] in ("F ", "B ")
    ]
    inner = [e for e in events if e["ph"] == "X" and e["name"] in ("gather", "reduce")]
    assert len(inner) == 3 * 6 * 4
    for bar in inner:
        assert any(
            bar["pid"] == rank and start - 1e-3 <= bar["ts"] and bar["ts"] + bar["dur"] <= end + 1e-3
            for rank, start, end in actions_at
        )


@settings(max_examples=100, deadline=None)
@given(st.lists(units(), min_size=2, max_size=6), st.integers(1, 5))
def test_two_stages_one_after_the_other_are_one(row: list[Unit], cut: int) -> None:
    """One micro-batch through both halves and back is one pass over the whole; without ZeRO, whose prefetch ends at
    a stage."""
    row = [replace(unit, zero=0, shards=1, relayout=False) for unit in row]
    cut = min(cut, len(row) - 1)
    whole = walk(row, actions("1f1b", 1, 0, 1), optimizer="adamw")
    halves = walk_stages(
        {0: row[:cut], 1: row[cut:]}, [("F", 0, 0), ("F", 1, 0), ("B", 1, 0), ("B", 0, 0)], optimizer="adamw"
    )
    assert halves == whole


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(tuple(CLASS_NAMES)),
    st.lists(units(), min_size=1, max_size=3),
    st.integers(1, 3),
    st.integers(1, 8),
)
def test_moments_of_any_schedule_end_where_they_began(
    schedule: Schedule, row: list[Unit], each: int, count: int
) -> None:
    if why_schedule_illegal(schedule, pp=2, num_micro_batches=count, stages_per_rank=each) is not None:
        return
    row = [replace(unit, zero=min(unit.zero, 2), recompute=False) for unit in row]
    for rank in range(2):
        order = actions(schedule, 2, rank, count, each)
        held = {stage: 7 for _, stage, _ in order}
        moments: list[RankMemory] = []
        stages = dict.fromkeys(held, row)
        peak = walk_stages(stages, order, optimizer="adamw", held_bytes=held, moments=moments)
        assert peak == walk_stages(stages, order, optimizer="adamw", held_bytes=held)
        assert len(moments) == len(order) + 1
        assert moments[-1].parts_bytes["activations"] == moments[-1].parts_bytes["unsharded"] == 0
        assert all(min(moment.parts_bytes.values()) >= 0 for moment in moments)
        assert peak.peak_bytes >= max(moment.peak_bytes for moment in moments)


def test_a_split_backward_by_hand() -> None:
    """States 300; the saved set 50 stays through the first part, which leaves gradients; the second part then works
    as a backward does, without those: 10 + 190."""
    moments: list[RankMemory] = []
    walk_stages({1: [PLAIN]}, [("F", 1, 0), ("I", 1, 0), ("W", 1, 0)], optimizer="adamw", moments=moments)
    forward, first, second, optimizer = (moment.peak_bytes for moment in moments)
    assert forward == 300 + 10 + 70
    # Input 10, working set 190 less the gradients 100 that are not made yet.
    assert first == 300 + 10 + 90
    assert second == 300 + 10 + 190
    assert optimizer == 300 + 100 + 40
    moments.clear()
    order: list[Action] = [(kind, 1, m) for kind in "FIW" for m in (0, 1)]  # type: ignore[misc]
    walk_stages({1: [PLAIN]}, order, optimizer="adamw", moments=moments)
    # Two saved sets; what the first micro-batch leaves for its second part, 0.6 * 50, is there in the second's first
    # part, and the other way round in the second parts, the later of which adds one gradient at a time: 10 + 140.
    assert [moment.peak_bytes for moment in moments[2:6]] == [
        300 + 100 + 10 + 90 - 50,
        300 + 100 + 30 + 10 + 90 - 50,
        300 + 100 + 30 + 10 + 190 - 50,
        300 + 50 + 100 + 10 + 140 - 50,
    ]
