"""Folding keeps what a plan is made of: every kind of part in every layer, the schedule, the order of the layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InputError
from autopar.folding import fold_plan
from autopar.legality import why_schedule_illegal
from autopar.plan import Plan
from autopar.strategy import Strategy
from tests.draws import strategies_on
from tests.values import plan


def wide(shorts: tuple[str, ...], world: int, *, pp: int = 1, **shape: object) -> Plan:
    base = plan(("dp2",) * 6, pp=2, layers_per_stage=(3, 3))
    return replace(
        base,
        cluster=replace(base.cluster, world_size=world, ranks_per_node=8),
        pp=pp,
        strategies=tuple(Strategy.parse(short) for short in shorts),
        **{"layers_per_stage": (len(shorts),), **shape},
        predicted=None,
    )


def parts(strategy: Strategy) -> tuple[object, ...]:
    s = strategy
    return (
        s.dp > 1,
        s.zero,
        s.shard is not None,
        s.tp > 1,
        s.sequence_norms,
        s.sp > 1,
        s.cp > 1,
        s.ep > 1,
        s.recompute,
    )


@pytest.mark.parametrize(
    ("shorts", "world", "shape", "expected"),
    [
        (("dp64-z3", "dp8-tp8", "tp64s"), 64, {}, ("dp4-z3", "dp2-tp2", "tp4s")),
        (("dp64-z3-h8", "dp8-z3-tp8s-r", "dp64"), 64, {}, ("dp4-z3-h2", "dp2-z3-tp2s-r", "dp4")),
        (("dp16-z3-h2-tp4", "dp64", "dp64"), 64, {}, ("dp4-z3-h2-tp2", "dp8", "dp8")),
        (("dp8", "tp8", "dp4-tp2", "dp8-z2"), 32, {"pp": 4, "layers_per_stage": (1, 1, 1, 1)},
         ("dp4", "tp4", "dp2-tp2", "dp4-z2")),
        (("dp3", "tp3", "tp3", "dp3"), 12, {"pp": 4, "layers_per_stage": (1, 1, 1, 1)}, ("dp3", "tp3", "tp3", "dp3")),
    ],
)  # fmt: skip
def test_degrees_shrink_together(
    shorts: tuple[str, ...], world: int, shape: dict[str, object], expected: tuple[str, ...]
) -> None:
    folded = fold_plan(wide(shorts, world, num_micro_batches=16, **shape))
    assert tuple(s.short for s in folded.strategies) == expected
    assert folded.cluster.world_size <= 8


def test_stages_are_joined_and_micro_batches_fewer() -> None:
    several = wide(
        ("dp4",) * 8, 16, pp=4, schedule="zbv", layers_per_stage=(1,) * 8, num_micro_batches=64
    )  # fmt: skip
    folded = fold_plan(several)
    assert (folded.pp, folded.stages_per_rank, folded.layers_per_stage) == (2, 2, (2, 2, 2, 2))
    assert (folded.num_micro_batches, folded.cluster.world_size) == (8, 4)
    three = fold_plan(wide(("dp4",) * 6, 12, pp=3, layers_per_stage=(1, 2, 3), num_micro_batches=3))
    assert (three.layers_per_stage, three.num_micro_batches) == ((1, 5), 3)
    interleaved = wide(("dp4",) * 8, 16, pp=4, schedule="interleaved-1f1b", layers_per_stage=(1,) * 8)
    counts = fold_plan(replace(interleaved, num_micro_batches=5)).num_micro_batches
    assert why_schedule_illegal("interleaved-1f1b", pp=2, num_micro_batches=counts, stages_per_rank=2) is None


def test_a_plan_of_few_ranks_is_itself_and_what_does_not_fit_says_so() -> None:
    small = plan(("dp2",) * 6, pp=2, layers_per_stage=(3, 3))
    assert fold_plan(small) is small
    with pytest.raises(InputError, match="cannot be folded to 8") as error:
        fold_plan(wide(("dp3-tp5", "dp15", "dp15"), 15))
    assert "dp3-tp5" in error.value.why


@settings(max_examples=60)
@given(st.lists(strategies_on(16), min_size=3, max_size=5))
def test_every_part_of_every_layer_is_kept(strategies: list[Strategy]) -> None:
    many = wide(tuple(s.short for s in strategies), 16)
    try:
        folded = fold_plan(many)
    except InputError:
        return
    assert folded.cluster.world_size <= 8
    for before, after in zip(many.strategies, folded.strategies, strict=True):
        assert parts(before) == parts(after)
        assert after.ranks == folded.mesh.ranks_per_stage
        folded.mesh.place(after)
