"""Torch's fake tensors, which have shapes and no numbers, and ranks that are not there; half private, so here only."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

__all__ = [
    "DEPENDS_ON_NUMBERS",
    "FakeTensor",
    "FakeTensorMode",
    "absent_ranks",
    "fake_mode",
    "has_numbers",
    "number",
    "shapes_only",
]

DEPENDS_ON_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException)
"""What is raised where the course of a model depends on the numbers in its tensors."""


class _OneMode(FakeTensorMode):
    def __deepcopy__(self, memo: dict[int, Any]) -> _OneMode:
        """The mode itself: it holds weak references to storages, and torch frees a copied one a second time."""
        return self


@contextmanager
def fake_mode() -> Iterator[FakeTensorMode]:
    """While inside, a mode that may be entered as often as wanted; every tensor that is made in it is fake."""
    with warnings.catch_warnings():
        # Printing and copying a parameter asks for its address, which torch deprecates for fake ones.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
        yield _OneMode(allow_non_fake_inputs=True)


@contextmanager
def shapes_only() -> Iterator[None]:
    """While inside, every tensor that is made has a shape and no storage, so that a model of any size fits."""
    with fake_mode() as mode, mode:
        yield


def has_numbers(tensor: Tensor) -> bool:
    """False for a fake tensor: what it would hold cannot be looked at, and need not be."""
    return not isinstance(tensor, FakeTensor)


def number(tensor: Tensor) -> float:
    """The number in a tensor of one element; 1 for a fake one."""
    return float(tensor) if has_numbers(tensor) else 1.0


@contextmanager
def absent_ranks(rank: int, world: int) -> Iterator[None]:
    """While inside, this process is one rank of a world whose other ranks do not exist.

    Collectives return at once and leave any numbers.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
