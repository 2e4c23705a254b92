"""Predicted step seconds of many cases at once, as a function of a few coefficients per GPU class.

The seconds of blocks and head come from autopar.roofline, collectives are alpha * steps + weight * size / bandwidth as
in autopar.comm, and the pipeline passes what its simulated critical path passes (fidelity_lib.schedules).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar import roofline
from tests.bench.fidelity_lib.cases import Case
from tests.bench.fidelity_lib.schedules import critical_path

Array = NDArray[np.float64]

TENSOR_FLOPS_PER_S = {"V100": 125e12, "A100": 312e12, "H100": 989.4e12}
MEMORY_BYTES_PER_S = {"V100": 0.9e12, "A100": 2.039e12, "H100": 3.35e12}
NVLINK_BYTES_PER_S = {"V100": 150e9, "A100": 300e9, "H100": 450e9}

MESH_LINKS = {8: {2: 1, 4: 4, 8: 6}, 4: {2: 2, 4: 6}}
"""NVLinks of a V100 to the other ranks of its group, by ranks a node and in the group; a switch gives all 6.

In the hybrid cube mesh of 8 (DGX-1, p3.16xlarge) neighbours 0 and 1 share one link, 0 to 3 have four each; in nodes of
4 each pair has two (https://images.nvidia.com/content/pdf/dgx1-v100-system-architecture-whitepaper.pdf, figure 4).
"""


@dataclass(frozen=True, kw_only=True)
class Coefficient:
    """One number that is fitted: where it starts, how far the prior lets it go (in log), and what it means."""

    start: float
    spread: float
    meaning: str


COEFFICIENTS: dict[str, Coefficient] = {
    "product_share": Coefficient(start=0.78, spread=0.2, meaning="share of the 16-bit peak of a large product"),
    "product_edge": Coefficient(start=250.0, spread=0.6, meaning="elements: loss of narrow matrices of a product"),
    "row_edge": Coefficient(start=250.0, spread=0.6, meaning="tokens: loss of few rows of a product"),
    "fp8_share": Coefficient(start=0.70, spread=0.3, meaning="share of the fp8 peak of a large product"),
    "fp8_edge": Coefficient(start=500.0, spread=0.7, meaning="the same loss in fp8"),
    "attention_share": Coefficient(start=0.40, spread=0.4, meaning="share of the peak in fused attention"),
    "backward_ratio": Coefficient(start=2.0, spread=0.08, meaning="backward over forward of products"),
    "old_attention": Coefficient(start=0.75, spread=0.4, meaning="first-generation fused attention, relative"),
    "scores_passes": Coefficient(start=14.0, spread=0.6, meaning="passes over the scores of unfused attention"),
    "streamed": Coefficient(start=1.0, spread=0.5, meaning="element-wise traffic relative to the count"),
    "misaligned": Coefficient(start=0.15, spread=0.7, meaning="added share of products with partial tiles"),
    "misaligned_heads": Coefficient(start=0.5, spread=0.7, meaning="added share of attention with odd heads"),
    "loss_passes": Coefficient(start=1.5, spread=0.6, meaning="passes over the logits"),
    "launch_s": Coefficient(start=0.35e-3, spread=0.6, meaning="host seconds of a block's forward"),
    "node_share": Coefficient(start=0.72, spread=0.3, meaning="share of NVLink's rate"),
    "node_alpha_s": Coefficient(start=25e-6, spread=0.6, meaning="latency inside a node"),
    "network_share": Coefficient(start=0.8, spread=0.4, meaning="share of the network's nominal rate"),
    "network_alpha_s": Coefficient(start=40e-6, spread=0.7, meaning="latency across nodes"),
    "shard_hop_s": Coefficient(start=0.5e-3, spread=1.0, meaning="seconds a rank of an optimizer's shard group adds"),
    "dp_exposed": Coefficient(start=0.5, spread=0.6, meaning="exposed share of overlapped gradient sync"),
    "tp_exposed": Coefficient(start=0.4, spread=0.5, meaning="exposed share of overlapped tp collectives"),
    "contention": Coefficient(start=0.2, spread=0.7, meaning="what hidden gathers slow the compute"),
    "optimizer_passes": Coefficient(start=1.5, spread=0.6, meaning="optimizer traffic relative to the count"),
    "accumulation_passes": Coefficient(start=2.0, spread=0.6, meaning="passes over the gradients at each micro-batch"),
    "fixed_s": Coefficient(start=0.02, spread=1.0, meaning="seconds a step beside all that"),
    "node_jitter": Coefficient(start=0.008, spread=0.7, meaning="loss per doubling of the nodes"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Cases as arrays, one entry each; `paths` holds for each case the paths found so far."""

    cases: tuple[Case, ...]
    shape: roofline.Shape
    columns: Mapping[str, Array]
    paths: Array
    log_seconds: Array

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def take(self, index: NDArray[np.intp]) -> Batch:
        """The batch of these cases."""
        return Batch(
            cases=tuple(self.cases[i] for i in index),
            shape=roofline.Shape(**{k: v[index] for k, v in vars(self.shape).items()}),
            columns={k: v[index] for k, v in self.columns.items()},
            paths=self.paths[index],
            log_seconds=self.log_seconds[index],
        )


def batch(cases: Sequence[Case]) -> Batch:
    """The arrays of these cases, with the path of equal stages as a first guess."""

    def column(values: Sequence[float]) -> Array:
        return np.array(values, dtype=float)

    a = [case.arch for case in cases]
    shape = roofline.Shape(
        hidden=column([x.hidden for x in a]),
        heads=column([x.heads for x in a]),
        kv_heads=column([x.kv_heads for x in a]),
        head_dim=column([x.head_dim for x in a]),
        ffn=column([x.ffn for x in a]),
        gated=column([x.gated for x in a]),
        vocab=column([x.vocab for x in a]),
        samples=column([c.micro_batch for c in cases]),
        sequence=column([c.sequence for c in cases]),
        tp=column([c.tp for c in cases]),
        cp=column([c.cp for c in cases]),
        sequence_norms=column([c.sequence_norms for c in cases]),
        fused_attention=column([c.kernel != "plain" for c in cases]),
        fused_streams=column([c.compiled for c in cases]),
    )
    columns = {
        "layers": column([x.layers for x in a]),
        "block_parameters": column([x.block_products + 2 * x.hidden for x in a]),
        "tied": column([x.tied for x in a]),
        **{
            name: column([getattr(c, name) for c in cases])
            for name in (
                *(
                    "num_micro_batches",
                    "pp",
                    "dp",
                    "chunks",
                    "gradient_bytes",
                    "ranks_per_node",
                    "ranks",
                    "fp8",
                    "zero",
                ),
                *("node_bytes_per_s", "overlap_dp", "overlap_tp", "fused_accumulation", "stops_early"),
            )
        },
        "full": column([c.recompute == "full" for c in cases]),
        "selective": column([c.recompute == "selective" for c in cases]),
        "shard": column([c.shard or c.dp for c in cases]),
        "hsdp": column([c.zero == 3 and bool(c.shard) for c in cases]),
        "old_kernel": column([c.kernel == "flash1" for c in cases]),
        "peak": column([TENSOR_FLOPS_PER_S[c.gpu] for c in cases]),
        "memory": column([MEMORY_BYTES_PER_S[c.gpu] for c in cases]),
        "tp_links": column([_link_share(c, c.tp) for c in cases]),
        "dp_links": column([_link_share(c, min(c.dp, max(1, c.ranks_per_node // c.tp))) for c in cases]),
        "nvlink": column([NVLINK_BYTES_PER_S[c.gpu] for c in cases]),
    }
    m, layers, pp = (columns[k] for k in ("num_micro_batches", "layers", "pp"))
    passed = m * layers / pp + (pp - 1) * layers / pp / columns["chunks"]
    one = np.stack([passed, passed, np.where(pp > 1, 0, m), np.where(pp > 1, pp * 0 + 1, m)] * 1, axis=1)
    first = np.concatenate([one, one[:, 3:], np.where(pp > 1, 2 * m, 0)[:, None]], axis=1)
    return Batch(
        cases=tuple(cases),
        shape=shape,
        columns=columns,
        paths=first[:, None, :],
        log_seconds=np.log(column([c.step_s for c in cases])),
    )


def _link_share(case: Case, ranks: int) -> float:
    """The part of a rank's links that lead to the other `ranks` of its group inside the node."""
    links = MESH_LINKS.get(case.ranks_per_node) if case.gpu == "V100" else None
    if links is None or ranks < 2:
        return 1.0
    return min((count for size, count in links.items() if size >= ranks), default=6) / 6


def collective_s(weight: float, steps: Array, ranks: Array, size_bytes: Array, rate: Array, alpha_s: Array) -> Array:
    """alpha * steps + weight * (n-1)/n * size / rate; 0 for one rank (autopar.comm)."""
    return np.where(ranks > 1, alpha_s * steps + weight * (ranks - 1) / ranks * size_bytes / rate, 0.0)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Seconds of one operation of each kind, and what follows the pipeline."""

    unit_s: Array
    tail_s: Array
    factor: Array


def parts(b: Batch, c: Mapping[str, float | Array], off: frozenset[str] = frozenset()) -> Parts:
    """The seconds behind the prediction; `off` names effects left out, for the ablation."""
    s = b.shape
    zero = np.zeros(len(b.cases))
    peak, fp8 = b["peak"], b["fp8"] > 0
    edge, fp8_edge = (0.0, 0.0) if "edges" in off else (c["product_edge"], c["fp8_edge"])
    machine = roofline.Machine(
        product_flops_per_s=np.where(fp8, 2 * peak, peak),
        head_flops_per_s=peak,
        attention_flops_per_s=peak,
        memory_bytes_per_s=b["memory"],
        product_share=np.where(fp8, c["fp8_share"], c["product_share"]),
        head_share=c["product_share"],
        product_edge=np.where(fp8, fp8_edge, edge),
        head_edge=edge,
        row_edge=np.where(fp8, fp8_edge, 0.0 if "edges" in off else c["row_edge"]),
        attention_share=c["attention_share"] * np.where(b["old_kernel"] > 0, c["old_attention"], 1.0),
        scores_passes=c["scores_passes"],
        streamed_share=1.0 / c["streamed"],
        misaligned=0.0 if "tiles" in off else c["misaligned"],
        misaligned_heads=0.0 if "tiles" in off else c["misaligned_heads"],
        loss_passes=c["loss_passes"],
        launch_s=0.0 if "launch" in off else c["launch_s"],
        backward_ratio=c["backward_ratio"],
    )
    block = roofline.block(s, machine)
    forward, backward = block.forward_s, block.backward_s
    stop = np.where(b["stops_early"] > 0, block.last_product_s, 0.0)
    again = np.where(b["full"] > 0, forward - stop, np.where(b["selective"] > 0, block.attention_s, 0.0))

    node_rate = b["nvlink"] * c["node_share"]
    net_rate = b["node_bytes_per_s"] * c["network_share"]
    per_node = np.minimum(b["ranks_per_node"], b["ranks"])
    # TP: two all-reduces each way (with sequence-parallel norms the same bytes as gather and scatter).
    tp_net = s.tp > per_node
    rate = np.where(tp_net, np.minimum(node_rate, net_rate), node_rate * b["tp_links"])
    alpha = np.where(tp_net, 2 * c["network_alpha_s"], c["node_alpha_s"])
    reduce_s = collective_s(2.0, 1 + 0.1 * s.tp, s.tp, 2 * s.tokens * s.hidden, rate, alpha)
    tp_s = 2 * reduce_s * np.where(b["overlap_tp"] > 0, c["tp_exposed"], 1.0)
    # CP: the ring passes keys and values on, half of it hidden by the blocks' attention.
    cp_rate = np.where(s.tp * s.cp > per_node, net_rate / per_node, node_rate)
    kv = np.maximum(s.kv_heads / s.tp, 1.0) * s.head_dim
    cp_s = np.where(s.cp > 1, 0.5 * 2 * 2 * s.tokens * (s.cp - 1) * kv / cp_rate, 0.0)
    if "tp" in off:
        tp_s = zero
    forward, backward = forward + tp_s + cp_s, backward + tp_s + 2 * cp_s
    again = again + np.where(b["full"] > 0, tp_s + cp_s, 0.0)
    backward = backward + again
    # Gradients of later micro-batches are added by a kernel of its own where the product does not do it.
    adds = (b["num_micro_batches"] > 1) & (b["fused_accumulation"] == 0) & (b["zero"] < 3)
    added_bytes = c["accumulation_passes"] * b["gradient_bytes"] * b["block_parameters"] / s.tp
    if "accumulation" not in off:
        backward = backward + np.where(adds, added_bytes / b["memory"], 0.0)

    # Data parallel: the ring of a rank's replicas leaves its node over its share of the network cards.
    n = b["dp"] * s.cp
    inside = np.minimum(np.maximum(per_node / s.tp, 1.0), n)
    share = net_rate * inside / per_node
    inner_rate = node_rate * b["dp_links"]
    dp_rate = np.where(n > inside, np.minimum(share, inner_rate), inner_rate)
    dp_alpha = np.where(n > inside, c["network_alpha_s"], c["node_alpha_s"])
    hops = np.log2(np.maximum(n, 2.0))
    gather_bytes = 2 * b["block_parameters"] / s.tp
    whole = collective_s(1.0, hops, n, gather_bytes, dp_rate, dp_alpha)
    local = collective_s(1.0, zero + 3, inside, gather_bytes, node_rate, c["node_alpha_s"] + zero)
    wide = b["gradient_bytes"] / 2
    across = np.maximum(n / inside, 1.0)
    local_scatter = local * wide + collective_s(
        2.0, hops, across, gather_bytes * wide / inside, share / inside, dp_alpha
    )
    gather = np.where(b["hsdp"] > 0, local, whole)
    scatter = np.where(b["hsdp"] > 0, local_scatter, whole * wide)
    sharded = (b["zero"] == 3) & ("fsdp" not in off)
    k = c["contention"]
    forward = np.where(sharded, roofline.smooth_max(forward, gather) + k * np.minimum(forward, gather), forward)
    both = gather + scatter
    backward = np.where(sharded, roofline.smooth_max(backward, both) + k * np.minimum(backward, both), backward)

    head_forward, head_backward = roofline.head(s, machine)
    embed = roofline.embed(s, machine)
    if "head" in off:
        head_forward, head_backward, embed = zero, zero, zero
    # Sends: the activation, cut by tp; across nodes where a stage fills one.
    stride = b["ranks"] / b["pp"]
    crosses = (stride >= b["ranks_per_node"]) | (b["ranks"] > b["ranks_per_node"]) & (stride * 2 > b["ranks_per_node"])
    send_rate = np.where(crosses, net_rate / np.minimum(per_node, stride), node_rate)
    send = np.where(b["pp"] > 1, 2 * s.tokens * s.hidden / s.tp / send_rate + c["network_alpha_s"], 0.0)
    send = send * np.where(b["overlap_tp"] > 0, 0.3, 1.0)
    if "sends" in off:
        send = zero

    stage = (
        b["layers"] * b["block_parameters"] / b["pp"]
        + s.vocab * s.hidden * np.where(b["pp"] > 1, 1.0, np.where(b["tied"] > 0, 1.0, 2.0))
    ) / s.tp
    sync = collective_s(1.0, 4 * hops, n, stage * (b["gradient_bytes"] + 2), dp_rate, dp_alpha)
    shards = np.where(b["zero"] > 0, np.where(b["shard"] < b["dp"], b["shard"], n), 1.0)
    if "hops" not in off:
        sync = sync + c["shard_hop_s"] * np.maximum(shards - per_node, 0.0)
    hidden_s = 0.8 * b["layers"] / b["pp"] * backward
    x = np.minimum(c["dp_exposed"], 1.0)
    sync = np.where(b["overlap_dp"] > 0, x * sync + np.maximum((1 - x) * sync - hidden_s, 0.0), sync)
    sync = np.where((b["zero"] == 3) | ("sync" in off), 0.0, sync)
    # The optimizer streams over its share of the states (34 bytes an element) and writes all parameters.
    states = 34 * stage / shards + 6 * stage * np.where(b["zero"] == 3, 0.1, 1.0)
    update = c["optimizer_passes"] * states / b["memory"]
    if "optimizer" in off:
        update = zero
    fixed = 0.0 if "fixed" in off else c["fixed_s"]
    jitter = 0.0 if "jitter" in off else c["node_jitter"]
    nodes = np.maximum(b["ranks"] / b["ranks_per_node"], 1.0)
    # Beside the pipeline: FSDP's first gather and last scatter of every micro-batch are alone.
    alone = np.where(sharded, b["num_micro_batches"] * both, 0.0)
    return Parts(
        unit_s=np.stack([forward, backward, embed + zero, head_forward, head_backward, send + zero], axis=1),
        tail_s=sync + update + fixed + alone,
        factor=1 + jitter * np.log2(nodes),
    )


def predict(b: Batch, c: Mapping[str, float | Array], off: frozenset[str] = frozenset()) -> Array:
    """Seconds of a step of each case: the longest of its known paths, then the tail."""
    p = parts(b, c, off)
    if "bubble" in off:
        m, layers, pp = b["num_micro_batches"], b["layers"], b["pp"]
        f, back, embed, hf, hb, _ = p.unit_s.T
        pipe = m * (layers * (f + back) + 2 * embed + hf + hb) / pp
    else:
        pipe = np.einsum("npk,nk->np", b.paths, p.unit_s).max(axis=1)
    return (pipe + p.tail_s) * p.factor


def with_paths(b: Batch, c: Mapping[str, float | Array]) -> Batch:
    """The batch with the critical paths at these coefficients, beside those already known."""
    units = parts(b, c).unit_s
    found = np.zeros((len(b.cases), 6))
    for i, case in enumerate(b.cases):
        if case.pp == 1:
            m, blocks = case.num_micro_batches, case.num_micro_batches * case.arch.layers
            found[i] = (blocks, blocks, 2 * m, m, m, 0)
            continue
        f, back, embed, head_f, head_b, send = units[i]
        _, path = critical_path(
            case.chunk_blocks,
            pp=case.pp,
            micro_batches=case.num_micro_batches,
            forward_s=f,
            backward_s=back,
            embed_s=embed,
            head_forward_s=head_f,
            head_backward_s=head_b,
            send_s=send,
        )
        found[i] = path.counts
    kept = [] if b.paths.shape[1] == 1 and not b.paths[:, 0, 5].any() else [b.paths]
    return Batch(
        cases=b.cases,
        shape=b.shape,
        columns=b.columns,
        paths=np.concatenate([*kept, found[:, None, :]], axis=1),
        log_seconds=b.log_seconds,
    )
