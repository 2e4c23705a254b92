"""A small synthetic model and cluster with known numbers, for the tests of prices and searches."""

from __future__ import annotations

from autopar.axes import RankMesh, divisors
from autopar.cluster import ClusterSpec
from autopar.comm import boundary_shape, shape_of
from autopar.measured import (
    COLLECTIVES,
    ClusterFile,
    Collective,
    GroupShape,
    LayerCost,
    LayerProfile,
    Line,
    LinkCurve,
    LinkProfile,
    ModelFile,
    Provenance,
    SelectiveCost,
    TensorParallelCall,
)
from autopar.model import Attention, LayerKind, ModelSpec, Parameter
from autopar.request import Request
from autopar.strategy import Strategy

HIDDEN, SEQUENCE, VOCAB = 64, 32, 256
SIZES = tuple(1 << k for k in range(10, 25))
ALPHA_S, BYTES_PER_S = 40e-6, 2e9
PROVENANCE = Provenance(machine="none", date="2026-01-01", command="synthetic", versions={})


def curve_s(collective: Collective, ranks: int, size: float, *, alpha_s: float, bytes_per_s: float) -> float:
    """The textbook seconds that the synthetic links take."""
    if collective == "p2p":
        return alpha_s + size / bytes_per_s
    rounds = 2 if collective == "all_reduce" else 1
    return rounds * (ranks - 1) * alpha_s + rounds * (ranks - 1) / ranks * size / bytes_per_s


def curve(
    collective: Collective, shape: GroupShape, *, alpha_s: float = ALPHA_S, bytes_per_s: float = BYTES_PER_S
) -> LinkCurve:
    times = tuple(curve_s(collective, shape.ranks, s, alpha_s=alpha_s, bytes_per_s=bytes_per_s) for s in SIZES)
    return LinkCurve(collective=collective, shape=shape, size_bytes=SIZES, seconds=times)


def shapes(world: int, ranks_per_node: int) -> list[GroupShape]:
    """Every group shape that the mesh of any number of stages can use."""
    found: dict[GroupShape, None] = {}
    for pp in divisors(world):
        mesh = RankMesh.of(world_size=world, pp=pp, ranks_per_node=ranks_per_node)
        names = mesh.names
        for first in range(len(names)):
            for last in range(first + 1, len(names) + 1):
                found[shape_of(mesh, names[first:last], ranks_per_node)] = None
        if pp > 1:
            found[boundary_shape(mesh, ranks_per_node)] = None
    return list(found)


def cluster_file(
    world: int = 4, *, memory_bytes: int = 1 << 30, alpha_s: float = ALPHA_S, bytes_per_s: float = BYTES_PER_S
) -> ClusterFile:
    curves = tuple(
        curve(collective, shape, alpha_s=alpha_s, bytes_per_s=bytes_per_s)
        for shape in shapes(world, world)
        for collective in COLLECTIVES
        if collective != "p2p" or shape.ranks == 2
    )
    cluster = ClusterSpec(
        name="synthetic",
        device="cpu",
        device_name="none",
        world_size=world,
        ranks_per_node=world,
        memory_bytes=memory_bytes,
    )
    return ClusterFile(cluster=cluster, links=LinkProfile(curves=curves), provenance=PROVENANCE)


def _line(per_sample: float) -> Line:
    return Line(fixed=0.0, per_sample=per_sample)


def layer_cost(
    kind: str, *, tp: int = 1, norms: bool = False, parameters: int, s_per_sample: float, activation: int
) -> LayerCost:
    """A layer whose tp cuts time, parameters and inner activations, with two all-reduces each way.

    Of a block selective recompute keeps half of the inner activations, for a quarter of a forward.
    """
    edge = activation // (tp if norms else 1)
    inner = 16 * activation // tp + 4 * edge
    counts = (1, 2, 4, 8)
    calls = tuple(
        TensorParallelCall(collective=collective, phase=phase, size_bytes=_line(activation))
        for phase in ("forward", "backward")
        for collective in (("all_gather", "reduce_scatter") if norms else ("all_reduce",))
        for _ in range(2)
    )
    size = parameters // tp * 4
    selective = SelectiveCost(
        saved_bytes=_line(8 * activation // tp + 4 * edge),
        forward_peak_bytes=_line(8 * activation // tp + 5 * edge),
        backward_peak_bytes=Line(fixed=size, per_sample=inner + 6 * edge),
        later_backward_peak_bytes=Line(fixed=size // 3, per_sample=inner + 6 * edge),
        share=0.25,
    )
    return LayerCost(
        kind=kind,
        tp=tp,
        sequence_norms=norms,
        samples=counts,
        forward_s=tuple(2e-5 + s_per_sample * n / tp for n in counts),
        backward_s=tuple(4e-5 + 2 * s_per_sample * n / tp for n in counts),
        parameter_bytes=size,
        trainable_bytes=size,
        largest_parameter_bytes=size // 3,
        input_bytes=_line(edge),
        output_bytes=_line(edge),
        saved_bytes=_line(inner),
        forward_peak_bytes=_line(inner + 3 * edge),
        backward_peak_bytes=Line(fixed=size, per_sample=inner + 5 * edge),
        flops=_line(2.0 * parameters * SEQUENCE),
        calls=calls if tp > 1 else (),
        selective=selective if kind == "block" else None,
    )


_ATTENTION = Attention(heads=4, kv_heads=4, head_dim=HIDDEN // 4)


def model_file(
    blocks: int = 2,
    *,
    tp_degrees: tuple[int, ...] = (2, 4),
    tied: bool = False,
    head_scale: float = 1.0,
    s_per_sample: float = 4e-4,
    words_tp: tuple[int, ...] = (2, 3, 4),
    attention: Attention | None = _ATTENTION,
) -> ModelFile:
    hidden, activation = HIDDEN, HIDDEN * SEQUENCE * 4
    words = {
        "parameters": (Parameter(name="w", shape=(VOCAB, hidden)),),
        "tp_degrees": words_tp,
        "tp_reason": "words",
    }
    embed = LayerKind(name="embed", role="embed", class_name="Embedding", **words)  # type: ignore[arg-type]
    block = LayerKind(
        name="block",
        role="block",
        class_name="Block",
        parameters=(Parameter(name="w", shape=(12 * hidden, hidden)),),
        tp_degrees=tp_degrees,
        tp_reason=f"heads {max(tp_degrees, default=1)}",
        sequence_norms=True,
        attention=attention,
    )
    head = LayerKind(name="head", role="head", class_name="Head", **words)  # type: ignore[arg-type]
    costs = [
        layer_cost("embed", parameters=VOCAB * hidden, s_per_sample=s_per_sample / 20, activation=activation // 4),
        layer_cost(
            "head", parameters=VOCAB * hidden, s_per_sample=head_scale * s_per_sample / 2, activation=activation
        ),
    ]
    for tp in (1, *tp_degrees):
        for norms in (False, True) if tp > 1 else (False,):
            costs.append(
                layer_cost(
                    "block",
                    tp=tp,
                    norms=norms,
                    parameters=12 * hidden * hidden,
                    s_per_sample=s_per_sample,
                    activation=activation,
                )
            )
    model = ModelSpec(
        name="synthetic",
        source="synthetic",
        fingerprint="0" * 16,
        layers=("embed", *["block"] * blocks, "head"),
        kinds=(embed, block, head),
        tied=tied,
        hidden_size=hidden,
        vocab_size=VOCAB,
    )
    layers = LayerProfile(
        device="cpu", device_name="none", processes=4, sequence=SEQUENCE, dtype="float32", costs=tuple(costs)
    )
    return ModelFile(model=model, layers=layers, provenance=PROVENANCE)


def request(global_batch: int = 16, **changes: object) -> Request:
    return Request(global_batch=global_batch, sequence=SEQUENCE, **changes)  # type: ignore[arg-type]


def strategies(*shorts: str) -> tuple[Strategy, ...]:
    return tuple(Strategy.parse(short) for short in shorts)
