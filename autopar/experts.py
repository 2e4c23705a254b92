"""Decoders with experts (Mixtral): every token goes through top_k of `experts` MLPs; their chain and counted layers.

All experts lie on every data-parallel rank, whole or with their width cut by tp; routing is assumed even, so that an
expert multiplies tokens * top_k / experts rows. One block keeps, in bytes a token with h hidden, w = heads * head_dim,
k likewise of the kv heads, f ffn, a heads, E experts:

    16 h + 4 w + 4 k + 4 a + 12       norms in fp32, attention, as in a Llama block
    4 h top_k                         the tokens sorted by expert, before and after
    8 f top_k                         gate, up and their product
    4 E + 40 top_k                    the router's probabilities and choices
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar import roofline
from autopar.counts import (
    Core,
    LayerCount,
    Moment,
    Product,
    chain,
    common_degrees,
    linear,
    parameter_count,
    profile,
    vector,
    word_head,
    word_kind,
)
from autopar.measured import LayerProfile
from autopar.model import Attention, LayerKind, ModelSpec, Parameter


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """A decoder as autopar.architectures has them (gated, RMSNorm, no biases), its MLPs experts of width ffn."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    experts: int
    top_k: int

    @property
    def longest(self) -> int:
        """No limit of the sequence."""
        return 0

    @property
    def parameter_count(self) -> int:
        """All parameters."""
        return parameter_count(self.spec("float32"))

    def spec(self, dtype: str) -> ModelSpec:
        """The chain with its parameters in `dtype`."""
        h, e = self.hidden, self.experts
        width = h // self.heads
        wide, kv = h, self.kv_heads * width
        block = (
            vector("attention_norm.weight", h, dtype),
            *linear("query", h, wide, dtype),
            *linear("key", h, kv, dtype),
            *linear("value", h, kv, dtype),
            *linear("output", wide, h, dtype),
            vector("mlp_norm.weight", h, dtype),
            *linear("router", h, e, dtype),
            Parameter(name="experts.gate_up", shape=(e, 2 * self.ffn, h), dtype=dtype),
            Parameter(name="experts.down", shape=(e, h, self.ffn), dtype=dtype),
        )
        kinds = (
            word_kind("embed", "Embedding", linear("tokens", h, self.vocab, dtype), self.vocab),
            LayerKind(
                name="block",
                role="block",
                class_name="MixtralDecoderLayer",
                parameters=block,
                tp_degrees=common_degrees(self.kv_heads, self.ffn),
                tp_reason=f"heads {self.heads}, kv heads {self.kv_heads}, width {self.ffn}",
                sequence_norms=True,
                attention=Attention(heads=self.heads, kv_heads=self.kv_heads, head_dim=width),
                sequence_reason="tokens are sorted by expert",
            ),
            word_kind(
                "head", "Head", (vector("norm.weight", h, dtype), *linear("logits", h, self.vocab, dtype)), self.vocab
            ),
        )
        layers = ("embed", *["block"] * self.layers, "head")
        return chain(self.name, kinds, layers, tied=False, hidden=h, vocab=self.vocab)

    def profile(
        self, machine: roofline.Machine, *, sequence: int, dtype: str = "bfloat16", device_name: str = ""
    ) -> LayerProfile:
        """The counted layers at this sequence length."""
        embed, block, head = self.spec(dtype).kinds
        h, v, n = self.hidden, self.vocab, sequence
        counts = (
            LayerCount(
                kind=embed,
                products=(),
                input_bytes=8 * n,
                output_bytes=2 * n * h,
                kept=Moment(),
                forward=(Moment(whole=4 * n * h),),
                backward=(Moment(whole=2 * n * h, once=embed.parameter_bytes),),
            ),
            self._block(block, n),
            word_head(head, n, h, v, kept=8 * h, input_bytes=2 * n * h),
        )
        return profile(counts, machine, sequence=sequence, dtype=dtype, device_name=device_name)

    def _block(self, kind: LayerKind, n: float) -> LayerCount:
        h, f, k, e = self.hidden, self.ffn, self.top_k, self.experts
        width = h // self.heads
        kv, rows = self.kv_heads * width, n * k / e
        kept = Moment(
            whole=n * (16 * h + 4 * h * k + 4 * e + 40 * k + 12),
            cut=n * (4 * h + 4 * kv + 4 * self.heads + 8 * f * k),
        )
        return LayerCount(
            kind=kind,
            products=(
                Product(rows=n, inner=h, outer=h, cut="outer"),
                Product(rows=n, inner=h, outer=kv, cut="outer", times=2),
                Product(rows=n, inner=h, outer=h, cut="inner"),
                Product(rows=n, inner=h, outer=e),
                Product(rows=rows, inner=h, outer=2 * f, cut="outer", times=e),
                Product(rows=rows, inner=f, outer=h, cut="inner", times=e),
            ),
            cores=(Core(queries=n, keys=n, heads=self.heads, head_dim=width, causal=True),),
            input_bytes=2 * n * h,
            output_bytes=2 * n * h,
            kept=kept,
            gathered=n * (4 * h + 4 * h * k + 4 * e + 40 * k),
            forward=(kept.plus(whole=n * (6 * h + 6 * h * k)),),
            # Gradients of the width's products; those of the gate and up matrices of all experts.
            backward=(
                kept.plus(whole=n * 2 * h * (k + 1), cut=n * 4 * f * k, once_cut=2 * e * h * f),
                kept.plus(whole=n * 2 * h * (k + 1), cut=-n * 2 * f * k, once_cut=3 * 2 * e * h * f),
            ),
            # The experts' gradient of each token comes top_k times.
            regions=((2 * n * h, 2 * n * h), (2 * n * h, 2 * n * h * k)),
            launches=1.5,
            uncut=("router.weight",),
        )
