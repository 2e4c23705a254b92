"""How fast a rank computes while only some of the ranks do: processes that share the cores of a machine."""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

_WIDTH, _ROWS = 256, 256
_BURST_S = 0.03
"""Longer than some time slices of the scheduler, so that ranks beyond the cores do wait for each other."""
_ROUNDS = 5


def compute_speedup(ranks_per_node: int) -> tuple[float, ...]:
    """Entry k-1: the speed of each computing rank when k ranks of its node compute, relative to all of them at once.

    The same on every rank; the last entry is 1. The work is the forward and backward of two linear layers; the other
    ranks wait for a collective, as they do in the bubble of a pipeline. Medians over rounds in which every k has its
    turn. Cost: about 0.2 s for each rank of a node.
    """
    nodes, rank = dist.get_world_size() // ranks_per_node, dist.get_rank() % ranks_per_node
    model = nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))
    batch = torch.randn(_ROWS, _WIDTH)
    _burst_s(model, batch, 1)
    dist.barrier()
    once_s = torch.tensor([_burst_s(model, batch, 3)], dtype=torch.float64)
    dist.all_reduce(once_s, op=dist.ReduceOp.MAX)
    repeats = max(1, round(_BURST_S / float(once_s)))
    speeds: list[list[float]] = [[] for _ in range(ranks_per_node)]
    for _ in range(_ROUNDS):
        for count in range(1, ranks_per_node + 1):
            # Which ranks compute must not matter: they take turns.
            computing = (rank + len(speeds[count - 1])) % ranks_per_node < count
            dist.barrier()
            seconds = _burst_s(model, batch, repeats) if computing else 0.0
            total = torch.tensor([1 / seconds if computing else 0.0], dtype=torch.float64)
            dist.all_reduce(total)
            speeds[count - 1].append(float(total) / (count * nodes))
    all_at_once = median(speeds[-1])
    return tuple(median(found) / all_at_once for found in speeds)


def _burst_s(model: nn.Module, batch: Tensor, repeats: int) -> float:
    """Seconds of one forward and backward."""
    started = time.perf_counter()
    for _ in range(repeats):
        model.zero_grad(set_to_none=True)
        model(batch).sum().backward()
    return (time.perf_counter() - started) / repeats
