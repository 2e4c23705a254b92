"""Seconds of collectives: what every rank does in `autopar profile cluster`.

The time of one repeat is that of the slowest rank, the time of a message size the median over repeats.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from autopar.errors import RunError
from autopar.formats import to_plain
from autopar.measured import Collective, GroupShape, LinkCurve, LinkProfile
from autopar.profiler.clock import device_name, slowest, wait_for
from autopar.profiler.cluster import Dimension, Groups, tasks
from autopar.profiler.sharing import compute_speedup
from autopar.profiler.updates import pipeline_call_s, update_costs, zero_costs
from autopar.runtime.launch import Progress
from autopar.runtime.machine import machine_memory_bytes

_ELEMENT_BYTES = 4  # float32
_BURST_S = 0.004  # a repeat is so many calls as take this long, to rise above the skew of the ranks' start
_MOST_CALLS = 8
_OUTLIER = 5
_ROUNDS, _MOST_REPEATS = 3, 8  # rounds over all sizes of a curve, repeats in each


def measure_rank(payload: dict[str, Any], report: Progress) -> dict[str, Any]:
    """What this rank found, as plain values: `device_name`, `memory_bytes`, and, the same on every rank, `curves`
    and what is measured `beside` them (fields of ClusterSpec and LinkProfile).

    payload: device, sizes_bytes (ascending), ranks_per_node, budget_s (to be shared out over all sizes). Reports how
    far it is at every size, every finished curve as `curve`, and repeats left out as `note`.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu") if payload["device"] == "cpu" else torch.device("cuda", torch.cuda.current_device())
    todo = tasks(world_size, payload["ranks_per_node"])
    handles = _process_groups(d.groups for _, d in todo if not d.p2p)
    facts = {"device_name": device_name(device), "memory_bytes": memory_bytes(device, payload["ranks_per_node"])}
    report({"facts": facts})
    clock = _Clock(budget_s=payload["budget_s"], total=len(todo) * len(payload["sizes_bytes"]) * _ROUNDS)
    curves, counted, dropped = [], 0, 0
    for collective, dimension in todo:
        what = f"{collective} over {dimension.shape.ranks} ranks, {dimension.shape.concurrent} at once"
        runs = dict(_run(collective, dimension, size, rank, device, handles) for size in payload["sizes_bytes"])
        repeats_s: dict[int, list[float]] = {size_bytes: [] for size_bytes in runs}
        for _ in range(_ROUNDS):  # a moment in which the machine was busy elsewhere then spoils no size alone
            for size_bytes, run in runs.items():
                report({"done": clock.done, "total": clock.total, "what": what})
                repeats_s[size_bytes] += _repeats(run, clock.share_s(), device)
        medians = {size_bytes: summary_s(repeats, what) for size_bytes, repeats in repeats_s.items()}
        counted += sum(map(len, repeats_s.values()))
        dropped += sum(s > _OUTLIER * medians[size] for size, repeats in repeats_s.items() for s in repeats)
        curve = LinkCurve(
            collective=collective,
            shape=dimension.shape,
            size_bytes=tuple(medians),
            seconds=tuple(medians.values()),
        )
        curves.append(curve)
        report({"curve": to_plain(curve)})
    if dropped:
        report({"note": f"{dropped} of {counted} repeats took over {_OUTLIER} times their median and do not count"})
    report({"done": clock.total, "total": clock.total, "what": "steps"})
    # Only processes on a CPU share what they compute with.
    speedup = compute_speedup(payload["ranks_per_node"]) if device.type == "cpu" else ()
    mesh = init_device_mesh(device.type, (world_size,))
    links = LinkProfile(curves=tuple(curves))
    found: dict[str, Any] = {"compute_speedup": speedup, "updates": update_costs(mesh)}
    if world_size > 1:
        everyone = GroupShape.of((tuple(range(world_size)),), payload["ranks_per_node"])
        found["zero"], found["overlap_slowdown"] = zero_costs(mesh, links, everyone)
        found["pipeline_call_s"] = pipeline_call_s(device)
    return {**facts, "curves": to_plain(curves), "beside": to_plain(found)}


class _Clock:
    """Shares `budget_s` out over `total` points, in so far as it lasts."""

    def __init__(self, *, budget_s: float, total: int) -> None:
        self._end = time.monotonic() + budget_s
        self.done, self.total = 0, total

    def share_s(self) -> float:
        """The seconds for the next point; not positive when the budget is used up."""
        share_s = (self._end - time.monotonic()) / max(1, self.total - self.done)
        self.done += 1
        return share_s


def summary_s(repeats_s: Sequence[float], what: str) -> float:
    """The median of the repeats, those beyond five times the median left out (a machine that was elsewhere).

    Raises RunError for a time that no clock gives: not finite, or not positive.
    """
    if not repeats_s or not all(math.isfinite(s) and s > 0 for s in repeats_s):
        raise RunError(
            f"{what}: measured {list(repeats_s)} s",
            why="a time must be finite and positive",
            fix="measure again; if it persists, the clock of this machine is not usable",
        )
    middle = median(repeats_s)
    return median(s for s in repeats_s if s <= _OUTLIER * middle)


def _process_groups(dims: Iterable[Groups]) -> dict[tuple[int, ...], Any]:
    """One process group for each distinct tuple of ranks, made in the same order on every rank."""
    everyone = tuple(range(dist.get_world_size()))
    handles: dict[tuple[int, ...], Any] = {everyone: dist.group.WORLD}
    for groups in dims:
        for ranks in groups:
            if ranks not in handles:
                handles[ranks] = dist.new_group(list(ranks))
    return handles


def _run(
    collective: Collective,
    dimension: Dimension,
    wanted_bytes: int,
    rank: int,
    device: torch.device,
    handles: dict[tuple[int, ...], Any],
) -> tuple[int, Callable[[], object]]:
    """The bytes of the message as LinkCurve counts them, and a function that runs the collective on this rank."""
    n = dimension.shape.ranks
    elements = max(1, math.ceil(wanted_bytes / _ELEMENT_BYTES / n)) * n
    whole = torch.zeros(elements, device=device)  # zeros stay zeros, however often they are summed
    size_bytes = elements * _ELEMENT_BYTES
    if collective == "p2p":
        return size_bytes, _exchange(dimension.groups, rank, whole)
    group = next(handles[ranks] for ranks in dimension.groups if rank in ranks)
    part = torch.zeros(elements // n, device=device)
    calls: dict[Collective, Callable[[], object]] = {
        "all_reduce": partial(dist.all_reduce, whole, group=group),
        "all_gather": partial(dist.all_gather_single, whole, part, group=group),
        "reduce_scatter": partial(dist.reduce_scatter_single, part, whole, group=group),
        "all_to_all": partial(dist.all_to_all_single, torch.zeros_like(whole), whole, group=group),
    }
    return size_bytes, calls[collective]


def _exchange(pairs: Groups, rank: int, message: Tensor) -> Callable[[], object]:
    operations = []
    for sender, receiver in pairs:
        if rank == sender:
            operations.append(dist.P2POp(dist.isend, message, receiver))
        if rank == receiver:
            operations.append(dist.P2POp(dist.irecv, torch.zeros_like(message), sender))
    return partial(_send_and_receive, operations)


def _send_and_receive(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def _repeats(run: Callable[[], object], share_s: float, device: torch.device) -> list[float]:
    """Seconds of one call in each repeat, of the slowest rank; all ranks repeat equally often, at least once.

    The first call does not count: it makes connections and touches memory, and decides how often to repeat.
    """
    once_s, spent_s = slowest([_timed(run, 1, device), -share_s], device)
    calls = min(_MOST_CALLS, max(1, round(_BURST_S / once_s)))
    count = min(_MOST_REPEATS, max(1, int(-spent_s / (once_s * calls))))
    return slowest([_timed(run, calls, device) for _ in range(count)], device)


def _timed(run: Callable[[], object], calls: int, device: torch.device) -> float:
    dist.barrier()
    wait_for(device)
    started = time.perf_counter()
    for _ in range(calls):
        run()
    wait_for(device)
    return (time.perf_counter() - started) / calls


def memory_bytes(device: torch.device, ranks_here: int) -> int:
    """What one rank may use in all: its GPU's memory, or its share of the machine's (of the container's, if less)."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return machine_memory_bytes() // ranks_here
