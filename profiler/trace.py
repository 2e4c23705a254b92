"""Bytes and floating-point operations of one layer, from running it once under trackers. No clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from autopar.measured import Line
from autopar.runtime.flash import FLASH_FOR_CPU
from autopar.runtime.tracker import LiveBytes, storage_bytes, storage_key, tensors_of

_GROUPED_PRODUCT = torch.ops.aten._grouped_mm


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerCall:
    """One layer with inputs of some number of samples.

    hidden: the activation that comes in (None: the layer takes only the batch); sides: what else it reads and what
    exists once however many layers read it (masks, rotary tables, the batch); run(hidden): the activation that goes
    out, or the sum of the losses.
    """

    module: nn.Module
    hidden: Tensor | None
    sides: Any
    run: Callable[[Tensor | None], Tensor]


@dataclass(frozen=True, kw_only=True)
class LayerTrace:
    """What one forward and backward holds, in bytes, and the FLOPs of the forward; fields as in LayerCost."""

    input_bytes: int
    output_bytes: int
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    later_backward_peak_bytes: int
    flops: int


def trace(call: LayerCall, *, shared_bytes: int = 0) -> LayerTrace:
    """The trace of one layer. Gradients of its parameters are cleared before and after.

    shared_bytes: side inputs that live during both peaks although this call does not hold them. The peaks count the
    side inputs (but never the batch, the incoming activation or the parameters), the saved set does not: they exist
    once, and only one layer is at its peak at a time. Cost: four forwards and two backwards.
    """
    found = _peaks(call, shared_bytes)
    saved_bytes, flops = _saved(call)
    call.module.zero_grad(set_to_none=True)
    return replace(found, saved_bytes=saved_bytes, flops=flops)


def trace_recomputed(call: LayerCall, *, shared_bytes: int = 0) -> LayerTrace:
    """As `trace`, without FLOPs, of a layer that computes again in its backward what it does not keep itself.

    What it keeps is seen as what lives between forward and backward, its input included.
    """
    _peaks(call, shared_bytes)  # what is kept of a first forward may not be what is kept later
    return _peaks(call, shared_bytes)


def _peaks(call: LayerCall, shared_bytes: int) -> LayerTrace:
    with torch.no_grad():
        call.run(call.hidden)  # what runs for the first time may compile, and that is not the layer's own memory
    call.module.zero_grad(set_to_none=True)
    device = next(call.module.parameters()).device
    weight = torch.zeros((), device=device, requires_grad=True)
    with LiveBytes().adopt(call.module, call.hidden, call.sides, weight) as live:
        entry_bytes = live.current_bytes
        output = run_inside_model(call, weight)
        output_bytes = output.untyped_storage().nbytes() if output.dim() else output.nbytes
        forward_peak_bytes = live.peak_bytes - entry_bytes
        ending = _Gradient.apply(output)
        del output
        kept_bytes = live.current_bytes - entry_bytes
        backward_peak_bytes = _backward_peak_bytes(ending, live) - entry_bytes
        entry_bytes = live.current_bytes  # with the gradients
        ending = _Gradient.apply(run_inside_model(call, weight))
        later_bytes = _backward_peak_bytes(ending, live) - entry_bytes
    call.module.zero_grad(set_to_none=True)
    input_bytes = storage_bytes(call.hidden) if call.hidden is not None else storage_bytes(call.sides)
    return LayerTrace(
        input_bytes=input_bytes,
        output_bytes=output_bytes,
        saved_bytes=input_bytes + kept_bytes,
        forward_peak_bytes=forward_peak_bytes + shared_bytes,
        backward_peak_bytes=backward_peak_bytes + shared_bytes,
        later_backward_peak_bytes=later_bytes + shared_bytes,
        flops=0,
    )


def _backward_peak_bytes(ending: Tensor, live: LiveBytes) -> int:
    """The highest live bytes during the backward from the end of a graph."""
    live.reset_peak()
    ending.backward()
    return live.peak_bytes


def in_graph(tensor: Tensor, weight: Tensor) -> Tensor:
    """A tensor as the middle of a graph; weight: any scalar that requires a gradient."""
    out: Tensor = _Activation.apply(tensor, weight)
    return out


def tie(tensor: Tensor, others: Sequence[Tensor]) -> Tensor:
    """The same tensor; its backward also hands the others gradients of zero."""
    out: Tensor = _Tied.apply(tensor, *others)
    return out


def run_inside_model(call: LayerCall, weight: Tensor) -> Tensor:
    """What the layer returns, as a node in the middle of a graph (`weight` is any scalar that requires a gradient)."""
    hidden = None if call.hidden is None else _Activation.apply(call.hidden, weight)
    output = call.run(hidden)
    if not output.requires_grad:
        output = _Activation.apply(output, weight)
    return output


def _saved(call: LayerCall) -> tuple[int, int]:
    """Bytes that autograd keeps (each storage once; no parameters, no side inputs), and FLOPs of the forward."""
    known = {storage_key(tensor.untyped_storage()) for tensor in tensors_of([call.module, call.sides])}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        key = storage_key(tensor.untyped_storage())
        if key not in known:
            kept[key] = tensor.detach()
        return tensor.detach()

    weight = torch.zeros((), device=next(call.module.parameters()).device, requires_grad=True)
    missing = {FLASH_FOR_CPU: _attention_flops, _GROUPED_PRODUCT: _grouped_flops}
    counter = FlopCounterMode(display=False, custom_mapping=missing)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), counter:
        output = run_inside_model(call, weight)
    del output
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), counter.get_total_flops()


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Torch counts every kernel of attention but this one; like it, the masked half is counted."""
    return int(sdpa_flop_count(query, key, value))


def _grouped_flops(rows: Any, matrices: Any, *args: Any, **kwargs: Any) -> int:
    """Each row meets one matrix of the group (rows x inner, groups x inner x outer), which torch does not count."""
    return int(2 * rows[-2] * matrices[-2] * matrices[-1])


class _Activation(torch.autograd.Function):
    """The activation as a layer in the middle of a model gets it: no leaf, its gradient goes on and is freed."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *others: Tensor) -> Tensor:
        ctx.likes = [(x.shape, x.dtype, x.device) for x in others]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], *(torch.zeros(s, dtype=dtype, device=device) for s, dtype, device in ctx.likes)


class _Gradient(torch.autograd.Function):
    """A scalar whose backward hands in a gradient as the next layer would: nobody else holds it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.shape, ctx.dtype, ctx.device = output.shape, output.dtype, output.device
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return torch.ones(ctx.shape, dtype=ctx.dtype, device=ctx.device)


def fit(samples: Sequence[int], values: Sequence[float]) -> Line:
    """The line through the first and the last of the values: exact where they lie on a line, as bytes and FLOPs do.

    A peak is the largest of several lines, thus convex: between the ends the fitted line is then never too low.
    With one value it is proportional. Raises ValueError for no values.
    """
    if not values or len(values) != len(samples):
        raise ValueError("fit needs as many values as samples, at least one")
    first, last = samples[0], samples[-1]
    if first == last:
        return Line(fixed=0.0, per_sample=values[0] / first)
    slope = (values[-1] - values[0]) / (last - first)
    return Line(fixed=values[0] - slope * first, per_sample=slope)
