"""Fake tensors are copied with the modules that hold them, and stay of their mode."""

from __future__ import annotations

import torch
from torch import nn

from autopar.runtime.fakes import FakeTensor, shapes_only
from autopar.runtime.tensor_parallel.skeleton import Skeleton


class Gathers(nn.Module):
    """A block with a buffer and a plain attribute that were made of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("places", torch.tensor([1, 0, 3, 2]))
        self.more = torch.tensor([2.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)[:, self.places] * self.more
        return y


def test_a_skeleton_does_not_copy_the_mode_of_fake_tensors() -> None:
    """A mode holds weak references to storages; torch frees a copied one a second time, and the process crashes."""
    with shapes_only():
        block = Gathers()
        copied = Skeleton(block).block
    assert isinstance(block.more, FakeTensor)
    for name in ("places", "more"):
        assert getattr(copied, name) is not getattr(block, name)
        assert getattr(copied, name).fake_mode is block.more.fake_mode
