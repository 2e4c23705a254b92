"""Which rank holds which stage, and which schedules are legal, against torch's own classes."""

from __future__ import annotations

import pytest

from autopar.legality import why_schedule_illegal, why_schedule_not_runnable, why_sharding_illegal
from autopar.request import SCHEDULES, Schedule
from autopar.schedules import V_SHAPED, rank_stages, stage_rank, why_stages_illegal
from autopar.strategy import Strategy
from tests.torch_schedules import CLASS_NAMES, build

ALL = tuple(CLASS_NAMES)


@pytest.mark.parametrize("schedule", ALL)
def test_stages_stand_on_the_ranks_of_torch(schedule: Schedule) -> None:
    from torch.distributed.pipelining import _utils

    style = "v" if schedule in V_SHAPED else "loop"
    for pp in (2, 3, 4, 8):
        for each in [each for each in (1, 2, 3) if why_stages_illegal(schedule, pp=pp, stages_per_rank=each) is None]:
            where = _utils.generate_stage_to_rank_mapping(pp, pp * each, style)
            assert where == {s: stage_rank(schedule, pp=pp, stage=s) for s in range(pp * each)}
            held = [rank_stages(schedule, pp=pp, rank=rank, stages_per_rank=each) for rank in range(pp)]
            assert held == [tuple(sorted(s for s in where if where[s] == rank)) for rank in range(pp)]


@pytest.mark.parametrize("schedule", ALL)
def test_legal_is_what_torch_builds(schedule: Schedule) -> None:
    """torch also builds LoopedBFS and interleaved 1F1B with one stage a rank, which have plainer names."""
    for pp in (2, 3, 4):
        for each in (1, 2, 3):
            for count in (1, 2, 3, 4, 5, 7, 8, 9, 12):
                reason = why_schedule_illegal(schedule, pp=pp, num_micro_batches=count, stages_per_rank=each)
                if each == 1 and schedule in ("looped-bfs", "interleaved-1f1b"):
                    assert reason is not None
                elif each > 1 and schedule in SCHEDULES:
                    assert reason == f"{schedule} puts one stage on a rank, not {each}"
                elif reason is None:
                    build(schedule, pp, each, count)
                else:
                    with pytest.raises((ValueError, AssertionError, RuntimeError)):
                        build(schedule, pp, each, count)


def test_one_rank_holds_one_stage_under_any_name() -> None:
    for schedule in ALL:
        assert why_schedule_illegal(schedule, pp=1, num_micro_batches=3) is None
        assert why_schedule_illegal(schedule, pp=1, num_micro_batches=3, stages_per_rank=2) is not None
        assert rank_stages(schedule, pp=1, rank=0, stages_per_rank=1) == (0,)
        assert stage_rank(schedule, pp=1, stage=0) == 0


def test_each_reason_names_its_numbers() -> None:
    words = why_schedule_illegal("interleaved-1f1b", pp=4, num_micro_batches=9, stages_per_rank=2)
    assert words == "interleaved-1f1b runs 9 micro-batches in 2 rounds over 4 ranks, unevenly; try 8 or 12"
    words = why_schedule_illegal("dualpipev", pp=4, num_micro_batches=7, stages_per_rank=2)
    assert words == "dualpipev needs at least as many micro-batches as stages: 7 for 8"
    words = why_schedule_illegal("zbv", pp=4, num_micro_batches=8, stages_per_rank=3)
    assert words == "zbv puts exactly 2 stages on a rank, not 3"
    assert why_schedule_not_runnable("1f1b", "bfloat16") is None
    assert why_schedule_not_runnable("zbv") is None
    words = why_schedule_not_runnable("zbv", "bfloat16")
    assert words is not None
    assert "zbv does not run in bfloat16 yet" in words
    assert why_sharding_illegal(Strategy.parse("dp4-z3"), "zbv") is not None
    assert why_sharding_illegal(Strategy.parse("dp4-z3"), "1f1b") is None
