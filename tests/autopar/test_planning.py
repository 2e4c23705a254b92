from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar import planning
from autopar.errors import InputError, RunError
from autopar.formats import read_kind
from autopar.request import Request
from autopar.searching import search_files
from tests.values import GOLDEN, measured


def test_one_call_gives_the_plan_of_the_files(tmp_path: Path) -> None:
    model_file, cluster_file = measured()
    model_file.save(tmp_path / "model.json")
    cluster_file.save(tmp_path / "cluster.json")
    expected = search_files(
        model_file, cluster_file, Request(global_batch=16, sequence=16, memory_bytes=24_000_000, pp=(1,))
    ).plan
    for model, cluster in (
        (model_file, cluster_file),
        (tmp_path / "model.json", tmp_path / "cluster.json"),
        (str(tmp_path / "model.json"), str(tmp_path / "cluster.json")),
    ):
        plan = autopar.search(model, cluster=cluster, global_batch=16, memory="24MB", pp=[1])
        assert plan.dumps() == expected.dumps()
    pinned = autopar.search(model_file, cluster=cluster_file, global_batch=16, pins=["*: tp4"])
    assert {strategy.short for strategy in pinned.strategies[1:-1]} == {"tp4"}


def test_limits_of_one_call() -> None:
    model_file, cluster_file = measured()
    with pytest.raises(InputError, match="dtype"):
        autopar.search(model_file, cluster=cluster_file, global_batch=16, dtype="bf16")
    with pytest.raises(RunError, match="stopped before"):
        autopar.search(model_file, cluster=cluster_file, global_batch=16, time_limit_s=0.0)


def test_wrong_input_is_named() -> None:
    model_file, cluster_file = measured()
    with pytest.raises(InputError, match="the request is not acceptable"):
        autopar.search(model_file, cluster=cluster_file, global_batch=0)
    with pytest.raises(InputError, match="not acceptable"):
        autopar.search(model_file, cluster=cluster_file, global_batch=16, optimizer="adam")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="not a dtype"):
        autopar.search(model_file, cluster=cluster_file, global_batch=16, dtype="bf17")
    with pytest.raises(InputError, match="does not exist"):
        autopar.search(model_file, cluster="none.json", global_batch=16)
    with pytest.raises(InputError, match="does not exist"):
        autopar.search(Path("none.json"), cluster=cluster_file, global_batch=16)


@pytest.mark.parametrize(
    "wrong",
    [
        {"time_limit_s": -1},
        {"time_limit_s": "x"},
        {"time_limit_s": float("nan")},
        {"dtype": 3},
        {"optimizer": "lion"},
        {"tp_across_nodes": "yes"},
        {"global_batch": 2.5},
        {"global_batch": "4"},
        {"global_batch": True},
        {"global_batch": [4, "x"]},
        {"global_batch": []},
        {"sequence": 0},
        {"sequence": "x"},
        {"pins": "*: dp4"},
        {"pp": 1},
        {"schedules": "gpipe"},
        {"micro_batches": ["x"]},
        {"micro_batch_sizes": 2},
    ],
    ids=str,
)
def test_arguments_of_the_wrong_type_are_refused_before_anything_is_measured(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_cluster", lambda _: pytest.fail("measured first"))
    with pytest.raises(InputError):
        autopar.search("LlamaConfig", **({"global_batch": 16} | wrong))


def test_the_kind_of_a_file(tmp_path: Path) -> None:
    assert read_kind(GOLDEN / "plan.json") == "autopar.plan"
    assert read_kind(tmp_path) is None
    assert read_kind("LlamaConfig") is None
    (tmp_path / "list.json").write_text("[1]")
    assert read_kind(tmp_path / "list.json") is None


@pytest.mark.slow
def test_a_module_is_measured_first() -> None:
    import torch

    from autopar.runtime.models import build_model

    _, cluster_file = measured(world_size=2)
    module = build_model("examples/gpt.py:build(width=32, heads=2, blocks=2, context=32)")
    example = {name: torch.zeros((3, 32), dtype=torch.long) for name in ("ids", "targets")}
    plan = autopar.search(module, cluster=cluster_file, global_batch=4, example=example)
    assert plan.request.sequence == 32
    assert len(plan.strategies) == 4
