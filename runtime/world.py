"""The ranks before a plan is applied: one process group of the right size, and equal weights on all of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import InputError
from autopar.plan import Plan
from autopar.runtime.fakes import has_numbers


def join_world(plan: Plan, timeout: timedelta | None = None) -> None:
    """Make sure that a process group of the plan's world size exists; a plan for one rank needs no launcher.

    timeout: of the group where it is made here; None for torch's.
    """
    if not dist.is_initialized():
        check_device(plan)
        backend = "cpu:gloo,cuda:nccl" if plan.cluster.device == "cuda" else "gloo"
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        elif plan.cluster.world_size == 1:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != plan.cluster.world_size:
        raise InputError(
            f"the plan is for {plan.cluster.world_size} ranks, {world} are running",
            why="cluster.world_size of the plan and the size of the process group differ",
            fix=f"start it with torchrun --nproc-per-node {plan.cluster.world_size}, or search again for {world}",
        )


def check_device(plan: Plan) -> None:
    """Raise InputError for a plan for GPUs where there are none."""
    if plan.cluster.device == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "the plan is for GPUs, and torch sees none here",
            why='its cluster has the device "cuda"',
            fix="run it where it was made for, or profile this machine and search again",
        )


def equalise(model: nn.Module) -> None:
    """Give every rank rank 0's weights and buffers unless all are equal already, as the sum of each tensor says.

    Those on the meta device have none yet.
    """
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    if not all(map(has_numbers, tensors)):
        return
    marks = torch.tensor([float(t.detach().double().sum()) for t in tensors if t.numel()], dtype=torch.float64)
    lowest, highest = marks.clone(), marks.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    if not torch.equal(lowest.nan_to_num(), highest.nan_to_num()):
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0)


def same_use(used: Sequence[str]) -> None:
    """Raise InputError, on every rank, when the forward uses other parameters on one rank than on another.

    Their gradients would be summed with nothing on the other side, and the ranks would wait for each other.
    """
    found: list[Sequence[str]] = [()] * dist.get_world_size()
    dist.all_gather_object(found, tuple(used))
    every = set(found[0]).union(*found)
    some = sorted(every.difference(set(found[0]).intersection(*found)))
    if some:
        ranks = [rank for rank, names in enumerate(found) if some[0] in names]
        raise InputError(
            f"parameters are used on some ranks only: {', '.join(some[:6])}{', ...' if len(some) > 6 else ''}",
            why=f"the forward uses {some[0]} on {'ranks ' + ', '.join(map(str, ranks[:8]))} of {len(found)}",
            fix="let the forward do the same on every rank",
        )
