"""Seconds of layers, on all ranks of a machine at once: processes that share it slow each other."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.profiler.clock import slowest, wait_for
from autopar.profiler.found import LayerSeconds
from autopar.profiler.trace import LayerCall, run_inside_model

_BURST_S = 0.05
_MOST_REPEATS = 50


def choose_repeats(call: LayerCall) -> int:
    """How often a layer runs forward and backward in about 50 ms on the slowest rank of the process group (if any)."""
    weight = _weight(call)
    grad = torch.ones_like(run_inside_model(call, weight))
    _runs([call], weight, grad, 1)
    seconds = _runs([call], weight, grad, 1)
    (once_s,) = slowest([seconds.forward_s + seconds.backward_s], _device(call))
    return min(_MOST_REPEATS, max(1, round(_BURST_S / once_s)))


def time_burst(calls: Sequence[LayerCall], repeats: int) -> LayerSeconds:
    """Mean seconds of a layer's forward and backward over a burst that all ranks begin together, on the last to end.

    calls: equal layers, which take turns.
    Single runs would not do: where ranks outnumber cores, a run shorter than the scheduler's time slice seems to have
    a core for itself. Nor would a rank's own burst: ranks that end early had more than their share of the cores, and
    those that begin late waited for them. All processes of a machine read one clock; those of several do not, and
    then the longest burst counts.
    """
    weight = _weight(calls[0])
    grad = torch.ones_like(run_inside_model(calls[0], weight))
    if dist.is_initialized():
        dist.barrier()
    began = time.perf_counter()
    own = _runs(calls, weight, grad, repeats)
    ended = time.perf_counter()
    last, first, longest_s = slowest([ended, -began, ended - began], _device(calls[0]))
    burst_s = last + first if last + first < 2 * longest_s else longest_s
    share = burst_s / repeats / (own.forward_s + own.backward_s)
    return LayerSeconds(forward_s=own.forward_s * share, backward_s=own.backward_s * share)


def _weight(call: LayerCall) -> Tensor:
    return torch.zeros((), device=_device(call), requires_grad=True)


def _device(call: LayerCall) -> torch.device:
    return next(call.module.parameters()).device


def _runs(calls: Sequence[LayerCall], weight: Tensor, grad: Tensor, repeats: int) -> LayerSeconds:
    device = _device(calls[0])
    forward_s = backward_s = 0.0
    for number in range(repeats):
        call = calls[number % len(calls)]
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
        call.module.zero_grad(set_to_none=True)
    return LayerSeconds(forward_s=forward_s / repeats, backward_s=backward_s / repeats)
