"""Gradients summed over ranks in buckets: many small all-reduces cost a latency each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.rows import Pending

BUCKET_BYTES = 4 << 20
"""Where the bandwidth of a collective is near its best; two buckets are held at once."""


def sum_in_buckets(grads: Sequence[tuple[Tensor, dist.ProcessGroup]]) -> None:
    """Sum each tensor over its group, in place; the groups and sizes come in the same order on all their ranks.

    Neighbours of one group and dtype travel together up to BUCKET_BYTES, larger tensors alone and without a copy.
    """
    before: tuple[Pending, Tensor, Sequence[Tensor]] | None = None
    for bucket, group in _buckets(grads):
        flat = bucket[0] if len(bucket) == 1 else torch.cat([grad.reshape(-1) for grad in bucket])
        work = dist.all_reduce(flat, group=group, async_op=True)
        if before is not None:
            _finish(*before)
        before = work, flat, bucket
    if before is not None:
        _finish(*before)


def _buckets(grads: Sequence[tuple[Tensor, dist.ProcessGroup]]) -> Iterator[tuple[list[Tensor], dist.ProcessGroup]]:
    for (group, _), pairs in groupby(grads, key=lambda pair: (pair[1], pair[0].dtype)):
        bucket: list[Tensor] = []
        size_bytes = 0
        for grad, _ in pairs:
            if bucket and size_bytes + grad.nbytes > BUCKET_BYTES:
                yield bucket, group
                bucket, size_bytes = [], 0
            bucket.append(grad)
            size_bytes += grad.nbytes
        yield bucket, group


def _finish(work: Pending, flat: Tensor, bucket: Sequence[Tensor]) -> None:
    work.wait()
    if len(bucket) > 1:
        pieces = flat.split([grad.numel() for grad in bucket])
        torch._foreach_copy_(list(bucket), [piece.view_as(grad) for piece, grad in zip(pieces, bucket, strict=True)])
