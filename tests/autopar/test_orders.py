"""Action tables against those of torch's own schedule classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.legality import why_schedule_illegal
from autopar.orders import Action, actions, in_flight
from autopar.request import SCHEDULES, Schedule
from tests.torch_schedules import CLASS_NAMES, build

SEVERAL = tuple(schedule for schedule in CLASS_NAMES if schedule not in SCHEDULES)
SIZES = [(pp, each, count) for pp in (2, 3, 4) for each in (1, 2, 3) for count in (1, 2, 3, 5, 6, 8, 12)]
MORE_SIZES = [
    (pp, each, count)
    for pp in (2, 3, 4, 5, 6, 8, 16)
    for each in (1, 2, 3, 4, 6)
    for count in (*range(1, 17), 24, 40, 64)
]


def _done(schedule: Schedule, count: int, stage: int, micro_batches: int) -> list[Action]:
    """What the stock schedule makes a stage do, recorded by a stage that does nothing."""
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

    done: list[Action] = []
    no_operations: list[object] = []
    recorder = SimpleNamespace(
        stage_index=stage,
        forward_one_chunk=lambda m, *_, **__: done.append(("F", stage, m)),
        backward_one_chunk=lambda m, **_: done.append(("B", stage, m)),
        perform_reduce_grad=lambda _: None,
        **{f"get_{way}_{end}_ops": lambda _: no_operations for way in ("fwd", "bwd") for end in ("recv", "send")},
    )
    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
    runner: Any = kind.__new__(kind)
    runner._stage = recorder
    runner._num_stages, runner._n_microbatches, runner.scale_grads = count, micro_batches, False
    runner._check_inputs = lambda args, kwargs, *_: (args, kwargs)
    for name in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
        setattr(runner, name, lambda *_: None)
    runner._step_microbatches([()] * micro_batches, [{}] * micro_batches)
    return done


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_one_stage_a_rank_does_what_torch_does(schedule: Schedule, count: int) -> None:
    for micro_batches in (count, count + 1, 2 * count, 9):
        for stage in range(count):
            order = actions(schedule, count, stage, micro_batches)
            assert list(order) == _done(schedule, count, stage, micro_batches)


def _same(schedule: Schedule, sizes: list[tuple[int, int, int]]) -> int:
    compared = 0
    for pp, each, count in sizes:
        if why_schedule_illegal(schedule, pp=pp, num_micro_batches=count, stages_per_rank=each) is not None:
            continue
        for rank, row in build(schedule, pp, each, count).pipeline_order.items():
            # Bubbles are left out; a pair that may be overlapped is run one after the other.
            flat = [part for action in row if action is not None for part in action.sub_actions or (action,)]
            table = [(part.computation_type.value, part.stage_index, part.microbatch_index) for part in flat]
            assert table == list(actions(schedule, pp, rank, count, each)), (pp, each, count, rank)
            compared += 1
    return compared


@pytest.mark.parametrize("schedule", SEVERAL)
def test_tables_are_those_of_torch(schedule: Schedule) -> None:
    assert _same(schedule, SIZES) > 10


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SEVERAL)
def test_tables_are_those_of_torch_at_many_sizes(schedule: Schedule) -> None:
    assert _same(schedule, MORE_SIZES) > 200


@settings(deadline=None)
@given(st.sampled_from(tuple(CLASS_NAMES)), st.integers(1, 6), st.integers(1, 3), st.integers(1, 12))
def test_each_micro_batch_passes_each_stage_once_and_in_flight_is_what_the_order_says(
    schedule: Schedule, pp: int, each: int, count: int
) -> None:
    if why_schedule_illegal(schedule, pp=pp, num_micro_batches=count, stages_per_rank=each) is not None:
        return
    seen: set[Action] = set()
    for rank in range(pp):
        live: dict[int, int] = {}
        most: dict[int, int] = {}
        for kind, stage, m in actions(schedule, pp, rank, count, each):
            assert (kind, stage, m) not in seen
            seen.add((kind, stage, m))
            if kind in "BI":
                assert ("F", stage, m) in seen
            if kind == "W":
                assert ("I", stage, m) in seen
            live[stage] = live.get(stage, 0) + {"F": 1, "I": 0}.get(kind, -1)
            most[stage] = max(most.get(stage, 0), live[stage])
        for stage, highest in most.items():
            assert highest == in_flight(schedule, pp, stage, count, each)
        assert not any(live.values())
    for stage in range(pp * each):
        for m in range(count):
            assert ("F", stage, m) in seen
            assert (("B", stage, m) in seen) != (("I", stage, m) in seen and ("W", stage, m) in seen)
