"""Encoders of words (BERT) and of images (ViT): their chains, parameters and counted layers.

One block of n tokens with h hidden, f ffn, a heads keeps 16 h + 4 f + 4 a + 8 bytes a token: inputs of both norms and
of both sharded regions, queries, keys, values and the output of fused attention, the MLP before and after GELU. BERT
has its norms after the residuals, ViT before the regions: the same count.
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
    layer_norm,
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
class WordEncoder:
    """BERT with its masked-word head: `types` of segments; embedding and head share the words' matrix."""

    name: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    positions: int
    types: int

    @property
    def longest(self) -> int:
        """The longest sequence."""
        return self.positions

    @property
    def parameter_count(self) -> int:
        """All parameters, a shared one once."""
        return parameter_count(self.spec("float32"), shared=self.vocab * self.hidden)

    def spec(self, dtype: str) -> ModelSpec:
        """The chain with its parameters in `dtype`."""
        h = self.hidden
        names = (("words", self.vocab), ("positions", self.positions), ("types", self.types))
        embed = tuple(Parameter(name=f"{n}.weight", shape=(rows, h), dtype=dtype) for n, rows in names)
        head = (
            *linear("transform", h, h, dtype, True),
            *layer_norm("transform_norm", h, dtype),
            *linear("logits", h, self.vocab, dtype, True),
        )
        kinds = (
            word_kind("embed", "BertEmbeddings", (*embed, *layer_norm("norm", h, dtype)), self.vocab),
            block_kind(self.hidden, self.heads, self.ffn, dtype, "BertLayer"),
            word_kind("head", "BertOnlyMLMHead", head, self.vocab),
        )
        return chain(self.name, kinds, _layers(self.layers), tied=True, hidden=h, vocab=self.vocab)

    def profile(
        self, machine: roofline.Machine, *, sequence: int, dtype: str = "bfloat16", device_name: str = ""
    ) -> LayerProfile:
        """The counted layers at this sequence length."""
        h, v, n = self.hidden, self.vocab, sequence
        spec = self.spec(dtype)
        embed, block, head = spec.kinds
        table = 2 * v * h
        kept = Moment(whole=n * (2 * h + 8))
        counts = (
            LayerCount(
                kind=embed,
                products=(),
                input_bytes=8 * n,
                output_bytes=2 * n * h,
                kept=kept,
                forward=(kept.plus(whole=n * 7 * h),),
                backward=(Moment(whole=n * 6 * h, once=table),),
            ),
            block_count(block, n, self.hidden, self.heads, self.ffn),
            word_head(
                head,
                n,
                h,
                v,
                kept=8 * h,
                input_bytes=2 * n * h,
                before=(Product(rows=n, inner=h, outer=h),),
                upcast=False,
            ),
        )
        return profile(counts, machine, sequence=sequence, dtype=dtype, device_name=device_name)


@dataclass(frozen=True, kw_only=True)
class ImageEncoder:
    """ViT with its classifier: squares of `patch` pixels as tokens and one more for the class."""

    name: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    image: int
    patch: int
    channels: int
    classes: int

    @property
    def longest(self) -> int:
        """The tokens of an image, one for the class; no other length."""
        return (self.image // self.patch) ** 2 + 1

    @property
    def parameter_count(self) -> int:
        """All parameters."""
        return parameter_count(self.spec("float32"))

    def spec(self, dtype: str) -> ModelSpec:
        """The chain with its parameters in `dtype`."""
        h, square = self.hidden, (self.channels, self.patch, self.patch)
        embed = (
            Parameter(name="class", shape=(1, 1, h), dtype=dtype),
            Parameter(name="positions", shape=(1, self.longest, h), dtype=dtype),
            Parameter(name="patches.weight", shape=(h, *square), dtype=dtype),
            vector("patches.bias", h, dtype),
        )
        reason = "no vocabulary"
        kinds = (
            LayerKind(name="embed", role="embed", class_name="ViTEmbeddings", parameters=embed, tp_reason=reason),
            block_kind(self.hidden, self.heads, self.ffn, dtype, "ViTLayer", tokens=self.longest),
            LayerKind(
                name="head",
                role="head",
                class_name="ViTForImageClassification",
                parameters=(*layer_norm("norm", h, dtype), *linear("classes", h, self.classes, dtype, True)),
                tp_reason=reason,
            ),
        )
        return chain(self.name, kinds, _layers(self.layers), tied=False, hidden=h, vocab=None)

    def profile(
        self, machine: roofline.Machine, *, sequence: int, dtype: str = "bfloat16", device_name: str = ""
    ) -> LayerProfile:
        """The counted layers; the sequence is that of an image."""
        h, n = self.hidden, self.longest
        embed, block, head = self.spec(dtype).kinds
        pixels = self.channels * self.image**2
        counts = (
            LayerCount(
                kind=embed,
                products=(Product(rows=n - 1, inner=self.channels * self.patch**2, outer=h),),
                input_bytes=4 * pixels,
                output_bytes=2 * n * h,
                kept=Moment(whole=2 * pixels),
                forward=(Moment(whole=2 * pixels + 4 * n * h),),
                backward=(Moment(whole=2 * pixels + 4 * n * h, once=embed.parameter_bytes),),
            ),
            block_count(block, n, self.hidden, self.heads, self.ffn),
            classifier_count(head, n, h, self.classes),
        )
        return profile(counts, machine, sequence=sequence, dtype=dtype, device_name=device_name)


def classifier_count(kind: LayerKind, tokens: float, hidden: int, classes: int) -> LayerCount:
    """A norm over all tokens, then classes of one of them (or of their mean)."""
    kept = Moment(whole=tokens * (2 * hidden + 8) + 2 * hidden + 4 * classes)
    return LayerCount(
        kind=kind,
        products=(Product(rows=1, inner=hidden, outer=classes),),
        input_bytes=2 * tokens * hidden,
        output_bytes=0,
        kept=kept,
        forward=(kept.plus(whole=2 * tokens * hidden + 6 * classes),),
        backward=(kept.plus(whole=4 * tokens * hidden + 8 * classes, once=2 * hidden * classes),),
        loss_logits=classes,
    )


def block_kind(hidden: int, heads: int, ffn: int, dtype: str, class_name: str, *, tokens: int = 0) -> LayerKind:
    """A block of biased attention over all tokens and a biased MLP with GELU, each with a LayerNorm.

    tokens: as in LayerKind.
    """
    names = ("query", "key", "value", "output")
    attention = tuple(p for name in names for p in linear(name, hidden, hidden, dtype, True))
    mlp = (*linear("up", hidden, ffn, dtype, True), *linear("down", ffn, hidden, dtype, True))
    norms = (*layer_norm("attention_norm", hidden, dtype), *layer_norm("mlp_norm", hidden, dtype))
    return LayerKind(
        name="block",
        role="block",
        class_name=class_name,
        parameters=(*attention, *mlp, *norms),
        tp_degrees=common_degrees(heads, ffn),
        tp_reason=f"heads {heads}, width {ffn}",
        sequence_norms=True,
        attention=Attention(heads=heads, kv_heads=heads, head_dim=hidden // heads),
        tokens=tokens,
    )


def block_products(tokens: float, hidden: int, ffn: int) -> tuple[Product, ...]:
    """Query, key and value, output, up and down over so many tokens."""
    return (
        Product(rows=tokens, inner=hidden, outer=hidden, cut="outer", times=3),
        Product(rows=tokens, inner=hidden, outer=hidden, cut="inner"),
        Product(rows=tokens, inner=hidden, outer=ffn, cut="outer"),
        Product(rows=tokens, inner=ffn, outer=hidden, cut="inner"),
    )


def block_count(kind: LayerKind, tokens: float, hidden: int, heads: int, ffn: int) -> LayerCount:
    """The block of `block_kind` over so many tokens."""
    n, h = tokens, hidden
    kept = Moment(whole=n * (8 * h + 8), cut=n * (8 * h + 4 * ffn + 4 * heads))
    return LayerCount(
        kind=kind,
        products=block_products(n, h, ffn),
        cores=(Core(queries=n, keys=n, heads=heads, head_dim=h // heads),),
        input_bytes=2 * n * h,
        output_bytes=2 * n * h,
        kept=kept,
        gathered=4 * n * h,
        regions=((2 * n * h, 2 * n * h),) * 2,
        forward=(kept.plus(whole=2 * n * h),),
        backward=(kept.plus(whole=2 * n * h, cut=2 * n * ffn, once_cut=2 * h * ffn),),
    )


def _layers(blocks: int) -> tuple[str, ...]:
    return ("embed", *["block"] * blocks, "head")
