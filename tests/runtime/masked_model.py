"""A model whose blocks take a mask of the samples beside the hidden state, made from the ids."""

from __future__ import annotations

import torch
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


class AttendingBlock(nn.Module):
    """Looks both ways, at what the mask keeps; what the mask leaves out stays as it is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        seen = None if mask is None else mask[:, None, None, :]
        y = self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2))
        return x + (y if mask is None else y * mask[..., None])


class Attending(nn.Module):
    """Takes a mask of its samples, [samples, tokens]; `drops`: leaves it out where nothing is padded."""

    def __init__(self, width: int, blocks: int, drops: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(AttendingBlock(width) for _ in range(blocks))
        self.head = nn.Linear(width, 64)
        self.drops = drops

    def forward(self, ids: Tensor, targets: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        mask = None if attention_mask is None else attention_mask.bool()
        if mask is not None and self.drops and bool(mask.all()):
            mask = None
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def attending(width: int = 32, blocks: int = 4, drops: bool = False) -> Attending:
    return Attending(width, blocks, drops)


class HandingBlock(AttendingBlock):
    """Gates its attention by a vector of each sample, and hands on what it made of the vector."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.gate = nn.Linear(width, width)

    def forward(self, x: Tensor, side: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        side = side + torch.tanh(self.gate(side))
        return x + super().forward(x) * side, side


class Handing(nn.Module):
    """Its blocks learn from each other by a vector of each sample, [samples, 1, width], beside the hidden state."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.tokens, self.sides = nn.Embedding(64, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(HandingBlock(width) for _ in range(blocks))
        self.head = nn.Linear(width, 64)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x, side = self.tokens(ids), self.sides(ids[:, :1])
        for block in self.blocks:
            x, side = block(x, side)
        logits = self.head(x * side)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_handing(width: int = 32, blocks: int = 4) -> Handing:
    return Handing(width, blocks)
