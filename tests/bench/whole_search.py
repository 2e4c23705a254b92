"""Seconds and peak memory of the whole `autopar search` process, interpreter start included, from profile files.

`python -m tests.bench.whole_search` writes synthetic profiles of well-known sizes into a temporary folder, runs the
command on each and prints one line a case. The layer times are those of an A100 at half efficiency; they are shaped
like real ones, nobody should plan with them. The limits are those of the project: 1 s for 7B on 8 GPUs, 3 s for 405B
on 512 and 128 layers on 1024, 500 MiB.

`--growth` prints instead how seconds of the processor, memory and gap grow with layers and GPUs.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
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
from autopar.plan import Certificate, Plan
from autopar.runtime.machine import cpu_name
from autopar.units import GIB, KIB, MIB

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


def machine() -> str:
    """The processor and the interpreter."""
    return f"{os.cpu_count()} cores of {cpu_name()}, Python {platform.python_version()}"


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What one process took, and what it found: the certificate of its plan, None when it wrote none."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    certificate: Certificate | None


def run(case: Case, *options: str) -> Ran:
    """One search in a process of its own."""
    root = str(Path(__file__).parent.parent.parent)
    env = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled
    with tempfile.TemporaryDirectory() as name:
        command = [*write(case, Path(name)), *options]
        started = time.monotonic()
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        plan = Path(name) / "plan.json"
        return Ran(
            wall_s=time.monotonic() - started,
            cpu_s=used.ru_utime + used.ru_stime,
            peak_bytes=used.ru_maxrss * KIB,
            certificate=Plan.load(plan).certificate if plan.exists() else None,
        )


def cases(wanted: list[str], runs: int = 3) -> None:
    """Print seconds (medians), peak memory and the limit of every case."""
    print(f"{'case':24} {'seconds':>8} {'cpu s':>8} {'limit':>6} {'peak MiB':>9}")
    for case in CASES:
        if wanted and not any(word in case.name for word in wanted):
            continue
        ran = [run(case) for _ in range(runs)]
        limit = "-" if case.limit_s is None else f"{case.limit_s:.1f}"
        wall, cpu = (statistics.median(getattr(one, name) for one in ran) for name in ("wall_s", "cpu_s"))
        peak_mib = max(one.peak_bytes for one in ran) / MIB
        print(f"{case.name:24} {wall:8.2f} {cpu:8.2f} {limit:>6} {peak_mib:9.0f}", flush=True)


def growth(wanted: list[str]) -> None:
    """Print seconds of the processor, MiB and gap of one search each, for layers like those of a 7B model.

    8 samples a GPU; the budget is 0.75 GiB a layer for 8 GPUs, as much less as there are more, and at least 40 GiB.
    """
    devices = (8, 64, 512, 4096, 16384)
    print("| layers | " + " | ".join(f"{count} GPUs" for count in devices) + " |")
    print("|---" * (1 + len(devices)) + "|")
    for blocks in (32, 64, 128, 256, 512, 1024):
        if wanted and str(blocks) not in wanted:
            continue
        cells = []
        for count in devices:
            case = Case(
                name=f"{blocks} layers, {count} GPUs", blocks=blocks, hidden=4096, inner=11008, vocabulary=32000,
                sequence=4096, devices=count, global_batch=8 * count, memory=f"{max(40, 6 * blocks // count)}GiB",
            )  # fmt: skip
            ran = run(case, "--time-limit", "300")
            found = "no plan"
            if ran.certificate is not None:
                gap = 1 - ran.certificate.lower_bound_ns / ran.certificate.objective_ns
                found = "optimal" if ran.certificate.status == "optimal" else f"gap {100 * gap:.2g} %"
            cells.append(f"{ran.cpu_s:.1f} s, {ran.peak_bytes / MIB:.0f} MiB, {found}")
        print(f"| {blocks} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print the machine and one of the two tables."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {machine()}, load {load}")
    wanted = [word for word in sys.argv[1:] if word != "--growth"]
    (growth if "--growth" in sys.argv else cases)(wanted)
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
