"""What one rank holds at every moment of a step.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.comm import BUCKET_BYTES
from autopar.layer_memory import Unit
from autopar.ledger import Ledger
from autopar.orders import Action, Kind
from autopar.plan import RankMemory
from autopar.request import OFFLOADED, Optimizer


def walk(
    units: Sequence[Unit],
    order: Sequence[Action],
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
    stage = order[0][1] if order else 0
    return walk_stages(
        {stage: units}, order, optimizer=optimizer, buffers_bytes=buffers_bytes, held_bytes={stage: held_bytes}
    )


def walk_stages(
    stages: Mapping[int, Sequence[Unit]],
    order: Sequence[Action],
    *,
    optimizer: Optimizer,
    buffers_bytes: int = 0,
    held_bytes: Mapping[int, int] | None = None,
    moments: list[RankMemory] | None = None,
    most_bytes: int | None = None,
    working: list[int | None] | None = None,
) -> RankMemory:
    """`walk` for a rank with any stages, in O(units) for one stage, otherwise in O(units * micro-batches).

    A backward in two parts keeps the saved set and the gradients between layers until its second part; the first
    stage works in the second part only. moments: gets the highest moment of each action, and that of the optimizer;
    most_bytes: OverBudgetError at the first moment above it; working: gets the place in its stage of the layer that
    works at the peak, None where none does.
    """
    ledger = Ledger(recording=moments is not None, most_bytes=most_bytes)
    states = {stage: _State(ledger=ledger, units=units, optimizer=optimizer) for stage, units in stages.items()}
    every = [unit for units in stages.values() for unit in units]
    for unit in every:
        ledger.add("parameters", unit.held_bytes(optimizer))
        ledger.add("optimizer", unit.optimizer_bytes(optimizer))
    ledger.add("communication", buffers_bytes)
    ledger.look(0)
    held_bytes = held_bytes or {}
    if len(stages) == 1 and moments is None and all(kind in "FB" for kind, _, _ in order):
        stage = next(iter(stages))
        phases = re.finditer("(?:BF)+|F+|B+", "".join(action[0] for action in order))
        for phase in (match[0] for match in phases):
            pattern = "BF" if phase.startswith("BF") else phase[0]
            _repeat(states[stage], pattern, len(phase) // len(pattern), held_bytes.get(stage, 0))
    else:
        for kind, stage, _ in order:
            ledger.moment = None
            _act(states[stage], kind, held_bytes.get(stage, 0), first=stage == 0)
            if moments is not None:
                ledger.look(0)
                moments.append(_moment(ledger))
    ledger.moment = ledger.place = None
    # ZeRO-1 sums its gradients in buckets: a copy beside the whole ones, which then go while its rows come.
    scattered = [unit for unit in every if unit.zero == 1]
    rows_bytes = sum(unit.optimizer_share(unit.gradient_bytes) for unit in scattered)
    ledger.look(0, _bucket_bytes(scattered, sum(unit.gradient_bytes for unit in scattered), 1))
    ledger.add("gradients", rows_bytes - sum(unit.gradient_bytes for unit in scattered))
    # Then replicas sum theirs: one bucket travels while the next is filled.
    ledger.look(0, min(2 * BUCKET_BYTES, sum(unit.gradient_bytes for unit in every if unit.summed)))
    ledger.look(max(unit.temporary_bytes(optimizer) for unit in every))
    if optimizer in OFFLOADED.values():
        # Gradients go to host memory in buckets, and parameters come so from there.
        ledger.look(0, min(BUCKET_BYTES, sum(unit.optimizer_share(unit.gradient_bytes) for unit in every)))
    # Then it gathers the new parameters likewise, two buckets at once.
    ledger.look(0, _bucket_bytes(scattered, sum(unit.trainable_bytes for unit in scattered), 2))
    if moments is not None:
        moments.append(_moment(ledger))
    if working is not None:
        working.append(ledger.peak_place)
    return RankMemory(peak_bytes=ledger.peak_bytes, parts_bytes=ledger.peak)


def _bucket_bytes(units: Sequence[Unit], size_bytes: int, count: int) -> int:
    """So many buckets of these units' bytes, with the rows of one rank in each but one that holds all there is."""
    if not units:
        return 0
    bucket_bytes = min(count * BUCKET_BYTES, size_bytes)
    with_rows = count > 1 or size_bytes > bucket_bytes
    return bucket_bytes + (bucket_bytes // min(unit.shards for unit in units) if with_rows else 0)


def _moment(ledger: Ledger) -> RankMemory:
    assert ledger.moment is not None
    return ledger.moment


def _act(state: _State, kind: Kind, held_bytes: int, *, first: bool) -> None:
    """One action of a stage."""
    ledger = state.ledger
    if kind == "F":
        state.forward()
        ledger.add("activations", held_bytes)
        ledger.look(0)
    elif kind == "I":
        if not first:
            state.inputs_gradient()
    else:
        state.backward(second=kind == "W" and not first)
        ledger.add("activations", -held_bytes)


def _repeat(state: _State, pattern: str, times: int, held_bytes: int) -> None:
    """Walk a pattern of forwards and backwards so many times; after two alike rounds the rest is known.

    Alike rounds differ in the activations alone, by as much each time: the highest moment of all is in the last of
    them when these grow, in the first when not.
    """
    ledger, done = state.ledger, 0
    while done < times:
        before, signature = ledger.live["activations"], state.signature
        for kind in pattern:
            _act(state, "F" if kind == "F" else "B", held_bytes, first=False)
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

    ledger: Ledger
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
            ledger.place = i
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

    def backward(self, *, second: bool = False) -> None:
        ledger, reduced_bytes, prefetched = self.ledger, 0, -1
        for i in reversed(range(len(self.units))):
            ledger.place, unit = i, self.units[i]
            grads = unit.trainable_bytes
            if unit.gathers:
                # ZeRO-2 too, where an earlier backward of another live micro-batch has resharded it.
                if i not in self.unsharded:
                    self._unshard(i)
                    ledger.look(unit.output_bytes, reduced_bytes + unit.parameter_bytes)
                prefetched = self._next_sharded(i)
            buffers = reduced_bytes + (self.units[prefetched].parameter_bytes if prefetched >= 0 else 0)
            if second:
                ledger.add("activations", -unit.second_part_bytes)
            elif unit.recompute:
                ledger.look(unit.output_bytes + unit.forward_peak_bytes, buffers)
            later = not unit.gathers and i in self.graded
            work = unit.later_backward_peak_bytes if later else unit.first_backward_peak_bytes
            ledger.look(max(0, unit.input_bytes + work - unit.kept_bytes), buffers)
            ledger.add("activations", -unit.kept_bytes)
            if not unit.gathers and i not in self.graded:
                ledger.add("gradients", unit.gradient_bytes)
            if unit.gathers:
                self._reshard(i)
                buffers += unit.gradient_bytes - reduced_bytes
                reduced_bytes = unit.gradient_bytes
                ledger.look(unit.input_bytes + grads, buffers)
                if i in self.graded:
                    ledger.look(unit.input_bytes + unit.share(unit.gradient_bytes), buffers)
                else:
                    ledger.add("gradients", unit.share(unit.gradient_bytes))
            self.graded.add(i)
            ledger.look(unit.input_bytes, buffers)
            if unit.relayout:
                ledger.look(unit.input_bytes + self._before(i), buffers)

    def inputs_gradient(self) -> None:
        """The first part of a backward: no gradients of weights yet; what the second part needs of it stays."""
        ledger = self.ledger
        for i in reversed(range(len(self.units))):
            ledger.place, unit = i, self.units[i]
            if unit.gathers and i not in self.unsharded:
                self._unshard(i)
                ledger.look(unit.output_bytes + unit.parameter_bytes)
            if unit.recompute:
                ledger.look(unit.output_bytes + unit.forward_peak_bytes)
            work = max(unit.saved_bytes, unit.backward_peak_bytes - unit.trainable_bytes)
            ledger.look(max(0, unit.input_bytes + work - unit.kept_bytes))
            # What was recomputed stays to the end of the step (measured: torch's checkpoint keeps it).
            ledger.add("activations", unit.second_part_bytes + unit.saved_bytes - unit.kept_bytes)
            ledger.look(unit.input_bytes)

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
    before_bytes, behind_bytes = size_bytes * (stage > 0), size_bytes * (stage < pp - 1)
    return ends_bytes(
        received_bytes=before_bytes, returned_bytes=behind_bytes, sent_bytes=behind_bytes, micro_batches=micro_batches
    )


def ends_bytes(*, received_bytes: int, returned_bytes: int, sent_bytes: int, micro_batches: int) -> tuple[int, int]:
    """As `edge_bytes` where boundaries differ: what the stage before sends, what comes back of the stage behind, and
    what is sent on that does not lie in a receive buffer."""
    return micro_batches * (received_bytes + returned_bytes) + sent_bytes, sent_bytes
