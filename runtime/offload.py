"""Tensors that go to host memory and come back, in buckets: what an optimizer whose states stay there steps.

On a GPU the host's side is pinned and copies do not block one another; whether they also run beside compute is
unverified. On a CPU the copies are as real, within the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from autopar.runtime.buckets import buckets_of

_told: list[Callable[[bool], None]] = []


@contextmanager
def told_when_made(tell: Callable[[bool], None]) -> Iterator[None]:
    """While inside, `tell` hears when a tensor for host memory is about to be made, and (False) when it is."""
    _told.append(tell)
    try:
        yield
    finally:
        _told.remove(tell)


def _host_tensor(like: Tensor) -> Tensor:
    for tell in _told:
        tell(True)
    made = like.new_empty(like.shape, device="cpu", pin_memory=like.is_cuda)
    for tell in _told:
        tell(False)
    return made


def in_host_memory(tensor: Tensor) -> Tensor:
    """A copy of a tensor in host memory, pinned where it comes from a GPU."""
    copy = _host_tensor(tensor)
    copy.copy_(tensor)
    return copy


@torch.no_grad()
def send_down(tensors: list[Tensor], take: Callable[[int, Tensor], None]) -> None:
    """Give `take` the place of each tensor and its copy in host memory; empties `tensors`.

    The copies of a bucket are views of one tensor. A tensor that nobody else holds is freed when its bucket is packed.
    """
    buckets, waiting = buckets_of(tensors), dict(enumerate(tensors))
    on_gpu = any(tensor.is_cuda for tensor in tensors)
    tensors.clear()
    for places in buckets:
        bucket = [waiting.pop(place) for place in places]
        shapes = [tensor.shape for tensor in bucket]
        flat = bucket[0].reshape(-1) if len(bucket) == 1 else torch.cat([tensor.reshape(-1) for tensor in bucket])
        bucket.clear()
        copy = _host_tensor(flat)
        copy.copy_(flat, non_blocking=True)
        for place, piece, shape in zip(places, copy.split([shape.numel() for shape in shapes]), shapes, strict=True):
            take(place, piece.view(shape))
    if on_gpu:
        torch.cuda.current_stream().synchronize()


@torch.no_grad()
def bring_up(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy into the first tensor of each pair the second, which lies in host memory, rounded to the first's dtype."""
    for places in buckets_of([source for _, source in pairs]):
        bucket = [pairs[place] for place in places]
        if len(bucket) == 1 and bucket[0][0].dtype == bucket[0][1].dtype:
            bucket[0][0].copy_(bucket[0][1], non_blocking=True)
            continue
        sizes = [source.numel() for _, source in bucket]
        staged = torch.empty(sum(sizes), dtype=bucket[0][1].dtype, device=bucket[0][0].device)
        pieces = [piece.view_as(source) for piece, (_, source) in zip(staged.split(sizes), bucket, strict=True)]
        for piece, (_, source) in zip(pieces, bucket, strict=True):
            piece.copy_(source, non_blocking=True)
        for (target, _), piece in zip(bucket, pieces, strict=True):
            target.copy_(piece)
