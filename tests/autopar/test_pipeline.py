"""The simulation of a step against hand counts, closed forms, bounds, and a second simulation by brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.legality import why_schedule_illegal
from autopar.orders import actions
from autopar.pipeline import Ending, StageTimes, Timeline, lower_bound_s, simulate, step
from autopar.request import SCHEDULES, Schedule
from autopar.schedules import stage_rank
from autopar.sharing import Sharing
from tests.torch_schedules import CLASS_NAMES

ALL = tuple(CLASS_NAMES)
times = st.floats(1e-4, 1.0)
stages = st.lists(st.builds(StageTimes, forward_s=times, backward_s=times), min_size=1, max_size=6)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, object]:
    """Any legal schedule over any stages, as arguments of `simulate`."""
    schedule: Schedule = draw(st.sampled_from(ALL))
    pp, each, count = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 12))
    if why_schedule_illegal(schedule, pp=pp, num_micro_batches=count, stages_per_rank=each) is not None:
        schedule, each, count = "gpipe", 1, count
    some = st.builds(
        StageTimes,
        forward_s=times,
        backward_s=times,
        gather_s=st.sampled_from((0.0, 0.3)),
    )
    row = draw(st.lists(some, min_size=pp * each, max_size=pp * each))
    return {
        "stages": row,
        "schedule": schedule,
        "micro_batches": count,
        "send_s": draw(st.sampled_from((0.0, 0.01, 0.3))),
        "pp": pp,
    }


def test_two_stages_by_hand() -> None:
    """Stage 1: F0 from 1.5, B0 2.5..4.5, F1 4.5..5.5, B1 5.5..7.5; stage 0: B1 from 7.5 + 0.5, two long."""
    pair = [StageTimes(forward_s=1, backward_s=2)] * 2
    line = simulate(pair, schedule="1f1b", micro_batches=2, send_s=0.5)
    assert line.step_s == 10.0
    assert line.last_rank == 0
    assert line.busy_s(0) == 6.0
    first = [(op.kind, op.micro_batch, op.start_s) for op in line.operations if op.stage == 0]
    assert first == [("F", 0, 0.0), ("F", 1, 1.0), ("B", 0, 5.0), ("B", 1, 8.0)]


def test_the_ending_by_hand() -> None:
    """Rank 1 is done at 4 and syncs until 13; both ends then sum 2, all clip 1, and the slower optimizer takes 3."""
    pair = [StageTimes(forward_s=1, backward_s=2)] * 2
    ending = Ending(sync_s=(0.25, 9.0), tied_s=2.0, clip_s=1.0, optimizer_s=(3.0, 0.5))
    line = simulate(pair, schedule="gpipe", micro_batches=1, send_s=0.0, ending=ending)
    assert (line.step_s, line.last_rank) == (4.0 + 9.0 + 2.0 + 1.0 + 3.0, 0)
    ends = [(op.kind, op.rank, op.start_s, op.end_s) for op in line.operations if op.stage == -1]
    assert ends == [
        ("sync", 1, 4.0, 13.0),
        ("sync", 0, 6.0, 6.25),
        ("tied", 0, 13.0, 15.0),
        ("tied", 1, 13.0, 15.0),
        ("clip", 0, 15.0, 16.0),
        ("clip", 1, 15.0, 16.0),
        ("optimizer", 0, 16.0, 19.0),
        ("optimizer", 1, 16.0, 16.5),
    ]


def test_zero_2_gathers_once_between_two_backwards() -> None:
    """GPipe: the first forward gathers and every backward but the first; 1F1B: the first forward, then by turns."""
    one = StageTimes(forward_s=1.0, backward_s=2.0, gather_s=0.25)
    for schedule in SCHEDULES:
        line = simulate([one] * 2, schedule=schedule, micro_batches=4, send_s=0.0)
        longer = [(op.kind, op.micro_batch) for op in line.operations if op.rank == 0 and (op.end_s - op.start_s) % 1]
        assert len(longer) == 4
        assert longer == [("F", 0), *(("B", m) for m in (1, 2, 3))] if schedule == "gpipe" else longer[0] == ("F", 0)


@pytest.mark.parametrize("schedule", CLASS_NAMES)
def test_zero_2_gathers_a_stage_as_often_as_it_reduces(schedule: Schedule) -> None:
    """The second part of a backward finds what the first has gathered."""
    each = 1 if schedule in SCHEDULES else 2
    row = [StageTimes(forward_s=1.0, backward_s=2.0, gather_s=0.25)] * (3 * each)
    line = simulate(row, schedule=schedule, micro_batches=6, send_s=0.0, pp=3)
    for stage in range(3 * each):
        own = [op for op in line.operations if op.stage == stage]
        assert sum(op.end_s - op.start_s for op in own) == pytest.approx(6 * (3.0 + 0.25))


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [2, 3, 8])
def test_equal_stages_take_the_textbook_time(pp: int, rounds: int) -> None:
    """GPipe (Huang 2019) and 1F1B: M + pp - 1 rounds; interleaved (Narayanan 2021) and breadth first (Lamy-Poirier
    2023): the bubble divides by v; zero bubble (Qi 2023): (pp - 1)(f + i - w); both V shapes fill the pipe and no more
    where f = i = w."""
    count, f = rounds * pp, 0.7

    def took(schedule: Schedule, each: int, b: float) -> float:
        row = [StageTimes(forward_s=f, backward_s=b)] * (pp * each)
        return step(row, schedule=schedule, micro_batches=count, send_s=0.0, pp=pp).step_s

    for b in (1.1, 1.4, 2.9):
        for schedule in SCHEDULES:
            assert took(schedule, 1, b) == pytest.approx((count + pp - 1) * (f + b), rel=1e-9)
        for each in (2, 3):
            several: tuple[Schedule, ...] = ("looped-bfs", "interleaved-1f1b")
            for schedule in several:
                expected = (count + (pp - 1) / each) * each * (f + b)
                assert took(schedule, each, b) == pytest.approx(expected, rel=1e-9)
    for each in (1, 2, 3):
        expected = count * each * 3 * f + (pp - 1) * f
        assert took("interleaved-zero-bubble", each, 2 * f) == pytest.approx(expected, rel=1e-9)
    for schedule in ("zbv", "dualpipev"):
        assert took(schedule, 2, 2 * f) == pytest.approx(count * 6 * f + (pp - 1) * f, rel=1e-9)  # type: ignore[arg-type]


def _bound_holds(drawn: list[StageTimes], micro_batches: int, send_s: float) -> None:
    line = step(drawn, schedule="1f1b", micro_batches=micro_batches, send_s=send_s)
    assert lower_bound_s(drawn, micro_batches=micro_batches, send_s=send_s) <= line.step_s * (1 + 1e-9)


test_the_lower_bound_holds = settings(max_examples=300, deadline=None)(
    given(stages, st.integers(1, 12), st.floats(0, 0.3))(_bound_holds)
)

test_the_lower_bound_holds_5000_times = pytest.mark.slow(
    settings(max_examples=5000, deadline=None)(given(stages, st.integers(1, 40), st.floats(0, 0.3))(_bound_holds))
)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_a_rank_does_one_thing_at_a_time_in_its_order_and_waits_for_its_input(drawn: dict[str, object]) -> None:
    line: Timeline = simulate(**drawn)  # type: ignore[arg-type]
    row, count, schedule, pp = drawn["stages"], drawn["micro_batches"], drawn["schedule"], drawn["pp"]
    assert isinstance(row, list)
    at = {(op.kind, op.stage, op.micro_batch): op for op in line.operations}
    for rank in range(pp):  # type: ignore[call-overload]
        own = [op for op in line.operations if op.rank == rank]
        mine = actions(schedule, pp, rank, count, len(row) // pp)  # type: ignore[arg-type, operator]
        assert sorted(mine) == sorted((op.kind, op.stage, op.micro_batch) for op in own)
        places = [at[action] for action in mine]
        assert all(b.start_s >= a.end_s for a, b in pairwise(places))
    for (kind, stage, m), op in at.items():
        source = stage - 1 if kind == "F" else stage + 1
        if kind == "W" or not 0 <= source < len(row):
            continue
        before = at.get((kind, source, m)) or at.get(("I" if kind == "B" else "B", source, m))  # type: ignore[arg-type]
        assert before is not None
        homes = {stage_rank(schedule, pp=pp, stage=s) for s in (stage, source)}  # type: ignore[arg-type]
        sent_s = drawn["send_s"] if len(homes) > 1 else 0.0
        assert op.start_s >= before.end_s + sent_s - 1e-12  # type: ignore[operator]
    assert line.step_s == pytest.approx(max(op.end_s for op in line.operations))


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(0, 14), st.sampled_from(("forward_s", "backward_s", "gather_s")), st.floats(0.01, 2.0))
def test_no_step_gets_shorter_when_something_takes_longer(
    drawn: dict[str, object], place: int, field: str, more_s: float
) -> None:
    """The orders are fixed: a longer action delays what waits for it and nothing else."""
    row = drawn["stages"]
    assert isinstance(row, list)
    now = step(**drawn).step_s  # type: ignore[arg-type]
    place %= len(row)
    changed = [*row]
    changed[place] = replace(row[place], **{field: getattr(row[place], field) + more_s})
    assert step(**drawn | {"stages": changed}).step_s >= now - 1e-12  # type: ignore[arg-type]
    assert step(**drawn | {"send_s": drawn["send_s"] + more_s}).step_s >= now - 1e-12  # type: ignore[arg-type, operator]


def test_nothing_to_simulate_is_a_bug_of_the_caller() -> None:
    one = StageTimes(forward_s=1, backward_s=1)
    for row, pp in (([], None), ([one] * 3, 2), ([one], 0)):
        with pytest.raises(ValueError, match="nothing to simulate"):
            simulate(row, schedule="1f1b", micro_batches=1, send_s=0.0, pp=pp)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_ranks_that_do_not_slow_each_other_share_nothing(drawn: dict[str, object]) -> None:
    """Speeds that differ by nothing, but take the way of those that do."""
    pp = drawn["pp"]
    assert isinstance(pp, int)
    alike = Sharing(speed=(1 + 1e-15, *[1.0] * (2 * pp - 1)), ranks_per_stage=1, ranks_per_node=2 * pp)
    plain, shared = (simulate(**drawn, sharing=how) for how in (None, alike))  # type: ignore[arg-type]
    assert shared.step_s == pytest.approx(plain.step_s, rel=1e-9)
    ends = [{(op.kind, op.stage, op.micro_batch): op.end_s for op in line.operations} for line in (plain, shared)]
    assert ends[1] == pytest.approx(ends[0], rel=1e-9, abs=1e-12)


def test_two_ranks_on_one_core_by_hand() -> None:
    """Alone a rank is twice as fast. F0 of rank 0 takes 0.5; then F1 of rank 0 and F0 of rank 1 share the core: both
    1, until 1.5; rank 1's B0 is alone until 2.5; B0 of rank 0 and F1 of rank 1 share: F1 until 3.5, half of B0 is
    left beside B1: 1 until 4.5, half of B1 left; alone 0.5 until 5; B1 of rank 0 alone until 6."""
    pair = [StageTimes(forward_s=1, backward_s=2)] * 2
    sharing = Sharing(speed=(2.0, 1.0), ranks_per_stage=1, ranks_per_node=2)
    line = simulate(pair, schedule="1f1b", micro_batches=2, send_s=0.0, sharing=sharing)
    found = {(op.kind, op.stage, op.micro_batch): op.end_s for op in line.operations}
    assert found == pytest.approx(
        {
            ("F", 0, 0): 0.5,
            ("F", 0, 1): 1.5,
            ("F", 1, 0): 1.5,
            ("B", 1, 0): 2.5,
            ("F", 1, 1): 3.5,
            ("B", 0, 0): 4.5,
            ("B", 1, 1): 5.0,
            ("B", 0, 1): 6.0,
        }
    )
    took = step(pair, schedule="1f1b", micro_batches=2, send_s=0.0, sharing=sharing)
    assert took.step_s == pytest.approx(6.0)


def test_waiting_for_collectives_leaves_the_core_to_others() -> None:
    """Half of each forward is waiting. Alone 0.5 + 0.5 / 2; then both meet half of a rank: 0.5 + 0.5 / 1.5."""
    pair = [StageTimes(forward_s=1, backward_s=2, waiting_forward_s=0.5)] * 2
    sharing = Sharing(speed=(2.0, 1.0), ranks_per_stage=1, ranks_per_node=2)
    line = simulate(pair, schedule="gpipe", micro_batches=2, send_s=0.0, sharing=sharing)
    found = {(op.kind, op.stage, op.micro_batch): op.end_s for op in line.operations}
    assert found["F", 0, 0] == pytest.approx(0.75)
    assert found["F", 0, 1] == found["F", 1, 0] == pytest.approx(0.75 + 0.5 + 0.5 / 1.5)
    wide = Sharing(speed=(4.0, 3.0, 2.0, 1.0), ranks_per_stage=2, ranks_per_node=4)
    line = simulate(pair, schedule="gpipe", micro_batches=2, send_s=0.0, sharing=wide)
    found = {(op.kind, op.stage, op.micro_batch): op.end_s for op in line.operations}
    # Two ranks of a stage compute at once: speed 3; beside half of the two others three do: speed 2.
    assert found["F", 0, 0] == pytest.approx(0.5 + 0.5 / 3)
    assert found["F", 1, 0] == pytest.approx(found["F", 0, 0] + 0.5 + 0.5 / 2)


def test_a_stage_that_fills_its_node_shares_with_none() -> None:
    pair = [StageTimes(forward_s=1, backward_s=2)] * 2
    sharing = Sharing(speed=(2.0, 1.0), ranks_per_stage=2, ranks_per_node=2)
    assert not sharing.matters
    assert step(pair, schedule="1f1b", micro_batches=2, send_s=0.0, sharing=sharing).step_s == 9.0
