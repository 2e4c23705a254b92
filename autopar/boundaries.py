"""What stands and crosses at the boundaries of stages, also where a chain has seams (encoder-decoders).

On several stages what the model does before its first block, and right before the first block after each seam, are
parts of their own, with the strategy of the embedding. Between stages goes the hidden state, and with it whatever
else later blocks take of earlier layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from autopar.derived import local_bytes
from autopar.measured import LayerProfile
from autopar.model import ModelSpec
from autopar.units import DTYPE_BYTES


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a stage runs: a kind, under the strategy of a layer."""

    layer: int
    kind: str


def parts_of(model: ModelSpec, span: range, pp: int) -> tuple[Part, ...]:
    """The parts of a stage of these layers, in order; one a layer where the chain has no seams."""
    if pp == 1 or not model.seams:
        return tuple(Part(layer=layer, kind=model.layers[layer]) for layer in span)
    seams = {seam.layer: Part(layer=0, kind=seam.kind) for seam in model.seams}
    found = []
    for layer in span:
        found += [seams[layer]] if layer in seams else []
        found.append(Part(layer=layer, kind=model.front if layer == 0 else model.layers[layer]))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """Bytes that cross a boundary: the hidden state, the sides beside it, and the gradients that come back."""

    hidden_bytes: float
    sides_bytes: float = 0.0
    back_bytes: float

    @property
    def sent_bytes(self) -> float:
        """All that is sent on."""
        return self.hidden_bytes + self.sides_bytes


def crossing(model: ModelSpec, layers: LayerProfile, layer: int, samples: float, ranks: int) -> Crossing:
    """What crosses the boundary before a layer (not the first) on each of the ranks that share so many samples."""
    if not model.seams and not layers.sides:
        size_bytes = activation_bytes(model, layers, samples) / ranks
        return Crossing(hidden_bytes=size_bytes, back_bytes=size_bytes)
    seam = any(seam.layer == layer for seam in model.seams)
    cost = layers.find(model.layers[layer - 1 if seam else layer])
    if cost is None:
        raise ValueError(f"layer {model.layer_names[layer]} was not measured")
    hidden_bytes = (cost.output_bytes if seam else cost.input_bytes).at(samples) / ranks
    sides = [side for side in layers.sides if side.made < layer <= side.last]
    return Crossing(
        hidden_bytes=hidden_bytes,
        sides_bytes=sum(side.size_bytes.at(samples / ranks) for side in sides),
        back_bytes=hidden_bytes + sum(side.gradient_bytes.at(samples / ranks) for side in sides),
    )


@dataclass(frozen=True, kw_only=True)
class Edge:
    """Whole bytes at a boundary: sent on, sent back, and of the hidden state alone."""

    sent_bytes: int
    back_bytes: int
    hidden_bytes: int


@dataclass(frozen=True, kw_only=True)
class Edges:
    """The least and the most of each over the boundaries of a chain; mean_bytes: of one send, over all ranks."""

    least: Edge
    most: Edge
    mean_bytes: float


def edges_of(model: ModelSpec, layers: LayerProfile, samples: float, ranks: int) -> Edges:
    """What crosses the boundaries of a chain, wherever it is cut, on each of the ranks that share so many samples."""
    firsts = range(1, len(model.layers) if model.seams or layers.sides else 2)
    found = [crossing(model, layers, layer, samples, ranks) for layer in firsts]
    edges = [
        Edge(sent_bytes=ceil(x.sent_bytes), back_bytes=ceil(x.back_bytes), hidden_bytes=ceil(x.hidden_bytes))
        for x in found
    ]
    least, most = (
        Edge(
            sent_bytes=by(x.sent_bytes for x in edges),
            back_bytes=by(x.back_bytes for x in edges),
            hidden_bytes=by(x.hidden_bytes for x in edges),
        )
        for by in (min, max)
    )
    mean_bytes = ranks * sum(x.sent_bytes + x.back_bytes for x in found) / 2 / len(found)
    return Edges(least=least, most=most, mean_bytes=mean_bytes)


def made_bytes(layers: LayerProfile, span: range, samples: float) -> float:
    """Of the sides that these layers make: each live micro-batch has its own."""
    return sum(side.size_bytes.at(samples) for side in layers.sides if side.made in span)


def activation_bytes(model: ModelSpec, layers: LayerProfile, samples: float) -> float:
    """Bytes of the whole activation between two layers for so many samples: the largest input of a block."""
    inputs = []
    for kind in model.kinds:
        cost = layers.find(kind.name)
        if kind.role == "block" and cost is not None:
            inputs.append(cost.input_bytes.at(samples))
    if not inputs:
        return samples * layers.sequence * model.hidden_size * DTYPE_BYTES[layers.dtype]
    return max(inputs)


def doubled_bytes(model: ModelSpec, parts: tuple[Part, ...], place: int, tp: int = 1) -> int:
    """Bytes of a part's parameters that are those of an earlier part of the stage: tied ones, and words of both sides.

    tp: over how many ranks the vocabulary is cut.
    """
    kind = model.kind_named(parts[place].kind)
    if kind.role == "block":
        return 0
    before = [model.kind_named(part.kind) for part in parts[:place]]
    outside = [p for one in before if one.role == "embed" for p in one.parameters]
    if kind.role == "embed":
        names = {p.name for p in outside}
        return sum(local_bytes(p, kind, tp) for p in kind.parameters if p.name in names)
    left = [(p.shape, p.dtype) for p in {p.name: p for p in outside}.values()] if model.tied else []
    total = 0
    for parameter in kind.parameters:
        if (parameter.shape, parameter.dtype) in left:
            left.remove((parameter.shape, parameter.dtype))
            total += local_bytes(parameter, kind, tp)
    return total
