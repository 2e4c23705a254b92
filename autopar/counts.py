"""A layer counted by hand: what one sample multiplies, keeps and moves, and from that a LayerCost without a device.

Seconds are those of autopar.roofline for each product and each core attention; element-wise kernels move STREAMED
bytes for each byte that the layer keeps. Bytes are exact counts of what torch's autograd keeps of the Hugging Face
classes in 16 bits without dropout (tests compare them with traces).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autopar import roofline
from autopar.axes import divisors
from autopar.measured import Collective, LayerCost, LayerProfile, Line, TensorParallelCall
from autopar.model import LayerKind, ModelSpec, Parameter, SeamKind
from autopar.units import DTYPE_BYTES

SAMPLES = (1, 2, 4, 8, 16, 32)
"""Local samples at which a counted profile holds seconds; between them lies a line."""

STREAMED = 1.3
"""Assumed: bytes that the element-wise kernels of a forward move, for each byte that the layer keeps.

Counted by autopar.roofline.streams_s over its counted saved set: 1.45 for a Llama block, 1.05 for one of GPT-2.
"""


WORD_DEGREES = tuple(range(2, 65))
"""Over how many ranks a vocabulary may be cut: any number would do, parts are padded."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """`times` products of (rows x inner) by (inner x outer) for one sample; cut: the side that tp ranks divide."""

    rows: float
    inner: float
    outer: float
    cut: Literal["inner", "outer", "none"] = "none"
    times: int = 1


@dataclass(frozen=True, kw_only=True)
class Core:
    """The core attention of one sample: `windows` times queries x keys for each head; its heads are cut by tp."""

    queries: float
    keys: float
    heads: int
    head_dim: int
    fused: bool = True
    causal: bool = False
    windows: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Bytes alive at one moment beside parameters: of a sample, whole and divided by tp; and once, likewise."""

    whole: float = 0.0
    cut: float = 0.0
    once: float = 0.0
    once_cut: float = 0.0

    def plus(self, *, whole: float = 0.0, cut: float = 0.0, once: float = 0.0, once_cut: float = 0.0) -> Moment:
        """The moment with more alive."""
        return Moment(
            whole=self.whole + whole, cut=self.cut + cut, once=self.once + once, once_cut=self.once_cut + once_cut
        )


@dataclass(frozen=True, kw_only=True)
class LayerCount:
    """One layer of one sample, counted.

    kept: what autograd keeps; gathered: the part of kept.whole that every rank keeps whole where norms run on a part
    of the sequence, None where they cannot; forward, backward: the moments among which the peaks are; regions: of
    `calls`; launches: forwards of a usual block that the host's launches are worth; loss_logits: logits of a head's
    loss; uncut: the matrices of a block that tp leaves whole.
    """

    kind: LayerKind
    products: tuple[Product, ...]
    cores: tuple[Core, ...] = ()
    input_bytes: float
    output_bytes: float
    kept: Moment
    gathered: float | None = None
    forward: tuple[Moment, ...]
    backward: tuple[Moment, ...]
    regions: tuple[tuple[float, float], ...] = ()
    launches: float = 1.0
    loss_logits: float = 0.0
    uncut: tuple[str, ...] = ()


def profile(
    counts: Sequence[LayerCount], machine: roofline.Machine, *, sequence: int, dtype: str, device_name: str
) -> LayerProfile:
    """The profile of these layers at all degrees that their kinds allow. Raises ValueError for no dtype of 16 bits."""
    if DTYPE_BYTES[dtype] != 2:
        raise ValueError(f"counted layers have 16-bit activations, not {dtype}")
    costs = []
    for count in counts:
        degrees = (1, *count.kind.tp_degrees) if count.kind.role == "block" else (1,)
        for tp in degrees:
            norms = count.kind.sequence_norms and count.gathered is not None and tp > 1 and sequence % tp == 0
            costs += [layer_cost(count, machine, tp=tp, norms=each) for each in ((False, True) if norms else (False,))]
    return LayerProfile(
        device="cuda", device_name=device_name, processes=1, sequence=sequence, dtype=dtype, costs=tuple(costs)
    )


def layer_cost(count: LayerCount, machine: roofline.Machine, *, tp: int = 1, norms: bool = False) -> LayerCost:
    """The cost of a counted layer on one of tp ranks."""
    kind, part = count.kind, tp if norms else 1
    times = [_seconds(count, n, tp, machine) for n in SAMPLES]
    gathered = count.kept.whole if count.gathered is None else count.gathered
    away = (count.kept.whole - gathered) * (1 - 1 / part)

    def peak(moments: Sequence[Moment]) -> Line:
        def at(n: int) -> float:
            return max(n * (m.whole - away + m.cut / tp) + m.once + m.once_cut / tp for m in moments)

        slope = (at(SAMPLES[-1]) - at(SAMPLES[0])) / (SAMPLES[-1] - SAMPLES[0])
        return Line(fixed=at(SAMPLES[0]) - slope * SAMPLES[0], per_sample=slope)

    local = [p.size_bytes // (tp if _is_cut(p, count) else 1) for p in kind.parameters]
    flops = sum(2 * p.rows * p.inner * p.outer * p.times / (1 if p.cut == "none" else tp) for p in count.products)
    flops += sum(4 * c.windows * c.queries * c.keys * c.heads * c.head_dim / tp for c in count.cores)
    return LayerCost(
        kind=kind.name,
        tp=tp,
        sequence_norms=norms,
        samples=SAMPLES,
        forward_s=tuple(forward for forward, _ in times),
        backward_s=tuple(backward for _, backward in times),
        parameter_bytes=sum(local),
        trainable_bytes=sum(local),
        largest_parameter_bytes=max(local),
        input_bytes=Line(fixed=0.0, per_sample=count.input_bytes / part),
        output_bytes=Line(fixed=0.0, per_sample=count.output_bytes / part),
        saved_bytes=Line(fixed=count.kept.once, per_sample=count.kept.whole - away + count.kept.cut / tp),
        forward_peak_bytes=peak(count.forward),
        backward_peak_bytes=peak(count.backward),
        flops=Line(fixed=0.0, per_sample=flops),
        calls=calls(count.regions, norms) if tp > 1 else (),
    )


def _is_cut(parameter: Parameter, count: LayerCount) -> bool:
    """Whether tp divides a parameter: the matrices of a block, of experts too, but those that stay whole."""
    return count.kind.role == "block" and len(parameter.shape) > 1 and parameter.name not in count.uncut


def _seconds(count: LayerCount, samples: int, tp: int, machine: roofline.Machine) -> tuple[float, float]:
    products_s = forward_s = backward_s = 0.0
    for p in count.products:
        inner, outer = p.inner / (tp if p.cut == "inner" else 1), p.outer / (tp if p.cut == "outer" else 1)
        products_s += p.times * float(roofline.machine_product_s(machine, p.rows * samples, inner, outer))
    for c in count.cores:
        pairs = samples * c.windows * c.queries * c.keys * c.heads / tp
        fused, plain = roofline.core_s(
            4 * pairs * c.head_dim, 2 * pairs, head_dim=c.head_dim, keys=c.keys, machine=machine, causal=c.causal
        )
        core_forward_s, core_backward_s = fused if c.fused else plain
        forward_s += float(core_forward_s)
        backward_s += float(core_backward_s)
    moved_bytes = samples * (STREAMED * (count.kept.whole + count.kept.cut / tp))
    if count.kind.role == "embed":
        moved_bytes = max(moved_bytes, 4 * samples * count.output_bytes)
    streams_s = moved_bytes / (machine.memory_bytes_per_s * machine.streamed_share)
    loss_s = machine.loss_passes * 8 * samples * count.loss_logits / machine.memory_bytes_per_s
    forward_s += products_s + streams_s + loss_s
    backward_s += machine.backward_ratio * products_s + 1.5 * streams_s + loss_s
    if count.kind.role != "block":
        return forward_s, backward_s
    launch_s = machine.launch_s * count.launches * (1.25 if tp > 1 else 1.0)
    return (
        float(roofline.smooth_max(forward_s, launch_s)),
        float(roofline.smooth_max(backward_s, 1.6 * launch_s)),
    )


def calls(regions: Sequence[tuple[float, float]], norms: bool) -> tuple[TensorParallelCall, ...]:
    """The collectives of one block: around each of its sharded regions, each way.

    regions: bytes a sample of a region's output, and of the gradient of its input where no norm is cut. With cut norms
    the gathered inputs are kept, not gathered again.
    """
    pair: tuple[Collective, ...] = ("all_gather", "reduce_scatter") if norms else ("all_reduce",)
    found: list[TensorParallelCall] = []
    for phase in ("forward", "backward"):
        for forward_bytes, backward_bytes in regions:
            size = Line(fixed=0.0, per_sample=forward_bytes if norms or phase == "forward" else backward_bytes)
            found += [TensorParallelCall(collective=name, phase=phase, size_bytes=size) for name in pair]
    return tuple(found)


def word_kind(
    role: Literal["embed", "head"], class_name: str, parameters: tuple[Parameter, ...], vocab: int
) -> LayerKind:
    """The embedding or head of so many words, which any number of ranks may share."""
    return LayerKind(
        name=role,
        role=role,
        class_name=class_name,
        parameters=parameters,
        tp_degrees=WORD_DEGREES,
        tp_reason=f"vocabulary {vocab}",
    )


def word_head(
    kind: LayerKind,
    tokens: float,
    hidden: int,
    vocab: int,
    *,
    kept: float,
    input_bytes: float,
    before: tuple[Product, ...] = (),
    upcast: bool = True,
) -> LayerCount:
    """The head over so many tokens of a sample: what comes before the logits keeps `kept` bytes a token.

    upcast: whether the loss is computed in float32, as causal models of Hugging Face do, or in 16 bits.
    """
    n, v = tokens, vocab
    if not upcast:
        return LayerCount(
            kind=kind,
            products=(*before, Product(rows=n, inner=hidden, outer=v)),
            input_bytes=input_bytes,
            output_bytes=0,
            kept=Moment(whole=n * (kept + 2 * v + 4)),
            # Logits and their log-softmax; then the gradients of both.
            forward=(Moment(whole=n * (kept + 4 * v)),),
            backward=(Moment(whole=n * (kept + 6 * v)),),
            loss_logits=n * v,
        )
    return LayerCount(
        kind=kind,
        products=(*before, Product(rows=n, inner=hidden, outer=v)),
        input_bytes=input_bytes,
        output_bytes=0,
        kept=Moment(whole=n * (kept + 4 * v + 12)),
        # Logits in 16 bits and in fp32, their log-softmax and the gradients of both.
        forward=(Moment(whole=n * (kept + 10 * v + 28)),),
        backward=(Moment(whole=n * (kept + 12 * v)),),
        loss_logits=n * v,
    )


def linear(name: str, inputs: int, outputs: int, dtype: str, bias: bool = False) -> tuple[Parameter, ...]:
    """The parameters of a linear layer."""
    weight = Parameter(name=f"{name}.weight", shape=(outputs, inputs), dtype=dtype)
    return (weight, *([vector(f"{name}.bias", outputs, dtype)] if bias else []))


def layer_norm(name: str, width: int, dtype: str) -> tuple[Parameter, ...]:
    """The parameters of a LayerNorm."""
    return vector(f"{name}.weight", width, dtype), vector(f"{name}.bias", width, dtype)


def vector(name: str, width: int, dtype: str) -> Parameter:
    """A parameter of one dimension."""
    return Parameter(name=name, shape=(width,), dtype=dtype)


def common_degrees(*sizes: int) -> tuple[int, ...]:
    """The tensor-parallel degrees above 1 that divide all sizes."""
    return tuple(d for d in divisors(sizes[0]) if d > 1 and all(size % d == 0 for size in sizes))


def parameter_count(model: ModelSpec, *, shared: int = 0) -> int:
    """All parameters of a chain; shared: elements that embedding and head have in common."""
    return sum(model.kind(i).parameter_count for i in range(len(model.layers))) - shared


def chain(
    name: str,
    kinds: tuple[LayerKind, ...],
    layers: tuple[str, ...],
    *,
    tied: bool,
    hidden: int,
    vocab: int | None,
    pipeline_reason: str = "",
    parts: tuple[LayerKind, ...] = (),
    seams: tuple[SeamKind, ...] = (),
) -> ModelSpec:
    """The shipped model of these kinds, in this order; parts: of its embedding, that before the first block first."""
    shapes = [[kind.name, [[p.name, p.shape, p.dtype] for p in kind.parameters]] for kind in kinds]
    text = json.dumps([shapes, layers, tied])
    return ModelSpec(
        name=name,
        source=f"shipped:{name}",
        fingerprint=hashlib.sha256(text.encode()).hexdigest()[:16],
        layers=layers,
        kinds=(*kinds, *parts),
        tied=tied,
        hidden_size=hidden,
        vocab_size=vocab,
        pipeline_reason=pipeline_reason,
        front=parts[0].name if parts else "",
        seams=seams,
    )
