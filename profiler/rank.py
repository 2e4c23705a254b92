"""What every rank does in a model profile: build the model, trace its share of the layers, time all together."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopar.formats import to_plain
from autopar.measured import Line, TensorParallelCall
from autopar.model import ModelSpec
from autopar.profiler.layers import LayerBench, LayerKey
from autopar.profiler.timing import LayerSeconds, time_call
from autopar.profiler.trace import LayerTrace, fit, trace
from autopar.runtime.models import build_model, prepare_source

Report = Callable[[dict[str, Any]], None]


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
    flops: Line
    calls: tuple[TensorParallelCall, ...]


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """What one rank found: the model, the bytes of some layers by their place, the seconds of all, by samples."""

    spec: ModelSpec
    device_name: str
    layers: tuple[str, ...]
    bytes_of: dict[str, LayerBytes]
    seconds: tuple[tuple[LayerSeconds, ...], ...]


def prepare(payload: Mapping[str, Any]) -> None:
    """Import what building and tracing the model will import, before the ranks are forked."""
    if payload["degrees"]:
        importlib.import_module("autopar.runtime.tensor_parallel")
    prepare_source(payload["source"])


def profile_rank(payload: Mapping[str, Any], report: Report) -> Any:
    """The RankProfile of this rank, as plain values.

    payload: source, dtype, sequence, device, degrees (tensor-parallel), samples.
    """
    device = payload["device"]
    where = "cpu" if device == "cpu" else f"cuda:{torch.cuda.current_device()}"
    model = build_model(payload["source"], dtype=payload["dtype"], device=where)
    degrees: list[int] = payload["degrees"]
    bench = LayerBench(model, sequence=payload["sequence"], source=payload["source"], max_tp=max(degrees, default=1))
    return to_plain(measure(bench, degrees=degrees, samples=payload["samples"], report=report))


def measure(bench: LayerBench, *, degrees: Sequence[int], samples: Sequence[int], report: Report) -> RankProfile:
    """What this rank of the process group (or this process alone) measures of the layers of a model."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    keys = bench.keys(degrees)
    total = len(keys) * (len(samples) + 1)
    bytes_of = {}
    for place, key in enumerate(keys):
        if place % world == rank:
            report({"done": place, "total": total, "what": f"memory of {key}"})
            bytes_of[str(place)] = layer_bytes(bench, key, samples)
    seconds = []
    for place, key in enumerate(keys):
        row = []
        for count, number in enumerate(samples):
            report({"done": len(keys) + place * len(samples) + count, "total": total, "what": f"time of {key}"})
            row.append(time_call(bench.call(key, number)))
        seconds.append(tuple(row))
    report({"done": total, "total": total, "what": "layers"})
    return RankProfile(
        spec=bench.spec,
        device_name=bench.device_name,
        layers=tuple(str(key) for key in keys),
        bytes_of=bytes_of,
        seconds=tuple(seconds),
    )


def layer_bytes(bench: LayerBench, key: LayerKey, samples: Sequence[int]) -> LayerBytes:
    """Bytes and FLOPs of a layer, traced at every number of samples and fitted by lines."""
    traces = [trace(bench.call(key, n), shared_bytes=bench.shared_bytes(key, n)) for n in samples]
    parameters = list(bench.call(key, samples[0]).module.parameters())

    def line(value: Callable[[LayerTrace], int]) -> Line:
        return fit(samples, [value(found) for found in traces])

    return LayerBytes(
        kind=key.kind,
        tp=key.tp,
        sequence_norms=key.sequence_norms,
        parameter_bytes=sum(p.nbytes for p in parameters),
        trainable_bytes=sum(p.nbytes for p in parameters if p.requires_grad),
        largest_parameter_bytes=max((p.nbytes for p in parameters), default=0),
        input_bytes=line(lambda found: found.input_bytes),
        output_bytes=line(lambda found: found.output_bytes),
        saved_bytes=line(lambda found: found.saved_bytes),
        forward_peak_bytes=line(lambda found: found.forward_peak_bytes),
        backward_peak_bytes=line(lambda found: found.backward_peak_bytes),
        flops=line(lambda found: found.flops),
        calls=bench.calls(key),
    )
