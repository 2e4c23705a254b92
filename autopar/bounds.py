"""Bounds on the peak of a rank in the form that solvers add up: over and under `autopar.memory.walk`."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.comm import BUCKET_BYTES
from autopar.layer_memory import Unit
from autopar.request import OFFLOADED, Optimizer


@dataclass(frozen=True, kw_only=True)
class Bound:
    """A bound on the peak as solvers add it up: sum of (state + in-flight * saved) plus the largest transient."""

    state_bytes: int
    saved_bytes: int
    transient_bytes: int


def upper_bound(
    unit: Unit,
    *,
    optimizer: Optimizer,
    steady: bool,
    before_bytes: int = 0,
    after_bytes: int = 0,
    arriving_bytes: int = 0,
) -> Bound:
    """A bound that `walk` never exceeds, whatever the strategies of the other layers of the stage.

    steady: as in `lower_bound`; otherwise a layer's gradients only come as its saved sets go, and the larger counts.
    before_bytes, after_bytes: the largest buffers of a ZeRO unit before and after this one in the stage, which
    may be alive while this one works; arriving_bytes: its input in the layout of the layer before.
    """
    grads, kept, moving = unit.gradient_bytes, unit.kept_bytes, unit.input_bytes
    whole = unit.parameter_bytes if unit.gathers else 0
    resident = whole if unit.zero == 3 else 0
    counted = unit.share(grads) if steady else max(0, unit.share(grads) - kept)
    state = unit.held_bytes(optimizer) + unit.optimizer_bytes(optimizer) + counted
    state += whole - resident
    if unit.zero == 1:
        # At the end of the step buckets of gradients lie beside the whole ones, and nothing is saved. A small layer
        # may share its bucket with one of fewer shards, at the least 2.
        copied = 0 if grads >= BUCKET_BYTES else grads + -(-grads // 2)
        state += max(0, grads + copied - kept - counted)
    if unit.summed and grads < 2 * BUCKET_BYTES:
        state += max(0, 2 * grads - kept - counted)
    # While the layer itself works backwards its gradients are there beside its saved sets.
    own = unit.share(grads) - counted
    around = before_bytes + after_bytes
    work = max(unit.first_backward_peak_bytes, unit.later_backward_peak_bytes + (0 if unit.gathers else grads))
    moments = [
        arriving_bytes + moving + around + own,
        moving + before_bytes + whole,
        max(0, moving + unit.forward_peak_bytes - kept) + max(whole, before_bytes) + resident,
        unit.output_bytes + max(whole, before_bytes) + resident,
        unit.output_bytes + after_bytes + whole + resident + own,
        max(0, moving + work - kept - (0 if unit.gathers else grads)) + around + resident + own,
        moving + before_bytes + (grads + unit.trainable_bytes if unit.gathers else after_bytes) + own,
        unit.temporary_bytes(optimizer),
    ]
    if unit.zero == 1 and grads >= BUCKET_BYTES:
        moments.append(2 * (BUCKET_BYTES + BUCKET_BYTES // unit.shards))
    if unit.summed and grads >= 2 * BUCKET_BYTES:
        moments.append(2 * BUCKET_BYTES)
    if optimizer in OFFLOADED.values():
        moments.append(BUCKET_BYTES)
    if unit.recompute:
        moments.append(unit.output_bytes + unit.forward_peak_bytes + around + resident + own)
    return Bound(state_bytes=state, saved_bytes=kept, transient_bytes=max(moments))


def lower_bound(unit: Unit, *, optimizer: Optimizer, steady: bool, last: bool) -> Bound:
    """A bound that `walk` never goes below: what lives when a backward begins with the most micro-batches in flight.

    steady: that happens again after the first backward, so that all gradients exist by then; last: the unit ends the
    chain, so that its own backward is that moment.
    """
    state = (
        unit.held_bytes(optimizer) + unit.optimizer_bytes(optimizer) + unit.share(unit.gradient_bytes) * int(steady)
    )
    state += unit.parameter_bytes if unit.zero == 2 else 0
    transient = 0
    if last:
        work = unit.later_backward_peak_bytes if steady and not unit.gathers else unit.first_backward_peak_bytes
        transient = max(0, unit.input_bytes + work - unit.kept_bytes) + (unit.parameter_bytes if unit.zero == 3 else 0)
    return Bound(state_bytes=state, saved_bytes=unit.kept_bytes, transient_bytes=transient)
