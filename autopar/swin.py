"""Swin: attention in windows of an image, in stages that halve its sides and double its width; counted layers.

Each stage has a kind of block; the last block of every stage but the last also merges squares of four tokens. A token
of a block with h hidden, f ffn, a heads and windows of W tokens keeps 16 h + 4 f + 6 a W + 8 bytes: the softmax of its
scores in fp32 and in 16 bits, the rest as in autopar.encoders. Merging keeps 4 h + 1 more.
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
)
from autopar.encoders import block_products, classifier_count
from autopar.measured import LayerProfile
from autopar.model import LayerKind, ModelSpec, Parameter

MLP_RATIO = 4


@dataclass(frozen=True, kw_only=True)
class WindowEncoder:
    """Swin with its classifier: depths, heads of each stage; hidden: of the first."""

    name: str
    depths: tuple[int, ...]
    heads: tuple[int, ...]
    hidden: int
    image: int
    patch: int
    channels: int
    window: int
    classes: int

    def __post_init__(self) -> None:
        if len(self.depths) != len(self.heads) or self.side(len(self.depths) - 1) % self.window:
            raise ValueError("WindowEncoder needs heads for each of its depths, and windows that fill every stage")

    @property
    def layers(self) -> int:
        """The blocks of all stages."""
        return sum(self.depths)

    @property
    def longest(self) -> int:
        """The tokens of an image; no other length."""
        return self.side(0) ** 2

    def side(self, stage: int) -> int:
        """The tokens of one side of the image in a stage."""
        return self.image // self.patch >> stage

    @property
    def parameter_count(self) -> int:
        """All parameters."""
        return parameter_count(self.spec("float32"))

    def spec(self, dtype: str) -> ModelSpec:
        """The chain with its parameters in `dtype`."""
        h = self.hidden
        patches = (
            Parameter(name="patches.weight", shape=(h, self.channels, self.patch, self.patch), dtype=dtype),
            vector("patches.bias", h, dtype),
            *layer_norm("norm", h, dtype),
        )
        reason = "no vocabulary"
        kinds = [
            LayerKind(name="embed", role="embed", class_name="SwinEmbeddings", parameters=patches, tp_reason=reason)
        ]
        layers = ["embed"]
        for stage, depth in enumerate(self.depths):
            merges = stage + 1 < len(self.depths)
            kinds += self._kinds(stage, merges, dtype)
            layers += [f"stage{stage}"] * (depth - merges) + [f"stage{stage}-merge"] * merges
        last = h << len(self.depths) - 1
        kinds.append(
            LayerKind(
                name="head",
                role="head",
                class_name="SwinForImageClassification",
                parameters=(*layer_norm("norm", last, dtype), *linear("classes", last, self.classes, dtype, True)),
                tp_reason=reason,
            )
        )
        return chain(self.name, tuple(kinds), (*layers, "head"), tied=False, hidden=h, vocab=None)

    def _kinds(self, stage: int, merges: bool, dtype: str) -> list[LayerKind]:
        h, heads = self.hidden << stage, self.heads[stage]
        attention = tuple(p for name in ("query", "key", "value", "output") for p in linear(name, h, h, dtype, True))
        places = (2 * self.window - 1) ** 2
        own = (
            *layer_norm("attention_norm", h, dtype),
            *attention,
            Parameter(name="relative_bias", shape=(places, heads), dtype=dtype),
            *layer_norm("mlp_norm", h, dtype),
            *linear("up", h, MLP_RATIO * h, dtype, True),
            *linear("down", MLP_RATIO * h, h, dtype, True),
        )
        merge = (*linear("merge", 4 * h, 2 * h, dtype), *layer_norm("merge_norm", 4 * h, dtype))
        return [
            LayerKind(
                name=name,
                role="block",
                class_name="SwinLayer",
                parameters=parameters,
                tp_degrees=common_degrees(heads, MLP_RATIO * h),
                tp_reason=f"heads {heads}, width {MLP_RATIO * h}",
                tokens=self.side(stage) ** 2,
            )
            for name, parameters in [(f"stage{stage}", own)] + [(f"stage{stage}-merge", (*own, *merge))] * merges
        ]

    def profile(
        self, machine: roofline.Machine, *, sequence: int, dtype: str = "bfloat16", device_name: str = ""
    ) -> LayerProfile:
        """The counted layers; the sequence is that of an image."""
        kinds = {kind.name: kind for kind in self.spec(dtype).kinds}
        n, h, pixels = self.longest, self.hidden, self.channels * self.image**2
        kept = Moment(whole=2 * pixels + n * (2 * h + 8))
        counts = [
            LayerCount(
                kind=kinds["embed"],
                products=(Product(rows=n, inner=self.channels * self.patch**2, outer=h),),
                input_bytes=4 * pixels,
                output_bytes=2 * n * h,
                kept=kept,
                forward=(kept.plus(whole=2 * n * h),),
                backward=(kept.plus(whole=4 * n * h, once=kinds["embed"].parameter_bytes),),
            )
        ]
        for stage in range(len(self.depths)):
            for name, merges in ((f"stage{stage}", False), (f"stage{stage}-merge", True)):
                if name in kinds:
                    counts.append(self._count(kinds[name], stage, merges))
        last = len(self.depths) - 1
        counts.append(classifier_count(kinds["head"], self.side(last) ** 2, h << last, self.classes))
        return profile(counts, machine, sequence=sequence, dtype=dtype, device_name=device_name)

    def _count(self, kind: LayerKind, stage: int, merges: bool) -> LayerCount:
        h, heads, n, seen = self.hidden << stage, self.heads[stage], self.side(stage) ** 2, self.window**2
        f = MLP_RATIO * h
        kept = Moment(whole=n * (8 * h + 8), cut=n * (8 * h + 4 * f + 6 * heads * seen))
        products = [*block_products(n, h, f)]
        early = kept.plus(whole=-4 * n * h, cut=-4 * n * f)
        gradients = kept.plus(whole=2 * n * h, cut=2 * n * f, once_cut=2 * h * f)
        if merges:
            kept = kept.plus(whole=n * (4 * h + 1))
            products.append(Product(rows=n / 4, inner=4 * h, outer=2 * h))
        return LayerCount(
            kind=kind,
            products=tuple(products),
            cores=(Core(queries=seen, keys=seen, heads=heads, head_dim=h // heads, fused=False, windows=n / seen),),
            input_bytes=2 * n * h,
            output_bytes=n * h if merges else 2 * n * h,
            kept=kept,
            regions=((2 * n * h, 2 * n * h),) * 2,
            # At its end, and while the scores are cast to fp32 for their softmax.
            forward=(kept.plus(whole=6 * n * h), early.plus(cut=8 * n * heads * seen)),
            backward=(gradients, kept.plus(whole=2 * n * h, once=16 * h * h * merges)),
            uncut=("relative_bias", "merge.weight"),
        )
