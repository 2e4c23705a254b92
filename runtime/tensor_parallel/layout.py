"""Which elements of each parameter a tensor-parallel rank holds: plain values, and how to cut and join tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autopar.measured import TensorParallelCall
from autopar.runtime.tensor_parallel.factors import Factor, find
from autopar.runtime.tensor_parallel.states import Classes


@dataclass(frozen=True)
class DimLayout:
    """One dimension: a leaf cut over `axes` (outermost first), or a product or concatenation of parts."""

    size: int
    kind: Literal["leaf", "product", "cat"] = "leaf"
    axes: tuple[int, ...] = ()
    parts: tuple[DimLayout, ...] = ()

    @property
    def is_cut(self) -> bool:
        """Whether any part of it is cut."""
        return bool(self.axes) or any(part.is_cut for part in self.parts)

    @property
    def is_mixed(self) -> bool:
        """Whether some of its segments are cut and others are held by every rank."""
        cut = [part.is_cut for part in self.parts] if self.kind == "cat" else []
        return (any(cut) and not all(cut)) or any(part.is_mixed for part in self.parts)

    def local_size(self, axis_sizes: tuple[int, ...]) -> int:
        """The elements that one rank holds."""
        if self.kind == "leaf":
            return self.size // prod(axis_sizes[i] for i in self.axes)
        sizes = [part.local_size(axis_sizes) for part in self.parts]
        return sum(sizes) if self.kind == "cat" else prod(sizes)

    def index(self, axis_sizes: tuple[int, ...], coordinate: tuple[int, ...]) -> NDArray[np.int64]:
        """The places, in the rank's own order, of the elements that it holds.

        An array of numpy, as no tensor keeps its values where models are traced with fake ones.
        """
        if self.kind == "leaf":
            place = 0
            for i in self.axes:
                place = place * axis_sizes[i] + coordinate[i]
            length = self.local_size(axis_sizes)
            return np.arange(place * length, (place + 1) * length)
        if self.kind == "cat":
            offsets = [sum(p.size for p in self.parts[:i]) for i in range(len(self.parts))]
            pairs = zip(self.parts, offsets, strict=True)
            return np.concatenate([part.index(axis_sizes, coordinate) + offset for part, offset in pairs])
        index = np.zeros(1, dtype=np.int64)
        for part in self.parts:
            index = (index[:, None] * part.size + part.index(axis_sizes, coordinate)[None]).flatten()
        return index

    def held_by_all(self, axis: int, axis_sizes: tuple[int, ...]) -> NDArray[np.int64]:
        """The local places whose elements all ranks along an axis hold."""
        return np.flatnonzero(self._free_of(axis, axis_sizes))

    def _free_of(self, axis: int, axis_sizes: tuple[int, ...]) -> NDArray[np.bool_]:
        if self.kind == "leaf":
            return np.full(self.local_size(axis_sizes), axis not in self.axes)
        parts = [part._free_of(axis, axis_sizes) for part in self.parts]
        if self.kind == "cat":
            return np.concatenate(parts)
        free = np.ones(1, dtype=np.bool_)
        for part in parts:
            free = (free[:, None] & part[None]).flatten()
        return free


ParameterLayout = tuple[DimLayout, ...]


def dim_layout(factor: Factor, axes: Sequence[Classes]) -> DimLayout:
    """The layout of a dimension under these classes per axis, in a normal form that forgets uncut structure."""
    root = find(factor)
    if root.kind == "leaf":
        return DimLayout(root.size, axes=tuple(i for i, classes in enumerate(axes) if root in classes))
    parts: list[DimLayout] = []
    for factor_part in root.parts:
        part = dim_layout(factor_part, axes)
        nested = part.parts if part.kind == root.kind else (part,)
        for piece in nested:
            if parts and not parts[-1].is_cut and not piece.is_cut:
                last = parts.pop().size
                piece = DimLayout(last * piece.size if root.kind == "product" else last + piece.size)
            parts.append(piece)
    parts = [part for part in parts if part.size != (1 if root.kind == "product" else 0)]
    if len(parts) < 2:
        return parts[0] if parts else DimLayout(root.size)
    return DimLayout(root.size, root.kind, parts=tuple(parts))


@lru_cache(maxsize=4096)
def _index(layout: DimLayout, axis_sizes: tuple[int, ...], coordinate: tuple[int, ...]) -> NDArray[np.int64]:
    return layout.index(axis_sizes, coordinate)


def take(tensor: Tensor, layout: ParameterLayout, axis_sizes: tuple[int, ...], coordinate: tuple[int, ...]) -> Tensor:
    """The elements of a tensor that the rank at these coordinates holds; the tensor itself when it holds all."""
    for dim, part in enumerate(layout):
        if part.is_cut:
            index = _index(part, axis_sizes, coordinate)
            first, length = int(index[0]), len(index)
            if int(index[-1]) - first + 1 == length and bool((np.diff(index) == 1).all()):
                tensor = tensor.narrow(dim, first, length)
            else:
                tensor = tensor.index_select(dim, torch.from_numpy(index).to(tensor.device))
    return tensor


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """How the ranks of a tensor-parallel group hold and run one block; the same for every batch and sequence.

    axis_sizes: the prime axes, outermost first; ranks are numbered row major over them. layouts: of every parameter by
    its name. calls: the collectives of one forward and backward at the traced sequence length. sp, cp: over how many
    ranks Ulysses and context parallelism cut the sequence, for each of the tensor-parallel ranks.
    """

    axis_sizes: tuple[int, ...]
    sequence_norms: bool
    layouts: dict[str, ParameterLayout]
    calls: tuple[TensorParallelCall, ...]
    sp: int = 1
    cp: int = 1

    @property
    def tp(self) -> int:
        """The tensor-parallel degree."""
        return prod(self.axis_sizes)

    @property
    def sequence_parts(self) -> int:
        """Into how many parts the sequence of the block's activation is cut."""
        return self.sp * self.cp * (self.tp if self.sequence_norms else 1)

    @cached_property
    def coordinates(self) -> tuple[tuple[int, ...], ...]:
        """The coordinates of each rank of the group."""
        return tuple(tuple(int(i) for i in np.unravel_index(r, self.axis_sizes)) for r in range(self.tp))

    @cached_property
    def local_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter on one rank."""
        return {n: tuple(d.local_size(self.axis_sizes) for d in dims) for n, dims in self.layouts.items()}

    def is_cut(self, name: str) -> bool:
        """Whether ranks hold different parts of a parameter."""
        return any(dim.is_cut for dim in self.layouts[name])

    def shard(self, name: str, tensor: Tensor, coordinate: tuple[int, ...]) -> Tensor:
        """The part of a whole parameter that the rank at these coordinates holds (a copy when it is cut)."""
        local = take(tensor, self.layouts[name], self.axis_sizes, coordinate)
        return local.contiguous().clone() if self.is_cut(name) else local

    def unshard(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """The whole parameter from the parts of all ranks, in rank order."""
        if len(parts) != self.tp:
            raise ValueError(f"{name} has {self.tp} parts, not {len(parts)}")
        layout = self.layouts[name]
        if not self.is_cut(name):
            return parts[0]
        whole = parts[0].new_empty([dim.size for dim in layout])
        for coordinate, part in zip(self.coordinates, parts, strict=True):
            places = [torch.from_numpy(_index(dim, self.axis_sizes, coordinate)).to(part.device) for dim in layout]
            cut = [dim for dim, part_layout in enumerate(layout) if part_layout.is_cut]
            if len(cut) == 1:
                whole.index_copy_(cut[0], places[cut[0]], part)
            else:
                whole[torch.meshgrid(*places, indexing="ij")] = part
        return whole
