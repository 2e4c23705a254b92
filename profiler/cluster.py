"""`autopar profile cluster`: which links are measured, by which processes, and the file that comes of it.

A *dimension* is all groups that one choice of mesh axes (or one stage boundary) makes; they communicate at the same
time, as they will in training. Each collective is timed on each dimension over message sizes, in `profiler.links`.
No torch here: the processes that measure import it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from autopar.axes import RankMesh, divisors
from autopar.cluster import ClusterSpec, UpdateCost, ZeroCost
from autopar.errors import InputError
from autopar.formats import from_plain
from autopar.measured import COLLECTIVES, ClusterFile, Collective, GroupShape, LinkCurve, LinkProfile
from autopar.profiler.provenance import provenance
from autopar.runtime.launch import Device, Progress, inside_torchrun, launch
from autopar.units import KIB, MIB

Groups = tuple[tuple[int, ...], ...]

SIZES_BYTES = (
    *(KIB * k for k in (1, 4, 16, 64, 256, 512)),
    *(MIB * m for m in (1, 2, 4, 8, 16)),
)
"""Default message sizes, each rounded up to a whole number of float32 on every rank of a group."""

_POINT_S = 0.07  # seconds to spend on one collective, dimension and size; fewer repeats where it takes longer


@dataclass(frozen=True, kw_only=True)
class _Beside:
    """What is measured after the links; an interrupted profile lacks it."""

    compute_speedup: tuple[float, ...] = ()
    updates: tuple[UpdateCost, ...] = ()
    zero: ZeroCost | None = None
    pipeline_call_s: float = 0.0
    overlap_slowdown: float | None = None


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a profile; `partial` has the finished curves, or is None where there are none yet."""

    def __init__(self, partial: ClusterFile | None) -> None:
        super().__init__("interrupted")
        self.partial = partial


def profile_cluster(
    *,
    nproc: int | None = None,
    device: Device | None = None,
    sizes: Sequence[int] | None = None,
    progress: Progress | None = None,
    command: str = "",
    timeout_s: float | None = None,
) -> ClusterFile:
    """The links, memory and names of this machine, measured by `nproc` local processes (or those of torchrun).

    nproc: default all GPUs, or as many processes as this process may use cores, at least 2; device: default CUDA where
    there is a GPU; sizes: message sizes in bytes; progress: takes `done`, `total`, `what`, or a `note`.
    Raises Interrupted on Ctrl-C, with what is finished; InputError for sizes that are none; RunError as `launch` does.
    Cost: a start of processes (about 3 s), then about 0.1 s for each collective, dimension and size.
    """
    chosen = device or default_device()
    count = nproc or default_nproc(chosen)
    ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", count)) if inside_torchrun() else count
    sizes_bytes = _checked(SIZES_BYTES if sizes is None else sizes)
    points = len(tasks(count, ranks_per_node)) * len(sizes_bytes)
    payload = {
        "device": chosen,
        "sizes_bytes": sizes_bytes,
        "ranks_per_node": ranks_per_node,
        "budget_s": points * _POINT_S,
    }
    facts: dict[str, Any] = {}
    curves: list[Any] = []

    def take(event: dict[str, Any]) -> None:
        if event["rank"] == 0:
            facts.update(event.get("facts", {}))
            curves.extend([event["curve"]] if "curve" in event else [])
            if progress is not None and ("done" in event or "note" in event):
                progress(event)

    def file() -> ClusterFile:
        beside = from_plain(_Beside, facts.get("beside", {}), "what was measured beside links")
        spec = ClusterSpec(
            name="local",
            device=chosen,
            device_name=facts["device_name"],
            world_size=count,
            ranks_per_node=ranks_per_node,
            memory_bytes=facts["memory_bytes"],
            compute_speedup=beside.compute_speedup,
            updates=beside.updates,
            zero=beside.zero,
            pipeline_call_s=beside.pipeline_call_s,
        )
        found = from_plain(tuple[LinkCurve, ...], curves, "the measured curves")
        machine = f"{facts['device_name']}, {os.cpu_count()} cores, {count} processes"
        slowdown = beside.overlap_slowdown
        links = LinkProfile(
            curves=found,
            overlap_slowdown=slowdown or 1.0,
            overlap_origin="assumed" if slowdown is None else "measured",
        )
        return ClusterFile(cluster=spec, links=links, provenance=provenance(command, machine))

    try:
        results = launch(
            "autopar.profiler.links:measure_rank",
            payload,
            nproc=count,
            device=chosen,
            progress=take,
            timeout_s=timeout_s or 120 + 2 * points,
        )
    except KeyboardInterrupt:
        raise Interrupted(file() if curves else None) from None
    facts, curves = results[0], results[0]["curves"]
    facts["memory_bytes"] = min(result["memory_bytes"] for result in results)
    return file()


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """Equal groups that communicate at the same time, with their shape; `stage_step` > 0 for pairs of stages."""

    shape: GroupShape
    groups: Groups
    p2p: bool


def dimensions(world_size: int, ranks_per_node: int) -> tuple[Dimension, ...]:
    """Every distinct group shape that a factored mesh of this world can use, each with the first groups that have it.

    For every number of stages: all subsets of the stage's axes (groups of all stages at once), then the pairs over
    each stage boundary. Order is the same on every rank. Cost: O(divisors * 2^axes).
    """
    found: dict[tuple[bool, GroupShape], Groups] = {}
    for pp in divisors(world_size):
        mesh = RankMesh.of(world_size=world_size, pp=pp, ranks_per_node=ranks_per_node)
        for count in range(1, len(mesh.names) + 1):
            for names in combinations(mesh.names, count):
                groups = tuple(group for stage in range(pp) for group in mesh.groups(names, stage))
                found.setdefault((False, GroupShape.of(groups, ranks_per_node)), groups)
        width = mesh.ranks_per_stage
        for first in range(0, world_size - width, width):
            pairs = tuple((rank, rank + width) for rank in range(first, first + width))
            found.setdefault((True, GroupShape.of(pairs, ranks_per_node)), pairs)
    return tuple(Dimension(shape=shape, groups=groups, p2p=p2p) for (p2p, shape), groups in found.items())


def tasks(world_size: int, ranks_per_node: int) -> tuple[tuple[Collective, Dimension], ...]:
    """What is measured, in order: each collective with each dimension it can run on."""
    dims = dimensions(world_size, ranks_per_node)
    return tuple((c, d) for c in COLLECTIVES for d in dims if d.p2p == (c == "p2p"))


def _checked(sizes: Sequence[int]) -> list[int]:
    found = sorted(set(sizes))
    if not found or found[0] < 1 or found[-1] > 1 << 40:
        raise InputError(
            f"{list(sizes)} are no message sizes", why="bytes, from 1 to 2^40", fix="leave them to the default"
        )
    return found


def default_device() -> Device:
    """CUDA where there is a GPU."""
    return "cuda" if _gpus() else "cpu"


def default_nproc(device: Device) -> int:
    """How many processes a profile starts: all of torchrun's, all GPUs, or one a core, at least 2."""
    if inside_torchrun():
        return int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        return max(1, _gpus())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, cores)


def _gpus() -> int:
    """The number of GPUs; torch is only asked (2-3 s to import) where the system has a device file of one."""
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/kfd").exists():
        return 0
    import torch

    return int(torch.cuda.device_count())
