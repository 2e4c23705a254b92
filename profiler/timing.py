"""Seconds of layers, on all ranks of a machine at once: processes that share it slow each other."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.profiler.found import LayerSeconds
from autopar.profiler.trace import LayerCall, run_inside_model

_BURST_S = 0.025
_MOST_REPEATS = 50


def choose_repeats(call: LayerCall) -> int:
    """How often a layer runs forward and backward in about 25 ms on the slowest rank of the process group (if any)."""
    weight, wait = _weight(call), _waiting(call)
    grad = torch.ones_like(run_inside_model(call, weight))
    _runs(call, weight, grad, 1, wait)
    seconds = _runs(call, weight, grad, 1, wait)
    once_s = _slowest(seconds.forward_s + seconds.backward_s)
    return min(_MOST_REPEATS, max(1, round(_BURST_S / once_s)))


def time_burst(call: LayerCall, repeats: int) -> LayerSeconds:
    """Mean seconds of a layer's forward and backward over a burst that all ranks begin together.

    Single runs would not do: where ranks outnumber cores, a run shorter than the scheduler's time slice seems to have
    a core for itself.
    """
    weight, wait = _weight(call), _waiting(call)
    grad = torch.ones_like(run_inside_model(call, weight))
    if dist.is_initialized():
        dist.barrier()
    seconds = _runs(call, weight, grad, repeats, wait)
    call.module.zero_grad(set_to_none=True)
    return seconds


def _weight(call: LayerCall) -> Tensor:
    return torch.zeros((), device=next(call.module.parameters()).device, requires_grad=True)


def _waiting(call: LayerCall) -> Callable[[], None]:
    return torch.cuda.synchronize if next(call.module.parameters()).is_cuda else _nothing


def _nothing() -> None:
    pass


def _runs(call: LayerCall, weight: Tensor, grad: Tensor, repeats: int, wait: Callable[[], None]) -> LayerSeconds:
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
    return LayerSeconds(forward_s=forward_s / repeats, backward_s=backward_s / repeats)


def _slowest(seconds: float) -> float:
    """The largest of all ranks' seconds, so that all ranks repeat equally often."""
    if not dist.is_initialized():
        return seconds
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    value = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)
