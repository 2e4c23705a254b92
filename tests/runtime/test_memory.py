"""Peak memory of every rank: what the memory model predicts beside what trackers see in real processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from autopar.measured import ModelFile
from autopar.plan import Plan
from autopar.predict import rank_memory
from autopar.profiler.models import profile
from autopar.runtime.counting import count_peaks
from autopar.runtime.models import build_model
from tests.runtime.rank_jobs import make_plan

Ranks = Callable[..., list[Any]]

SOURCE = (
    "LlamaConfig(hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4, "
    "num_key_value_heads=2, vocab_size=256, max_position_embeddings=64)"
)
SEQUENCE, WORLD = 32, 4
PLANS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "replicated": (["dp4"] * 6, {"micro_batches": 2}),
    "optimizer sharded": (["dp4-z1"] * 6, {"micro_batches": 2}),
    "sharded": (["dp4-z3"] * 6, {"micro_batches": 2}),
    "kept whole between": (["dp4-z2"] * 6, {}),
    "tensor parallel": (["dp4", "tp4", "tp4", "dp2-tp2", "dp2-tp2", "dp4-z3"], {}),
    "all mixed, recomputed": (["dp4-z3", "dp2-z3-tp2", "tp4s-r", "dp4-z2-r", "dp4-r", "dp4-z3"], {"micro_batches": 2}),
    "hybrid sharded": (["dp4-z3-h2", "dp4-z3-h2", "dp4-z2-h2", "dp4-z1-h2", "dp4-z3-h2-r", "dp4-z3-h2"], {}),
    "sequence cut for the heads": (["dp4", "dp2-sp2", "dp2-z3-sp2", "dp2-sp2", "dp2-sp2-r", "dp4-z3"], {}),
    "sequence cut for the context": (["dp4", "dp2-cp2", "dp2-z3-cp2", "cp4", "dp2-cp2-r", "dp4-z3"], {}),
    "words cut": (["dp2-tp2", "dp4", "dp4-z3", "dp2-tp2", "tp4", "tp4"], {"micro_batches": 2}),
    "half precision": (["dp4-z3", "dp4-r", "dp2-tp2", "tp4s", "dp4-z3", "dp4"], {"dtype": "bfloat16"}),
    "recomputed": (["dp4", *["dp4-r"] * 4, "dp4"], {"micro_batches": 2}),
    "selective": (["dp4", "dp4-rs", "dp4-z3-rs", "dp4-z2-rs", "dp4-z1-rs", "dp4"], {"micro_batches": 2}),
    "selective, tensor parallel": (["dp4-z3", "tp4-rs", "dp2-tp2-rs", "tp4s-rs", "dp2-z3-tp2-rs", "dp4-z3"], {}),
    "selective everywhere": (["dp4-z3", *["dp4-z3-rs"] * 4, "dp4-z3"], {"micro_batches": 2}),
    "selective, two stages": (
        ["dp2", "dp2-z3-rs", "tp2-rs", "tp2s-rs", "dp2-rs", "dp2-z3"],
        {"pp": 2, "layers_per_stage": [3, 3], "micro_batches": 4},
    ),
    "selective, two filled stages": (
        ["dp2", *["dp2-rs"] * 4, "dp2"],
        {"pp": 2, "layers_per_stage": [3, 3], "micro_batches": 4, "schedule": "gpipe"},
    ),
    "two stages": (
        ["dp2", "dp2-z3", "tp2", "tp2s", "dp2-r", "dp2-z3"],
        {"pp": 2, "layers_per_stage": [3, 3], "micro_batches": 4},
    ),
    "two filled stages": (
        ["dp2-z3", "dp2-z3", "dp2-z2", "dp2-z3-r", "dp2", "dp2-z3"],
        {"pp": 2, "layers_per_stage": [4, 2], "micro_batches": 4, "schedule": "gpipe"},
    ),
    "four stages": (
        ["dp1", "dp1", "dp1-r", "dp1", "dp1", "dp1"],
        {"pp": 4, "layers_per_stage": [2, 1, 1, 2], "micro_batches": 4},
    ),
    "two stages a rank": (
        ["dp2", "dp2-z3", "tp2", "dp2-z2", "dp2-r", "dp2-z3"],
        {"pp": 2, "layers_per_stage": [2, 1, 1, 2], "micro_batches": 4, "schedule": "interleaved-1f1b"},
    ),
    **{
        schedule: (
            ["dp2", "dp2", "dp2", "dp2-r" if schedule == "looped-bfs" else "dp2", "dp2", "dp2"],
            {"pp": 2, "layers_per_stage": [2, 1, 1, 2], "micro_batches": 4, "schedule": schedule},
        )
        for schedule in ("looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev")
    },
}  # fmt: skip


SEVERAL = ("two stages a rank", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev")
SLOW = (
    "tensor parallel",
    "selective, tensor parallel",
    "hybrid sharded",
    "words cut",
    "half precision",
    "sequence cut for the heads",
    "sequence cut for the context",
    *SEVERAL,
    "kept whole between",
    "two filled stages",
    "selective everywhere",
    "selective, two filled stages",
)


MISSED = {
    "all mixed, recomputed": "predicted 3.6 % too high: a recomputed forward ends before its last product",
    "interleaved-zero-bubble": "predicted 3.7 % too low: what the second half of a backward needs is assumed",
}


@cache
def measured(dtype: str) -> ModelFile:
    """The profile of the model, memory traced in this process."""
    return profile(build_model(SOURCE, dtype=dtype), sequence=SEQUENCE, tp_degrees=(2, 4), samples=(1, 2))


@pytest.fixture(scope="module")
def tracked(ranks: Ranks) -> Callable[[str], tuple[Plan, list[int]]]:
    """A plan of PLANS and the peak that each of its ranks tracked in a real run.

    The ranks of a stage hold equally much. Where they do not, a thread of gloo has freed a copy late on one of them
    (docs/fidelity.md): the least of up to three runs counts.
    """

    @cache
    def run(name: str) -> tuple[Plan, list[int]]:
        strategies, shape = PLANS[name]
        arguments = {"source": SOURCE, "strategies": strategies, "global_batch": 16, "sequence": SEQUENCE, **shape}
        least = [sys.maxsize] * WORLD
        for _ in range(3):
            results = ranks("train", WORLD, steps=4, **arguments)
            least = [min(a, b["peak_memory_bytes"]) for a, b in zip(least, results, strict=True)]
            plan = Plan.loads(results[0]["plan"])
            width = plan.mesh.ranks_per_stage
            stages = [least[first : first + width] for first in range(0, WORLD, width)]
            if all(max(stage) <= 1.01 * min(stage) for stage in stages):
                break
        return plan, least

    return run


Tracked = Callable[[str], tuple[Plan, list[int]]]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in PLANS])
def test_predicted_peak_is_within_three_percent_of_the_tracked_one(name: str, tracked: Tracked) -> None:
    plan, peaks_bytes = tracked(name)
    profiled = measured(plan.request.dtype)
    width = plan.mesh.ranks_per_stage
    for rank, peak_bytes in enumerate(peaks_bytes):
        predicted = rank_memory(plan, rank // width, profiled.model, profiled.layers)
        error = predicted.peak_bytes / peak_bytes - 1
        most = 0.05 if name in MISSED else 0.03
        assert abs(error) <= most, f"rank {rank}: {predicted} against {peak_bytes} ({error:+.1%})"


COUNTED = ("all mixed, recomputed",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in COUNTED)) for n in PLANS])
def test_the_peak_counted_on_fake_tensors_is_the_tracked_one(name: str, tracked: Tracked) -> None:
    plan, peaks_bytes = tracked(name)
    width = plan.mesh.ranks_per_stage
    counted = count_peaks(plan)
    assert [one.rank for one in counted] == list(range(0, WORLD, width))
    for one in counted:
        for peak_bytes in peaks_bytes[one.rank : one.rank + width]:
            # The threads of gloo now and then hold a tensor a little longer.
            assert peak_bytes == pytest.approx(one.peak_bytes, rel=0.01), (one, peaks_bytes)
        assert one.peak_bytes == sum(one.parts_bytes.values())


def test_the_counted_parts_are_those_of_a_count_by_hand() -> None:
    strategies, shape = PLANS["two filled stages"]
    plan = make_plan(SOURCE, strategies, world=WORLD, global_batch=16, sequence=SEQUENCE, **shape)
    first, last = count_peaks(plan)
    block, words, norm = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160 + 2 * 64, 256 * 64, 64
    held = {first.rank: (words + 3 * block) // 2, last.rank: block + (words + norm) // 2}
    for one in (first, last):
        parts = one.parts_bytes
        trained = 4 * held[one.rank]
        # Buffers of positions, and what stands in for the parameters of other stages, are small and whole.
        assert trained <= parts["parameters"] <= trained + 200, (parts, trained)
        # Two moments of AdamW, and a count of steps for each tensor.
        assert 2 * trained <= parts["optimizer"] <= 2 * trained + 200
        # Four micro-batches of two samples a rank go to the last stage, and their gradients to the first.
        assert parts["communication"] >= 4 * 2 * SEQUENCE * 64 * 4
        assert one.peak_bytes == sum(parts.values())
