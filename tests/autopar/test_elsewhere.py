from __future__ import annotations

from dataclasses import replace

import pytest

import autopar
from autopar import shipped
from autopar.cluster import ALLOCATOR_MARGIN, CUDA_CONTEXT_BYTES
from autopar.elsewhere import on_device
from autopar.errors import InputError
from autopar.estimating import files
from autopar.measured import ModelFile


def slowed(model: ModelFile) -> ModelFile:
    """The model as if profiled on a machine a thousand times slower."""
    costs = tuple(
        replace(c, forward_s=tuple(1e3 * s for s in c.forward_s), backward_s=tuple(1e3 * s for s in c.backward_s))
        for c in model.layers.costs
    )
    return replace(model, layers=replace(model.layers, device="cpu", device_name="laptop", costs=costs))


@pytest.mark.parametrize(("name", "sequence"), [("llama2-7b", 4096), ("llama3-70b", 4096), ("gpt2-xl", 1024)])
def test_seconds_from_bytes_and_flops_are_near_those_from_dimensions(name: str, sequence: int) -> None:
    device = shipped.devices()["a100-80g"]
    judge = shipped.model(name, device, sequence=sequence)
    found = on_device(slowed(judge), device)
    for cost, expected in zip(found.layers.costs, judge.layers.costs, strict=True):
        assert cost.forward_s == pytest.approx(expected.forward_s, rel=0.06 if cost.tp <= 2 else 0.35)
        assert cost.backward_s == pytest.approx(expected.backward_s, rel=0.06 if cost.tp <= 2 else 0.35)
        assert cost.origin == "assumed"
        assert cost.saved_bytes == expected.saved_bytes


def test_experts_cost_what_their_tokens_cost() -> None:
    """The rows of each expert are found back from the FLOPs."""
    device = shipped.devices()["a100-80g"]
    judge = shipped.model("mixtral-8x7b", device)
    for cost, expected in zip(on_device(slowed(judge), device).layers.costs, judge.layers.costs, strict=True):
        if cost.kind == "block" and cost.tp <= 2:
            assert cost.forward_s == pytest.approx(expected.forward_s, rel=0.06)
            assert cost.backward_s == pytest.approx(expected.backward_s, rel=0.06)


def test_the_tokens_of_an_image_are_those_of_the_model_whatever_the_sequence() -> None:
    device = shipped.devices()["a100-80g"]
    judge = slowed(shipped.model("vit-large-16", device))
    other = replace(judge, layers=replace(judge.layers, sequence=2048))
    for cost, expected in zip(
        on_device(other, device).layers.costs, on_device(judge, device).layers.costs, strict=True
    ):
        if cost.kind == "block":
            assert (cost.forward_s, cost.backward_s) == (expected.forward_s, expected.backward_s)


def test_a_profile_of_here_takes_the_seconds_of_a_shipped_cluster() -> None:
    device = shipped.devices()["h100-80g"]
    model = slowed(shipped.model("llama2-7b", device, sequence=2048))
    slow = max(cost.forward_s[0] for cost in model.layers.costs)
    assert max(cost.forward_s[0] for cost in on_device(model, device).layers.costs) < slow / 100


def test_a_profile_in_32_bits_is_refused() -> None:
    device = shipped.devices()["h100-80g"]
    model = shipped.model("llama2-7b", device, sequence=2048)
    with pytest.raises(InputError, match="float32"):
        on_device(replace(model, layers=replace(model.layers, dtype="float32")), device)


def test_a_gpu_keeps_memory_for_its_context_and_allocator() -> None:
    cluster = files("llama2-7b", "h100-80g:1x8")[1].cluster
    assert cluster.usable_bytes == int((80_000_000_000 - CUDA_CONTEXT_BYTES) / ALLOCATOR_MARGIN)
    assert replace(cluster, device="cpu").usable_bytes == cluster.memory_bytes


def test_a_search_takes_shipped_names() -> None:
    plan = autopar.search("llama2-7b", cluster="a100-80g:1x8", global_batch=64)
    assert plan.cluster.world_size == 8
    assert plan.predicted is not None
    assert plan.predicted.origin in ("fitted", "assumed")
    with pytest.raises(InputError, match="has no seconds on a100-80g:1x8"):
        autopar.search(
            shipped.model("llama2-7b", shipped.devices()["a100-80g"], sequence=64),
            cluster="a100-80g:1x8",
            global_batch=64,
        )
