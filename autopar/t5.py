"""T5: an encoder and a decoder as one chain, with counted layers.

The embedding looks up the words of both sides, so that what goes from layer to layer is both hidden states: decoder
blocks pass the encoder's output on to the next, which attends to it. Attention adds a position bias to its scores and
keeps their softmax. With h hidden, w = heads * head_dim, f ffn, a heads, S tokens of its own side and E of the
encoder, a token of a block keeps in bytes

    encoder   20 h + 8 w + 2 f + 2 a S + 8
    decoder   30 h + 16 w + 2 f + 2 a (S + E) + 12

The first block of each side holds its table of biases and keeps the bias itself once, 2 a S^2; the last block of the
encoder its last norm. On several stages the biases go along, and those of the cross attention, which are all zero; the
stage of the decoder's first block looks its words up in a copy of the table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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
from autopar.measured import LayerProfile, Line, SideBytes
from autopar.model import LayerKind, ModelSpec, Parameter, SeamKind


@dataclass(frozen=True, kw_only=True)
class EncoderDecoder:
    """T5 of the first release: ReLU, one table of words for both sides and the head; `buckets` of relative places.

    decoder_part: how many times fewer tokens the decoder sees than the encoder.
    """

    name: str
    encoder_layers: int
    decoder_layers: int
    hidden: int
    heads: int
    head_dim: int
    ffn: int
    vocab: int
    buckets: int
    decoder_part: int

    @property
    def layers(self) -> int:
        """The blocks of both sides."""
        return self.encoder_layers + self.decoder_layers

    @property
    def longest(self) -> int:
        """No limit of the sequence: places are relative."""
        return 0

    @property
    def parameter_count(self) -> int:
        """All parameters, a shared one once."""
        return parameter_count(self.spec("float32"), shared=self.vocab * self.hidden)

    def spec(self, dtype: str) -> ModelSpec:
        """The chain with its parameters in `dtype`."""
        words = Parameter(name="words.weight", shape=(self.vocab, self.hidden), dtype=dtype)
        final = vector("final_norm.weight", self.hidden, dtype)
        table = Parameter(name="relative_bias.weight", shape=(self.buckets, self.heads), dtype=dtype)
        encoder, decoder = self._block("encoder", dtype), self._block("decoder", dtype)
        own: dict[str, tuple[Parameter, ...]] = {
            "encoder-first": (*encoder, table),
            "encoder": encoder,
            "encoder-last": (*encoder, final),
            "decoder-first": (*decoder, table),
            "decoder": decoder,
        }
        blocks = [
            LayerKind(
                name=name,
                role="block",
                class_name="T5Block",
                parameters=parameters,
                tp_degrees=common_degrees(self.heads, self.ffn),
                tp_reason=f"heads {self.heads}, width {self.ffn}",
            )
            for name, parameters in own.items()
        ]
        logits = (final, *linear("logits", self.hidden, self.vocab, dtype))
        ends = [word_kind("embed", "Embedding", (words,), self.vocab), word_kind("head", "Head", logits, self.vocab)]
        inner = self.encoder_layers - 2
        layers = ("embed", "encoder-first", *["encoder"] * inner, "encoder-last")
        layers = (*layers, "decoder-first", *["decoder"] * (self.decoder_layers - 1), "head")
        return chain(
            self.name,
            (ends[0], *blocks, ends[1]),
            layers,
            tied=True,
            hidden=self.hidden,
            vocab=self.vocab,
            parts=tuple(replace(ends[0], name=name) for name in ("front", "between")),
            seams=(SeamKind(layer=self.encoder_layers + 1, kind="between"),),
        )

    def _block(self, side: str, dtype: str) -> tuple[Parameter, ...]:
        h, wide = self.hidden, self.heads * self.head_dim

        def attention(name: str) -> tuple[Parameter, ...]:
            ways = [linear(f"{name}.{way}", h, wide, dtype) for way in ("query", "key", "value")]
            output = linear(f"{name}.output", wide, h, dtype)
            return (*(p for way in ways for p in way), *output, vector(f"{name}.norm.weight", h, dtype))

        cross = attention("cross_attention") if side == "decoder" else ()
        mlp = (*linear("up", h, self.ffn, dtype), *linear("down", self.ffn, h, dtype))
        return (*attention("attention"), *cross, *mlp, vector("mlp_norm.weight", h, dtype))

    def profile(
        self, machine: roofline.Machine, *, sequence: int, dtype: str = "bfloat16", device_name: str = ""
    ) -> LayerProfile:
        """The counted layers; the sequence is the encoder's."""
        kinds = {kind.name: kind for kind in self.spec(dtype).kinds}
        h, v, n, m = self.hidden, self.vocab, sequence, self.decoder_tokens(sequence)
        passed = 2 * (n + m) * h
        counts = [
            LayerCount(
                kind=kinds[name],
                products=(),
                input_bytes=input_bytes,
                output_bytes=passed,
                kept=Moment(),
                forward=(Moment(whole=2 * made),),
                backward=(Moment(whole=made, once=kinds[name].parameter_bytes),),
            )
            for name, input_bytes, made in (
                ("embed", 8 * (n + m), passed),
                ("front", 8 * n, 2 * n * h),
                ("between", passed, 2 * m * h),
            )
        ]
        for name, kind in kinds.items():
            if kind.role == "block":
                counts.append(self._count(kind, name, n, m, passed))
        counts.append(word_head(kinds["head"], m, h, v, kept=10 * h, input_bytes=passed, upcast=False))
        found = profile(counts, machine, sequence=sequence, dtype=dtype, device_name=device_name)
        return replace(found, sides=self._sides(n, m))

    def _sides(self, n: int, m: int) -> tuple[SideBytes, ...]:
        """The position biases of encoder, decoder and cross attention."""
        first, last, nothing = self.encoder_layers + 1, self.layers, Line(fixed=0.0, per_sample=0.0)
        ends = ((1, self.encoder_layers, n, n), (first, last, m, m), (first, last, m, n))
        sizes = [Line(fixed=2.0 * self.heads * queries * keys, per_sample=0.0) for _, _, queries, keys in ends]
        return tuple(
            SideBytes(made=a, last=z, size_bytes=size, gradient_bytes=nothing if place == 2 else size)
            for place, ((a, z, _, _), size) in enumerate(zip(ends, sizes, strict=True))
        )

    def decoder_tokens(self, sequence: int) -> int:
        """The tokens of the decoder beside so many of the encoder."""
        return max(1, sequence // self.decoder_part)

    def _count(self, kind: LayerKind, name: str, n: int, m: int, passed: float) -> LayerCount:
        decoder = name.startswith("decoder")
        h, f, a, w = self.hidden, self.ffn, self.heads, self.heads * self.head_dim
        own = m if decoder else n
        seen = [own, n] if decoder else [own]
        regions = len(seen)
        scores = [2.0 * a * own * keys for keys in seen]
        # Each attention: its norm, its inputs and output; then the MLP's norm, inputs and residual.
        inside = sum(own * 6 * w + 2 * w * (keys - own) * 2 + own * 2 * w for keys in seen)
        kept = Moment(
            whole=own * (20 * h + 8 + (10 * h + 4) * decoder),
            cut=inside + own * 2 * f + sum(scores),
            once=2 * a * own * own * name.endswith("first"),
        )
        if name == "encoder-last":
            kept = kept.plus(whole=own * (10 * h + 4))
        products = [
            Product(rows=own, inner=h, outer=f, cut="outer"),
            Product(rows=own, inner=f, outer=h, cut="inner"),
        ]
        for keys in seen:
            products += [
                Product(rows=own, inner=h, outer=w, cut="outer"),
                Product(rows=keys, inner=h, outer=w, cut="outer", times=2),
                Product(rows=own, inner=w, outer=h, cut="inner"),
            ]
        most = max(scores)
        return LayerCount(
            kind=kind,
            products=tuple(products),
            cores=tuple(
                Core(
                    queries=own,
                    keys=keys,
                    heads=a,
                    head_dim=self.head_dim,
                    fused=False,
                    causal=decoder and place == 0,
                )
                for place, keys in enumerate(seen)
            ),
            input_bytes=passed,
            output_bytes=passed,
            kept=kept,
            forward=(kept.plus(whole=own * 6 * h), kept.plus(whole=-own * 8 * h, cut=most - own * 2 * f)),
            # In the MLP's norm all of it is in fp32; then the gradients of the scores.
            backward=(
                kept.plus(whole=own * 10 * h, cut=own * 2 * f, once_cut=2 * h * f),
                kept.plus(
                    whole=own * 2 * h, cut=2 * most - own * 2 * f, once_cut=4 * h * f + 8 * h * w * (regions - 1)
                ),
            ),
            regions=((2 * own * h, 2 * own * h),) * (1 + regions),
            uncut=("relative_bias.weight",),
            launches=1.0 + 0.5 * decoder,
        )
