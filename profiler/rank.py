"""What every rank does in a model profile: build the model, trace its share of the layers, time all together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from autopar.formats import to_plain
from autopar.measured import Line, SelectiveCost
from autopar.profiler.found import LayerBytes, LayerSeconds, RankProfile
from autopar.profiler.layers import LayerBench, LayerKey
from autopar.profiler.timing import choose_repeats, time_burst
from autopar.profiler.trace import LayerTrace, fit, trace, trace_recomputed
from autopar.runtime.launch import Progress
from autopar.runtime.models import build_model

_ROUNDS = 3


_prepared: dict[str, LayerBench] = {}
"""Filled by `prepare` before the ranks are forked: they then share the weights and the exported graphs."""


def prepare(payload: Mapping[str, Any]) -> None:
    """Build the model of this payload and export its tensor-parallel graphs, once for all ranks forked later."""
    _prepared[json.dumps(payload)] = _bench(payload)


def profile_rank(payload: Mapping[str, Any], report: Progress) -> Any:
    """The RankProfile of this rank, as plain values.

    payload: source, dtype, sequence, device, degrees (tensor-parallel), samples.
    """
    bench = _prepared.get(json.dumps(payload)) or _bench(payload)
    return to_plain(measure(bench, degrees=payload["degrees"], samples=payload["samples"], report=report))


def _bench(payload: Mapping[str, Any]) -> LayerBench:
    source, degrees = payload["source"], payload["degrees"]
    where = "cpu" if payload["device"] == "cpu" else f"cuda:{torch.cuda.current_device()}"
    model = build_model(source, dtype=payload["dtype"], device=where)
    bench = LayerBench(model, sequence=payload["sequence"], source=source, max_tp=max(degrees, default=1))
    with torch.no_grad():
        for key in bench.keys(degrees):
            for number in counts(key, payload["samples"]) if key.tp > 1 else ():
                call = bench.call(key, number)
                call.run(call.hidden)
    return bench


def counts(key: LayerKey, samples: Sequence[int]) -> tuple[int, ...]:
    """The numbers of samples at which a layer is timed.

    Under tensor parallelism two, as each exports a graph; the larger as a whole group has them, for its ranks share
    one batch.
    """
    return tuple(samples) if key.tp == 1 else tuple(dict.fromkeys((samples[0], samples[-1] * key.tp)))


def measure(bench: LayerBench, *, degrees: Sequence[int], samples: Sequence[int], report: Progress) -> RankProfile:
    """What this rank of the process group (or this process alone) measures of the layers of a model.

    Seconds are medians over rounds, and a round goes through all layers: when something else slows the machine for a
    while, it slows them alike.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    keys = bench.keys(degrees)
    timed = [counts(key, samples) for key in keys]
    cells = [(place, number) for place in range(len(keys)) for number in timed[place]]
    done, total = 0, len(keys) + _ROUNDS * len(cells)
    bytes_of = {}
    for place, key in enumerate(keys):
        report({"done": done, "total": total, "what": f"memory of {key}"})
        if place % world == rank:
            bytes_of[str(place)] = layer_bytes(bench, key, timed[place])
        done += 1
    repeats: dict[tuple[int, int], int] = {}
    bursts: dict[tuple[int, int], list[LayerSeconds]] = {cell: [] for cell in cells}
    most = {place: bench.selective_turns(key, timed[place][-1]) for place, key in enumerate(keys)}
    again = {place: calls for place, calls in most.items() if calls}
    bursts_again: dict[int, list[LayerSeconds]] = {place: [] for place in again}
    for _ in range(_ROUNDS):
        for cell in cells:
            key, number = keys[cell[0]], cell[1]
            report({"done": done, "total": total, "what": f"time of {key}"})
            calls = bench.turns(key, number)
            if cell not in repeats:
                repeats[cell] = choose_repeats(calls[0])
            bursts[cell].append(time_burst(calls, repeats[cell]))
            done += 1
        for place, calls in again.items():
            bursts_again[place].append(time_burst(calls, repeats[place, timed[place][-1]]))
    report({"done": total, "total": total, "what": "layers"})
    return RankProfile(
        spec=bench.spec,
        device_name=bench.device_name,
        layers=tuple(str(key) for key in keys),
        bytes_of=bytes_of,
        samples=tuple(timed),
        seconds=tuple(tuple(_median(bursts[place, n]) for n in timed[place]) for place in range(len(keys))),
        selective={str(place): _median(found) for place, found in bursts_again.items()},
        sides=bench.sides(samples),
    )


def _median(bursts: Sequence[LayerSeconds]) -> LayerSeconds:
    return LayerSeconds(
        forward_s=median(burst.forward_s for burst in bursts), backward_s=median(burst.backward_s for burst in bursts)
    )


def layer_bytes(bench: LayerBench, key: LayerKey, samples: Sequence[int]) -> LayerBytes:
    """Bytes and FLOPs of a layer, traced at the smallest and the largest number of samples, and the lines between."""
    ends = list(dict.fromkeys((samples[0], samples[-1])))
    traces = [trace(bench.call(key, n), shared_bytes=bench.shared_bytes(key, n)) for n in ends]
    parameters = list(bench.call(key, samples[0]).module.parameters())

    def line(value: Callable[[LayerTrace], int]) -> Line:
        return fit(ends, [value(found) for found in traces])

    again = [bench.selective_call(key, n) for n in ends]
    kept = [
        trace_recomputed(call, shared_bytes=bench.shared_bytes(key, n))
        for call, n in zip(again, ends, strict=True)
        if call is not None
    ]

    def kept_line(name: str) -> Line:
        return fit(ends, [getattr(found, name) for found in kept])

    selective = kept and SelectiveCost(
        saved_bytes=kept_line("saved_bytes"),
        forward_peak_bytes=kept_line("forward_peak_bytes"),
        backward_peak_bytes=kept_line("backward_peak_bytes"),
        later_backward_peak_bytes=kept_line("later_backward_peak_bytes"),
    )
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
        later_backward_peak_bytes=line(lambda found: found.later_backward_peak_bytes),
        flops=line(lambda found: found.flops),
        trainable_tensors=sum(p.requires_grad for p in parameters),
        selective=selective or None,
        calls=bench.calls(key),
    )
