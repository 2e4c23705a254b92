"""Seconds of layers, on all ranks of a machine at once: processes that share it slow each other."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.profiler.clock import slowest, wait_for
from autopar.profiler.found import LayerSeconds
from autopar.profiler.trace import LayerCall, run_inside_model

_BURST_S = 0.025
_MOST_REPEATS = 50


def choose_repeats(call: LayerCall) -> int:
    """How often a layer runs forward and backward in about 25 ms on the slowest rank of the process group (if any)."""
    weight = _weight(call)
    grad = torch.ones_like(run_inside_model(call, weight))
    _runs(call, weight, grad, 1)
    seconds = _runs(call, weight, grad, 1)
    (once_s,) = slowest([seconds.forward_s + seconds.backward_s], _device(call))
    return min(_MOST_REPEATS, max(1, round(_BURST_S / once_s)))


def time_burst(call: LayerCall, repeats: int) -> LayerSeconds:
    """Mean seconds of a layer's forward and backward over a burst that all ranks begin together, on the last to end.

    Single runs would not do: where ranks outnumber cores, a run shorter than the scheduler's time slice seems to have
    a core for itself. Nor would a rank's own burst: ranks that end early had more than their share of the cores.
    """
    weight = _weight(call)
    grad = torch.ones_like(run_inside_model(call, weight))
    if dist.is_initialized():
        dist.barrier()
    own = _runs(call, weight, grad, repeats)
    call.module.zero_grad(set_to_none=True)
    own_s = own.forward_s + own.backward_s
    (last_s,) = slowest([own_s], _device(call))
    return LayerSeconds(forward_s=own.forward_s * last_s / own_s, backward_s=own.backward_s * last_s / own_s)


def _weight(call: LayerCall) -> Tensor:
    return torch.zeros((), device=_device(call), requires_grad=True)


def _device(call: LayerCall) -> torch.device:
    return next(call.module.parameters()).device


def _runs(call: LayerCall, weight: Tensor, grad: Tensor, repeats: int) -> LayerSeconds:
    device = _device(call)
    forward_s = backward_s = 0.0
    for _ in range(repeats):
        call.module.zero_grad(set_to_none=True)
        wait_for(device)
        started = time.perf_counter()
        output = run_inside_model(call, weight)
        wait_for(device)
        between = time.perf_counter()
        torch.autograd.backward(output, grad)
        wait_for(device)
        ended = time.perf_counter()
        forward_s += between - started
        backward_s += ended - between
    return LayerSeconds(forward_s=forward_s / repeats, backward_s=backward_s / repeats)
