"""Torch's fake tensors, which have shapes and no numbers. Their names are half private: imported here only."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

__all__ = ["DEPENDS_ON_NUMBERS", "FakeTensor", "FakeTensorMode", "shapes_only"]

DEPENDS_ON_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException)
"""What is raised where the course of a model depends on the numbers in its tensors."""


@contextmanager
def shapes_only() -> Iterator[None]:
    """While inside, every tensor that is made has a shape and no storage, so that a model of any size fits."""
    with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True):
        # Printing and copying a parameter asks for its address, which torch deprecates for fake ones.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
        yield
