"""Seconds of what a step does beside layers and collectives, by the runtime's own functions, on all ranks at once.

After the last backward a rank scales its gradients, clips them over the whole model and runs its optimizer. Around
each layer that ZeRO cuts, fully_shard copies parameters into and out of its buffers and runs its hooks.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from autopar.cluster import UpdateCost, ZeroCost
from autopar.comm import seconds
from autopar.measured import GroupShape, LinkProfile
from autopar.profiler.clock import slowest, wait_for
from autopar.runtime.gradients import HeldParameter, clip_gradients, scale_gradients
from autopar.runtime.stepping import stand_in
from autopar.runtime.zero import shard_modules, shard_root

_ROUNDS = 5
_FEW, _MANY, _SMALL, _LARGE = 4, 32, 64, 1 << 16
_UNITS, _WIDTHS, _ROWS = 3, (64, 384), 48
_MICRO_BATCHES = (8, 24)


def update_costs(mesh: DeviceMesh) -> tuple[UpdateCost, ...]:
    """What the end of a step costs with AdamW, for plain tensors and for those that fully_shard cuts.

    Solved from three sets of tensors: few and many small ones, and many large ones. Medians over rounds of the slowest
    rank; the same on every rank.
    """
    shapes = ((_FEW, _SMALL), (_MANY, _SMALL), (_MANY, _LARGE))
    found = []
    for sharded in (False, True):
        runs = [_update(mesh, count, elements, sharded=sharded) for count, elements in shapes]
        few_s, many_s, large_s = _rounds(runs, torch.device(mesh.device_type))
        found.append(
            UpdateCost(
                optimizer="adamw",
                sharded=sharded,
                tensor_s=max(0.0, many_s - few_s) / (_MANY - _FEW),
                byte_s=max(0.0, large_s - many_s) / (_MANY * (_LARGE - _SMALL) * 4),
            )
        )
    return tuple(found)


def _update(mesh: DeviceMesh, count: int, elements: int, *, sharded: bool) -> Callable[[], object]:
    """Scaling, clipping and one AdamW step of so many local tensors of so many elements."""

    def tensor() -> Tensor:
        local = torch.randn(elements // 16, 16, device=mesh.device_type)
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False) if sharded else local

    held = []
    for number in range(count):
        parameter = nn.Parameter(tensor())
        stepped = stand_in(parameter, None, None)
        stepped.grad = torch.randn_like(stepped)
        entry = HeldParameter(name=str(number), layer=0, parameter=parameter, stepped=stepped, group=None, share=1.0)
        held.append(entry)
    optimizer = torch.optim.AdamW([entry.stepped for entry in held], lr=1e-3)

    def run() -> None:
        scale_gradients(held, 0.999)
        clip_gradients(held, 1.0)
        optimizer.step()

    return run


def zero_costs(mesh: DeviceMesh, links: LinkProfile, shape: GroupShape) -> tuple[ZeroCost, float]:
    """What fully_shard adds to the collectives of a layer, and how compute and collectives slow each other under it.

    Chains of equal layers, cut over all ranks, beside the same chains whole: with one row the difference is all
    communication and copies; with more rows, what of it the compute beside it does not hide says the slowdown, between
    1 (both at once at full speed) and 2 (one after the other). shape: of the group of all ranks.
    """
    device = torch.device(mesh.device_type)
    runs: list[Callable[[], object]] = []
    sizes = []
    for width in _WIDTHS:
        chain = nn.Sequential(*(_unit(width) for _ in range(_UNITS))).to(device)
        sizes.append(sum(p.nbytes for p in chain[0].parameters()))
        cut = copy.deepcopy(chain)
        for unit in cut:
            shard_modules([unit], mesh, keep_unsharded=False, gathered=None)
        shard_root(cut, mesh, set(), gathered=None)
        runs += [_pass(module, width, rows, device) for rows in (1, _ROWS) for module in (chain, cut)]
    times = _rounds(runs, device)
    extra_s = []
    for place, size_bytes in enumerate(sizes):
        whole_s, cut_s = times[4 * place : 4 * place + 2]
        # A layer is gathered for its forward and again for its backward, its gradients are scattered once.
        moved_s = 2 * seconds(links, "all_gather", shape, size_bytes).seconds
        moved_s += seconds(links, "reduce_scatter", shape, size_bytes).seconds
        extra_s.append(max(0.0, (cut_s - whole_s) / _UNITS - moved_s) / 3)
    slope = max(0.0, extra_s[1] - extra_s[0]) / (sizes[1] - sizes[0])
    cost = ZeroCost(call_s=max(0.0, extra_s[0] - slope * sizes[0]), byte_s=slope)
    idle_s, communicating_s, computing_s, together_s = times[4:]
    network_s = max(0.0, communicating_s - idle_s)
    shared_s = min(computing_s, network_s)
    slowdown = (together_s - abs(computing_s - network_s)) / shared_s if shared_s > 0 else 2.0
    return cost, min(2.0, max(1.0, slowdown))


def pipeline_call_s(device: torch.device) -> float:
    """What a micro-batch costs a stage beside its layers: the schedule, autograd, a send and a receive each way.

    The slope over micro-batches of a 1F1B step of stages that compute next to nothing, one on each rank.
    """
    few, many = _MICRO_BATCHES
    few_s, many_s = _rounds([_pipeline_step(count, device) for count in _MICRO_BATCHES], device)
    return max(0.0, many_s - few_s) / (many - few)


def _pipeline_step(count: int, device: torch.device) -> Callable[[], object]:
    from autopar.runtime.pipelining import Pipeline  # half a second, which clusters of one rank need not spend

    rank, world_size = dist.get_rank(), dist.get_world_size()
    shape = (1, 4, 4)
    pipeline = Pipeline(
        modules={rank: _Scale(rank == 0, rank == world_size - 1).to(device)},
        num_stages=world_size,
        schedule="1f1b",
        num_micro_batches=count,
        group=dist.group.WORLD,
        device=device,
        hidden_shape=shape,
        dtype=torch.float32,
    )
    batch = {"x": torch.ones(count, *shape[1:], device=device)}
    return lambda: pipeline.step(batch)


class _Scale(nn.Module):
    """A stage of one parameter."""

    def __init__(self, first: bool, last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.first, self.last = first, last

    def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
        scaled = (x if self.first else hidden) * self.weight
        return scaled.sum() if self.last else scaled


def _unit(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))


def _pass(module: nn.Module, width: int, rows: int, device: torch.device) -> Callable[[], object]:
    batch = torch.randn(rows, width, device=device, requires_grad=True)

    def run() -> None:
        module(batch).sum().backward()
        for parameter in module.parameters():
            parameter.grad = None

    return run


def _rounds(runs: list[Callable[[], Any]], device: torch.device) -> list[float]:
    """Median seconds of each function on the slowest rank; in each round every function has its turn."""
    times: list[list[float]] = [[] for _ in runs]
    for round_ in range(_ROUNDS + 1):
        for number, run in enumerate(runs):
            dist.barrier()
            wait_for(device)
            started = time.perf_counter()
            run()
            wait_for(device)
            if round_:  # the first warms up
                times[number].append(time.perf_counter() - started)
    return [median(slowest(found, device)) for found in times]
