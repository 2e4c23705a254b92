from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from autopar.errors import InputError
from autopar.plan import Plan
from autopar.strategy import Strategy
from tests.draws import plans
from tests.values import golden, model, plan


@settings(max_examples=40)
@given(plans())
def test_each_layer_stands_on_one_stage(any_plan: Plan) -> None:
    held = [layer for stage in range(any_plan.num_stages) for layer in any_plan.stage_layers(stage)]
    assert held == list(range(len(any_plan.strategies)))
    assert all(layer in any_plan.stage_layers(any_plan.stage_of(layer)) for layer in held)


def test_a_plan_that_fits_its_model_passes() -> None:
    plan().check(model())


def test_a_plan_with_several_stages_a_rank(tmp_path: Path) -> None:
    several = replace(plan(("dp2",) * 6, pp=2, layers_per_stage=(3, 3)), schedule="zbv", layers_per_stage=(1, 2, 1, 2))
    assert (several.num_stages, several.stages_per_rank) == (4, 2)
    assert [several.stages_of_rank(rank) for rank in range(2)] == [(0, 3), (1, 2)]
    assert [several.stage_of(layer) for layer in range(6)] == [0, 1, 1, 2, 3, 3]
    several.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == several
    several.check(model())
    sharded = replace(several, strategies=(Strategy.parse("dp2-z3"),) * 6)
    with pytest.raises(InputError, match="ZeRO-3 frees the parameters"):
        sharded.check(model())
    for schedule, layers in (("zbv", (1, 1, 1, 1, 1, 1)), ("1f1b", (1, 2, 1, 2)), ("interleaved-1f1b", (3, 3))):
        with pytest.raises(ValueError, match="on a rank, not"):
            replace(several, schedule=schedule, layers_per_stage=layers)


def _strategies(*shorts: str) -> tuple[Strategy, ...]:
    return tuple(Strategy.parse(short) for short in shorts)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_micro_batches": 3}, "global batch 16 is not divisible by 3"),
        ({"strategies": _strategies(*["dp4"] * 5, "tp4s")}, "head runs data parallel, or vocabulary-parallel with tp"),
        ({"strategies": _strategies("dp4", "dp2", *["dp4"] * 4)}, "occupies 2 ranks"),
        ({"strategies": _strategies("dp4", "dp2-ep2", *["dp4"] * 4)}, "expert parallelism"),
    ],
)
def test_check_names_what_cannot_run(change: dict[str, object], words: str) -> None:
    with pytest.raises(InputError) as caught:
        replace(plan(), **change).check(model())  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_check_refuses_another_model() -> None:
    with pytest.raises(InputError, match="another model"):
        plan().check(replace(model(), fingerprint="f"))
    with pytest.raises(InputError, match="one strategy per layer"):
        plan().check(model(5))
    mixed = replace(plan(), strategies=_strategies("dp4", *["dp4"] * 4, "dp4-z3"))
    with pytest.raises(InputError, match="embed and head share parameters"):
        mixed.check(model(tied=True))


@pytest.mark.parametrize(
    "change",
    [
        {"pp": 3},
        {"pp": 0},
        {"num_micro_batches": 0},
        {"layers_per_stage": (6, 0)},
        {"layers_per_stage": (5,)},
        {"pp": 2, "layers_per_stage": (2, 2, 2)},
        {"strategies": _strategies("dp4"), "layers_per_stage": (1,)},
    ],
)
def test_counts_that_do_not_agree_are_a_callers_bug(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        replace(plan(), **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"2": "dp4-z3-r"', '"7": "dp4-z3-r"', "the next block is 2"),
        ('"0-1": "dp2-tp2s"', '"0-999999": "dp2-tp2s"', "absurd"),
        ('"a0": 2', '"a0": 3', "does not fit the cluster"),
        ('"pp": 1', '"pp": 3', "pp 3 does not divide the world size 4"),
        ('"world_size": 4', '"world_size": 0', "world_size"),
        ('"embed": "dp4-z3"', '"embed": "dp4-z9"', "is not a strategy"),
        ('"embed: dp4-z3"', '"embed = dp4-z3"', "is not a pin"),
        ('"num_micro_batches": 2,', '"num_micro_batchs": 2,', "did you mean 'num_micro_batches'?"),
        ('"schema": 1', '"schema": 2', "reads schema 1"),
        ('"global_batch": 16', '"global_batch": -16', "global_batch"),
        ('"global_batch": 16', '"global_batch": 16.5', "a whole number"),
        ('"step_s": 0.125', '"step_s": 1e999', "a finite number"),
        ('"step_s": 0.125', '"step_s": NaN', "NaN is not a number"),
        ('"step_s": 0.125', '"step_s": -0.125', "step_s"),
        ('"worst_rank": 3', '"worst_rank": 4', "worst_rank 4 is no rank"),
        ('"worst_rank": 3', '"worst_rank": -1', "worst_rank -1 is no rank"),
        ('"lower_bound_ns": 3000000', '"lower_bound_ns": 3000001', "lower_bound_ns 3000001 exceeds 3000000"),
        ('"2": "dp4-z3-r"', '"3": "dp4-z3-r"', "twice"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused_by_field(tmp_path: Path, old: str, new: str, words: str) -> None:
    text = golden()["plan.json"].dumps()
    assert old in text
    path = tmp_path / "plan.json"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        Plan.load(path)
    assert words in str(caught.value)


@pytest.mark.parametrize("world_size", [0, -4, 1 << 21, 10**30])
def test_an_absurd_world_is_refused_also_without_a_prediction(tmp_path: Path, world_size: int) -> None:
    content = json.loads(golden()["plan.json"].dumps())
    content["predicted"] = None
    content["cluster"]["world_size"] = world_size
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="is not acceptable") as caught:
        Plan.load(tmp_path / "plan.json")
    assert "world_size" in caught.value.why
