"""Tensors cut by rows over the ranks of a group, as fully_shard cuts them: equal chunks, the last shorter or empty."""

from __future__ import annotations

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
    whole = padded(full.contiguous(), -(-full.shape[0] // parts) * parts)
    out = torch.empty((whole.shape[0] // parts, *full.shape[1:]), dtype=full.dtype, device=full.device)
    work = dist.reduce_scatter_single(out, whole, group=group, async_op=True)
    return work, out[: own_rows(full, group).shape[0]]


def gather_rows(local: Tensor, rows: int, group: dist.ProcessGroup) -> Tensor:
    """The tensor of `rows` rows of which each rank of the group holds its own; a collective."""
    parts = dist.get_world_size(group)
    chunk = -(-rows // parts)
    out = torch.empty((chunk * parts, *local.shape[1:]), dtype=local.dtype, device=local.device)
    dist.all_gather_single(out, padded(local.contiguous(), chunk), group=group)
    return out[:rows]


def padded(tensor: Tensor, rows: int) -> Tensor:
    """The tensor with zeros below up to so many rows; itself where it has as many."""
    if tensor.shape[0] == rows:
        return tensor
    more = tensor.new_zeros((rows, *tensor.shape[1:]))
    more[: tensor.shape[0]] = tensor
    return more
