"""Seconds of layers, on all ranks of a machine at once: processes that share it slow each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.profiler.found import LayerSeconds
from autopar.profiler.trace import LayerCall, run_inside_model

_BURST_S = 0.025
_BURSTS = 3
_MOST_REPEATS = 50


def time_call(call: LayerCall) -> LayerSeconds:
    """Seconds of a layer's forward and backward, while every rank of the process group (if any) runs the same.

    Medians over bursts; a burst is the mean over so many repeats as take about 25 ms. Single runs would not do: where
    ranks outnumber cores, a run shorter than the scheduler's time slice seems to have a core for itself.
    """
    weight = torch.zeros((), device=next(call.module.parameters()).device, requires_grad=True)
    wait = torch.cuda.synchronize if weight.is_cuda else _nothing
    grad = torch.ones_like(run_inside_model(call, weight))
    _barrier()
    started = time.perf_counter()
    _burst(call, weight, grad, 1, wait)
    once_s = _slowest(time.perf_counter() - started)
    repeats = min(_MOST_REPEATS, max(1, round(_BURST_S / once_s)))
    bursts = []
    for _ in range(_BURSTS):
        _barrier()
        bursts.append(_burst(call, weight, grad, repeats, wait))
    call.module.zero_grad(set_to_none=True)
    return LayerSeconds(forward_s=median(b[0] for b in bursts), backward_s=median(b[1] for b in bursts))


def _burst(
    call: LayerCall, weight: Tensor, grad: Tensor, repeats: int, wait: Callable[[], None]
) -> tuple[float, float]:
    forward_s = backward_s = 0.0
    for _ in range(repeats):
        call.module.zero_grad(set_to_none=True)
        wait()
        started = time.perf_counter()
        output = run_inside_model(call, weight)
        wait()
        between = time.perf_counter()
        torch.autograd.backward(output, grad)
        wait()
        ended = time.perf_counter()
        forward_s += between - started
        backward_s += ended - between
    return forward_s / repeats, backward_s / repeats


def _nothing() -> None:
    pass


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _slowest(seconds: float) -> float:
    """The largest of all ranks' seconds, so that all ranks repeat equally often."""
    if not dist.is_initialized():
        return seconds
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)
