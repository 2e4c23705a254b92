"""How many ranks hold each element of what one of them steps."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.runtime.gradients import TensorParallelCut, shard_of
from autopar.runtime.rows import own_rows
from autopar.runtime.vocabulary import WordPlan


def shards_of(parameter: nn.Parameter, rows: dist.ProcessGroup | None) -> int:
    """Over how many ranks ZeRO cut what is stepped of a parameter."""
    if isinstance(parameter, DTensor):
        return int(parameter.device_mesh.size(parameter.device_mesh.ndim - 1))
    return 1 if rows is None else dist.get_world_size(rows)


def tensor_share(cut: TensorParallelCut, parameter: nn.Parameter, rows: dist.ProcessGroup | None) -> float | Tensor:
    """One over the number of tensor-parallel ranks that hold each element of this rank's piece.

    A number where it is the same for all elements, otherwise a tensor that broadcasts over the piece (fused weights
    whose kv heads are fewer than the ranks).
    """
    if isinstance(cut.plan, WordPlan):
        return 1.0
    layout, sizes = cut.plan.layouts[cut.name], cut.plan.axis_sizes
    share = torch.ones([1] * len(layout))
    for axis, size in enumerate(sizes):
        free = torch.ones([1] * len(layout), dtype=torch.bool)
        for dim, part in enumerate(layout):
            places = torch.zeros(part.local_size(sizes), dtype=torch.bool)
            places[part.held_by_all(axis, sizes)] = True
            if not places.all():
                free = free & places.reshape([-1 if d == dim else 1 for d in range(len(layout))])
        share = torch.where(free, share / size, share)
    if bool((share == share.flatten()[0]).all()):
        return float(share.flatten()[0])
    if share.shape[0] > 1:
        share = shard_of(parameter, share) if isinstance(parameter, DTensor) else share
        share = own_rows(share, rows) if rows is not None else share
    return share.to(parameter.device)
