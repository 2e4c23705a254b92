"""Schedules with several stages a rank or backwards in two parts: legal, within memory, near the best of all."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.finalists import peak_bytes, step_s
from autopar.plan import Plan
from autopar.predict import predict
from autopar.request import Forbid, Schedule
from autopar.schedules import SPLIT_BACKWARD
from autopar.searching import search_files
from autopar.tables import tables
from autopar.virtual import allowed, even_cuts
from tests.pricing import cluster_file, model_file, request

MODEL, CLUSTER = model_file(6), cluster_file()
ALL: tuple[Schedule, ...] = ("looped-bfs", "interleaved-1f1b", "interleaved-zero-bubble", "zbv", "dualpipev")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 8))
def test_even_cuts_have_the_shortest_longest_part(times: list[int], stages: int) -> None:
    stages = min(stages, len(times))
    every = [
        max(sum(times[a:b]) for a, b in zip((0, *ends), (*ends, len(times)), strict=True))
        for ends in combinations(range(1, len(times)), stages - 1)
    ]
    cuts = even_cuts(times, stages)
    assert (len(cuts), sum(cuts), min(cuts) >= 1) == (stages, len(times), True)
    ends = [sum(cuts[:i]) for i in range(stages + 1)]
    assert max(sum(times[a:b]) for a, b in pairwise(ends)) == min(every)


@pytest.mark.parametrize("schedule", ALL)
@pytest.mark.parametrize("memory_bytes", [None, 1 << 22])
def test_every_plan_is_legal_fits_and_is_what_the_simulation_says(
    schedule: Schedule, memory_bytes: int | None
) -> None:
    asked = request(16, pp=(4,), schedules=(schedule,), memory_bytes=memory_bytes)
    result = search_files(MODEL, CLUSTER, asked)
    for finalist in result.finalists:
        plan = finalist.plan
        plan.check(MODEL.model)
        assert plan.schedule == schedule
        assert plan.predicted == predict(plan, MODEL.model, MODEL.layers, CLUSTER.cluster, CLUSTER.links)
        assert peak_bytes(plan) <= (memory_bytes or CLUSTER.cluster.memory_bytes)
        assert schedule not in SPLIT_BACKWARD or all(strategy.zero != 3 for strategy in plan.strategies)
        assert plan.certificate is not None
        assert plan.certificate.status == "gap"
    assert Plan.loads(result.plan.dumps()) == result.plan


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zbv"])
def test_the_plan_is_near_the_best_of_all(schedule: Schedule) -> None:
    """All cuts and choices of three strategies a layer of five layers on two ranks of a pipeline, simulated."""
    file = model_file(3)
    bans = tuple(Forbid.parse(f"{where}: {part}") for where in ("embed", "*", "head") for part in ("z2", "z3"))
    bans += tuple(Forbid.parse(f"*: {part}") for part in ("r", "tp2s"))
    asked = request(8, pp=(2,), num_micro_batches=(4,), schedules=(schedule,), forbids=bans)
    found = search_files(file, CLUSTER, asked).plan
    made = tables(
        file.model, file.layers, CLUSTER.cluster, CLUSTER.links, asked, pp=2, num_micro_batches=4, schedule="1f1b"
    )
    rows = [[made.strategies[s] for s in range(len(made.strategies)) if made.feasible[u, s]] for u in range(5)]
    assert max(map(len, rows)) == 3
    steps = []
    for ends in combinations(range(1, 5), 3):
        layers = tuple(b - a for a, b in zip((0, *ends), (*ends, 5), strict=True))
        for chosen in product(*rows):
            plan = replace(found, layers_per_stage=layers, strategies=chosen)
            steps.append(predict(plan, file.model, file.layers, CLUSTER.cluster, CLUSTER.links).step_s)
    assert min(steps) <= step_s(found) <= min(steps) * 1.02
    assert found.certificate is not None
    work_ns = 4 * int(made.time_ns.min(axis=1).sum()) // 2
    assert found.certificate.lower_bound_ns == work_ns <= min(steps) * 1e9


@pytest.mark.parametrize("schedule", ALL)
def test_a_split_backward_leaves_zero_3_out(schedule: Schedule) -> None:
    made = tables(
        MODEL.model,
        MODEL.layers,
        CLUSTER.cluster,
        CLUSTER.links,
        request(),
        pp=2,
        num_micro_batches=4,
        schedule="1f1b",
    )
    sharded = [strategy.zero == 3 for strategy in made.strategies]
    left = allowed(made, schedule).feasible[:, sharded]
    assert made.feasible[:, sharded].any()
    assert left.any() == (schedule not in SPLIT_BACKWARD)


def test_less_memory_is_never_faster() -> None:
    steps = []
    for memory_bytes in (5 << 19, 3 << 20, 7 << 19, 1 << 22):
        asked = request(16, pp=(4,), schedules=("interleaved-1f1b",), memory_bytes=memory_bytes)
        steps.append(step_s(search_files(MODEL, CLUSTER, asked).plan))
    assert steps == sorted(set(steps), reverse=True)


def test_a_pipeline_with_a_bubble_gains() -> None:
    """Few micro-batches on four ranks: two stages a rank fill and drain in half the time."""
    plain, looped = (
        step_s(search_files(MODEL, CLUSTER, request(4, pp=(4,), num_micro_batches=(4,), schedules=asked)).plan)
        for asked in (("1f1b", "gpipe"), ("1f1b", "gpipe", "interleaved-1f1b"))
    )
    assert looped < plain


def test_a_schedule_that_cannot_run_so_says_what_else() -> None:
    with pytest.raises(InfeasibleError, match="No plan under zbv fits") as caught:
        search_files(model_file(1), CLUSTER, request(16, pp=(4, 2), schedules=("zbv",)))
    assert "--schedule" in str(caught.value)
