"""A small vision transformer in plain PyTorch. It knows nothing of autopar."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Returns logits [batch, classes], and the mean loss when `labels` [batch] are given."""

    def __init__(self, image: int, patch: int, classes: int, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.image, self.classes = image, classes
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (image // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x[:, 0]))
        return logits, None if labels is None else F.cross_entropy(logits, labels)

    def example_batch(self, samples: int, sequence: int) -> dict[str, Tensor]:
        """Random images and labels; they have no sequence."""
        images = torch.randn(samples, 3, self.image, self.image)
        return {"images": images, "labels": torch.randint(self.classes, (samples,))}


def build(
    image: int = 32, patch: int = 4, classes: int = 10, width: int = 128, heads: int = 4, blocks: int = 4
) -> ViT:
    """The model of `examples/vit.py:build`."""
    return ViT(image, patch, classes, width, heads, blocks)
