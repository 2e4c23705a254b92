"""Models of many kinds, unmodified, against one process: each strategy part alone, then random mixed plans."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch

from autopar.axes import RankMesh
from autopar.legality import why_illegal, why_pipeline_not_runnable
from autopar.model import ModelSpec
from autopar.plan import Plan, PlanCluster, PlanModel
from autopar.request import Request
from autopar.runtime.batches import example_batch
from autopar.runtime.models import build_model
from autopar.runtime.probing import probe
from autopar.runtime.spec import describe
from autopar.runtime.tiny import exact_dtype
from autopar.runtime.train import LEARNING_RATE, MAX_NORM
from autopar.runtime.verify_random import draw_plans
from autopar.strategy import Strategy
from tests.runtime.test_equality import check

Ranks = Callable[..., list[Any]]

_COMMON = (
    "hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, vocab_size=64, "
    "max_position_embeddings=64"
)
MODELS = {
    "llama": f"LlamaConfig({_COMMON}, num_key_value_heads=2)",
    "qwen2": f"Qwen2Config({_COMMON}, num_key_value_heads=2)",
    "qwen3": f"Qwen3Config({_COMMON}, num_key_value_heads=2, head_dim=8)",
    "mistral": f"MistralConfig({_COMMON}, num_key_value_heads=2)",
    "gemma2": f"Gemma2Config({_COMMON}, num_key_value_heads=2, head_dim=8)",
    "gemma3": f"Gemma3TextConfig({_COMMON}, num_key_value_heads=2, head_dim=8)",
    "phi3": f"Phi3Config({_COMMON}, num_key_value_heads=2, pad_token_id=0)",
    "gpt-neox": f"GPTNeoXConfig({_COMMON})",
    "olmo2": f"Olmo2Config({_COMMON}, num_key_value_heads=2)",
    "falcon": "FalconConfig(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, vocab_size=64, "
    "new_decoder_architecture=True, num_kv_heads=2)",
    "bloom": "BloomConfig(hidden_size=32, n_layer=4, n_head=4, vocab_size=64)",
    "opt": "OPTConfig(hidden_size=32, ffn_dim=48, num_hidden_layers=4, num_attention_heads=4, vocab_size=64, "
    "max_position_embeddings=64, word_embed_proj_dim=32)",
    "gpt2": "GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=64, n_positions=64)",
    "mixtral": f"MixtralConfig({_COMMON}, num_key_value_heads=2, num_local_experts=4)",
    "qwen2-moe": f"Qwen2MoeConfig({_COMMON}, num_key_value_heads=2, moe_intermediate_size=16, num_experts=4, "
    "shared_expert_intermediate_size=24, num_experts_per_tok=2)",
    "bert": f"BertConfig({_COMMON})",
    "bert classifier": f"BertForSequenceClassification({_COMMON}, num_labels=3)",
    "vit": "ViTConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, patch_size=4, "
    "image_size=12, num_labels=5)",
    "swin": "SwinConfig(embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=2, patch_size=2, image_size=16, "
    "num_labels=5)",
    "t5": "T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=64)",
    "whisper": "WhisperConfig(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, "
    "decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=64, num_mel_bins=8, "
    "max_source_positions=12, max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, "
    "decoder_start_token_id=1)",
    "nn.TransformerEncoder": "tests/runtime/encoder_model.py:build",
    "plain vit": "examples/vit.py:build(image=6, patch=2, width=32, heads=4, blocks=3)",
    "plain gpt": "examples/gpt.py:build(width=32, heads=4, blocks=4, vocab=64, context=32)",
}
PARTS = ("dp2", "dp2-z1", "dp2-z2", "dp2-z3", "dp2-z3-r", "tp2", "tp2-r", "tp2s", "sp2", "cp2")
CHAINS = ("swin", "t5", "whisper")
"""Models with several lists of blocks."""

RANDOM = [(name, size) for place, name in enumerate(MODELS) for size in ((2, 4), (4, 3), (4, 6))[place % 3]]


@lru_cache(maxsize=2)
def spec_of(name: str) -> ModelSpec:
    model = build_model(MODELS[name], dtype=exact_dtype(MODELS[name]))
    found = probe(model, example_batch(model, samples=3, sequence=8))
    return describe(model, found, source=MODELS[name], name=name, max_tp=2).spec


def plan_of(spec: ModelSpec, wanted: list[Strategy], world: int = 2, **shape: Any) -> Plan:
    """The plan with these strategies where a layer can take them, and data parallelism in its other layers."""
    mesh = RankMesh.of(world_size=world, pp=shape.get("pp", 1))
    plain = Strategy(dp=mesh.ranks_per_stage)
    taken = [
        one if why_illegal(one, spec.kind(layer), mesh, micro_batch=4, sequence=8) is None else plain
        for layer, one in enumerate(wanted)
    ]
    if spec.tied and taken[0] != taken[-1]:
        taken[0] = taken[-1] = plain
    return Plan(
        model=PlanModel(name="test", source=spec.source, fingerprint=spec.fingerprint),
        cluster=PlanCluster(name="test", device="cpu", world_size=world, ranks_per_node=world, memory_bytes=1 << 30),
        request=Request(global_batch=8, sequence=8, dtype=spec.kinds[0].parameters[0].dtype),
        **{"pp": 1, "schedule": "1f1b", "layers_per_stage": (len(spec.layers),), **shape},
        num_micro_batches=2,
        strategies=tuple(taken),
        versions={},
    )


def agree(plans: list[Plan], ranks: Ranks, size: int) -> None:
    for plan, results in zip(
        plans, zip(*ranks("compare_plans", size, plans=[p.dumps() for p in plans]), strict=True), strict=True
    ):
        assert {e.short for e in plan.strategies}, plan
        check(list(results))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_mixed_plan_equals_one_process(name: str, ranks: Ranks) -> None:
    spec = spec_of(name)
    cycle = [Strategy.parse(s) for s in ("tp2", "dp2-z3-r", "tp2s", "dp2-z2", "tp2-r", "dp2-z1")]
    strategies = [Strategy.parse("dp2-z3"), *(cycle[i % 6] for i in range(spec.num_blocks)), Strategy.parse("dp2-z3")]
    plans = [plan_of(spec, strategies)]
    half = len(spec.layers) // 2
    cut = (half, len(spec.layers) - half)
    plans.append(plan_of(spec, [Strategy()] * len(spec.layers), pp=2, layers_per_stage=cut))
    agree(plans, ranks, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_each_part_alone_equals_one_process(name: str, ranks: Ranks) -> None:
    spec = spec_of(name)
    plans = {p.strategies: p for p in (plan_of(spec, [Strategy.parse(s)] * len(spec.layers)) for s in PARTS)}
    agree(list(plans.values()), ranks, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), RANDOM)
def test_random_plans_equal_one_process(name: str, size: int, ranks: Ranks) -> None:
    agree(list(draw_plans(MODELS[name], nproc=size, count=1, seed=size)), ranks, size)


@pytest.mark.slow
def test_a_run_on_random_images_has_the_losses_of_a_plain_loop(ranks: Ranks) -> None:
    """New images with new labels in each step: there is nothing to learn, and the loss wanders around log(classes)."""
    strategies = ["dp2-z3", "tp2", "dp2-z3-r", "sp2", "dp2", "dp2-z3"]
    found = ranks("train", 2, source=MODELS["vit"], strategies=strategies, steps=6, micro_batches=2)[0]["losses"]
    model = build_model(MODELS["vit"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE["adamw"])
    for step, loss in enumerate(found):
        expected = model(**example_batch(model, samples=8, sequence=8, seed=step)).loss
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        optimizer.zero_grad()
        expected.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()


def test_what_blocks_learn_beside_the_hidden_state_is_no_reason_against_a_cut_sequence() -> None:
    """T5: the encoder's second block takes the first one's position biases; the decoder attends to the encoder."""
    spec, mesh = spec_of("t5"), RankMesh.of(world_size=2)
    for layer in range(1, 5):
        for part in ("sp2", "cp2"):
            why = why_illegal(Strategy.parse(part), spec.kind(layer), mesh, micro_batch=4, sequence=8)
            assert why is None if layer < 3 else "an attention that is not over the block's own sequence" in str(why)


@pytest.mark.parametrize("name", CHAINS)
def test_several_chains_run_on_several_stages(name: str) -> None:
    assert why_pipeline_not_runnable(spec_of(name), 2) is None
    assert len({plan.pp for plan in draw_plans(MODELS[name], nproc=4, count=20, seed=0)}) == 3
