"""Random streams of dropout: one for each block and data-parallel rank, the same for the ranks of its tensor group.

Ranks that hold the same samples must drop the same elements of what they all hold, ranks that hold other samples must
not. A block therefore draws from a stream of its own, named by a seed that all ranks agree on, the block, its place
among the data-parallel ranks, and how often it has run; recompute finds the same stream again.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def agreed_seed() -> int:
    """Rank 0's torch seed, on every rank; a collective of the world."""
    seed = torch.tensor(torch.initial_seed() % (1 << 62), dtype=torch.int64)
    dist.broadcast(seed, src=0)
    return int(seed)


class BlockStream:
    """Hooks that give a block its own random stream while it trains, and put the caller's back after it."""

    def __init__(self, block: nn.Module, *, seed: int, number: int, place: int) -> None:
        self._name = f"{seed}/{number}/{place}"
        self._runs = 0
        self._outside: list[Any] = []
        # Before every other hook, and outside the recompute, which itself restores the state it began with.
        block.register_forward_pre_hook(self._enter, prepend=True)
        block.register_forward_hook(self._leave, always_call=True)

    def _enter(self, block: nn.Module, args: Any) -> None:
        if not block.training:
            return
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        self._outside.append((torch.get_rng_state(), cuda))
        digest = hashlib.sha256(f"{self._name}/{self._runs}".encode()).digest()
        # Not torch.manual_seed: without a GPU it keeps a stack trace for each kind of device (milliseconds).
        number = int.from_bytes(digest[:8], "big") >> 2
        torch.default_generator.manual_seed(number)
        if cuda is not None:
            torch.cuda.manual_seed(number)
        self._runs += 1

    def _leave(self, block: nn.Module, args: Any, output: Any) -> None:
        if self._outside:
            cpu, cuda = self._outside.pop()
            torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda)
