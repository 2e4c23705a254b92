"""Schedules with several stages a rank or backwards in two parts: legal, within memory, near the best of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.finalists import peak_bytes, step_s
from autopar.measured import ClusterFile
from autopar.plan import Plan
from autopar.predict import Known, predict
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


@dataclass(frozen=True, kw_only=True)
class _Beside:
    """What was found at a budget: its step over the best of all plans that fit, and its bound over it; 0 for none."""

    budget_bytes: int
    found: float
    bound: float


def _beside_all(
    schedule: Schedule, bans: Sequence[str], budgets: int, cluster: ClusterFile = CLUSTER
) -> list[_Beside]:
    """All cuts and choices of five layers on two ranks of a pipeline, two stages a rank, simulated."""
    file = model_file(3)
    forbids = tuple(map(Forbid.parse, bans))
    asked = request(8, pp=(2,), num_micro_batches=(4,), schedules=(schedule,), forbids=forbids)
    some = search_files(file, cluster, asked).plan
    made = tables(
        file.model, file.layers, cluster.cluster, cluster.links, asked, pp=2, num_micro_batches=4, schedule="1f1b"
    )
    table = allowed(made, schedule)
    rows = [[made.strategies[s] for s in np.flatnonzero(row)] for row in table.feasible]
    known, plans = Known(), []
    for ends in combinations(range(1, 5), 3):
        layers = tuple(b - a for a, b in zip((0, *ends), (*ends, 5), strict=True))
        for chosen in product(*rows):
            plan = replace(some, layers_per_stage=layers, strategies=chosen)
            plan = replace(
                plan, predicted=predict(plan, file.model, file.layers, cluster.cluster, cluster.links, known)
            )
            plans.append((peak_bytes(plan), step_s(plan)))
    peaks = sorted({peak for peak, _ in plans})
    result = []
    for place in range(budgets):
        budget_bytes = peaks[len(peaks) * place // budgets] if place else peaks[-1]
        best_s = min(step for peak, step in plans if peak <= budget_bytes)
        try:
            plan = search_files(file, cluster, replace(asked, memory_bytes=budget_bytes)).plan
        except InfeasibleError:
            result.append(_Beside(budget_bytes=budget_bytes, found=0.0, bound=0.0))
            continue
        assert plan.certificate is not None
        bound = plan.certificate.lower_bound_ns / 1e9 / best_s
        result.append(_Beside(budget_bytes=budget_bytes, found=step_s(plan) / best_s, bound=bound))
    return result


ENDS = tuple(f"{where}: {part}" for where in ("embed", "head") for part in ("z1", "z2", "z3", "tp2"))
THREE = (*ENDS, "*: z1", "*: z2", "*: z3", "*: r", "*: tp2s")
FIVE = (*(ban for ban in ENDS if not ban.endswith("z2")), "*: z1", "*: z3", "*: tp2s")


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zbv"])
def test_the_plan_is_near_the_best_of_all(schedule: Schedule) -> None:
    everything, *tighter = _beside_all(schedule, THREE, 3, CLUSTER)
    assert 1 <= everything.found <= 1.02
    assert all(one.bound <= 1 for one in (everything, *tighter))
    assert all(one.found == 0 or 1 <= one.found < 1.25 for one in tighter)


OVERLAP = replace(CLUSTER, links=replace(CLUSTER.links, overlap_origin="fitted", overlap_slowdown=1.1))
CORES = replace(CLUSTER, cluster=replace(CLUSTER.cluster, compute_speedup=(1.0, 0.9, 0.6, 0.4)))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ALL)
@pytest.mark.parametrize("cluster", [CLUSTER, OVERLAP, CORES], ids=["waits", "overlap", "cores"])
def test_no_plan_is_below_the_bound_of_its_schedule(schedule: Schedule, cluster: ClusterFile) -> None:
    """Ratios to the best of all: docs/strategies.md. A search may find fewer stages a rank than are enumerated."""
    found = _beside_all(schedule, FIVE, 6, cluster)
    print(schedule, " ".join(f"{one.found:.3f}/{one.bound:.3f}" for one in found))
    assert all(one.bound <= 1 for one in found)
    assert all(one.found < 1.25 for one in found)
    assert sum(one.found == 0 for one in found) <= 1


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
