"""The machine as numbers: how many ranks, on which nodes, with which memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autopar.formats import omitted


@dataclass(frozen=True, kw_only=True)
class UpdateCost:
    """Seconds of what follows the last backward on a rank: scaling, clipping and the step of an optimizer.

    tensor_s for each trained tensor, byte_s for each byte that the rank holds of them. sharded: for tensors that
    fully_shard cuts, of which the rank steps its rows.
    """

    optimizer: Literal["adamw"]
    sharded: bool
    tensor_s: float
    byte_s: float

    def __post_init__(self) -> None:
        _check_seconds(self, "tensor_s", "byte_s")


@dataclass(frozen=True, kw_only=True)
class ZeroCost:
    """Seconds that a gather or reduce-scatter of a layer under ZeRO-2 or ZeRO-3 costs beside the collective.

    call_s for each, byte_s for each byte of the whole layer: hooks, and copies into and out of flat buffers.
    """

    call_s: float
    byte_s: float

    def __post_init__(self) -> None:
        _check_seconds(self, "call_s", "byte_s")

    def at(self, size_bytes: float) -> float:
        """Seconds for a layer of this size."""
        return self.call_s + self.byte_s * size_bytes


def _check_seconds(value: object, *fields: str) -> None:
    for field in fields:
        if not 0 <= getattr(value, field) < 1e6:
            raise ValueError(f"{type(value).__name__}.{field} must not be negative, is {getattr(value, field)}")


CUDA_CONTEXT_BYTES = 1 << 30
"""Assumed: what the CUDA context and the buffers of NCCL take on a GPU before the first tensor."""

ALLOCATOR_MARGIN = 1.06
"""Assumed: what torch's CUDA allocator reserves, over what lives in it (design: cost model, section 5)."""


def usable_bytes(device: Literal["cpu", "cuda"], memory_bytes: int) -> int:
    """Bytes of live tensors that a rank with this memory can hold: on a GPU less its context, and the margin."""
    if device == "cpu":
        return memory_bytes
    return max(1, int((memory_bytes - CUDA_CONTEXT_BYTES) / ALLOCATOR_MARGIN))


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What whole runs showed of a cluster: compute_factor multiplies the seconds of all layers.

    runs: how many were fitted; median_error: what is left of their relative error; log_spread: 80 % of predictions are
    expected within exp(-log_spread) .. exp(log_spread) of the measured step.
    """

    compute_factor: float = 1.0
    runs: int = 0
    median_error: float = 0.0
    log_spread: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.compute_factor < 1e6:
            raise ValueError(f"Calibration.compute_factor must be positive, is {self.compute_factor}")
        if self.runs < 0 or not 0 <= self.median_error < 1e6 or not 0 <= self.log_spread < 100:
            raise ValueError("Calibration.runs, median_error and log_spread must not be negative")


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """`world_size` equal ranks, `ranks_per_node` on each node.

    device: "cpu" or "cuda"; device_name: the maker's name; memory_bytes: what one rank may use in all.
    compute_speedup: entry k-1 is the speed of a rank while k ranks of its node compute, relative to all at once
    (processes that share the cores of a machine); empty where ranks do not slow each other. updates, zero: measured
    with all ranks at once; empty and None: assumed, see autopar.work. pipeline_call_s: what a micro-batch costs a
    stage of a pipeline beside its layers and sends. calibration: of `autopar calibrate`, if it ran.
    Raises ValueError for sizes that make no machine.
    """

    name: str
    device: Literal["cpu", "cuda"]
    device_name: str
    world_size: int
    ranks_per_node: int
    memory_bytes: int
    compute_speedup: tuple[float, ...] = ()
    updates: tuple[UpdateCost, ...] = omitted(())
    zero: ZeroCost | None = omitted(None)
    pipeline_call_s: float = omitted(0.0)
    calibration: Calibration | None = omitted(None)

    def __post_init__(self) -> None:
        for field, limit in (("world_size", 1 << 20), ("ranks_per_node", 1 << 20), ("memory_bytes", 1 << 60)):
            if getattr(self, field) < 1:
                raise ValueError(f"ClusterSpec.{field} must be >= 1, not {getattr(self, field)}")
            if getattr(self, field) > limit:
                raise ValueError(f"ClusterSpec.{field} is absurd: {getattr(self, field)}")
        if self.world_size > self.ranks_per_node and self.world_size % self.ranks_per_node:
            raise ValueError(
                f"ClusterSpec.world_size {self.world_size} is not a whole number of nodes of {self.ranks_per_node}"
            )
        if self.compute_speedup and len(self.compute_speedup) != self.ranks_per_node:
            raise ValueError("ClusterSpec.compute_speedup needs one entry for each rank of a node, or none")
        if any(not 0 < speed <= 1000 for speed in self.compute_speedup):
            raise ValueError(f"ClusterSpec.compute_speedup must lie between 0 and 1000, not {self.compute_speedup}")
        _check_seconds(self, "pipeline_call_s")

    @property
    def usable_bytes(self) -> int:
        """Bytes of live tensors that one rank can hold: the budget where none is given."""
        return usable_bytes(self.device, self.memory_bytes)

    @property
    def compute_factor(self) -> float:
        """By what the seconds of layers are multiplied."""
        return 1.0 if self.calibration is None else self.calibration.compute_factor
