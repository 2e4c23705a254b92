"""What is searched, planned and refused: the space never holds what the runtime refuses, unless it was asked to."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.axes import RankMesh
from autopar.errors import InputError
from autopar.legality import why_not_runnable
from autopar.model import ModelSpec
from autopar.plan import Plan, PlanCluster, PlanModel
from autopar.request import Pin, Request
from autopar.searching import search_files
from autopar.space import StrategySpace, candidates
from autopar.strategy import Strategy
from tests.pricing import SEQUENCE, cluster_file, model_file, request

MODEL, CLUSTER = model_file(), cluster_file()


@lru_cache(maxsize=64)
def _space(world: int, ranks_per_node: int, micro_batch: int, asked: Request) -> StrategySpace:
    mesh = RankMesh.of(world_size=world, ranks_per_node=ranks_per_node)
    return StrategySpace.of(MODEL.model, MODEL.layers, mesh, asked, micro_batch)


def _names(space: StrategySpace, layer: int) -> set[str]:
    return {space.strategies[s].short for s in space.allowed[layer]}


def test_every_part_is_searched_when_asked() -> None:
    space = _space(4, 4, 16, request(allow_unrunnable=True))
    blocks = _names(space, 1)
    assert {"dp4-z1", "dp2-sp2", "sp4-rs", "dp2-z3-cp2", "tp2s-cp2-r", "tp2-sp2", "sp2-cp2", "dp4-rs"} <= blocks
    for layer in (0, -1):
        assert {"tp4", "dp2-z1-tp2", "dp4-z3"} <= _names(space, layer)
        assert not any(part in short for short in _names(space, layer) for part in ("sp", "cp", "s-", "-r"))


def test_nothing_but_what_runs_is_searched_otherwise() -> None:
    space = _space(4, 4, 16, request())
    for layer, role in ((0, "embed"), (1, "block"), (-1, "head")):
        assert all(why_not_runnable(Strategy.parse(short), role) is None for short in _names(space, layer))


def test_a_pin_is_no_way_around() -> None:
    short = "dp2-cp2"
    asked = request(pins=(Pin.parse(f"0: {short}"),))
    if why_not_runnable(Strategy.parse(short)):
        with pytest.raises(InputError, match="is not legal for layer 0"):
            _space(4, 4, 16, asked)
    assert _names(_space(4, 4, 16, replace(asked, allow_unrunnable=True)), 1) == {short}


def test_hsdp_is_searched_where_dp_spans_nodes() -> None:
    assert not any("-h" in strategy.short for strategy in candidates(RankMesh.of(world_size=8)))
    two = {s.short for s in candidates(RankMesh.of(world_size=16, ranks_per_node=8)) if s.shard}
    assert {"dp16-z3-h8", "dp16-z2-h8-r", "dp8-z3-h4-tp2s", "dp4-z3-h2-tp4"} <= two
    assert not any(s.dp == 2 for s in map(Strategy.parse, two))
    mesh = RankMesh.of(world_size=16, ranks_per_node=8)
    assert all(name.startswith("a") for short in two for name in mesh.place(Strategy.parse(short)).dp_shard)


@pytest.mark.parametrize(
    ("short", "layer", "words"),
    [
        ("dp2-sp2", 0, "embed runs data parallel, or vocabulary-parallel with tp"),
        ("tp2-sp2", 1, "sp 2 beside tp 2 does not divide heads 2 and kv heads 2"),
        ("cp4", 1, "sequence 36 is not divisible by twice cp 4; the next legal length is 40"),
        ("sp2-cp2", 1, "sequence 36 is not divisible by sp 2 times twice cp 2"),
    ],
)
def test_reasons_name_heads_and_lengths(short: str, layer: int, words: str) -> None:
    kinds = list(MODEL.model.kinds)
    assert kinds[1].attention is not None
    if "heads" in words:
        kinds[1] = replace(kinds[1], attention=replace(kinds[1].attention, heads=2, kv_heads=2))
    model = replace(MODEL.model, kinds=tuple(kinds))
    asked = replace(request(allow_unrunnable=True), sequence=36 if "sequence" in words and layer else SEQUENCE)
    space = StrategySpace.of(model, MODEL.layers, RankMesh.of(world_size=4), asked, 16)
    reasons = {(r.kind, r.strategy.short): r.reason for r in space.rejections}
    name = model.kind(layer).name
    reason = reasons.get((name, short))
    assert reason is not None
    assert words in reason


@st.composite
def any_plans(draw: st.DrawFn, unrunnable: bool) -> tuple[Plan, ModelSpec]:
    """A plan of any strategies that the space allows on some mesh."""
    world, per_node = draw(st.sampled_from(((4, 4), (8, 4), (6, 6)) if unrunnable else ((4, 4), (6, 6), (16, 8))))
    samples, count = world, draw(st.sampled_from((1, 2)))
    asked = request(samples * count, allow_unrunnable=unrunnable)
    space = _space(world, per_node, samples, asked)
    plan = Plan(
        model=PlanModel(name="m", source="m", fingerprint=MODEL.model.fingerprint),
        cluster=PlanCluster(name="c", device="cpu", world_size=world, ranks_per_node=per_node, memory_bytes=1 << 30),
        request=asked,
        pp=1,
        schedule="1f1b",
        num_micro_batches=count,
        layers_per_stage=(len(space.allowed),),
        strategies=tuple(space.strategies[draw(st.sampled_from(row))] for row in space.allowed),
        versions={},
    )
    return plan, MODEL.model


@settings(max_examples=80, deadline=None)
@given(any_plans(unrunnable=False))
def test_whatever_the_space_holds_passes_the_checks_of_the_runtime(drawn: tuple[Plan, ModelSpec]) -> None:
    plan, model = drawn
    plan.check(model)  # what `parallelize` asks before it touches the model
    assert plan.not_runnable == ()
    assert "not_runnable" not in plan.dumps()
    assert "allow_unrunnable" not in plan.dumps()


@settings(max_examples=40, deadline=None)
@given(any_plans(unrunnable=True))
def test_what_does_not_run_is_recorded_and_refused(drawn: tuple[Plan, ModelSpec]) -> None:
    plan, model = drawn
    plan.check(model, unrunnable=True)
    again = Plan.loads(plan.dumps())
    assert again == plan
    missing = [name for name in ("sequence-parallel norms", "expert", "selective") if name in plan.dumps()]
    if plan.not_runnable:
        assert missing
        with pytest.raises(InputError, match="do not run yet") as caught:
            plan.check(model)
        assert "without --allow-unrunnable" in str(caught.value)
    else:
        plan.check(model)


def test_a_plan_without_the_option_keeps_its_bytes() -> None:
    golden = Path(__file__).parent.parent / "golden" / "plan.json"
    assert Plan.load(golden).dumps() == golden.read_text()


def test_a_file_that_names_the_parts_wrongly_is_refused() -> None:
    plan = search_files(MODEL, CLUSTER, request(allow_unrunnable=True)).plan
    with pytest.raises(InputError, match="not_runnable"):
        Plan.loads(plan.dumps().replace('"not_runnable": [', '"not_runnable": [3, ', 1).replace("3, ]", "3]"))


def test_more_to_choose_from_is_never_slower() -> None:
    for memory_bytes in (3 << 19, 1 << 21, 1 << 24):
        few, many = (
            search_files(MODEL, CLUSTER, request(memory_bytes=memory_bytes, allow_unrunnable=more)).plan
            for more in (False, True)
        )
        assert few.certificate is not None
        assert many.certificate is not None
        assert many.certificate.objective_ns <= few.certificate.objective_ns


def test_a_model_of_one_stage_is_planned_on_several_only_when_asked() -> None:
    reason = "an encoder and a decoder"
    whole = replace(MODEL, model=replace(MODEL.model, pipeline_reason=reason))
    plan = search_files(whole, CLUSTER, request()).plan
    assert plan.pp == 1
    with pytest.raises(InputError, match=reason):
        search_files(whole, CLUSTER, request(pp=(2,)))
    asked = request(pp=(2,), allow_unrunnable=True)
    staged = search_files(whole, CLUSTER, asked).plan
    assert staged.pp == 2
    staged.check(whole.model, unrunnable=True)
    staged.check(MODEL.model, unrunnable=True)
    with pytest.raises(InputError, match=reason):
        replace(staged, request=request(pp=(2,))).check(whole.model)
