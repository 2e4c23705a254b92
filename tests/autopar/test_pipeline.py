"""Orders against what torch's schedules execute; the simulation against hand counts and bounds."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.pipeline import Action, StageTimes, actions, in_flight, lower_bound_s, simulate
from autopar.request import SCHEDULES, Schedule

times = st.floats(1e-4, 1.0)
stages = st.lists(st.builds(StageTimes, forward_s=times, backward_s=times), min_size=1, max_size=6)


def _torch_order(schedule: Schedule, count: int, stage: int, micro_batches: int) -> list[Action]:
    """What the stock schedule makes a stage do, recorded by a stage that does nothing."""
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

    done: list[Action] = []
    no_operations: list[object] = []
    recorder = SimpleNamespace(
        stage_index=stage,
        forward_one_chunk=lambda m, *_, **__: done.append(("F", m)),
        backward_one_chunk=lambda m, **_: done.append(("B", m)),
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
def test_orders_are_those_of_torch(schedule: Schedule, count: int) -> None:
    for micro_batches in (count, count + 1, 2 * count, 9):
        for stage in range(count):
            order = actions(schedule, count, stage, micro_batches)
            assert list(order) == _torch_order(schedule, count, stage, micro_batches)


@settings(deadline=None)
@given(st.sampled_from(SCHEDULES), st.integers(1, 6), st.integers(1, 12))
def test_in_flight_is_what_the_order_says(schedule: Schedule, count: int, micro_batches: int) -> None:
    for stage in range(count):
        live, most = 0, 0
        for kind, _ in actions(schedule, count, stage, micro_batches):
            live += 1 if kind == "F" else -1
            most = max(most, live)
        assert most == in_flight(schedule, count, stage, micro_batches)
        assert live == 0


def test_two_stages_by_hand() -> None:
    """Stage 1: F0 from 1.5, B0 2.5..4.5, F1 4.5..5.5, B1 5.5..7.5; stage 0: B1 from 7.5 + 0.5, two long."""
    pair = [StageTimes(forward_s=1, backward_s=2)] * 2
    line = simulate(pair, schedule="1f1b", micro_batches=2, send_s=0.5)
    assert line.step_s == 10.0
    assert line.last_stage == 0
    assert line.busy_s(0) == 6.0
    first = [(op.kind, op.micro_batch, op.start_s) for op in line.operations if op.stage == 0]
    assert first == [("F", 0, 0.0), ("F", 1, 1.0), ("B", 0, 5.0), ("B", 1, 8.0)]


def test_the_tail_belongs_to_its_stage() -> None:
    pair = [StageTimes(forward_s=1, backward_s=2, tail_s=tail) for tail in (0.25, 9.0)]
    line = simulate(pair, schedule="gpipe", micro_batches=1, send_s=0.0)
    assert (line.step_s, line.last_stage) == (4.0 + 9.0, 1)


@settings(deadline=None)
@given(stages, st.integers(1, 12))
def test_equal_stages_without_sends_take_the_textbook_time(drawn: list[StageTimes], micro_batches: int) -> None:
    equal = [drawn[0]] * len(drawn)
    one = drawn[0].forward_s + drawn[0].backward_s
    for schedule in SCHEDULES:
        line = simulate(equal, schedule=schedule, micro_batches=micro_batches, send_s=0.0)
        assert line.step_s == pytest.approx((micro_batches + len(equal) - 1) * one)


@settings(max_examples=150, deadline=None)
@given(stages, st.integers(1, 12), st.floats(0, 0.3))
def test_the_lower_bound_holds(drawn: list[StageTimes], micro_batches: int, send_s: float) -> None:
    line = simulate(drawn, schedule="1f1b", micro_batches=micro_batches, send_s=send_s)
    assert lower_bound_s(drawn, micro_batches=micro_batches, send_s=send_s) <= line.step_s * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(stages, st.integers(1, 8), st.floats(0, 0.3), st.sampled_from(SCHEDULES))
def test_a_stage_does_one_thing_at_a_time_and_waits_for_its_input(
    drawn: list[StageTimes], micro_batches: int, send_s: float, schedule: Schedule
) -> None:
    line = simulate(drawn, schedule=schedule, micro_batches=micro_batches, send_s=send_s)
    at = {(op.kind, op.stage, op.micro_batch): op for op in line.operations}
    assert len(at) == 2 * len(drawn) * micro_batches
    for stage in range(len(drawn)):
        own = [op for op in line.operations if op.stage == stage]
        assert all(b.start_s >= a.end_s for a, b in pairwise(own))
        for m in range(micro_batches):
            assert at["B", stage, m].start_s >= at["F", stage, m].end_s
            if stage:
                assert at["F", stage, m].start_s >= at["F", stage - 1, m].end_s + send_s
                assert at["B", stage - 1, m].start_s >= at["B", stage, m].end_s + send_s


def test_nothing_to_simulate_is_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match="nothing to simulate"):
        simulate([], schedule="1f1b", micro_batches=1, send_s=0.0)
