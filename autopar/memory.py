"""What one rank holds at every moment of a step, and bounds on its peak in the form that solvers add up.

`walk` goes through the rank's own list of forwards and backwards, layer by layer, adds and frees named parts and keeps
the highest moment. What it follows is FSDP2 of torch 2.13 with one unit a layer, AdamW in its steady state:

    parameters, gradients, optimizer   the rank's share; gradients appear during the first backward, unit by unit
    unsharded       whole parameters of ZeRO units: ZeRO-3 while they work, ZeRO-2 from forward to backward
    communication   gather buffers (in the forward until the next gather, in the backward prefetched one unit ahead)
                    and the input of the last reduce-scatter (until the next one or the end of the backward);
                    the receive buffers of a stage, which torch's pipelines keep for every micro-batch of a step
    activations     what backwards still need: saved sets, or inputs under recompute, of every live micro-batch
    transient       the activation or gradient on its way, the working set of a layer, whole gradients before their
                    reduce-scatter, the optimizer's temporaries
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from typing import Literal

from autopar.measured import LayerCost
from autopar.plan import RankMemory
from autopar.request import Optimizer
from autopar.strategy import Strategy

OPTIMIZER_COPIES = {"adamw": 2, "sgd": 0}
"""States of the optimizer in copies of the trained parameters (AdamW: both moments; SGD without momentum)."""

OPTIMIZER_TEMPORARIES = {"adamw": 2, "sgd": 1}
"""Temporaries of the optimizer step in copies of its largest parameter (torch's loop over single tensors)."""

PARTS = ("parameters", "gradients", "optimizer", "unsharded", "communication", "activations", "transient")


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One layer on one rank: bytes, whole after tp where not said otherwise; activations of one micro-batch.

    shards: over how many ranks ZeRO cuts it (ZeRO-1 the optimizer's states alone); relayout: its input arrives in
    another layout than its own. The saved set of a selective recompute is what is left of it.
    """

    zero: int
    shards: int
    recompute: bool
    parameter_bytes: int
    trainable_bytes: int
    largest_parameter_bytes: int
    input_bytes: int
    output_bytes: int
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    relayout: bool = False

    @classmethod
    def of(
        cls,
        cost: LayerCost,
        strategy: Strategy,
        samples: float,
        *,
        shared_bytes: int = 0,
        relayout: bool = False,
    ) -> Unit:
        """The unit of a layer; `shared_bytes` of its parameters belong to another unit of the rank (tied weights)."""
        return cls(
            zero=strategy.zero,
            shards=strategy.state_shards,
            recompute=strategy.recompute == "full",
            parameter_bytes=max(0, cost.parameter_bytes - shared_bytes),
            trainable_bytes=max(0, cost.trainable_bytes - shared_bytes),
            largest_parameter_bytes=cost.largest_parameter_bytes,
            input_bytes=ceil(max(0.0, cost.input_bytes.at(samples))),
            output_bytes=ceil(max(0.0, cost.output_bytes.at(samples))),
            saved_bytes=ceil(max(0.0, cost.saved_bytes.at(samples))),
            forward_peak_bytes=ceil(max(0.0, cost.forward_peak_bytes.at(samples))),
            backward_peak_bytes=ceil(max(0.0, cost.backward_peak_bytes.at(samples))),
            relayout=relayout,
        )

    @property
    def gathers(self) -> bool:
        """Whether its parameters are gathered before they work, and its gradients scattered after: ZeRO-2 and 3."""
        return self.zero >= 2

    def share(self, size_bytes: int) -> int:
        """The rank's share of parameters or gradients."""
        return -(-size_bytes // self.shards) if self.gathers else size_bytes

    def optimizer_share(self, size_bytes: int) -> int:
        """The rank's share of the optimizer's states."""
        return -(-size_bytes // self.shards)

    @property
    def kept_bytes(self) -> int:
        """What a live micro-batch keeps from this layer's forward to its backward."""
        return self.input_bytes if self.recompute else self.saved_bytes

    @cached_property
    def later_backward_peak_bytes(self) -> int:
        """The working set of a backward that adds to gradients that already exist: one new gradient at a time.

        Saved sets go as gradients come, both about evenly, so the trace's peak lies at one of the two ends. Measured
        on a Llama block whose saved set outweighs its parameters: the full peak, not the peak less the gradients.
        """
        grads = self.trainable_bytes
        ends = self.backward_peak_bytes - grads + max(self.saved_bytes, min(self.largest_parameter_bytes, grads))
        return min(self.backward_peak_bytes, max(self.saved_bytes + self.output_bytes, ends))


@dataclass(kw_only=True)
class _Ledger:
    """Live bytes by part, and a copy of them at the highest moment."""

    live: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    total_bytes: int = 0
    peak_bytes: int = -1
    peak: dict[str, int] = field(default_factory=dict)

    def add(self, part: str, size_bytes: int) -> None:
        self.live[part] += size_bytes
        self.total_bytes += size_bytes

    def look(self, transient_bytes: int, communication_bytes: int = 0) -> None:
        """Note this moment, with so much more on top."""
        moment_bytes = self.total_bytes + transient_bytes + communication_bytes
        if moment_bytes > self.peak_bytes:
            self.peak_bytes = moment_bytes
            self.peak = dict(self.live)
            self.peak["transient"] += transient_bytes
            self.peak["communication"] += communication_bytes


def walk(
    units: Sequence[Unit],
    order: Sequence[tuple[Literal["F", "B"], int]],
    *,
    optimizer: Optimizer,
    buffers_bytes: int = 0,
    held_bytes: int = 0,
) -> RankMemory:
    """The peak of one rank over a step and its parts, in O(units): a repeated action that finds what it left is not
    walked again, whatever the number of micro-batches.

    units: the layers of its stage; order: its forwards and backwards; buffers_bytes: what the stage keeps for the
    whole step to receive into; held_bytes: what each live micro-batch holds at the ends of the stage beside the
    layers' own saved sets (negative when a saved input lies in a receive buffer).
    """
    ledger = _Ledger()
    state = _State(ledger=ledger, units=units, optimizer=optimizer)
    for unit in units:
        ledger.add("parameters", unit.share(unit.parameter_bytes))
        ledger.add("optimizer", unit.optimizer_share(unit.trainable_bytes) * OPTIMIZER_COPIES[optimizer])
    ledger.add("communication", buffers_bytes)
    ledger.look(0)
    phases = re.finditer("(?:BF)+|F+|B+", "".join(kind for kind, _ in order))
    for phase in (match[0] for match in phases):
        pattern = "BF" if phase.startswith("BF") else phase[0]
        _repeat(state, pattern, len(phase) // len(pattern), held_bytes)
    largest_bytes = max(unit.optimizer_share(unit.largest_parameter_bytes) for unit in units)
    ledger.look(largest_bytes * OPTIMIZER_TEMPORARIES[optimizer])
    return RankMemory(peak_bytes=ledger.peak_bytes, parts_bytes=ledger.peak)


def _repeat(state: _State, pattern: str, times: int, held_bytes: int) -> None:
    """Walk a pattern of forwards and backwards so many times; after two alike rounds the rest is known.

    Alike rounds differ in the activations alone, by as much each time: the highest moment of all is in the last of
    them when these grow, in the first when not.
    """
    ledger, done = state.ledger, 0
    while done < times:
        before, signature = ledger.live["activations"], state.signature
        for kind in pattern:
            if kind == "F":
                state.forward()
                ledger.add("activations", held_bytes)
                ledger.look(0)
            else:
                state.backward()
                ledger.add("activations", -held_bytes)
        done += 1
        if signature == state.signature:
            growth_bytes = ledger.live["activations"] - before
            left = times - done - (1 if growth_bytes > 0 else 0)
            if left > 0:
                ledger.add("activations", left * growth_bytes)
                done += left


@dataclass(kw_only=True)
class _State:
    """The moments of one forward and one backward of a stage."""

    ledger: _Ledger
    units: Sequence[Unit]
    optimizer: Optimizer
    graded: set[int] = field(default_factory=set)
    unsharded: set[int] = field(default_factory=set)

    @property
    def signature(self) -> tuple[object, ...]:
        """All that the next action depends on but the activations, by which it adds the same anyway."""
        others = tuple(size for part, size in self.ledger.live.items() if part != "activations")
        return others, frozenset(self.graded), frozenset(self.unsharded)

    def forward(self) -> None:
        ledger, buffer_bytes = self.ledger, 0
        for i, unit in enumerate(self.units):
            if unit.relayout:
                ledger.look(self._before(i) + unit.input_bytes)
            if unit.gathers and i not in self.unsharded:
                ledger.look(unit.input_bytes, buffer_bytes + unit.parameter_bytes)
                buffer_bytes = unit.parameter_bytes
                self._unshard(i)
            ledger.look(unit.input_bytes + unit.forward_peak_bytes, buffer_bytes)
            ledger.add("activations", unit.kept_bytes)
            ledger.look(unit.output_bytes, buffer_bytes)
            if unit.zero == 3:
                self._reshard(i)

    def backward(self) -> None:
        ledger, reduced_bytes, prefetched = self.ledger, 0, -1
        for i in reversed(range(len(self.units))):
            unit = self.units[i]
            grads = unit.trainable_bytes
            if unit.gathers:
                # ZeRO-2 too, where an earlier backward of another live micro-batch has resharded it.
                if i not in self.unsharded:
                    self._unshard(i)
                    ledger.look(unit.output_bytes, reduced_bytes + unit.parameter_bytes)
                prefetched = self._next_sharded(i)
            buffers = reduced_bytes + (self.units[prefetched].parameter_bytes if prefetched >= 0 else 0)
            if unit.recompute:
                ledger.look(unit.output_bytes + unit.forward_peak_bytes, buffers)
            later = not unit.gathers and i in self.graded
            work = unit.later_backward_peak_bytes if later else unit.backward_peak_bytes
            ledger.look(max(0, unit.input_bytes + work - unit.kept_bytes), buffers)
            ledger.add("activations", -unit.kept_bytes)
            if not unit.gathers and i not in self.graded:
                ledger.add("gradients", grads)
            if unit.gathers:
                self._reshard(i)
                buffers += grads - reduced_bytes
                reduced_bytes = grads
                ledger.look(unit.input_bytes + grads, buffers)
                if i in self.graded:
                    ledger.look(unit.input_bytes + unit.share(grads), buffers)
                else:
                    ledger.add("gradients", unit.share(grads))
            self.graded.add(i)
            ledger.look(unit.input_bytes, buffers)
            if unit.relayout:
                ledger.look(unit.input_bytes + self._before(i), buffers)

    def _unshard(self, i: int) -> None:
        self.unsharded.add(i)
        self.ledger.add("unsharded", self.units[i].parameter_bytes)

    def _reshard(self, i: int) -> None:
        self.unsharded.remove(i)
        self.ledger.add("unsharded", -self.units[i].parameter_bytes)

    def _before(self, i: int) -> int:
        return self.units[i - 1].output_bytes if i else 0

    def _next_sharded(self, i: int) -> int:
        """The ZeRO unit that is prefetched while unit i works backwards: the one before, if it must be gathered."""
        before = next((j for j in reversed(range(i)) if self.units[j].gathers), -1)
        return before if before not in self.unsharded else -1


def edge_bytes(size_bytes: int, *, stage: int, pp: int, micro_batches: int) -> tuple[int, int]:
    """What a stage keeps at its two ends, for one micro-batch of `size_bytes` on a rank at the boundary.

    First what it keeps for the whole step: one buffer a micro-batch to receive the activation into, one for the
    gradient (torch.distributed.pipelining allocates all of them at once), and the output that was sent last, which the
    schedule holds until the next; then what each live micro-batch keeps: its output.
    """
    before, behind = int(stage > 0), int(stage < pp - 1)
    return size_bytes * (micro_batches * (before + behind) + behind), size_bytes * behind


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
    before_bytes, after_bytes: the largest parameters of a ZeRO unit before and after this one in the stage, whose
    buffers may be alive while this one works; arriving_bytes: its input in the layout of the layer before.
    """
    grads, kept, moving = unit.trainable_bytes, unit.kept_bytes, unit.input_bytes
    whole = unit.parameter_bytes if unit.gathers else 0
    resident = whole if unit.zero == 3 else 0
    counted = unit.share(grads) if steady else max(0, unit.share(grads) - kept)
    state = unit.share(unit.parameter_bytes) + unit.optimizer_share(grads) * OPTIMIZER_COPIES[optimizer] + counted
    state += whole - resident
    # While the layer itself works backwards its gradients are there beside its saved sets.
    own = unit.share(grads) - counted
    around = before_bytes + after_bytes
    work = max(unit.backward_peak_bytes, unit.later_backward_peak_bytes + (0 if unit.gathers else grads))
    moments = [
        arriving_bytes + moving + around + own,
        moving + before_bytes + whole,
        max(0, moving + unit.forward_peak_bytes - kept) + max(whole, before_bytes) + resident,
        unit.output_bytes + max(whole, before_bytes) + resident,
        unit.output_bytes + after_bytes + whole + resident + own,
        max(0, moving + work - kept - (0 if unit.gathers else grads)) + around + resident + own,
        moving + before_bytes + (2 * grads if unit.gathers else after_bytes) + own,
        unit.optimizer_share(unit.largest_parameter_bytes) * OPTIMIZER_TEMPORARIES[optimizer],
    ]
    if unit.recompute:
        moments.append(unit.output_bytes + unit.forward_peak_bytes + around + resident + own)
    return Bound(state_bytes=state, saved_bytes=kept, transient_bytes=max(moments))


def lower_bound(unit: Unit, *, optimizer: Optimizer, steady: bool, last: bool) -> Bound:
    """A bound that `walk` never goes below: what lives when a backward begins with the most micro-batches in flight.

    steady: that happens again after the first backward, so that all gradients exist by then; last: the unit ends the
    chain, so that its own backward is that moment.
    """
    grads = unit.trainable_bytes
    state = unit.share(unit.parameter_bytes) + unit.optimizer_share(grads) * OPTIMIZER_COPIES[optimizer]
    state += unit.share(grads) * int(steady)
    state += unit.parameter_bytes if unit.zero == 2 else 0
    transient = 0
    if last:
        work = unit.later_backward_peak_bytes if steady and not unit.gathers else unit.backward_peak_bytes
        transient = max(0, unit.input_bytes + work - unit.kept_bytes) + (unit.parameter_bytes if unit.zero == 3 else 0)
    return Bound(state_bytes=state, saved_bytes=unit.kept_bytes, transient_bytes=transient)
