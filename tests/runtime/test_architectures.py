"""Causal language models of Hugging Face, unmodified, under a mixed plan and over two stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Ranks = Callable[..., list[Any]]

_COMMON = (
    "hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, vocab_size=64, "
    "max_position_embeddings=64"
)
SOURCES = [
    f"Qwen2Config({_COMMON}, num_key_value_heads=2)",
    f"Qwen3Config({_COMMON}, num_key_value_heads=2, head_dim=8)",
    f"MistralConfig({_COMMON}, num_key_value_heads=2)",
    f"Gemma2Config({_COMMON}, num_key_value_heads=2, head_dim=8)",
    f"Gemma3TextConfig({_COMMON}, num_key_value_heads=2, head_dim=8)",
    f"Phi3Config({_COMMON}, num_key_value_heads=2, pad_token_id=0)",
    f"GPTNeoXConfig({_COMMON})",
    f"Olmo2Config({_COMMON}, num_key_value_heads=2)",
    "FalconConfig(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, vocab_size=64, "
    "new_decoder_architecture=True, num_kv_heads=2)",
    "BloomConfig(hidden_size=32, n_layer=4, n_head=4, vocab_size=64)",
    f"MixtralConfig({_COMMON}, num_key_value_heads=2, num_local_experts=4)",
    "OPTConfig(hidden_size=32, ffn_dim=48, num_hidden_layers=4, num_attention_heads=4, vocab_size=64, "
    "max_position_embeddings=64, word_embed_proj_dim=32)",
]
PLANS: list[tuple[list[str], dict[str, Any]]] = [
    (["dp2-z3", "tp2", "dp2-z3-r", "tp2-r", "dp2", "dp2-z3"], {}),
    (["dp1"] * 6, {"pp": 2, "layers_per_stage": [3, 3], "micro_batches": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
def test_architecture_equals_one_process(source: str, ranks: Ranks) -> None:
    for strategies, shape in PLANS:
        for found in ranks("compare_with_one_process", 2, source=source, strategies=strategies, **shape):
            assert found["agrees"], found
