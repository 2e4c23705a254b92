"""After the third step the part that is not as predicted is named, once; nothing alarms within the usual error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from autopar.plan import Prediction, RankMemory
from autopar.runtime.step_check import MeasuredStep, memory_words, step_words

Ranks = Callable[..., list[Any]]

GPT = "examples/gpt.py:build(width=32, heads=4, blocks=2, vocab=64, context=16)"
STAGES = {"pp": 2, "layers_per_stage": [2, 2], "micro_batches": 2}
PARTS = {"compute": 0.5, "tp_communication": 0.2, "bubble": 0.1, "gradient_sync": 0.1, "clip": 0.0, "optimizer": 0.1}
MEMORY = RankMemory(peak_bytes=1000, parts_bytes={"parameters": 400, "activations": 500, "transient": 100})
PREDICTED = Prediction(step_s=1.0, parts_s=PARTS, memory=(MEMORY,), worst_rank=0)
MEASURED = MeasuredStep(
    parts_s={"training": 0.8, "gradient_sync": 0.1, "optimizer": 0.1},
    waiting_s=None,
    peak_bytes=1000,
    parts_bytes={"parameters": 400, "activations": 600},
)


def measured(**changes: Any) -> MeasuredStep:
    parts = {**MEASURED.parts_s, **changes.pop("parts_s", {})}
    fields = {"waiting_s": None, "peak_bytes": 1000, "parts_bytes": MEASURED.parts_bytes, **changes}
    return MeasuredStep(parts_s=parts, **fields)


@pytest.mark.parametrize(
    ("parts_s", "waiting_s", "words"),
    [
        ({}, None, ""),
        ({"optimizer": 0.4}, None, ""),  # 1.0 of 1.3 is 23 % off
        ({"optimizer": 0.5}, None, "in optimizer: 500.0 ms, predicted 100.0 ms"),
        ({"gradient_sync": 0.6}, None, "in gradient_sync: 600.0 ms, predicted 100.0 ms"),
        ({"training": 1.5}, None, "in forward and backward: 1.50 s, predicted 800.0 ms (compute 500.0 ms, tp_comm"),
        ({"training": 1.5}, 0.8, "in waiting for other stages: 800.0 ms, predicted 100.0 ms"),
        ({"training": 1.5}, 0.1, "in forward and backward: 1.40 s, predicted 700.0 ms"),
        ({"training": 0.3, "optimizer": 0.2}, None, "in forward and backward: 300.0 ms, predicted 800.0 ms"),
    ],
)
def test_the_part_of_a_step_that_is_off(parts_s: dict[str, float], waiting_s: float | None, words: str) -> None:
    off, said = step_words(PREDICTED, measured(parts_s=parts_s, waiting_s=waiting_s))
    assert off == bool(words)
    assert words in said


def test_a_calibrated_interval_decides() -> None:
    from dataclasses import replace

    narrow = replace(PREDICTED, step_s_interval=(0.95, 1.05))
    assert not step_words(narrow, MEASURED)[0]
    assert step_words(narrow, measured(parts_s={"optimizer": 0.2}))[0]


def test_a_sync_within_the_backward_is_expected_there() -> None:
    only = MeasuredStep(parts_s={"training": 0.9, "optimizer": 0.5}, waiting_s=None, peak_bytes=0, parts_bytes={})
    assert "in optimizer" in step_words(PREDICTED, only)[1]
    assert memory_words(PREDICTED, only, 0) == []


def test_the_category_of_memory_that_is_off() -> None:
    assert not memory_words(PREDICTED, measured(peak_bytes=1100), 0)[0][0]
    off, said = memory_words(
        PREDICTED, measured(peak_bytes=1300, parts_bytes={"parameters": 700, "activations": 600}), 0
    )[0]
    assert off
    assert "in parameters" in said
    assert memory_words(PREDICTED, measured(peak_bytes=500, parts_bytes={}), 0)[0][0]


@pytest.mark.parametrize(
    ("slow", "words", "settings"),
    [
        ("optimizer", "most of the difference is in optimizer: 6", {}),
        pytest.param("a block", "is in forward and backward", {"forward": True}, marks=pytest.mark.slow),
        pytest.param("a block", "is in waiting for other stages", STAGES, marks=pytest.mark.slow),
        pytest.param("own code", "", {}, marks=pytest.mark.slow),
        pytest.param("nothing", "is in forward and backward", {}, marks=pytest.mark.slow),
    ],
)
def test_what_is_slow_is_named_once_on_the_first_rank(
    slow: str, words: str, settings: dict[str, Any], ranks: Ranks
) -> None:
    strategies = ["dp1"] * 4 if settings is STAGES else ["dp2-z1", "dp2", "tp2", "dp2-z1"]
    first, second = ranks("step_check_jobs:slow_in", 2, source=GPT, strategies=strategies, slow=slow, **settings)
    assert first["over"]
    assert second["over"]
    ((level, message),) = first["logged"]
    assert level == "WARNING"
    assert message == f"step 3: {first['words']}"
    assert words in message
    if slow == "own code":
        assert "a step takes 6" not in message
    if "forward" in settings:
        assert "peak" not in message
        assert not second["logged"]
    else:
        assert "; the peak of rank 0 is" in message
        assert "in parameters" in message
        ((_, of_worst),) = second["logged"]
        assert of_worst.startswith("step 3: the peak of rank 1 is")
