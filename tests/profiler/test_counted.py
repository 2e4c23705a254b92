"""A model traced on fake tensors: the same bytes as one that runs, and any size."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from autopar import shipped
from autopar.errors import InputError
from autopar.profiler.counted import count_model
from autopar.profiler.layers import LayerBench
from autopar.profiler.rank import layer_bytes
from autopar.runtime.models import build_model

LOOKS = """
import torch
from torch import nn


class Block(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 16)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def build():
    return Model()
"""

DEVICE = shipped.devices()["a100-80g"]


@pytest.mark.parametrize(
    "source",
    [
        "LlamaConfig(hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4, "
        "num_key_value_heads=2, vocab_size=128)",
        pytest.param("GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128)", marks=pytest.mark.slow),
        pytest.param(
            "examples/gpt.py:build(width=32, heads=4, blocks=2, vocab=64, context=128)", marks=pytest.mark.slow
        ),
    ],
)
def test_counted_layers_are_what_a_run_traces(source: str) -> None:
    counted = count_model(source, DEVICE, sequence=128, max_tp=2)
    bench = LayerBench(build_model(source, dtype="bfloat16"), sequence=128, source=source, max_tp=2)
    assert counted.model == bench.spec
    for key in bench.keys([2]):
        cost = counted.layers.find(key.kind, key.tp, key.sequence_norms)
        traced = layer_bytes(bench, key, (1, 2))
        found = {f.name: getattr(cost, f.name) for f in fields(traced)}
        if cost.selective is not None:
            assert 0 < cost.selective.share < 1  # of a forward, all but its products
            found["selective"] = replace(cost.selective, share=1.0)
        assert found == vars(traced)


@pytest.mark.slow
def test_a_model_larger_than_this_machine_is_counted() -> None:
    source = (
        "LlamaConfig(hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128, "
        "num_key_value_heads=8, vocab_size=128256)"
    )
    counted = count_model(source, DEVICE, sequence=1024, max_tp=1)
    kinds = {kind.role: kind for kind in counted.model.kinds}
    published = shipped.architectures()["llama3-405b"].parameter_count
    blocks = counted.model.num_blocks * kinds["block"].parameter_count
    assert kinds["embed"].parameter_count + blocks + kinds["head"].parameter_count == published


def test_a_model_that_looks_at_its_numbers_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "looks.py"
    file.write_text(LOOKS)
    with pytest.raises(InputError, match="cannot be traced without running it"):
        count_model(f"{file}:build", DEVICE, sequence=32, max_tp=1)
