"""The tiny replica that `verify` runs: the same plan, on CPU in float64, small enough for one machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.plan import Plan, PlanCluster, PlanModel
from autopar.request import Request
from autopar.runtime.models import build_model
from autopar.runtime.structure import fingerprint
from autopar.runtime.tiny import SMALL_PARAMETERS, tiny_plan
from autopar.runtime.verify import verify_plan
from autopar.strategy import Strategy

LARGE = "LlamaConfig(hidden_size=512, intermediate_size=1376, num_hidden_layers=2, num_attention_heads=8)"
SMALL = "LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)"


def plan_of(source: str, dtype: str) -> Plan:
    """A plan for two GPUs that nobody has here."""
    return Plan(
        model=PlanModel(name="test", source=source, fingerprint=fingerprint(build_model(source, device="meta"))),
        cluster=PlanCluster(name="away", device="cuda", world_size=2, ranks_per_node=2, memory_bytes=1 << 30),
        request=Request(global_batch=8, sequence=64, dtype=dtype),
        pp=1,
        schedule="1f1b",
        num_micro_batches=2,
        layers_per_stage=(4,),
        strategies=tuple(Strategy.parse(s) for s in ("dp2-z3", "tp2", "dp2-r", "dp2")),
        versions={},
    )


def test_the_replica_keeps_the_plan_and_shrinks_the_model() -> None:
    plan = plan_of(LARGE, "bfloat16")
    tiny = tiny_plan(plan)
    assert (tiny.strategies, tiny.mesh, tiny.num_micro_batches) == (plan.strategies, plan.mesh, 2)
    assert (tiny.cluster.device, tiny.request.dtype, tiny.request.global_batch) == ("cpu", "float64", 4)
    model = build_model(tiny.model.source, dtype="float64")
    assert sum(p.numel() for p in model.parameters()) < SMALL_PARAMETERS
    assert fingerprint(model) == tiny.model.fingerprint
    assert model.config.num_attention_heads == 8  # type: ignore[union-attr]


def test_a_small_model_is_taken_as_it_is() -> None:
    plan = plan_of(SMALL, "float32")
    assert tiny_plan(plan).model.source == plan.model.source
    assert replace(tiny_plan(plan), cluster=plan.cluster, request=plan.request, model=plan.model) == plan


def test_what_does_not_run_in_float64_is_compared_in_float32() -> None:
    experts = f"MixtralConfig({SMALL[len('LlamaConfig(') : -1]}, num_local_experts=4)"
    assert tiny_plan(plan_of(experts, "bfloat16")).request.dtype == "float32"


@pytest.mark.slow
def test_a_plan_for_gpus_in_half_precision_is_verified_here() -> None:
    found = verify_plan(plan_of(SMALL, "bfloat16"))
    assert found.agrees, found
