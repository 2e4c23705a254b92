"""What one layer holds on one rank: the bytes that the memory walk (autopar.memory) adds up."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil

from autopar.measured import LayerCost
from autopar.request import OFFLOADED, OPTIMIZER_COPIES, Optimizer
from autopar.strategy import Strategy
from autopar.units import widening

OPTIMIZER_TEMPORARIES = {"adamw": 2, "sgd": 1, "sgd-momentum": 1, "adamw-offloaded": 0, "sgd-momentum-offloaded": 0}
"""Temporaries of the optimizer step in copies of its largest parameter (torch's loop over single tensors)."""

ASSUMED_SECOND_PART = 0.6
"""Assumed: the gradients of the outputs of all weights in saved sets (0.57 measured on a Llama block and its head)."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One layer on one rank: bytes, whole after tp where not said otherwise; activations of one micro-batch.

    shards: over how many ranks ZeRO cuts it (ZeRO-1 the optimizer's states alone); relayout: its input arrives in
    another layout than its own; summed: replicas sum its gradients, through copies in buckets; widening: bytes of a
    summed gradient or of what the optimizer steps for each byte of the parameter that works (2 under mixed precision);
    traced_later_bytes: as LayerCost.later_backward_peak_bytes. The saved set of a selective recompute is what is left
    of it.
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
    summed: bool = False
    traced_later_bytes: int | None = None
    widening: int = 1

    @classmethod
    def of(
        cls,
        cost: LayerCost,
        strategy: Strategy,
        samples: float,
        *,
        shared_bytes: int = 0,
        relayout: bool = False,
        dtype: str = "float32",
    ) -> Unit:
        """The unit of a layer in this dtype; `shared_bytes` of its parameters are those of another unit (tied)."""
        later = cost.later_backward_peak_bytes
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
            traced_later_bytes=None if later is None else ceil(max(0.0, later.at(samples))),
            relayout=relayout,
            summed=strategy.zero == 0 and strategy.dp * strategy.sp * strategy.cp > 1,
            widening=widening(dtype),
        )

    @cached_property
    def gathers(self) -> bool:
        """Whether its parameters are gathered before they work, and its gradients scattered after: ZeRO-2 and 3."""
        return self.zero >= 2

    def share(self, size_bytes: int) -> int:
        """The rank's share of parameters or gradients."""
        return -(-size_bytes // self.shards) if self.gathers else size_bytes

    def optimizer_share(self, size_bytes: int) -> int:
        """The rank's share of the optimizer's states."""
        return -(-size_bytes // self.shards)

    @cached_property
    def gradient_bytes(self) -> int:
        """The summed gradients of the whole layer."""
        return self.trainable_bytes * self.widening

    @property
    def buffer_bytes(self) -> int:
        """The larger buffer of a layer that gathers: its whole parameters, or its gradients to be scattered."""
        return max(self.parameter_bytes, self.gradient_bytes)

    def held_bytes(self, optimizer: Optimizer) -> int:
        """The rank's parameters between steps: under mixed precision the masters alone where they are gathered.

        Otherwise the masters are beside them, or in host memory with the states of the optimizer.
        """
        if self.gathers:
            return self.share(self.parameter_bytes * self.widening)
        masters = self.widening > 1 and optimizer not in OFFLOADED.values()
        return self.parameter_bytes + (self.optimizer_share(self.gradient_bytes) if masters else 0)

    def optimizer_bytes(self, optimizer: Optimizer) -> int:
        """The rank's states of the optimizer."""
        return self.optimizer_share(self.gradient_bytes) * OPTIMIZER_COPIES[optimizer]

    def temporary_bytes(self, optimizer: Optimizer) -> int:
        """Temporaries of the optimizer step."""
        return self.optimizer_share(self.largest_parameter_bytes * self.widening) * OPTIMIZER_TEMPORARIES[optimizer]

    @cached_property
    def first_backward_peak_bytes(self) -> int:
        """The working set of a backward whose gradients are the first: replicas hold them summed."""
        return self.backward_peak_bytes + (0 if self.gathers else self.gradient_bytes - self.trainable_bytes)

    @cached_property
    def kept_bytes(self) -> int:
        """What a live micro-batch keeps from this layer's forward to its backward."""
        return self.input_bytes if self.recompute else self.saved_bytes

    @cached_property
    def second_part_bytes(self) -> int:
        """What the first part of a backward leaves for the second beside what was kept: gradients of outputs."""
        return ceil(self.saved_bytes * ASSUMED_SECOND_PART)

    @cached_property
    def later_backward_peak_bytes(self) -> int:
        """The working set of a backward that adds to gradients that already exist: one new gradient at a time.

        As traced; otherwise estimated: saved sets go as gradients come, both about evenly, so the trace's peak lies at
        one of the two ends. Measured on a Llama block whose saved set outweighs its parameters: the full peak, not the
        peak less the gradients.
        """
        grads, one = self.trainable_bytes, min(self.largest_parameter_bytes, self.trainable_bytes)
        if self.traced_later_bytes is not None:
            return min(self.backward_peak_bytes, self.traced_later_bytes) + one * (self.widening - 1) * 2
        ends = self.backward_peak_bytes - grads + max(self.saved_bytes, one)
        peak = min(self.backward_peak_bytes, max(self.saved_bytes + self.output_bytes, ends))
        return peak + one * (self.widening - 1) * 2
