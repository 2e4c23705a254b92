"""Transformers from their published dimensions, without torch: the chain of layers and its parameters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from autopar import roofline
from autopar.axes import divisors
from autopar.counts import SAMPLES, WORD_DEGREES, calls, linear
from autopar.measured import LayerCost, LayerProfile, Line
from autopar.model import Attention, LayerKind, ModelSpec, Parameter
from autopar.units import DTYPE_BYTES


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder: `layers` blocks of attention (heads, kv_heads) and an MLP of width ffn, gated with a third matrix.

    tied: embedding and head share their matrix; biased: projections have biases and norms are LayerNorms (GPT-2),
    otherwise RMSNorm and no biases, or those of query, key and value alone (attention_biased); positions: learned
    position embeddings, 0 for rotary or none.
    Raises ValueError for dimensions that make no model.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool
    tied: bool
    biased: bool = False
    attention_biased: bool = False
    positions: int = 0
    head_size: int | None = None

    def __post_init__(self) -> None:
        for field in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"):
            if getattr(self, field) < 1:
                raise ValueError(f"Architecture.{field} must be >= 1, not {getattr(self, field)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"Architecture.kv_heads {self.kv_heads} does not divide heads {self.heads}")

    @property
    def head_dim(self) -> int:
        """The width of one head."""
        return self.head_size or self.hidden // self.heads

    @property
    def block_products(self) -> int:
        """Elements of the matrices of one block, which are its multiply-adds for one token outside attention."""
        wide = self.heads * self.head_dim
        attention = self.hidden * (wide + 2 * self.kv_heads * self.head_dim) + wide * self.hidden
        return attention + self.hidden * self.ffn * (3 if self.gated else 2)

    @property
    def parameter_count(self) -> int:
        """All parameters, a shared one once."""
        kinds = {kind.name: kind for kind in model_spec(self, dtype="float32").kinds}
        shared = self.vocab * self.hidden if self.tied else 0
        blocks = self.layers * kinds["block"].parameter_count
        return kinds["embed"].parameter_count + blocks + kinds["head"].parameter_count - shared

    @property
    def tp_degrees(self) -> tuple[int, ...]:
        """The tensor-parallel degrees above 1 that cut heads, kv heads and the MLP evenly."""
        return tuple(d for d in divisors(self.kv_heads) if d > 1 and self.ffn % d == 0)


def model_spec(arch: Architecture, *, dtype: str) -> ModelSpec:
    """The chain of this architecture with its parameter shapes in `dtype`."""
    words = tuple(degree for degree in WORD_DEGREES if degree <= arch.vocab)
    kinds = (
        LayerKind(
            name="embed",
            role="embed",
            class_name="Embedding",
            parameters=_embed(arch, dtype),
            tp_degrees=words,
            tp_reason=f"vocabulary {arch.vocab}",
        ),
        LayerKind(
            name="block",
            role="block",
            class_name="DecoderLayer",
            parameters=_block(arch, dtype),
            tp_degrees=arch.tp_degrees,
            tp_reason=f"heads {arch.heads}, kv heads {arch.kv_heads}, width {arch.ffn}",
            sequence_norms=bool(arch.tp_degrees),
            attention=Attention(heads=arch.heads, kv_heads=arch.kv_heads, head_dim=arch.head_dim),
        ),
        LayerKind(
            name="head",
            role="head",
            class_name="Head",
            parameters=_head(arch, dtype),
            tp_degrees=words,
            tp_reason=f"vocabulary {arch.vocab}",
        ),
    )
    shapes = [[kind.name, [[p.name, p.shape, p.dtype] for p in kind.parameters]] for kind in kinds]
    text = json.dumps([shapes, arch.layers, arch.tied])
    return ModelSpec(
        name=arch.name,
        source=f"shipped:{arch.name}",
        fingerprint=hashlib.sha256(text.encode()).hexdigest()[:16],
        layers=("embed", *["block"] * arch.layers, "head"),
        kinds=kinds,
        tied=arch.tied,
        hidden_size=arch.hidden,
        vocab_size=arch.vocab,
    )


def _norm(name: str, arch: Architecture, dtype: str) -> tuple[Parameter, ...]:
    names = (f"{name}.weight", f"{name}.bias") if arch.biased else (f"{name}.weight",)
    return tuple(Parameter(name=each, shape=(arch.hidden,), dtype=dtype) for each in names)


def _block(arch: Architecture, dtype: str) -> tuple[Parameter, ...]:
    wide, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    matrices = [("query", arch.hidden, wide), ("key", arch.hidden, kv), ("value", arch.hidden, kv)]
    matrices += [("output", wide, arch.hidden), ("up", arch.hidden, arch.ffn), ("down", arch.ffn, arch.hidden)]
    if arch.gated:
        matrices.append(("gate", arch.hidden, arch.ffn))
    incoming = ("query", "key", "value")
    projections = tuple(
        p
        for n, i, o in matrices
        for p in linear(n, i, o, dtype, arch.biased or (arch.attention_biased and n in incoming))
    )
    return (*_norm("attention_norm", arch, dtype), *projections, *_norm("mlp_norm", arch, dtype))


def _embed(arch: Architecture, dtype: str) -> tuple[Parameter, ...]:
    tokens = Parameter(name="tokens.weight", shape=(arch.vocab, arch.hidden), dtype=dtype)
    if not arch.positions:
        return (tokens,)
    return (tokens, Parameter(name="positions.weight", shape=(arch.positions, arch.hidden), dtype=dtype))


def _head(arch: Architecture, dtype: str) -> tuple[Parameter, ...]:
    return (*_norm("norm", arch, dtype), *linear("logits", arch.hidden, arch.vocab, dtype, False))


def layer_profile(
    arch: Architecture, machine: roofline.Machine, *, sequence: int, dtype: str = "bfloat16", device_name: str = ""
) -> LayerProfile:
    """Seconds by the roofline and bytes by count of every layer kind at every tensor-parallel degree, in 16 bits.

    Attention is fused, element-wise kernels are not. Bytes of a token that a block keeps, with h hidden, w = heads *
    head_dim, k likewise of the kv heads, f ffn:  16 h + 4 w + 4 k + 8 f (gated, RMSNorm in fp32) or  8 h + 4 w + 4 k +
    10 f (LayerNorm, GPT-2's composed GELU), 4 a head, 8; a head 8 h (4 h) + 4 V + 12. These counts are what the
    profiler's trace of the Hugging Face models gives (a test compares). Raises ValueError for another dtype.
    """
    if DTYPE_BYTES[dtype] != 2:
        raise ValueError(f"layer_profile counts 16-bit activations, not {dtype}")
    model = model_spec(arch, dtype=dtype)
    costs = [_embed_cost(arch, model.kinds[0], machine, sequence)]
    for tp in (1, *arch.tp_degrees):
        for norms in (False, True) if tp > 1 and sequence % tp == 0 else (False,):
            costs.append(_block_cost(arch, model.kinds[1], machine, sequence, tp, norms))
    costs.append(_head_cost(arch, model.kinds[2], machine, sequence))
    return LayerProfile(
        device="cuda", device_name=device_name, processes=1, sequence=sequence, dtype=dtype, costs=tuple(costs)
    )


def _shape(arch: Architecture, samples: float, sequence: int, tp: int = 1, norms: bool = False) -> roofline.Shape:
    return roofline.Shape(
        hidden=arch.hidden,
        heads=arch.heads,
        kv_heads=arch.kv_heads,
        head_dim=arch.head_dim,
        ffn=arch.ffn,
        gated=int(arch.gated),
        vocab=arch.vocab,
        samples=samples,
        sequence=sequence,
        tp=tp,
        sequence_norms=int(norms),
    )


def _per_token(fixed: float, token_bytes: float, sequence: int) -> Line:
    return Line(fixed=fixed, per_sample=token_bytes * sequence)


def _block_cost(
    arch: Architecture, kind: LayerKind, machine: roofline.Machine, sequence: int, tp: int, norms: bool
) -> LayerCost:
    h, wide, kv = arch.hidden, arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    times = [roofline.block(_shape(arch, n, sequence, tp, norms), machine) for n in SAMPLES]
    whole, inside = (8, 10) if arch.biased else (16, 8)
    cut = (4 * wide + 4 * kv + inside * arch.ffn + 4 * arch.heads) / tp
    # With sequence-parallel norms both inputs of the sharded regions are kept gathered, 2 bytes each.
    outside = ((whole - 4) / tp + 4) * h + 8 / tp if norms else whole * h + 8
    saved, moving = cut + outside, 2 * h / (tp if norms else 1)
    matrices = sum(p.size_bytes for p in kind.parameters if len(p.shape) == 2) // tp
    local = matrices + sum(p.size_bytes for p in kind.parameters if len(p.shape) == 1)
    flops = 2 * arch.block_products + 4 * sequence * wide
    return LayerCost(
        kind=kind.name,
        tp=tp,
        sequence_norms=norms,
        samples=SAMPLES,
        forward_s=tuple(float(t.forward_s) for t in times),
        backward_s=tuple(float(t.backward_s) for t in times),
        parameter_bytes=local,
        trainable_bytes=local,
        largest_parameter_bytes=2 * h * arch.ffn // tp,
        input_bytes=_per_token(0, moving, sequence),
        output_bytes=_per_token(0, moving, sequence),
        saved_bytes=_per_token(0, saved, sequence),
        forward_peak_bytes=_per_token(0, saved + (8 if norms else 6) * h, sequence),
        backward_peak_bytes=_backward_peak(arch, saved, sequence, tp, norms),
        flops=_per_token(0, flops / tp, sequence),
        calls=calls(((2 * h * sequence, 2 * h * sequence),) * 2, norms) if tp > 1 else (),
    )


def _backward_peak(arch: Architecture, saved: float, sequence: int, tp: int, norms: bool) -> Line:
    """The line through the peaks at the fewest and the most samples, each the highest of the block's moments.

    saved: bytes a token. With h hidden, f ffn, bytes a token and gradients of MLP matrices of 2 h f / tp:

        at its end   the saved set, the gathered gradient (norms: 4 h) and the outgoing one, 2 h
        in the MLP   the saved set, two gradients of its width (4 f), 2 h, one matrix
        in the norm  the saved set without the MLP's (8 f), 18 h in fp32, all its matrices

    Where norms run on a part of the sequence, h counts 1 / tp in them. LayerNorm and GELU: the MLP's moment alone.
    Within 5 % of what autopar.profiler.counted traces (a test compares).
    """
    h, f, part = arch.hidden, arch.ffn / tp, tp if norms else 1
    matrix = 2 * h * f
    if arch.biased:
        moments = [(saved + 2 * h + 4 * f, matrix)]
    else:
        moments = [
            (saved + (4 * h if norms else 0) + 2 * h / part, 0.0),
            (saved + 4 * f + 2 * h / part, matrix),
            (saved - 8 * f + 18 * h / part, (3 if arch.gated else 2) * matrix),
        ]
    first, last = (max(token * n * sequence + fixed for token, fixed in moments) for n in (SAMPLES[0], SAMPLES[-1]))
    slope = (last - first) / (SAMPLES[-1] - SAMPLES[0])
    return Line(fixed=first - slope * SAMPLES[0], per_sample=slope)


def _head_cost(arch: Architecture, kind: LayerKind, machine: roofline.Machine, sequence: int) -> LayerCost:
    times = [roofline.head(_shape(arch, n, sequence), machine) for n in SAMPLES]
    kept = (4 if arch.biased else 8) * arch.hidden
    return _outer_cost(
        arch,
        kind,
        sequence,
        forward_s=[float(forward) for forward, _ in times],
        backward_s=[float(backward) for _, backward in times],
        token_bytes=(2 * arch.hidden, 0, kept + 4 * arch.vocab + 12),
        # Logits in 16 bits and in fp32, their log-softmax and the gradients of both.
        forward_peak=_per_token(0, kept + 10 * arch.vocab + 28, sequence),
        backward_peak=_per_token(0, kept + 12 * arch.vocab, sequence),
        flops=2.0 * arch.hidden * arch.vocab,
    )


def _embed_cost(arch: Architecture, kind: LayerKind, machine: roofline.Machine, sequence: int) -> LayerCost:
    seconds = [float(roofline.embed(_shape(arch, n, sequence), machine)) for n in SAMPLES]
    return _outer_cost(
        arch,
        kind,
        sequence,
        forward_s=seconds,
        backward_s=seconds,
        token_bytes=(8, 2 * arch.hidden, 0),
        forward_peak=_per_token(0, 4 * arch.hidden, sequence),
        backward_peak=_per_token(kind.parameter_bytes, 2 * arch.hidden, sequence),
        flops=0.0,
    )


def _outer_cost(
    arch: Architecture,
    kind: LayerKind,
    sequence: int,
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    token_bytes: tuple[float, float, float],
    forward_peak: Line,
    backward_peak: Line,
    flops: float,
) -> LayerCost:
    """The cost of embedding or head; token_bytes: of input, output and saved set."""
    entering, leaving, saved = (_per_token(0, each, sequence) for each in token_bytes)
    return LayerCost(
        kind=kind.name,
        samples=SAMPLES,
        forward_s=tuple(forward_s),
        backward_s=tuple(backward_s),
        parameter_bytes=kind.parameter_bytes,
        trainable_bytes=kind.parameter_bytes,
        largest_parameter_bytes=2 * arch.vocab * arch.hidden,
        input_bytes=entering,
        output_bytes=leaving,
        saved_bytes=saved,
        forward_peak_bytes=forward_peak,
        backward_peak_bytes=backward_peak,
        flops=_per_token(0, flops, sequence),
    )
