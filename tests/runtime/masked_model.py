"""A model whose blocks take a mask of the samples beside the hidden state, made from the ids."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * mask[..., None]


class Masked(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 64)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        mask = (ids % 3 > 0).to(self.head.weight.dtype)
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(width: int = 32, blocks: int = 4) -> Masked:
    return Masked(width, blocks)
