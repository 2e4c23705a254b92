"""Optimizers in host memory: the numbers are those at home, under every kind of ZeRO and from each other's files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.runtime import buckets
from autopar.runtime.offload import bring_up, send_down

Ranks = Callable[..., list[Any]]

SMALL = "LlamaConfig(hidden_size=32, intermediate_size=50, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)"
MIXED, JOB = ["dp2", "dp2-z1", "dp2-z3", "dp2-z2"], "offload_jobs:steps_beside_those_at_home"


@pytest.mark.parametrize(
    ("dtype", "strategies", "shape"),
    [
        ("float32", MIXED, {"micro_batches": 2}),
        ("bfloat16", MIXED, {"micro_batches": 2}),
        pytest.param(
            "float32", ["dp1"] * 4, {"pp": 2, "layers_per_stage": [2, 2], "micro_batches": 2}, marks=pytest.mark.slow
        ),
        pytest.param("bfloat16", ["tp2", "tp2", "dp2-z1-r", "dp2-z3"], {}, marks=pytest.mark.slow),
    ],
)
def test_steps_in_host_memory_are_those_at_home(
    dtype: str, strategies: list[str], shape: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    for found in ranks(JOB, 2, source=SMALL, strategies=strategies, folder=str(tmp_path), dtype=dtype, **shape):
        assert found["weights"][:3] == found["masters"][:3] == [0.0] * 3
        assert max(found["masters"][3], found["weights"][3]) <= (1e-7 if dtype == "float32" else 1e-3)
        assert found["masters"][3] <= 1e-7  # torch's fused step rounds otherwise
        assert found["apart"]
        assert found["host"]


@pytest.mark.slow
def test_a_gradient_lost_on_its_way_is_seen(ranks: Ranks, tmp_path: Path) -> None:
    job = {"source": SMALL, "strategies": MIXED, "folder": str(tmp_path)}
    assert ranks(JOB, 2, plant="stale", **job)[0]["weights"][1] > 1e-4


def test_a_loop_of_ones_own_steps_in_host_memory(ranks: Ranks) -> None:
    assert ranks("offload_jobs:own_loop", 2, source=SMALL, strategies=MIXED) == [0.0, 0.0]


def test_buckets_go_down_and_come_up_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 100)
    shapes = [(3, 4), (5,), (40, 2), (0, 3), (2,)]
    tensors = [torch.randn(shape) for shape in shapes]
    wanted, found = [tensor.clone() for tensor in tensors], dict[int, torch.Tensor]()
    send_down(tensors, found.__setitem__)
    assert tensors == []
    assert [found[place].shape for place in range(5)] == [want.shape for want in wanted]
    assert all(torch.equal(found[place], want) for place, want in enumerate(wanted))
    up = [torch.empty(shape, dtype=torch.bfloat16 if place % 2 else None) for place, shape in enumerate(shapes)]
    bring_up([(target, found[place]) for place, target in enumerate(up)])
    assert all(torch.equal(target, want.to(target.dtype)) for target, want in zip(up, wanted, strict=True))
