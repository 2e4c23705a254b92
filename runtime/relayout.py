"""Moving an activation between the layouts of two layers: a gather or a slice per mesh axis, never a reduction.

A gather's backward is a slice and the reverse: the ranks that hold the same slice compute the same value from it, so
their gradients are equal and complete already. Checked against DTensor's redistribute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from autopar.axes import Layout
from autopar.errors import InputError

GroupOf = Callable[[str], dist.ProcessGroup]
"""The process group of this rank along one axis."""


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """All slices along `dim` of the group's ranks, put together in rank order; not differentiable."""
    size = dist.get_world_size(group)
    if size == 1:
        return x
    x = x.contiguous()
    whole = x.new_empty((size * x.shape[0], *x.shape[1:]))
    dist.all_gather_single(whole, x, group=group)
    if dim == 0:
        return whole
    return torch.cat(whole.chunk(size, 0), dim)


def cut(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's slice of `x` along `dim`, contiguous; not differentiable.

    Raises ValueError when the size does not divide.
    """
    size = dist.get_world_size(group)
    if x.shape[dim] % size:
        raise ValueError(f"dimension {dim} of {tuple(x.shape)} is not divisible by {size} ranks")
    return x.chunk(size, dim)[dist.get_rank(group)].clone(memory_format=torch.contiguous_format)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return cut(grads[0], ctx.dim, ctx.group), None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return cut(x, dim, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return gather(grads[0], ctx.dim, ctx.group), None, None


class _ShareGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] / ctx.ranks, None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
        ctx.groups = groups
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        for group in ctx.groups:
            dist.all_reduce(grad, group=group)
        return grad, None


def share_gradient(x: Tensor, ranks: int) -> Tensor:
    """The same tensor; its gradient, which so many ranks have whole, counts once in a sum over them."""
    out: Tensor = _ShareGradient.apply(x, ranks)
    return out


def sum_gradient(x: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """The same tensor; its gradients on the ranks of these groups are summed."""
    out: Tensor = _SumGradient.apply(x, groups)
    return out


def relayout(x: Tensor, source: Layout, target: Layout, group_of: GroupOf, *, batch_dim: int = 0) -> Tensor:
    """The same activation in another layout; differentiable.

    x: samples along `batch_dim`, sequence along the next. Common leading axes stay; the others of `source` are
    gathered, innermost first, then those of `target` cut. Cost: one all-gather per gathered axis forward, one per
    cut axis backward, and a copy where a sequence is dealt out or put in order again. Raises InputError, before any
    collective and so on all ranks that have equal shapes, for a sequence that does not divide.
    """
    if target.sequence:
        length = x.shape[batch_dim + 1] * prod(dist.get_world_size(group_of(axis)) for axis in source.sequence)
        pieces = prod(dist.get_world_size(group_of(axis)) for axis in target.sequence)
        refuse_length(length, 2 * pieces if target.dealt else pieces)
    pairs = ((batch_dim, source.batch, target.batch), (batch_dim + 1, source.sequence, target.sequence))
    kept = source.kept(target)
    for (dim, old, _), keep in zip(pairs, kept, strict=True):
        for axis in reversed(old[keep:]):
            x = _Gather.apply(x, dim, group_of(axis))
    if kept[1] == 0:
        for layout, back in ((source, True), (target, False)):
            if layout.dealt:
                axes = tuple((dist.get_world_size(group_of(axis)), axis in layout.dealt) for axis in layout.sequence)
                order = dealt_order(x.shape[batch_dim + 1], axes)
                places = torch.from_numpy(order.argsort() if back else order)
                x = x.index_select(batch_dim + 1, places.to(x.device))
    for (dim, _, new), keep in zip(pairs, kept, strict=True):
        for axis in new[keep:]:
            x = _Cut.apply(x, dim, group_of(axis))
    return x


def refuse_length(length: int, pieces: int) -> None:
    """Raise InputError for a sequence that does not fall into so many equal pieces."""
    if length % pieces:
        raise InputError(
            f"the sequence of the batch is {length} long, which the plan cannot cut",
            why=f"its layers cut the sequence into {pieces} equal pieces",
            fix=f"pad every batch to a multiple of {pieces}: the next length is {-(-length // pieces) * pieces}",
        )


@lru_cache(maxsize=64)
def dealt_order(length: int, axes: tuple[tuple[int, bool], ...]) -> NDArray[np.int64]:
    """The places of a sequence in the order in which the ranks along `axes` hold them, rank after rank.

    axes: for each axis of the sequence, outermost first, its size and whether it deals out pairs (see Layout). An
    array of numpy, as no tensor keeps its values where models are traced with fake ones.
    """
    pairs = prod(size for size, dealt in axes if dealt)
    pieces = np.arange(length).reshape(2 * pairs, -1)
    held = np.concatenate([pieces[:pairs], pieces[: pairs - 1 : -1]], axis=1)
    outer_first = sorted(range(len(axes)), key=lambda i: not axes[i][1])
    held = held.reshape(*(axes[i][0] for i in outer_first), -1)
    back = [outer_first.index(i) for i in range(len(axes))]
    return held.transpose(*back, len(axes)).flatten()
