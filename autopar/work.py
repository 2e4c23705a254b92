"""What one layer does in a step under one strategy, in seconds: compute, collectives, gradient sync, optimizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from autopar import compute
from autopar.axes import Layout, RankMesh
from autopar.cluster import ClusterSpec
from autopar.comm import BUCKET_BYTES, boundary_shape, seconds, shape_of
from autopar.measured import Collective, LayerCost, LinkProfile, Origin, weakest
from autopar.request import OFFLOADED, Optimizer
from autopar.strategy import Strategy
from autopar.units import widening

ASSUMED_OPTIMIZER_BYTES_PER_S = {"cpu": 4e9, "cuda": 1e12}
"""Assumed until measured: the memory bandwidth of one rank while its optimizer streams over the states."""

ASSUMED_OPTIMIZER_ACCESSES = {"adamw": 16, "sgd": 3, "sgd-momentum": 8}
"""Assumed: reads and writes of each trained element by one step, torch's unfused loop (AdamW: seven passes)."""

ASSUMED_HOST_BYTES_PER_S = {"cpu": 4e9, "cuda": 20e9}
"""Assumed: what one rank moves from or to host memory, one way at a time (PCIe 4 x16; a copy in memory for a CPU)."""

ASSUMED_HOST_MEMORY_BYTES_PER_S = {"cpu": 4e9, "cuda": 25e9}
"""Assumed: the bandwidth of one rank in host memory while it steps there (200 GB/s of a node shared by 8 ranks)."""

ASSUMED_HOST_ACCESSES = {"adamw": 12, "sgd-momentum": 10}
"""Assumed: reads and writes of each trained element there: scaling, norm, clipping (5), and one fused step."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Seconds of one layer on one rank.

    Of one micro-batch: forward_s, backward_s (compute; the backward with the recomputed forward), tp_forward_s,
    tp_backward_s (collectives of the tp group), sequence_forward_s, sequence_backward_s (of the sp and cp groups),
    zero_forward_s, zero_backward_s (exposed gathers and reduce-scatters, the layer on its own), gather_s, reduce_s
    (one gather and one reduce-scatter of ZeRO-2 and 3, whatever runs beside them). Once a step: sync_s (gradients of
    replicas; ZeRO-1 also gathers the new parameters), optimizer_s.
    """

    forward_s: float
    backward_s: float
    tp_forward_s: float = 0.0
    tp_backward_s: float = 0.0
    sequence_forward_s: float = 0.0
    sequence_backward_s: float = 0.0
    zero_forward_s: float = 0.0
    zero_backward_s: float = 0.0
    gather_s: float = 0.0
    reduce_s: float = 0.0
    sync_s: float = 0.0
    optimizer_s: float = 0.0
    origin: Origin = "measured"

    @property
    def whole_forward_s(self) -> float:
        """The forward of one micro-batch with its collectives."""
        return self.forward_s + self.tp_forward_s + self.sequence_forward_s + self.zero_forward_s

    @property
    def whole_backward_s(self) -> float:
        """The backward of one micro-batch with its collectives."""
        return self.backward_s + self.tp_backward_s + self.sequence_backward_s + self.zero_backward_s


def layer_work(
    cost: LayerCost,
    strategy: Strategy,
    *,
    mesh: RankMesh,
    cluster: ClusterSpec,
    links: LinkProfile,
    samples: float,
    optimizer: Optimizer,
    dtype: str = "float32",
    shared_bytes: int = 0,
) -> Work:
    """The work of a layer with `samples` samples on each dp rank; cost: of this strategy (see autopar.derived);
    dtype: of the plan, bfloat16 being mixed precision; shared_bytes: of its parameters those that another layer of the
    stage holds (tied), whose gradients are summed and which are stepped there.

    ZeRO-2 and ZeRO-3 gather once for the forward of each micro-batch, ZeRO-3 again for the backward, and both
    reduce-scatter in each backward. Replicas of a shard, those of HSDP and the ranks of sp and cp, then all-reduce it.
    Once a step replicas (dp, sp and cp) all-reduce their gradients; ZeRO-1 reduce-scatters them, and all-gathers the
    new parameters.
    """
    place = mesh.place(strategy)
    forward, backward = (
        replace(found, seconds=found.seconds * cluster.compute_factor)
        for found in (compute.forward(cost, samples), compute.backward(cost, samples))
    )
    origins = [cost.origin, forward.origin, backward.origin]
    # Selective recompute computes in the cost of its backward; its collectives run again as under full.
    recompute = strategy.recompute == "full"

    def over(names: tuple[str, ...], collective: Collective, size_bytes: float) -> float:
        found = seconds(links, collective, shape_of(mesh, names, cluster.ranks_per_node), size_bytes)
        origins.append(found.origin)
        return found.seconds

    groups = {"tp": place.tp, "sp": place.sp, "cp": place.cp}
    calls_s = {(name, phase): 0.0 for name in ("tp", "sequence") for phase in ("forward", "backward")}
    for call in cost.calls:
        if names := groups[call.over]:
            cause = "tp" if call.over == "tp" else "sequence"
            calls_s[cause, call.phase] += over(names, call.collective, call.size_bytes.at(samples))
    if strategy.recompute != "none":
        for cause in ("tp", "sequence"):
            calls_s[cause, "backward"] += calls_s[cause, "forward"]

    backward_s = backward.seconds + (forward.seconds if recompute else 0.0)
    zero_forward_s = zero_backward_s = gather_s = reduce_s = sync_s = 0.0
    held = cost
    if shared_bytes:
        left_bytes, left = max(0, cost.trainable_bytes - shared_bytes), max(0, cost.trainable_tensors - 1)
        held = replace(cost, trainable_bytes=left_bytes, trainable_tensors=left)
    gradient_bytes = (cost if strategy.zero > 1 else held).trainable_bytes * widening(dtype)
    replicas = _in_order(mesh, place.dp_replicate, place.sp, place.cp)
    # Gradients of replicas and of ZeRO-1 go in buckets, larger tensors alone; fully_shard sends a layer at once.
    sends = 1 if strategy.zero > 1 else max(1, min(held.trainable_tensors, ceil(gradient_bytes / BUCKET_BYTES)))
    if strategy.zero:
        reduce_s = sends * over(place.dp_shard, "reduce_scatter", gradient_bytes / sends)
        if replicas:
            reduce_s += sends * over(replicas, "all_reduce", gradient_bytes / strategy.state_shards / sends)
        if strategy.zero == 1:
            sync_s = reduce_s + sends * over(place.dp_shard, "all_gather", held.trainable_bytes / sends)
            reduce_s = 0.0
        else:
            # fully_shard's hooks and copies around each.
            beside_s = 0.0 if cluster.zero is None else cluster.zero.at(cost.parameter_bytes)
            gather_s = over(place.dp_shard, "all_gather", cost.parameter_bytes) + beside_s
            reduce_s += beside_s
            zero_forward_s = exposed_s(gather_s, forward.seconds, links)
            again_s = gather_s if strategy.zero == 3 else 0.0
            zero_backward_s = exposed_s(again_s + reduce_s, backward_s, links)
    elif replicas:
        sync_s = sends * over(replicas, "all_reduce", gradient_bytes / sends)
    if optimizer in OFFLOADED.values():
        origins.append("assumed")

    return Work(
        forward_s=forward.seconds,
        backward_s=backward_s,
        tp_forward_s=calls_s["tp", "forward"],
        tp_backward_s=calls_s["tp", "backward"],
        sequence_forward_s=calls_s["sequence", "forward"],
        sequence_backward_s=calls_s["sequence", "backward"],
        zero_forward_s=zero_forward_s,
        zero_backward_s=zero_backward_s,
        gather_s=gather_s,
        reduce_s=reduce_s,
        sync_s=sync_s,
        optimizer_s=_optimizer_s(held, strategy, cluster, optimizer, dtype),
        origin=weakest(*origins),
    )


def _optimizer_s(cost: LayerCost, strategy: Strategy, cluster: ClusterSpec, optimizer: Optimizer, dtype: str) -> float:
    """Seconds of scaling, clipping and stepping one layer's share; assumed where the cluster does not say."""
    held_bytes = cost.trainable_bytes * widening(dtype) / strategy.state_shards
    for name, offloaded in OFFLOADED.items():
        if optimizer == offloaded:
            # Gradients go down and parameters come up, beside nothing; the step between is the host's work.
            up_bytes = held_bytes if strategy.zero >= 2 else cost.trainable_bytes / strategy.state_shards
            stepping_s = held_bytes * ASSUMED_HOST_ACCESSES[name] / ASSUMED_HOST_MEMORY_BYTES_PER_S[cluster.device]
            return stepping_s + (held_bytes + up_bytes) / ASSUMED_HOST_BYTES_PER_S[cluster.device]
    for update in cluster.updates:
        if (update.optimizer, update.sharded) == (optimizer, strategy.zero >= 2):
            return cost.trainable_tensors * update.tensor_s + held_bytes * update.byte_s
    return held_bytes * ASSUMED_OPTIMIZER_ACCESSES[optimizer] / ASSUMED_OPTIMIZER_BYTES_PER_S[cluster.device]


def _in_order(mesh: RankMesh, *names: tuple[str, ...]) -> tuple[str, ...]:
    """These axes together, in root order."""
    wanted = {name for some in names for name in some}
    return tuple(name for name in mesh.names if name in wanted)


def exposed_s(comm_s: float, compute_s: float, links: LinkProfile) -> float:
    """The seconds that communication adds to the compute beside it.

    All of it, unless the cluster's overlap was measured or fitted: then both run at once, each slowed by
    `links.overlap_slowdown`, and what is left of the longer one runs alone. Never more than all of it.
    """
    if links.overlap_origin == "assumed":
        return comm_s
    shared_s = min(comm_s, compute_s)
    together_s = shared_s * links.overlap_slowdown + max(comm_s, compute_s) - shared_s
    return min(comm_s, together_s - compute_s)


def relayout_s(
    source: Layout,
    target: Layout,
    *,
    mesh: RankMesh,
    cluster: ClusterSpec,
    links: LinkProfile,
    activation_bytes: float,
) -> tuple[float, float]:
    """Seconds of moving an activation from one layout to another: in the forward, and of its gradient back.

    activation_bytes: of the whole micro-batch on a stage. An axis that cuts the source and not the target is gathered
    in the forward and sliced (free) in the backward; one that only the target has, the other way round. The common
    first axes of a tensor dimension stay; from the first difference on, all are gathered, innermost first.
    """

    def gathers_s(a: Layout, b: Layout) -> float:
        local_bytes = activation_bytes / mesh.size((*a.batch, *a.sequence))
        total_s = 0.0
        for old, kept in zip((a.batch, a.sequence), a.kept(b), strict=True):
            for name in reversed(old[kept:]):
                local_bytes *= mesh.size((name,))
                shape = shape_of(mesh, (name,), cluster.ranks_per_node)
                total_s += seconds(links, "all_gather", shape, local_bytes).seconds
        return total_s

    return gathers_s(source, target), gathers_s(target, source)


def send_s(mesh: RankMesh, cluster: ClusterSpec, links: LinkProfile, activation_bytes: float) -> float:
    """Seconds of one send of a micro-batch's activation (or gradient) to the neighbouring stage; 0 for one stage."""
    if mesh.pp == 1:
        return 0.0
    shape = boundary_shape(mesh, cluster.ranks_per_node)
    return seconds(links, "p2p", shape, activation_bytes / mesh.ranks_per_stage).seconds
