"""What a forward shows of a model: its chains, kinds of blocks, and what ties its layers to one stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.runtime.batches import example_batch
from autopar.runtime.models import build_model
from autopar.runtime.probing import probe
from tests.runtime.test_architectures import MODELS

IDS = {"ids": torch.zeros(3, 4, dtype=torch.long)}


class Block(nn.Module):
    def __init__(self, shift: int = 0) -> None:
        super().__init__()
        self.linear, self.shift = nn.Linear(8, 8), shift

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.linear(x).roll(self.shift, 1)
        return x + (y if bias is None else y + bias)


class Model(nn.Module):
    """Something between its blocks (a scale, a norm with parameters), a learned bias beside them, or batch second."""

    def __init__(self, between: str = "", blocks: Any = (0, 0)) -> None:
        super().__init__()
        self.between, self.embedding = between, nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block(shift) for shift in blocks)
        self.norm, self.bias, self.head = nn.LayerNorm(8), nn.Parameter(torch.zeros(8)), nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x.transpose(0, 1) if self.between == "batch second" else x
        bias = 2 * self.bias
        for block in self.blocks:
            if self.between == "scale":
                x = 2 * x
            x = block(x, bias) if self.between == "bias" else block(x)
            if self.between == "norm":
                self.norm(x)
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize(
    ("between", "starts", "words"),
    [
        ("", (0,), ""),
        ("scale", (0, 1), "something between blocks.0 and blocks.1"),
        ("norm", (0,), "uses norm.weight between its blocks"),
        ("bias", (0,), "blocks.0 gets argument 1"),
    ],
)
def test_what_ties_layers_to_one_stage(between: str, starts: tuple[int, ...], words: str) -> None:
    found = probe(Model(between), IDS).structure
    assert found.starts == starts
    assert words in found.pipeline_reason
    assert bool(words) == bool(found.pipeline_reason)


def test_samples_must_come_first() -> None:
    with pytest.raises(InputError, match="samples along the first dimension"):
        probe(Model("batch second"), IDS)


def test_blocks_with_other_settings_are_other_kinds() -> None:
    assert probe(Model(blocks=(0, 1, 0, 1)), IDS).structure.kinds == (0, 1, 0, 1)
    assert probe(Model(blocks=(0, 0, 0)), IDS).structure.kinds == (0, 0, 0)


@pytest.mark.parametrize(
    ("name", "class_name", "kinds", "starts"),
    [
        ("bert", "BertForMaskedLM", (0, 0, 0, 0), (0,)),
        ("bert classifier", "BertForSequenceClassification", (0, 0, 0, 0), (0,)),
        ("vit", "ViTForImageClassification", (0, 0, 0, 0), (0,)),
        ("swin", "SwinForImageClassification", (0, 1, 2, 3), (0, 2)),
        ("t5", "T5ForConditionalGeneration", (0, 1, 2, 3), (0, 2)),
        ("whisper", "WhisperForConditionalGeneration", (0, 0, 1, 1), (0, 2)),
    ],
)
def test_a_config_makes_the_class_of_its_task(
    name: str, class_name: str, kinds: tuple[int, ...], starts: tuple[int, ...]
) -> None:
    model = build_model(MODELS[name])
    assert type(model).__name__ == class_name
    found = probe(model, example_batch(model, samples=3, sequence=8)).structure
    assert (found.kinds, found.starts) == (kinds, starts)


def test_a_load_balancing_loss_is_refused_by_name() -> None:
    model = build_model(MODELS["mixtral"].replace("num_local", "output_router_logits=True, num_local"))
    with pytest.raises(InputError, match="output_router_logits"):
        probe(model, example_batch(model, samples=3, sequence=8))
