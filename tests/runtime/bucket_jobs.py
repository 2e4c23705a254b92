"""What test_buckets.py runs on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.runtime import buckets


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
