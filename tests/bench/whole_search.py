"""Seconds and peak memory of the whole `autopar search` process, interpreter start included, from profile files.

`python -m tests.bench.whole_search` writes synthetic profiles of well-known sizes into a temporary folder, runs the
command on each and prints one line a case. The layer times are those of an A100 at half efficiency; they are shaped
like real ones, nobody should plan with them. The limits are those of the project: 1 s for 7B on 8 GPUs, 3 s for 405B
on 512 and 128 layers on 1024, 500 MiB.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from autopar.axes import RankMesh, divisors
from autopar.cluster import ClusterSpec
from autopar.comm import boundary_shape, shape_of
from autopar.measured import (
    COLLECTIVES,
    ClusterFile,
    GroupShape,
    LayerCost,
    LayerProfile,
    Line,
    LinkCurve,
    LinkProfile,
    ModelFile,
    Provenance,
    TensorParallelCall,
)
from autopar.model import LayerKind, ModelSpec, Parameter
from autopar.units import GIB, MIB

NODE = 8
FLOPS = 156e12
INSIDE_BYTES_PER_S, BETWEEN_BYTES_PER_S = 230e9, 22e9
SIZES = tuple(1 << k for k in range(12, 31, 2))
PROVENANCE = Provenance(machine="none", date="2026-01-01", command="synthetic", versions={})


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a machine and a request; limit_s: what the whole process may take, None where nothing is asked."""

    name: str
    blocks: int
    hidden: int
    inner: int
    vocabulary: int
    sequence: int
    devices: int
    global_batch: int
    memory: str
    limit_s: float | None = None
    kv_share: float = 1.0
    tied: bool = False


CASES = (
    Case(
        name="1B, 8 GPUs", blocks=16, hidden=2048, inner=8192, vocabulary=128256, sequence=4096, devices=8,
        global_batch=64, memory="16GiB", kv_share=0.25, tied=True,
    ),
    Case(
        name="7B, 8 GPUs", blocks=32, hidden=4096, inner=11008, vocabulary=32000, sequence=4096, devices=8,
        global_batch=64, memory="24GiB", limit_s=1.0,
    ),
    Case(
        name="70B, 64 GPUs", blocks=80, hidden=8192, inner=28672, vocabulary=128256, sequence=4096, devices=64,
        global_batch=1024, memory="80GiB", kv_share=0.125,
    ),
    Case(
        name="405B, 512 GPUs", blocks=126, hidden=16384, inner=53248, vocabulary=128256, sequence=8192, devices=512,
        global_batch=2048, memory="80GiB", kv_share=0.0625, limit_s=3.0,
    ),
    Case(
        name="128 layers, 1024 GPUs", blocks=128, hidden=12288, inner=32768, vocabulary=128000, sequence=4096,
        devices=1024, global_batch=4096, memory="60GiB", kv_share=0.125, limit_s=3.0,
    ),
)  # fmt: skip


def cluster_file(devices: int, memory_bytes: int = 80 * GIB) -> ClusterFile:
    """A cluster of nodes of eight with a curve for every group shape that a profile of two nodes would measure."""
    measured = min(devices, 2 * NODE)
    found: dict[GroupShape, None] = {}
    for pp in divisors(measured):
        mesh = RankMesh.of(world_size=measured, pp=pp, ranks_per_node=NODE)
        for first in range(len(mesh.names)):
            for last in range(first + 1, len(mesh.names) + 1):
                found[shape_of(mesh, mesh.names[first:last], NODE)] = None
        if pp > 1:
            found[boundary_shape(mesh, NODE)] = None
    curves = []
    for shape in found:
        for collective in COLLECTIVES:
            if collective == "p2p" and shape.ranks != 2:
                continue
            bytes_per_s = INSIDE_BYTES_PER_S if shape.nodes == 1 else BETWEEN_BYTES_PER_S / shape.concurrent
            rounds = 1 if collective == "p2p" else (2 if collective == "all_reduce" else 1) * (shape.ranks - 1)
            weight = 1.0 if collective == "p2p" else rounds / shape.ranks
            times = tuple(rounds * 8e-6 + weight * size / bytes_per_s for size in SIZES)
            curves.append(LinkCurve(collective=collective, shape=shape, size_bytes=SIZES, seconds=times))
    cluster = ClusterSpec(
        name="synthetic",
        device="cuda",
        device_name="synthetic",
        world_size=devices,
        ranks_per_node=min(devices, NODE),
        memory_bytes=memory_bytes,
    )
    return ClusterFile(cluster=cluster, links=LinkProfile(curves=tuple(curves)), provenance=PROVENANCE)


def _cost(case: Case, role: str, tp: int = 1, norms: bool = False) -> LayerCost:
    """A layer in bfloat16 by its sizes."""
    hidden, tokens = case.hidden, case.sequence
    edge = tokens * hidden * 2
    cut = edge // (tp if norms else 1)
    if role == "block":
        weights = hidden**2 * (2 + 2 * case.kv_share) + 3 * hidden * case.inner
        flops = 2 * tokens * (weights + tokens * hidden)
        inner = tokens * (8 * hidden + 6 * case.inner) / tp + 4 * cut
    else:
        weights = float(case.vocabulary * hidden)
        flops = tokens * hidden * (1 if role == "embed" else 2 * case.vocabulary)
        inner = edge + (tokens * case.vocabulary * 6 if role == "head" else 0)
    counts = (1, 2, 4)
    forward_s = flops / tp / FLOPS
    size = int(weights * 2 / tp)
    names = ("all_gather", "reduce_scatter") if norms else ("all_reduce",)
    calls = tuple(
        TensorParallelCall(collective=name, phase=phase, size_bytes=Line(fixed=0.0, per_sample=edge))  # type: ignore[arg-type]
        for phase in ("forward", "backward")
        for name in names
        for _ in range(2)
    )
    return LayerCost(
        kind=role,
        tp=tp,
        sequence_norms=norms,
        samples=counts,
        forward_s=tuple(2e-5 + forward_s * n for n in counts),
        backward_s=tuple(4e-5 + 2 * forward_s * n for n in counts),
        parameter_bytes=size,
        trainable_bytes=size,
        largest_parameter_bytes=size // 3,
        input_bytes=Line(fixed=0.0, per_sample=cut),
        output_bytes=Line(fixed=0.0, per_sample=cut),
        saved_bytes=Line(fixed=0.0, per_sample=inner),
        forward_peak_bytes=Line(fixed=0.0, per_sample=inner + 3 * cut),
        backward_peak_bytes=Line(fixed=size, per_sample=inner + 5 * cut),
        flops=Line(fixed=0.0, per_sample=flops),
        calls=calls if tp > 1 else (),
    )


def model_file(case: Case) -> ModelFile:
    """The profile of a decoder of this size, with tp degrees 2, 4 and 8."""
    hidden = case.hidden
    whole = round(hidden * (2 + 2 * case.kv_share)) + 3 * case.inner

    def kind(role: str, rows: int) -> LayerKind:
        return LayerKind(
            name=role,
            role=role,  # type: ignore[arg-type]
            class_name=role.title(),
            parameters=(Parameter(name="w", shape=(rows, hidden), dtype="bfloat16"),),
            tp_degrees=(2, 4, 8) if role == "block" else (),
            tp_reason="heads 8" if role == "block" else "",
            sequence_norms=role == "block",
        )

    costs = [_cost(case, "embed"), _cost(case, "head"), _cost(case, "block")]
    costs += [_cost(case, "block", tp, norms) for tp in (2, 4, 8) for norms in (False, True)]
    spec = ModelSpec(
        name=case.name,
        source="synthetic",
        fingerprint="0" * 16,
        layers=("embed", *["block"] * case.blocks, "head"),
        kinds=(kind("embed", case.vocabulary), kind("block", whole), kind("head", case.vocabulary)),
        tied=case.tied,
        hidden_size=hidden,
        vocab_size=case.vocabulary,
    )
    layers = LayerProfile(
        device="cuda",
        device_name="synthetic",
        processes=8,
        sequence=case.sequence,
        dtype="bfloat16",
        costs=tuple(costs),
    )
    return ModelFile(model=spec, layers=layers, provenance=PROVENANCE)


def write(case: Case, folder: Path) -> list[str]:
    """The command line of a case, after writing its files."""
    model, cluster = folder / "model.json", folder / "cluster.json"
    model_file(case).save(model)
    cluster_file(case.devices).save(cluster)
    command = [sys.executable, "-m", "autopar", "search", "--model", str(model), "--cluster", str(cluster)]
    command += ["--global-batch", str(case.global_batch), "--memory", case.memory, "-o", str(folder / "plan.json")]
    return command


def main(runs: int = 3) -> None:
    """Print seconds (median), peak memory and the limit of every case."""
    root = str(Path(__file__).parent.parent.parent)
    env = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    wanted = sys.argv[1:]
    print(f"{'case':24} {'seconds':>8} {'cpu s':>8} {'limit':>6} {'peak MiB':>9}")
    for case in CASES:
        if wanted and not any(word in case.name for word in wanted):
            continue
        with tempfile.TemporaryDirectory() as name:
            command = write(case, Path(name))
            wall, cpu, peak = [], [], 0
            for _ in range(runs):
                started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
                subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                wall.append(time.monotonic() - started)
                cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
                peak = max(peak, after.ru_maxrss)
            limit = "-" if case.limit_s is None else f"{case.limit_s:.1f}"
            peak_mib = peak * 1024 / MIB
            seconds = f"{statistics.median(wall):8.2f} {statistics.median(cpu):8.2f}"
            print(f"{case.name:24} {seconds} {limit:>6} {peak_mib:9.0f}")


if __name__ == "__main__":
    main()
