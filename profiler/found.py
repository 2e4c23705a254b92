"""What a rank finds in a model profile, as plain values that pass between processes. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.measured import Line, SelectiveCost, SideBytes, TensorParallelCall
from autopar.model import ModelSpec


@dataclass(frozen=True, kw_only=True)
class LayerSeconds:
    """Seconds of one forward and one backward on this rank."""

    forward_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """The part of a LayerCost that needs no clock; fields as there."""

    kind: str
    tp: int
    sequence_norms: bool
    parameter_bytes: int
    trainable_bytes: int
    largest_parameter_bytes: int
    input_bytes: Line
    output_bytes: Line
    saved_bytes: Line
    forward_peak_bytes: Line
    backward_peak_bytes: Line
    later_backward_peak_bytes: Line
    flops: Line
    trainable_tensors: int
    selective: SelectiveCost | None
    calls: tuple[TensorParallelCall, ...]


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """The model, the bytes of the layers that this rank traced (by their place), and the seconds of all layers.

    layers: their names; samples, seconds: of each layer, at how many samples it was timed; selective: likewise of
    blocks under selective recompute, at the most samples, by their place; sides: as in LayerProfile.
    """

    spec: ModelSpec
    device_name: str
    layers: tuple[str, ...]
    bytes_of: dict[str, LayerBytes]
    samples: tuple[tuple[int, ...], ...]
    seconds: tuple[tuple[LayerSeconds, ...], ...]
    selective: dict[str, LayerSeconds]
    sides: tuple[SideBytes, ...] = ()
