"""Tensors that many ranks exchange, in buckets: many small collectives cost a latency each.

Neighbours of one group and dtype travel together up to BUCKET_BYTES, larger tensors alone and, where rows divide,
without a copy. Two buckets are held at once: one travels while the next is filled or the one before is emptied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.comm import BUCKET_BYTES
from autopar.runtime.rows import Pending, own_rows, padded

Grouped = tuple[Tensor, dist.ProcessGroup]


def sum_in_buckets(grads: Sequence[Grouped]) -> None:
    """Sum each tensor over its group, in place; the groups and sizes come in the same order on all their ranks."""
    before: tuple[Pending, Tensor, Sequence[Tensor]] | None = None
    for places, group in _buckets(grads):
        bucket = [grads[place][0] for place in places]
        flat = bucket[0] if len(bucket) == 1 else torch.cat([grad.reshape(-1) for grad in bucket])
        work = dist.all_reduce(flat, group=group, async_op=True)
        if before is not None:
            _finish(*before)
        before = work, flat, bucket
    if before is not None:
        _finish(*before)


def sum_rows_in_buckets(grads: list[Grouped], take: Callable[[int, Tensor], None]) -> None:
    """Give `take` the place of each tensor and this rank's rows of its sum over its group; empties `grads`.

    The groups and sizes come in the same order on all their ranks. The rows of a bucket are views of one tensor. A
    tensor that nobody else holds is freed as soon as it has been copied or, where it travels uncopied, sent.
    """
    before: Callable[[], None] | None = None
    buckets = list(_buckets(grads))
    tensors: dict[int, Tensor] = {place: grad for place, (grad, _) in enumerate(grads)}
    grads.clear()
    for places, group in buckets:
        finish = _start_sum_rows([tensors.pop(place) for place in places], places, group, take)
        if before is not None:
            before()
        before = finish
    if before is not None:
        before()


def _start_sum_rows(
    bucket: list[Tensor], places: Sequence[int], group: dist.ProcessGroup, take: Callable[[int, Tensor], None]
) -> Callable[[], None]:
    parts = dist.get_world_size(group)
    shapes, chunks = [own_rows(grad, group).shape for grad in bucket], [_chunk(grad, parts) for grad in bucket]
    flat = _by_rank(bucket, parts)
    bucket.clear()  # before there is a tensor more
    out = flat.new_empty(flat.shape[1])
    work = dist.reduce_scatter_single(out, flat.view(-1), group=group, async_op=True)
    held = [flat]

    def finish() -> None:
        work.wait()
        held.clear()
        for place, piece, shape in zip(places, out.split(chunks), shapes, strict=True):
            take(place, piece[: shape.numel()].view(shape))

    return finish


@torch.no_grad()
def gather_rows_in_buckets(tensors: Sequence[Grouped]) -> None:
    """Fill each tensor, of which every rank of its group has its own rows right, with the rows of the others."""
    before: Callable[[], None] | None = None
    for places, group in _buckets(tensors):
        finish = _start_gather_rows([tensors[place][0] for place in places], group)
        if before is not None:
            before()
        before = finish
    if before is not None:
        before()


def _start_gather_rows(bucket: Sequence[Tensor], group: dist.ProcessGroup) -> Callable[[], None]:
    parts = dist.get_world_size(group)
    chunks = [_chunk(full, parts) for full in bucket]
    own = [padded(own_rows(full, group), -(-full.shape[0] // parts)).reshape(-1) for full in bucket]
    alone = len(bucket) == 1 and bucket[0].shape[0] % parts == 0 and bucket[0].is_contiguous()
    flat = own[0] if len(own) == 1 else torch.cat(own)
    out = bucket[0].view(parts, -1) if alone else flat.new_empty((parts, sum(chunks)))
    work = dist.all_gather_single(out.view(-1), flat, group=group, async_op=True)

    def finish() -> None:
        work.wait()
        if not alone:
            pairs = [_alike(full, piece) for full, piece in zip(bucket, out.split(chunks, 1), strict=True)]
            torch._foreach_copy_([full for full, _ in pairs], [piece for _, piece in pairs])

    return finish


def _alike(full: Tensor, piece: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor and what was gathered of it, one rank a row, in one shape; a copy where rows do not divide."""
    if full.numel() == piece.numel() and full.is_contiguous():
        return full.view_as(piece), piece
    return full, piece.reshape(-1)[: full.numel()].view_as(full)


def _chunk(full: Tensor, parts: int) -> int:
    """The elements of the rows, as many as the first rank has, that each of `parts` ranks holds of a tensor."""
    rows = full.shape[0]
    return int(-(-rows // parts) * (full.numel() // rows if rows else 0))


def _by_rank(bucket: Sequence[Tensor], parts: int) -> Tensor:
    """What goes to each of `parts` ranks, one a row; of a single tensor a view where its rows divide."""
    pieces = [padded(grad, -(-grad.shape[0] // parts) * parts).reshape(parts, -1) for grad in bucket]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def buckets_of(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The places of the tensors of each bucket: neighbours of one dtype."""
    return [places for places, _ in _in_buckets(tensors, [None] * len(tensors))]


def _buckets(tensors: Sequence[Grouped]) -> Iterator[tuple[list[int], dist.ProcessGroup]]:
    """The places of the tensors of each bucket, and its group."""
    return _in_buckets([tensor for tensor, _ in tensors], [group for _, group in tensors])


def _in_buckets(tensors: Sequence[Tensor], groups: Sequence[Any]) -> Iterator[tuple[list[int], Any]]:
    for (group, _), places in groupby(range(len(tensors)), key=lambda place: (groups[place], tensors[place].dtype)):
        bucket: list[int] = []
        size_bytes = 0
        for place in places:
            more_bytes = tensors[place].nbytes
            if bucket and size_bytes + more_bytes > BUCKET_BYTES:
                yield bucket, group
                bucket, size_bytes = [], 0
            bucket.append(place)
            size_bytes += more_bytes
        yield bucket, group


def _finish(work: Pending, flat: Tensor, bucket: Sequence[Tensor]) -> None:
    work.wait()
    if len(bucket) > 1:
        pieces = flat.split([grad.numel() for grad in bucket])
        torch._foreach_copy_(list(bucket), [piece.view_as(grad) for piece, grad in zip(pieces, bucket, strict=True)])
