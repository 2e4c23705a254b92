"""Synthetic tables of well-known models for benchmarks: an analytic cost of every layer under every strategy.

A100-like: 312 Tflop/s at half efficiency, 230 GB/s within nodes of 8 and 22 GB/s between, bf16 with Adam in float32
(18 bytes a parameter). The numbers are there to be shaped like real ones; nobody should plan with them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.price import INFEASIBLE, CostTables, Int
from autopar.strategy import Strategy

FLOPS = 156e12
NODE = 8
INSIDE_BYTES_PER_S, BETWEEN_BYTES_PER_S = 230e9, 22e9
CONTEXT_BYTES = 1 << 30
LAUNCH_S = 15e-6

Float = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer by its sizes. experts: how many MLPs it holds, active: how many a token uses; window: of attention."""

    role: str
    hidden: int
    inner: int = 0
    kv_share: float = 1.0
    sequence: int = 4096
    vocabulary: int = 0
    experts: int = 1
    active: int = 1
    window: int | None = None
    attentions: int = 1
    matrices: int = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a machine: its layers, devices, batch, micro-batches and budget."""

    name: str
    layers: tuple[Layer, ...]
    devices: int
    global_batch: int
    micro_batches: int
    budget_gib: float


@dataclass(frozen=True, kw_only=True, eq=False)
class ChainTables:
    """What `solve_chain` takes, for a case on one stage."""

    time_ns: Int
    memory_bytes: Int
    transition_ns: Int
    layout: Int
    budget_bytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Degrees:
    """S strategies as columns of degrees: tp, dp, Ulysses instead of tensor parallelism, ZeRO stage, recompute."""

    tp: Int
    dp: Int
    ulysses: Int
    zero: Int
    recompute: Int

    @classmethod
    def on(cls, devices: int) -> Degrees:
        """Every strategy on so many devices, tp within a node."""
        rows = []
        tp = 1
        while tp <= min(devices, NODE):
            dp = devices // tp
            for ulysses in (0, 1) if tp > 1 else (0,):
                for zero in (0, 2, 3) if dp > 1 or ulysses else (0,):
                    rows += [(tp, dp, ulysses, zero, recompute) for recompute in (0, 1)]
            tp *= 2
        columns = np.array(rows, dtype=np.int64).T
        return cls(**dict(zip(("tp", "dp", "ulysses", "zero", "recompute"), columns, strict=True)))


def decoder(
    layers: int, hidden: int, inner: int, kv_share: float, sequence: int, vocabulary: int
) -> tuple[Layer, ...]:
    """Embedding, blocks and head of a Llama-like model."""
    ends = {"hidden": hidden, "sequence": sequence, "vocabulary": vocabulary}
    block = Layer(role="block", hidden=hidden, inner=inner, kv_share=kv_share, sequence=sequence)
    return (Layer(role="embed", **ends), *[block] * layers, Layer(role="head", **ends))


def t5() -> tuple[Layer, ...]:
    """24 encoder layers of 2048 tokens, 24 decoder layers of 512."""
    sizes = {"hidden": 4096, "inner": 16384}
    encoder = Layer(role="block", sequence=2048, **sizes)
    both = Layer(role="block", sequence=512, attentions=2, **sizes)
    ends = {"hidden": 4096, "vocabulary": 32128}
    embed, head = Layer(role="embed", sequence=2048, **ends), Layer(role="head", sequence=512, **ends)
    return (embed, *[encoder] * 24, *[both] * 24, head)


def swin() -> tuple[Layer, ...]:
    """48 layers in four kinds: resolution falls, width grows."""
    layers: list[Layer] = []
    for count, hidden, sequence in ((2, 320, 9216), (2, 640, 2304), (42, 1280, 576), (2, 2560, 144)):
        one = Layer(role="block", hidden=hidden, inner=4 * hidden, sequence=sequence, window=144, matrices=2)
        layers += [one] * count
    return tuple(layers)


def moe() -> tuple[Layer, ...]:
    """32 layers, dense and 8-expert ones in turn."""
    dense = Layer(role="block", hidden=4096, inner=14336, kv_share=0.25)
    mixed = replace(dense, experts=8, active=2)
    ends = {"hidden": 4096, "vocabulary": 32000}
    return (Layer(role="embed", **ends), *[dense, mixed] * 16, Layer(role="head", **ends))


def cases() -> tuple[Case, ...]:
    """The cases of the benchmark."""
    seven = decoder(32, 4096, 11008, 1.0, 4096, 32000)
    seventy = decoder(80, 8192, 28672, 0.125, 4096, 128256)
    large = decoder(126, 16384, 53248, 0.0625, 8192, 128256)
    deep = decoder(128, 12288, 32768, 0.125, 4096, 128000)
    rows = (
        ("7B, 8 GPUs, 24 GiB", seven, 8, 256, 16, 24),
        ("13B, 8 GPUs, 40 GiB", decoder(40, 5120, 13824, 1.0, 4096, 32000), 8, 256, 16, 40),
        ("T5 24+24, 8 GPUs, 40 GiB", t5(), 8, 256, 16, 40),
        ("Swin 48, 8 GPUs, 8 GiB", swin(), 8, 1024, 16, 8),
        ("MoE 32, 64 GPUs, 40 GiB", moe(), 64, 1024, 16, 40),
        ("70B, 64 GPUs, 80 GiB", seventy, 64, 1024, 16, 80),
        ("70B, 512 GPUs, 40 GiB", seventy, 512, 4096, 8, 40),
        ("405B, 512 GPUs, 80 GiB", large, 512, 4096, 8, 80),
        ("128 layers, 1024 GPUs, 60 GiB", deep, 1024, 4096, 4, 60),
    )
    return tuple(
        Case(name=n, layers=chain, devices=d, global_batch=b, micro_batches=m, budget_gib=g)
        for n, chain, d, b, m, g in rows
    )


def layer_costs(layer: Layer, on: Degrees, samples: int, micro_batches: int) -> tuple[Float, Float, Float]:
    """Seconds, bytes of states and bytes of saved activations under every strategy; samples: of a micro-batch."""
    devices = int(on.tp[0] * on.dp[0])
    tokens = samples / on.dp * layer.sequence
    hidden = layer.hidden
    sharded_by = np.where(on.ulysses, 1, on.tp)
    if layer.role == "block":
        window = layer.sequence if layer.window is None else layer.window
        attention = hidden**2 * (2 + 2 * layer.kv_share) * layer.attentions
        mlp = layer.matrices * hidden * layer.inner
        parameters = attention + mlp * layer.experts
        flops = 2 * tokens * (attention + mlp * layer.active + window * hidden * layer.attentions)
        saved = tokens * (12 * hidden + 4 * hidden * layer.attentions + 6 * layer.inner * layer.active) / on.tp
        saved = np.where(on.recompute, tokens * 2 * hidden / on.tp, saved)
        collectives = 1.0 + layer.attentions
    else:
        parameters = float(layer.vocabulary * hidden)
        flops = tokens * hidden * (0.5 if layer.role == "embed" else 2 * layer.vocabulary)
        saved = tokens * (2 * hidden if layer.role == "embed" else 6 * layer.vocabulary + 2 * hidden) / on.tp
        collectives = 0.5
    forward_s = flops / on.tp / FLOPS
    volume = tokens * hidden * 2 * (on.tp - 1) / on.tp
    call_s = collectives * 2 * np.where(on.ulysses, 2 / on.tp, 1) * volume / INSIDE_BYTES_PER_S
    again_s = on.recompute * (layer.role == "block") * (forward_s + call_s / 2)
    time_s = 3 * forward_s + call_s + again_s + LAUNCH_S * (1 + 0.2 * (on.tp > 1))
    group = np.where(on.ulysses, devices, on.dp)
    bandwidth = INSIDE_BYTES_PER_S if devices <= NODE else BETWEEN_BYTES_PER_S
    shard = parameters / sharded_by
    reduce_s = 2 * shard * (group - 1) / group / bandwidth
    gathered_s = np.maximum(0.6 * reduce_s, 4 * reduce_s - 2.4 * forward_s) + 0.3 * reduce_s / micro_batches
    time_s = time_s + np.where(on.zero == 3, gathered_s, reduce_s / micro_batches)
    state = np.select([on.zero == 0, on.zero == 2], [18 * shard, 4 * shard + 14 * shard / group], 18 * shard / group)
    return time_s, state, saved


def relayout_s(layer: Layer, on: Degrees, samples: int) -> Float:
    """[S, S]: moving the activation between tensor-parallel degrees, forward and backward."""
    wide = np.maximum(on.tp[:, None], on.tp[None, :])
    moved = samples * wide / int(on.tp[0] * on.dp[0]) * layer.sequence * layer.hidden * 2
    return np.where(on.tp[:, None] == on.tp[None, :], 0.0, 2 * (wide - 1) / wide * moved / INSIDE_BYTES_PER_S)


def chain_tables(case: Case) -> ChainTables:
    """The chain of a case on one stage."""
    on = Degrees.on(case.devices)
    samples = case.global_batch // case.micro_batches
    kinds = list(dict.fromkeys(case.layers))
    time_ns, memory, moves = [], [], []
    for kind in kinds:
        time_s, state, saved = layer_costs(kind, on, samples, case.micro_batches)
        time_ns.append(np.where(samples % on.dp == 0, np.ceil(time_s * 1e9), np.inf))
        memory.append(np.ceil(state + saved))
        moves.append(np.ceil(relayout_s(kind, on, samples) * 1e9))
    order = [kinds.index(layer) for layer in case.layers]
    times = np.array(time_ns)[order]
    steps = np.array(moves, dtype=np.int64)[order]
    if (steps == steps[0]).all():
        steps = steps[0]
    return ChainTables(
        time_ns=np.where(np.isinf(times), INFEASIBLE, np.where(np.isinf(times), 0, times).astype(np.int64)),
        memory_bytes=np.array(memory, dtype=np.int64)[order],
        transition_ns=steps,
        layout=np.unique(on.tp, return_inverse=True)[1].astype(np.int64),
        budget_bytes=int(case.budget_gib * 2**30) - CONTEXT_BYTES,
    )


def pipeline_tables(case: Case) -> list[CostTables]:
    """Every (stages, micro-batches) of a case under 1F1B, stages up to 16."""
    found = []
    kinds = list(dict.fromkeys(case.layers))
    order = [kinds.index(layer) for layer in case.layers]
    for stages in (1, 2, 4, 8, 16):
        devices = case.devices // stages
        if stages > len(order) or case.devices % stages:
            continue
        on = Degrees.on(devices)
        layout = np.unique(on.tp, return_inverse=True)[1].astype(np.int64)
        for micro_batches in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
            samples = case.global_batch // micro_batches
            if samples < 1 or not (samples % on.dp == 0).any():
                continue
            rows = [layer_costs(kind, on, samples, micro_batches) for kind in kinds]
            legal = samples % on.dp == 0
            time_ns = np.array([np.where(legal, np.ceil(row[0] * 1e9), 0) for row in rows], dtype=np.int64)
            time_ns[:, ~legal] = INFEASIBLE
            boundary = max(case.layers, key=lambda layer: layer.sequence * layer.hidden)
            bandwidth = INSIDE_BYTES_PER_S if case.devices <= NODE else BETWEEN_BYTES_PER_S
            p2p_s = 2 * samples / devices * boundary.sequence * boundary.hidden * 2 / bandwidth
            steps = np.ceil(relayout_s(boundary, on, samples) * 1e9).astype(np.int64)
            found.append(
                CostTables(
                    stages=stages,
                    micro_batches=micro_batches,
                    schedule="1f1b",
                    strategies=(Strategy(dp=devices),) * len(on.tp),
                    time_ns=time_ns[order],
                    state_bytes=np.array([np.ceil(row[1]) for row in rows], dtype=np.int64)[order],
                    saved_bytes=np.array([np.ceil(row[2]) for row in rows], dtype=np.int64)[order],
                    transient_bytes=np.zeros((len(order), len(on.tp)), dtype=np.int64),
                    transition_ns=steps,
                    entry_ns=steps[0],
                    exit_ns=steps[:, 0].copy(),
                    p2p_ns=int(np.ceil(p2p_s * 1e9)) if stages > 1 else 0,
                    layout=layout,
                    in_flight=tuple(min(stages - stage, micro_batches) for stage in range(stages)),
                    budget_bytes=(int(case.budget_gib * 2**30) - CONTEXT_BYTES,) * stages,
                )
            )
    return found


def scaled(case: Case, *, layers: int, devices: int) -> Case:
    """The case with so many equal blocks and devices, and a batch of 8 samples a device."""
    embed, block, head = case.layers[0], case.layers[1], case.layers[-1]
    return replace(
        case,
        name=f"{layers} layers, {devices} GPUs",
        layers=(embed, *[block] * layers, head),
        devices=devices,
        global_batch=8 * devices,
    )
