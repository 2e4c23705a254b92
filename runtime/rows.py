"""Tensors cut by rows over the ranks of a group, as fully_shard cuts them: equal chunks, the last shorter or empty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Return when it is done."""


def rows_of(full: Tensor, parts: int, place: int) -> Tensor:
    """The rows of `full` that the rank at `place` of `parts` holds; a view of it."""
    chunks = full.chunk(parts, 0)
    return chunks[place] if place < len(chunks) else full[:0]


def own_rows(full: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows of `full` that this rank of the group holds; a view of it."""
    return rows_of(full, dist.get_world_size(group), dist.get_rank(group))


def start_sum_rows(full: Tensor, group: dist.ProcessGroup) -> tuple[Pending, Tensor]:
    """A reduce-scatter of `full` under way, and the tensor that will hold this rank's rows of the sum."""
    parts = dist.get_world_size(group)
    padded = _padded(full.contiguous(), -(-full.shape[0] // parts) * parts)
    out = torch.empty((padded.shape[0] // parts, *full.shape[1:]), dtype=full.dtype, device=full.device)
    work = dist.reduce_scatter_single(out, padded, group=group, async_op=True)
    return work, out[: own_rows(full, group).shape[0]]


def start_gather_rows(local: Tensor, full: Tensor, group: dist.ProcessGroup) -> tuple[Pending, Callable[[], None]]:
    """An all-gather of every rank's rows into `full` under way, and what must be called when it is done.

    local: this rank's rows in the dtype of `full`, possibly a view of them there.
    """
    parts = dist.get_world_size(group)
    chunk = -(-full.shape[0] // parts)
    if full.shape[0] == chunk * parts and full.is_contiguous():
        return dist.all_gather_single(full, local.contiguous(), group=group, async_op=True), lambda: None
    out = torch.empty((chunk * parts, *full.shape[1:]), dtype=full.dtype, device=full.device)
    work = dist.all_gather_single(out, _padded(local.contiguous(), chunk), group=group, async_op=True)

    def done() -> None:
        full.copy_(out[: full.shape[0]])

    return work, done


def gather_rows(local: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    """The tensor of `rows` rows of which each rank of the group holds its own; a collective."""
    full = torch.empty((rows, *local.shape[1:]), dtype=local.dtype, device=local.device)
    work, done = start_gather_rows(local, full, group)
    work.wait()
    done()
    return full


def _padded(tensor: Tensor, rows: int) -> Tensor:
    if tensor.shape[0] == rows:
        return tensor
    padded = tensor.new_zeros((rows, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    return padded
