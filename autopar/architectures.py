"""Transformers from their published dimensions, without torch: the chain of layers and its parameters."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from autopar.axes import divisors
from autopar.model import LayerKind, ModelSpec, Parameter


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder: `layers` blocks of attention (heads, kv_heads) and an MLP of width ffn, gated with a third matrix.

    tied: embedding and head share their matrix; biased: projections have biases and norms are LayerNorms (GPT-2),
    otherwise no biases and RMSNorm; positions: learned position embeddings, 0 for rotary or none.
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
    kinds = (
        LayerKind(name="embed", role="embed", class_name="Embedding", parameters=_embed(arch, dtype)),
        LayerKind(
            name="block",
            role="block",
            class_name="DecoderLayer",
            parameters=_block(arch, dtype),
            tp_degrees=arch.tp_degrees,
            tp_reason=f"heads {arch.heads}, kv heads {arch.kv_heads}, width {arch.ffn}",
            sequence_norms=bool(arch.tp_degrees),
        ),
        LayerKind(name="head", role="head", class_name="Head", parameters=_head(arch, dtype)),
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


def _linear(name: str, inputs: int, outputs: int, dtype: str, bias: bool) -> tuple[Parameter, ...]:
    weight = Parameter(name=f"{name}.weight", shape=(outputs, inputs), dtype=dtype)
    return (weight, Parameter(name=f"{name}.bias", shape=(outputs,), dtype=dtype)) if bias else (weight,)


def _norm(name: str, arch: Architecture, dtype: str) -> tuple[Parameter, ...]:
    names = (f"{name}.weight", f"{name}.bias") if arch.biased else (f"{name}.weight",)
    return tuple(Parameter(name=each, shape=(arch.hidden,), dtype=dtype) for each in names)


def _block(arch: Architecture, dtype: str) -> tuple[Parameter, ...]:
    wide, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    matrices = [("query", arch.hidden, wide), ("key", arch.hidden, kv), ("value", arch.hidden, kv)]
    matrices += [("output", wide, arch.hidden), ("up", arch.hidden, arch.ffn), ("down", arch.ffn, arch.hidden)]
    if arch.gated:
        matrices.append(("gate", arch.hidden, arch.ffn))
    projections = tuple(p for n, i, o in matrices for p in _linear(n, i, o, dtype, arch.biased))
    return (*_norm("attention_norm", arch, dtype), *projections, *_norm("mlp_norm", arch, dtype))


def _embed(arch: Architecture, dtype: str) -> tuple[Parameter, ...]:
    tokens = Parameter(name="tokens.weight", shape=(arch.vocab, arch.hidden), dtype=dtype)
    if not arch.positions:
        return (tokens,)
    return (tokens, Parameter(name="positions.weight", shape=(arch.positions, arch.hidden), dtype=dtype))


def _head(arch: Architecture, dtype: str) -> tuple[Parameter, ...]:
    return (*_norm("norm", arch, dtype), *_linear("logits", arch.hidden, arch.vocab, dtype, False))
