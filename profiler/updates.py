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
from autopar.profiler.clock import mean, slowest, wait_for
from autopar.runtime.gradients import HeldParameter, clip_gradients, scale_gradients
from autopar.runtime.stepping import stand_in
from autopar.runtime.zero import shard_modules, shard_root

_ROUNDS = 5
_FEW, _MANY, _SMALL, _LARGE = 4, 32, 64, 1 << 16
_UNITS, _WIDTHS, _ROWS = 3, (64, 384), 48
_MICRO_BATCHES = (8, 32)
_ACTIVATION = (1, 64, 256)


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

    The slope over micro-batches of a 1F1B step, one stage on each rank, less what the same stages take without a
    pipeline. Where ranks share cores, all their threads count, and no waiting: that is processor time, in seconds of a
    layer that runs while all ranks compute. Single waits depend on who holds the cores, and say nothing of the work.
    """
    few, many = _MICRO_BATCHES
    on_cpu = device.type == "cpu"
    stage = _Stage(device)
    runs = [stage.pipeline(few), stage.pipeline(many), stage.alone(many - few)]
    walls = _rounds(runs, device)
    few_s, many_s, alone_s = _rounds(runs, device, time.process_time, mean) if on_cpu else walls
    return max(0.0, many_s - few_s - alone_s) / (many - few) * walls[2] / alone_s


class _Stage:
    """A stage of the rank's own, to be run by itself or by a pipeline over all ranks."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._rank, self._stages = device, dist.get_rank(), dist.get_world_size()
        self._module = _Layers(first=self._rank == 0, last=self._rank == self._stages - 1).to(device)

    def pipeline(self, micro_batches: int) -> Callable[[], object]:
        """A step of so many micro-batches."""
        from autopar.runtime.pipelining import Pipeline  # half a second, which clusters of one rank need not spend

        pipeline = Pipeline(
            modules={self._rank: self._module},
            num_stages=self._stages,
            schedule="1f1b",
            num_micro_batches=micro_batches,
            group=dist.group.WORLD,
            device=self._device,
            boundaries=[(torch.empty(_ACTIVATION, device="meta", requires_grad=True),)] * (self._stages - 1),
        )
        batch = {"x": self._batch(micro_batches)}
        return lambda: pipeline.step(batch)

    def alone(self, micro_batches: int) -> Callable[[], object]:
        """Forward and backward of so many micro-batches."""
        batch = self._batch(1)
        hidden = batch.clone().requires_grad_()

        def run() -> None:
            for _ in range(micro_batches):
                output = self._module(hidden, x=batch)
                output.backward(torch.ones_like(output))

        return run

    def _batch(self, samples: int) -> Tensor:
        return torch.ones(samples, *_ACTIVATION[1:], device=self._device)


class _Layers(nn.Module):
    """Some layers that keep a core busy for longer than a message takes."""

    def __init__(self, *, first: bool, last: bool) -> None:
        super().__init__()
        self.layers = _unit(_ACTIVATION[-1])
        self.first, self.last = first, last

    def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x if self.first else hidden)
        return out.sum() if self.last else out


def _unit(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))


def _pass(module: nn.Module, width: int, rows: int, device: torch.device) -> Callable[[], object]:
    batch = torch.randn(rows, width, device=device, requires_grad=True)

    def run() -> None:
        module(batch).sum().backward()
        for parameter in module.parameters():
            parameter.grad = None

    return run


def _rounds(
    runs: list[Callable[[], Any]],
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
    over_ranks: Callable[[list[float], torch.device], list[float]] = slowest,
) -> list[float]:
    """Median seconds of each function on the slowest rank; in each round every function has its turn."""
    times: list[list[float]] = [[] for _ in runs]
    for round_ in range(_ROUNDS + 1):
        for number, run in enumerate(runs):
            dist.barrier()
            wait_for(device)
            started = clock()
            run()
            wait_for(device)
            if round_:  # the first warms up
                times[number].append(clock() - started)
    return [median(over_ranks(found, device)) for found in times]
