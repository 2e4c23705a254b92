"""A user's module around torch.nn.TransformerEncoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Tagger(nn.Module):
    """Logits of a tag for each token, and the mean loss when `labels` are given."""

    def __init__(self, width: int, heads: int, layers: int, vocab: int, norm_first: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.1, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.tags = nn.Linear(width, vocab)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.tags(self.encoder(self.words(ids)))
        return logits, None if labels is None else functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(width: int = 32, heads: int = 4, layers: int = 4, vocab: int = 48, norm_first: bool = True) -> Tagger:
    torch.manual_seed(0)
    return Tagger(width, heads, layers, vocab, norm_first)


def build_eager_vit() -> nn.Module:
    """Its softmax is in float32 whatever its own dtype, and its biases of keys have a gradient of rounding alone."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        patch_size=4,
        image_size=12,
        num_labels=5,
        attn_implementation="eager",
    )
    return ViTForImageClassification(config)
