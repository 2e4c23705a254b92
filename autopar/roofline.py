"""Seconds of a transformer block and its head without a device: from FLOPs, bytes and kernel launches.

    seconds = max(products / rate + attention + streamed bytes / bandwidth, kernels * launch)

A product of M x K by K x N runs at share `product_share` of the peak, less for small tiles:

    2 M K N / (peak * share) * (1 + row_edge / M + edge (1/K + 1/N)) * (1 + misaligned, K or N no multiple of 64)

Edge terms are what a memory-bound term adds for the three matrices; misalignment is what tensor cores lose on partial
tiles. All functions are arithmetic, so that they take numbers or numpy arrays (one entry a case) alike. The shares are
data of `profiles/` with their source, or the fit of tests/bench/fidelity.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Number = Any
"""A float or a numpy array of floats."""

ALIGNMENT = 64
"""Elements: 128 bytes in 16 bits, the line that tensor-core kernels load whole."""

FUSED_HEAD = 32
"""Fused attention pads a head's width to a multiple of this (FlashAttention-2: 32, 64, 96, 128, 160, 192, 256)."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One device: peaks as stated by its maker, and the few numbers that say how much of them is reached.

    product_flops_per_s, attention_flops_per_s: peak of dense matrix products in the dtype of each;
    head_flops_per_s: of the logits; memory_bytes_per_s.
    product_share, product_edge, row_edge: see the module; head_edge: for 16 bits (fp8 saturates later);
    attention_share: of the peak, fused kernels; scores_passes: reads and writes of the score matrix by unfused ones;
    streamed_share: of the memory bandwidth, norms, activations and residuals; misaligned, misaligned_heads: the added
    share on partial tiles; loss_passes: of the logits; launch_s: host seconds of one forward of a block;
    backward_ratio: of products, 2 by count.
    """

    product_flops_per_s: Number
    head_flops_per_s: Number
    attention_flops_per_s: Number
    memory_bytes_per_s: Number
    product_share: Number
    head_share: Number
    product_edge: Number
    row_edge: Number
    head_edge: Number
    attention_share: Number
    scores_passes: Number
    streamed_share: Number
    misaligned: Number
    misaligned_heads: Number
    loss_passes: Number
    launch_s: Number
    backward_ratio: Number = 2.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One block as a rank sees it.

    samples, sequence: of one micro-batch, sequence before any cut; tp, cp: how many ranks share heads and width, and
    the sequence; sequence_norms: norms run on 1/tp of the tokens; fused_attention: no score matrix in memory;
    fused_streams: a compiler has fused the element-wise kernels.
    """

    hidden: Number
    heads: Number
    kv_heads: Number
    head_dim: Number
    ffn: Number
    gated: Number
    vocab: Number
    samples: Number
    sequence: Number
    tp: Number = 1
    cp: Number = 1
    sequence_norms: Number = 0
    fused_attention: Number = 1
    fused_streams: Number = 0

    @property
    def tokens(self) -> Number:
        """Tokens of a rank."""
        return self.samples * self.sequence / self.cp


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Forward and backward of one block and its causes; the backward without recompute.

    last_product_s: of the down projection, whose output a recompute that stops early never needs.
    """

    products_s: Number
    last_product_s: Number
    attention_s: Number
    attention_backward_s: Number
    streams_s: Number
    forward_s: Number
    backward_s: Number


def product_s(
    m: Number, k: Number, n: Number, *, flops_per_s: Number, edge: Number, row_edge: Number, misaligned: Number
) -> Number:
    """Seconds of one matrix product over m rows (tokens); `flops_per_s` is the peak times its share."""
    partial = (np.mod(k, ALIGNMENT) > 0.5) | (np.mod(n, ALIGNMENT) > 0.5)
    small = 1 + row_edge / m + edge * (1 / k + 1 / n)
    return 2 * m * k * n / flops_per_s * small * np.where(partial, 1 + misaligned, 1.0)


def machine_product_s(machine: Machine, m: Number, k: Number, n: Number) -> Number:
    """The same on a machine, in the dtype of its products."""
    return product_s(
        m,
        k,
        n,
        flops_per_s=machine.product_flops_per_s * machine.product_share,
        edge=machine.product_edge,
        row_edge=machine.row_edge,
        misaligned=machine.misaligned,
    )


def smooth_max(a: Number, b: Number, sharpness: float = 4.0) -> Number:
    """The larger of two times, up to 19 % more where they are equal: two queues never overlap perfectly."""
    most = np.maximum(np.maximum(a, b), 1e-30)
    return most * ((a / most) ** sharpness + (b / most) ** sharpness) ** (1 / sharpness)


def block_products_s(shape: Shape, machine: Machine) -> tuple[Number, Number]:
    """Seconds of the four products of one forward (query-key-value, output, up and gate, down), and of the last."""
    s = shape
    rate = machine.product_flops_per_s * machine.product_share
    wide, kv = s.heads * s.head_dim / s.tp, np.maximum(s.kv_heads / s.tp, 1.0) * s.head_dim
    width = s.ffn * (1 + s.gated) / s.tp

    def one(k: Number, n: Number) -> Number:
        edge, rows, misaligned = machine.product_edge, machine.row_edge, machine.misaligned
        return product_s(s.tokens, k, n, flops_per_s=rate, edge=edge, row_edge=rows, misaligned=misaligned)

    last = one(s.ffn / s.tp, s.hidden)
    return one(s.hidden, wide + 2 * kv) + one(wide, s.hidden) + one(s.hidden, width) + last, last


def attention_s(shape: Shape, machine: Machine) -> tuple[Number, Number]:
    """Seconds of causal attention itself, forward and backward; see core_s."""
    s = shape
    flops = 4 * s.samples * s.sequence**2 * s.heads * s.head_dim / s.tp / s.cp
    scores_bytes = 2 * s.samples * s.heads / s.tp * s.sequence**2 / s.cp
    fused, plain = core_s(flops, scores_bytes, head_dim=s.head_dim, keys=s.sequence, machine=machine, causal=True)
    forward, backward = (np.where(s.fused_attention > 0, f, p) for f, p in zip(fused, plain, strict=True))
    return forward, backward


def core_s(
    flops: Number, scores_bytes: Number, *, head_dim: Number, keys: Number, machine: Machine, causal: bool
) -> tuple[tuple[Number, Number], tuple[Number, Number]]:
    """Seconds of the core attention, forward and backward: of a fused kernel, and of three plain ones.

    flops: of both products, nothing masked. Fused: half of them where causal, 2.5 times that backwards (it computes
    the scores again). Plain: all products at the efficiency of products of inner size head_dim, and `scores_passes`
    over the score matrix of scores_bytes in 16 bits.
    """
    fused = (0.5 if causal else 1.0) * flops / (machine.attention_flops_per_s * machine.attention_share)
    fused = fused * np.ceil(head_dim / FUSED_HEAD) * FUSED_HEAD / head_dim
    small = 1 + machine.head_edge * 0.5 * (1 / head_dim + 2 / keys)
    products = flops / (machine.attention_flops_per_s * machine.head_share) * small
    passes = 0.5 * machine.scores_passes * scores_bytes / machine.memory_bytes_per_s
    loss = np.where(np.mod(head_dim, 8) > 0.5, 1 + machine.misaligned_heads, 1.0)
    return (fused, 2.5 * fused), ((products + passes) * loss, (2 * products + passes) * loss)


def streams_s(shape: Shape, machine: Machine) -> Number:
    """Seconds of the element-wise work of one forward: 14 passes of the hidden width, 3 of the MLP's, 16 bits each."""
    s = shape
    whole = 14 * s.hidden / np.where(s.sequence_norms > 0, s.tp, 1.0)
    cut = (3 * s.ffn * (1 + s.gated) + 3 * s.hidden) / s.tp
    moved_bytes = 2 * s.tokens * (whole + cut) * np.where(s.fused_streams > 0, 0.5, 1.0)
    return moved_bytes / (machine.memory_bytes_per_s * machine.streamed_share)


def block(shape: Shape, machine: Machine) -> Seconds:
    """Seconds of one block, collectives not included."""
    (products, last), streams = block_products_s(shape, machine), streams_s(shape, machine)
    attention, attention_backward = attention_s(shape, machine)
    launch = machine.launch_s * np.where(shape.fused_streams > 0, 0.5, 1.0) * np.where(shape.tp > 1, 1.25, 1.0)
    forward = products + attention + streams
    backward = machine.backward_ratio * products + attention_backward + 1.5 * streams
    return Seconds(
        products_s=products,
        last_product_s=last,
        attention_s=attention,
        attention_backward_s=attention_backward,
        streams_s=streams,
        forward_s=smooth_max(forward, launch),
        backward_s=smooth_max(backward, 1.6 * launch),
    )


def head(shape: Shape, machine: Machine) -> tuple[Number, Number]:
    """Seconds of logits and loss, forward and backward; the vocabulary is cut by tp."""
    s = shape
    logits = product_s(
        s.tokens,
        s.hidden,
        s.vocab / s.tp,
        flops_per_s=machine.head_flops_per_s * machine.head_share,
        edge=machine.head_edge,
        row_edge=machine.row_edge,
        misaligned=machine.misaligned,
    )
    loss = machine.loss_passes * 8 * s.tokens * s.vocab / s.tp / machine.memory_bytes_per_s
    return logits + loss, machine.backward_ratio * logits + loss


def embed(shape: Shape, machine: Machine) -> Number:
    """Seconds of looking up the embedding, the same backwards."""
    return 8 * shape.tokens * shape.hidden / (machine.memory_bytes_per_s * machine.streamed_share)
