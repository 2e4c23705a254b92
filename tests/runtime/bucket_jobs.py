"""What test_buckets.py runs on real ranks."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.runtime import buckets
from autopar.runtime.rows import own_rows


def sums(sizes: list[int], bucket_bytes: int) -> dict[str, Any]:
    """The largest difference to one all-reduce a tensor, over two groups and two dtypes, and the all-reduces made."""
    rank, calls = dist.get_rank(), []
    pair = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    torch.manual_seed(rank)
    grads = [
        (torch.randn(size, dtype=dtype), group)
        for dtype in (torch.float32, torch.float64)
        for group in (dist.group.WORLD, pair)
        for size in sizes
    ]
    expected = [grad.clone() for grad, _ in grads]
    for grad, (_, group) in zip(expected, grads, strict=True):
        dist.all_reduce(grad, group=group)
    real = dist.all_reduce

    def counted(tensor: torch.Tensor, **options: Any) -> Any:
        calls.append(tensor.numel())
        return real(tensor, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "BUCKET_BYTES", bucket_bytes)
        patch.setattr(dist, "all_reduce", counted)
        buckets.sum_in_buckets(grads)
    errors = [float((grad - want).abs().max()) for (grad, _), want in zip(grads, expected, strict=True)]
    return {"error": max(errors), "calls": calls}


def rows(shapes: list[list[int]], bucket_bytes: int) -> dict[str, Any]:
    """As `sums`, of rows that are summed and then gathered again, beside whole sums; and that tensors are freed."""
    rank, calls = dist.get_rank(), []
    pair = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    torch.manual_seed(rank)
    grads = [(torch.randn(shape), group) for group in (dist.group.WORLD, pair) for shape in shapes]
    groups, expected = [group for _, group in grads], [grad.clone() for grad, _ in grads]
    alive = [weakref.ref(grad) for grad, _ in grads]
    for grad, group in zip(expected, groups, strict=True):
        dist.all_reduce(grad, group=group)
    found: dict[int, torch.Tensor] = {}
    real = {name: getattr(dist, name) for name in ("reduce_scatter_single", "all_gather_single")}

    def counted(name: str) -> Any:
        def call(output: torch.Tensor, given: torch.Tensor, **options: Any) -> Any:
            calls.append(max(output.numel(), given.numel()))
            return real[name](output, given, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "BUCKET_BYTES", bucket_bytes)
        for name in real:
            patch.setattr(dist, name, counted(name))
        buckets.sum_rows_in_buckets(grads, found.__setitem__)
        whole = [torch.full_like(want, torch.nan) for want in expected]
        for place, (full, group) in enumerate(zip(whole, groups, strict=True)):
            own_rows(full, group).copy_(found[place])
        buckets.gather_rows_in_buckets(list(zip(whole, groups, strict=True)))
    errors = [float((full - want).abs().max()) for full, want in zip(whole, expected, strict=True) if full.numel()]
    shapes_are = all(found[i].shape == own_rows(want, groups[i]).shape for i, want in enumerate(expected))
    freed = not any(ref() is not None for ref in alive)
    return {"error": max(errors), "calls": calls, "shapes": shapes_are, "freed": freed}
