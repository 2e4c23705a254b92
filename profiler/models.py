"""`autopar.profile`: a model measured layer by layer. The measuring itself happens in local processes of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from autopar.errors import InputError
from autopar.formats import from_plain
from autopar.measured import LayerCost, LayerProfile, ModelFile, SelectiveCost
from autopar.profiler.found import LayerBytes, RankProfile
from autopar.profiler.provenance import provenance
from autopar.runtime.launch import Device, Progress, launch
from autopar.units import dtype_name

if TYPE_CHECKING:
    from torch import Tensor, nn

    from autopar.runtime.stage import LossFunction

DEFAULT_SAMPLES = (1, 2, 4)
"""Local samples at which layers are timed; between them seconds are interpolated."""


def profile(
    model: nn.Module | str,
    *,
    sequence: int = 2048,
    dtype: str = "float32",
    nproc: int = 1,
    tp_degrees: Sequence[int] | None = None,
    samples: Sequence[int] | None = None,
    device: Device = "cpu",
    loss: LossFunction | None = None,
    example: Mapping[str, Tensor] | None = None,
    progress: Progress | None = None,
) -> ModelFile:
    """The layers of a model as numbers: what `search` plans from.

    model: a MODEL string, measured by `nproc` processes at once as `nproc` ranks will share the machine; or an
    nn.Module, measured in this process alone at its own dtype and device (nproc then only says which tensor-parallel
    degrees to measure, and on a CPU shared by ranks the times are too short). loss, example: as in
    `autopar.parallelize`, for an nn.Module. Raises InputError, RunError.
    """
    if not isinstance(model, str) and not hasattr(model, "named_parameters"):  # torch is not loaded for a text
        why = f"it is of type {type(model).__name__}"
        raise InputError("model must be an nn.Module or a MODEL", why=why, fix="see MODEL in the README")
    for name, number in (("sequence", sequence), ("nproc", nproc)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise InputError(f"{name} is {number!r}", why="it is a count", fix="give a whole number above 0")
    command = f"autopar.profile({model if isinstance(model, str) else type(model).__name__!r}, sequence={sequence})"
    if isinstance(model, str):
        if loss is not None or example is not None:
            raise ValueError("profile takes loss and example with an nn.Module only")
        return profile_model(
            model,
            sequence=sequence,
            dtype=dtype,
            nproc=nproc,
            device=device,
            tp_degrees=tp_degrees,
            samples=samples,
            progress=progress,
            command=command,
        )
    degrees, counts = _degrees(nproc, tp_degrees), _counts(samples, sequence)
    from autopar.profiler.layers import LayerBench
    from autopar.profiler.rank import measure

    bench = LayerBench(model, sequence=sequence, max_tp=max(degrees, default=1), loss=loss, example=example)
    found = measure(bench, degrees=degrees, samples=counts, report=progress or _silent)
    return _model_file([found], sequence=sequence, dtype=bench.dtype, device=bench.device, command=command)


def profile_model(
    source: str,
    *,
    sequence: int = 2048,
    dtype: str = "float32",
    nproc: int = 1,
    device: Device = "cpu",
    tp_degrees: Sequence[int] | None = None,
    samples: Sequence[int] | None = None,
    progress: Progress | None = None,
    command: str = "",
    timeout_s: float = 1800.0,
) -> ModelFile:
    """The layers of the model of a MODEL string, measured by `nproc` local processes at once.

    tp_degrees: to measure where a layer allows them (default: all divisors of nproc); samples: local samples at which
    layers are timed (default 1, 2, 4; under tensor parallelism the first, and the last times the degree). Raises
    InputError for what is no model or a batch that it cannot run, RunError when a process fails or takes too long.

    Cost: one start of processes, then about 0.2 s for each layer kind, degree and number of samples, or four runs.
    """
    degrees, counts = _degrees(nproc, tp_degrees), _counts(samples, sequence)
    payload = {
        "source": source,
        "dtype": dtype_name(dtype),
        "sequence": sequence,
        "device": device,
        "degrees": degrees,
        "samples": counts,
    }
    results = launch(
        "autopar.profiler.rank:profile_rank",
        payload,
        nproc=nproc,
        timeout_s=timeout_s,
        device=device,
        progress=progress,
    )

    found = [from_plain(RankProfile, result, f"rank {rank}") for rank, result in enumerate(results)]
    return _model_file(found, sequence=sequence, dtype=dtype_name(dtype), device=device, command=command)


def _model_file(found: Sequence[RankProfile], *, sequence: int, dtype: str, device: Device, command: str) -> ModelFile:
    """One file from what the ranks found: seconds are medians over ranks."""
    first = found[0]
    costs = []
    for place in range(len(first.layers)):
        (layer,) = (rank.bytes_of[str(place)] for rank in found if str(place) in rank.bytes_of)
        rows, numbers = [rank.seconds[place] for rank in found], first.samples[place]
        costs.append(
            LayerCost(
                **{**vars(layer), "selective": _selective(found, place, layer)},
                samples=numbers,
                forward_s=tuple(median(row[i].forward_s for row in rows) for i in range(len(numbers))),
                backward_s=tuple(median(row[i].backward_s for row in rows) for i in range(len(numbers))),
            )
        )
    layers = LayerProfile(
        device=device,
        device_name=first.device_name,
        processes=len(found),
        sequence=sequence,
        dtype=dtype,
        costs=tuple(costs),
        sides=first.sides,
    )
    return ModelFile(model=first.spec, layers=layers, provenance=provenance(command, first.device_name))


def _selective(found: Sequence[RankProfile], place: int, layer: LayerBytes) -> SelectiveCost | None:
    """What was traced of selective recompute, with the seconds that it adds."""
    if layer.selective is None:
        return None
    plain = [rank.seconds[place][-1] for rank in found]
    again = [rank.selective[str(place)] for rank in found]
    added_s = median(
        a.forward_s + a.backward_s - p.forward_s - p.backward_s for a, p in zip(again, plain, strict=True)
    )
    return replace(layer.selective, share=max(0.0, added_s) / median(p.forward_s for p in plain))


def _degrees(nproc: int, tp_degrees: Sequence[int] | None) -> list[int]:
    if not 1 <= nproc <= 1024:
        raise InputError(f"{nproc} processes are not acceptable", why="it is 1 to 1024", fix="check --nproc")
    if tp_degrees is None:
        return [degree for degree in range(2, nproc + 1) if nproc % degree == 0]
    if any(degree < 1 for degree in tp_degrees):
        raise InputError(
            f"tensor-parallel degrees {list(tp_degrees)} are not acceptable",
            why="a degree is at least 1",
            fix="name degrees such as 2 and 4",
        )
    return sorted({degree for degree in tp_degrees if degree > 1})


def _counts(samples: Sequence[int] | None, sequence: int) -> list[int]:
    counts = sorted(set(samples if samples is not None else DEFAULT_SAMPLES))
    if not counts or counts[0] < 1 or counts[-1] > 1 << 20:
        raise InputError(
            f"samples {counts} are not acceptable", why="they are 1 or more", fix="name for example 1 2 4"
        )
    if not 1 <= sequence <= 1 << 24:
        raise InputError(f"sequence {sequence} is not acceptable", why="it is 1 to 2^24", fix="check --seq")
    return counts


def _silent(event: Mapping[str, Any]) -> None:
    pass
