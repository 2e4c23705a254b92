"""Arguments of the wrong kind, over the whole public face: an InputError that names them, never a bare TypeError."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.errors import InputError
from autopar.runtime.models import build_model
from autopar.runtime.parallel import ParallelModel
from autopar.runtime.train import run_plan, train_rank
from tests.runtime.rank_jobs import make_plan

GPT = "examples/gpt.py:build(width=32, heads=4, blocks=2, vocab=64, context=16)"
SHIPPED: dict[str, Any] = {"model": "llama2-7b", "cluster": "h100-80g:1x8", "global_batch": 8}
TOKENS = torch.zeros(8, 8, dtype=torch.long)


@pytest.mark.parametrize(
    "wrong",
    [
        {"cluster": 3}, {"cluster": None}, {"cluster": b"x"}, {"model": 3}, {"model": None}, {"global_batch": "64"},
        {"global_batch": 1.5}, {"global_batch": True}, {"global_batch": []}, {"sequence": "a"}, {"sequence": True},
        {"memory": 1.5}, {"memory": [1]}, {"dtype": 3}, {"optimizer": "adamx"}, {"optimizer": None}, {"pp": ["a"]},
        {"pp": 3}, {"micro_batches": ["x"]}, {"micro_batch_sizes": ["x"]}, {"micro_batch_sizes": [0]},
        {"schedules": [3]}, {"pins": [3]}, {"forbids": [None]}, {"max_strategies": "3"}, {"tp_across_nodes": "no"},
        {"allow_unrunnable": "no"}, {"verify": "no"}, {"verify": None}, {"time_limit_s": True}, {"time_limit_s": "1"},
        {"example": 3}, {"loss": 3},
    ],
    ids=str,
)  # fmt: skip
def test_search_refuses_other_kinds(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        autopar.search(**{**SHIPPED, **wrong})
    assert caught.value.why


def plan() -> autopar.Plan:
    return make_plan(GPT, ["dp1"] * 4, world=1)


@pytest.mark.parametrize(
    ("named", "wrong"),
    [
        ("model", {"model": 3}),
        ("model", {"model": "LlamaConfig"}),
        ("plan", {"plan": "plan.json"}),
        ("plan", {"plan": None}),
        ("example", {"example": 3}),
        ("example is empty", {"example": {}}),
        ("example['ids']", {"example": {"ids": [1]}}),
        ("loss", {"loss": 3}),
        ("weights", {"weights": 3}),
        ("weights", {"weights": ""}),
        ("timeout_s", {"timeout_s": "5"}),
    ],
)
def test_parallelize_refuses_other_kinds(named: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        autopar.parallelize(**{"model": nn.Linear(1, 1), "plan": plan(), **wrong})
    assert named in caught.value.what
    assert not dist.is_initialized()


@cache
def wrapped() -> tuple[ParallelModel, torch.optim.Optimizer]:
    model = autopar.parallelize(build_model(GPT), plan())
    return model, torch.optim.AdamW(model.param_groups())


@pytest.fixture(scope="module", autouse=True)
def _world_of_one() -> Any:
    yield
    wrapped.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()


Act = Callable[[ParallelModel, torch.optim.Optimizer], Any]


@pytest.mark.parametrize(
    ("named", "act"),
    [
        ("batch must be", lambda m, o: m.shard_batch([TOKENS])),
        ("batch is empty", lambda m, o: m.shard_batch({})),
        ("batch['ids'] must be", lambda m, o: m.train_step({"ids": [1]})),
        ("batch must be", lambda m, o: m.train_step(TOKENS)),
        ("max_norm", lambda m, o: m.clip_grad_norm_("a")),
        ("max_norm", lambda m, o: m.clip_grad_norm_(float("nan"))),
        ("max_norm", lambda m, o: m.clip_grad_norm_(-1.0)),
        ("folder must be", lambda m, o: m.save(3, o)),
        ("folder must be", lambda m, o: m.load("", o)),
        ("folder must be", lambda m, o: m.load_optimizer(None, o)),
        ("folder must be", lambda m, o: m.export(b"x")),
        ("folder must be", lambda m, o: m.import_weights(3)),
        ("optimizer must be", lambda m, o: m.save("x", "adam")),
        ("does not step this model", lambda m, o: m.save("x", torch.optim.AdamW(nn.Linear(2, 2).parameters()))),
        ("does not step this model", lambda m, o: m.load("x", torch.optim.AdamW(nn.Linear(2, 2).parameters()))),
    ],
)
def test_a_wrapped_model_refuses_other_kinds(named: str, act: Act, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        act(*wrapped())
    assert named in caught.value.what
    assert not Path("x").exists()


def test_a_plan_from_shipped_numbers_is_refused_before_ranks_start() -> None:
    made = plan()
    shipped = replace(made, model=replace(made.model, source="shipped:t5-large"))
    with pytest.raises(InputError, match="t5-large cannot be built"):
        run_plan(shipped)
    with pytest.raises(InputError, match="t5-large cannot be built"):
        build_model("shipped:t5-large")
    with pytest.raises(InputError, match="vit-large-16 is a name of shipped numbers"):
        build_model("vit-large-16")


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model, _ = wrapped()
    model.export(tmp_path / "good")
    file, index = tmp_path / "bad" / "model.safetensors", tmp_path / "bad" / "model.safetensors.index.json"
    file.parent.mkdir()
    whole = (tmp_path / "good" / "model.safetensors").read_bytes()
    names = [entry.name for entry in model.held]
    good = load_file(tmp_path / "good" / "model.safetensors")

    def said() -> str:
        with pytest.raises(InputError) as caught:
            model.import_weights(tmp_path / "bad")
        return caught.value.what

    for damaged in (b"", b"x" * 100, whole[: len(whole) // 2]):
        file.write_bytes(damaged)
        assert "holds no weights" in said()
    save_file({**good, names[0]: good[names[0]].to(torch.int8)}, file)
    assert f"{names[0]} is torch.int8 in the file" in said()
    save_file({**good, names[0]: torch.ones(5)}, file)
    assert "another shape" in said()
    save_file({name: good[name] for name in names[1:]}, file)
    assert f"lacks {names[0]}" in said()
    for content in ([1], {"weight_map": [1]}, {"weight_map": dict.fromkeys(names, "absent.safetensors")}):
        index.write_text(json.dumps(content))
        assert "holds no weights" in said() or "cannot be read" in said()


@pytest.mark.parametrize(
    ("saved", "planned", "words"),
    [
        ("adamw", "adamw-offloaded", ""),
        ("adamw-offloaded", "adamw", ""),
        pytest.param("sgd-momentum", "sgd-momentum-offloaded", "", marks=pytest.mark.slow),
        ("sgd", "adamw", "has no state of AdamW"),
        ("sgd-momentum", "sgd", "was trained with momentum"),
        ("sgd", "sgd-momentum", "was trained without momentum"),
    ],
)
def test_a_run_goes_on_with_its_optimizer_wherever_that_is(
    saved: str, planned: str, words: str, tmp_path: Path
) -> None:
    wrapped()  # the world of one
    source = GPT.replace("vocab=64", "vocab=256")

    def job(optimizer: str, **others: Any) -> dict[str, Any]:
        return {"plan": make_plan(source, ["dp1"] * 4, world=1, optimizer=optimizer).dumps(), "text": None, **others}

    folder = str(tmp_path / "checkpoint")
    train_rank(job(saved, steps=1, save=folder), lambda event: None)
    if words:
        with pytest.raises(InputError, match=words):
            train_rank(job(planned, steps=1, resume=folder), lambda event: None)
        return
    went_on = train_rank(job(planned, steps=1, resume=folder), lambda event: None)
    whole = train_rank(job(saved, steps=2), lambda event: None)
    assert went_on["losses"][0] == pytest.approx(whole["losses"][1], rel=1e-6)


@pytest.mark.parametrize(
    "act",
    [
        lambda: autopar.Plan.load(3),  # type: ignore[arg-type]
        lambda: autopar.Plan.loads(3),  # type: ignore[arg-type]
        lambda: autopar.Strategy.parse(3),  # type: ignore[arg-type]
        lambda: autopar.Strategy.parse(None),  # type: ignore[arg-type]
        lambda: autopar.profile(3),  # type: ignore[arg-type]
        lambda: autopar.profile(nn.Linear(1, 1), nproc="x"),  # type: ignore[arg-type]
        lambda: autopar.profile(nn.Linear(1, 1), sequence=True),
    ],
)
def test_values_refuse_other_kinds(act: Callable[[], Any]) -> None:
    with pytest.raises(InputError):
        act()
