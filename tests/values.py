"""Values of the ground floor for the tests: hypothesis strategies, and the fixed ones behind tests/golden.

`python -m tests.values` writes tests/golden again, after a schema change that CHANGELOG.md names.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import strategies as st

from autopar.axes import divisors
from autopar.cluster import ClusterSpec
from autopar.measured import (
    COLLECTIVES,
    ClusterFile,
    GroupShape,
    LayerCost,
    LayerProfile,
    Line,
    LinkCurve,
    LinkProfile,
    ModelFile,
    Provenance,
    TensorParallelCall,
)
from autopar.model import LayerKind, ModelSpec, Parameter
from autopar.plan import Certificate, Plan, PlanCluster, PlanModel, Prediction, RankMemory
from autopar.request import Pin, Request
from autopar.strategy import Strategy

GOLDEN = Path(__file__).parent / "golden"

words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)
names = st.text("abcdefghijklmnopqrstuvwxyz_.0123456789", min_size=1, max_size=12)
counts = st.integers(0, 1 << 40)
seconds = st.floats(1e-9, 1e5, allow_nan=False)
lines = st.builds(Line, fixed=st.floats(0, 1e12), per_sample=st.floats(0, 1e12))
provenances = st.builds(
    Provenance, machine=words, date=words, command=words, versions=st.dictionaries(names, words, max_size=3)
)


@st.composite
def strategies_on(draw: st.DrawFn, ranks: int, *, runnable: bool = False) -> Strategy:
    """A strategy that occupies this many ranks; `runnable` leaves out what the runtime refuses."""
    tp = draw(st.sampled_from(divisors(ranks)))
    rest = ranks // tp
    sp = 1 if runnable else draw(st.sampled_from(divisors(rest)))
    cp = 1 if runnable else draw(st.sampled_from(divisors(rest // sp)))
    ep = 1 if runnable else draw(st.sampled_from(divisors(rest // sp // cp)))
    dp = rest // sp // cp // ep
    zero = draw(st.sampled_from((0, 2, 3) if runnable else (0, 1, 2, 3))) if dp > 1 else 0
    shards = [None, *divisors(dp)[1:-1]] if zero and not runnable else [None]
    return Strategy(
        dp=dp,
        zero=zero,
        shard=draw(st.sampled_from(shards)),
        tp=tp,
        sequence_norms=tp > 1 and draw(st.booleans()),
        sp=sp,
        cp=cp,
        ep=ep,
        recompute=draw(st.sampled_from(("none", "full") if runnable else ("none", "full", "selective"))),
    )


any_strategies = st.integers(1, 64).flatmap(strategies_on)
pins = st.builds(
    Pin,
    layers=st.one_of(
        st.sampled_from(("embed", "head", "*")),
        st.integers(0, 99).map(str),
        st.tuples(st.integers(0, 9), st.integers(10, 99)).map(lambda ends: f"{ends[0]}-{ends[1]}"),
    ),
    strategy=any_strategies,
)
requests = st.builds(
    Request,
    global_batch=st.integers(1, 1 << 20),
    sequence=st.integers(1, 1 << 20),
    dtype=st.sampled_from(("float32", "bfloat16")),
    optimizer=st.sampled_from(("adamw", "sgd")),
    memory_bytes=st.none() | st.integers(1, 1 << 50),
    pp=st.lists(st.integers(1, 64), max_size=3).map(tuple),
    num_micro_batches=st.lists(st.integers(1, 64), max_size=3).map(tuple),
    schedules=st.sampled_from((("1f1b", "gpipe"), ("gpipe",))),
    pins=st.lists(pins, max_size=3).map(tuple),
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan that the value accepts."""
    world = draw(st.sampled_from((1, 2, 3, 4, 6, 8, 12)))
    pp = draw(st.sampled_from(divisors(world)))
    layers_per_stage = tuple(draw(st.lists(st.integers(3, 6), min_size=pp, max_size=pp)))
    predicted = None
    if draw(st.booleans()):
        memory = [
            RankMemory(peak_bytes=draw(counts), parts_bytes=draw(st.dictionaries(names, counts, max_size=3)))
            for _ in range(world)
        ]
        predicted = Prediction(
            step_s=draw(seconds),
            parts_s=draw(st.dictionaries(names, seconds, max_size=3)),
            memory=tuple(memory),
            worst_rank=draw(st.integers(0, world - 1)),
            origin=draw(st.sampled_from(("measured", "fitted", "interpolated", "assumed"))),
        )
    certificates = st.builds(
        Certificate,
        objective_ns=counts,
        lower_bound_ns=counts,
        status=st.sampled_from(("optimal", "gap")),
        solver=names,
        verified_by=st.lists(names, max_size=2).map(tuple),
    )
    return Plan(
        model=PlanModel(name=draw(words), source=draw(words), fingerprint=draw(names)),
        cluster=PlanCluster(
            name=draw(words),
            device=draw(st.sampled_from(("cpu", "cuda"))),
            world_size=world,
            ranks_per_node=draw(st.sampled_from(divisors(world))),
            memory_bytes=draw(st.integers(1, 1 << 50)),
        ),
        request=draw(requests),
        pp=pp,
        schedule=draw(st.sampled_from(("1f1b", "gpipe"))),
        num_micro_batches=draw(st.integers(1, 64)),
        layers_per_stage=layers_per_stage,
        strategies=tuple(draw(strategies_on(world // pp)) for _ in range(sum(layers_per_stage))),
        predicted=predicted,
        certificate=draw(st.none() | certificates),
        versions=draw(st.dictionaries(names, words, max_size=2)),
    )


@st.composite
def cluster_files(draw: st.DrawFn) -> ClusterFile:
    """Any content of a cluster.json."""
    nodes, ranks_per_node = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    curves = []
    for _ in range(draw(st.integers(0, 3))):
        sizes = sorted(draw(st.sets(st.integers(1, 1 << 30), min_size=1, max_size=4)))
        curves.append(
            LinkCurve(
                collective=draw(st.sampled_from(COLLECTIVES)),
                shape=GroupShape(ranks=draw(st.integers(2, 8)), concurrent=draw(st.integers(1, 4))),
                size_bytes=tuple(sizes),
                seconds=tuple(draw(seconds) for _ in sizes),
            )
        )
    return ClusterFile(
        cluster=ClusterSpec(
            name=draw(words),
            device=draw(st.sampled_from(("cpu", "cuda"))),
            device_name=draw(words),
            world_size=nodes * ranks_per_node,
            ranks_per_node=ranks_per_node,
            memory_bytes=draw(st.integers(1, 1 << 50)),
        ),
        links=LinkProfile(curves=tuple(curves), overlap_slowdown=draw(st.floats(1, 4))),
        provenance=draw(provenances),
    )


parameters = st.builds(
    Parameter,
    name=names,
    shape=st.lists(st.integers(0, 4096), max_size=3).map(tuple),
    dtype=st.sampled_from(("float32", "bfloat16", "int8")),
    trainable=st.booleans(),
)


@st.composite
def model_files(draw: st.DrawFn) -> ModelFile:
    """Any content of a model.json."""
    kinds = tuple(
        LayerKind(
            name=f"{role}-{i}",
            role=role,
            class_name=draw(names),
            parameters=tuple(draw(st.lists(parameters, max_size=3))),
            tp_degrees=tuple(sorted(draw(st.sets(st.sampled_from((2, 3, 4, 8)), max_size=2)))),
            tp_reason=draw(words),
            sequence_norms=draw(st.booleans()),
        )
        for i, role in enumerate(("embed", "block", "block", "head"))
    )
    blocks = draw(st.lists(st.sampled_from(("block-1", "block-2")), min_size=1, max_size=5))
    costs = []
    for kind in kinds:
        samples = sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=3)))
        trainable = draw(st.integers(0, 1 << 30))
        costs.append(
            LayerCost(
                kind=kind.name,
                samples=tuple(samples),
                forward_s=tuple(draw(seconds) for _ in samples),
                backward_s=tuple(draw(seconds) for _ in samples),
                parameter_bytes=trainable + draw(st.integers(0, 64)),
                trainable_bytes=trainable,
                largest_parameter_bytes=trainable,
                input_bytes=draw(lines),
                output_bytes=draw(lines),
                saved_bytes=draw(lines),
                forward_peak_bytes=draw(lines),
                backward_peak_bytes=draw(lines),
                flops=draw(lines),
                calls=(TensorParallelCall(collective="all_reduce", phase="forward", size_bytes=draw(lines)),),
            )
        )
    return ModelFile(
        model=ModelSpec(
            name=draw(words),
            source=draw(words),
            fingerprint=draw(names),
            layers=("embed-0", *blocks, "head-3"),
            kinds=kinds,
            tied=draw(st.booleans()),
            hidden_size=draw(st.integers(1, 8192)),
            vocab_size=draw(st.none() | st.integers(1, 200_000)),
        ),
        layers=LayerProfile(
            device="cpu",
            device_name=draw(words),
            processes=draw(st.integers(1, 8)),
            sequence=draw(st.integers(1, 8192)),
            dtype="float32",
            costs=tuple(costs),
        ),
        provenance=draw(provenances),
    )


def kind(role: str = "block", *, tp_degrees: tuple[int, ...] = (2, 4), sequence_norms: bool = True) -> LayerKind:
    """A kind of layer with two parameters of 8 x 8 and 8 elements."""
    return LayerKind(
        name=role,
        role=role,  # type: ignore[arg-type]
        class_name={"block": "DecoderLayer"}.get(role, role.title()),
        parameters=(Parameter(name="weight", shape=(8, 8)), Parameter(name="bias", shape=(8,))),
        tp_degrees=tp_degrees if role == "block" else (),
        tp_reason="heads 8, kv heads 4, width 32" if role == "block" else "",
        sequence_norms=sequence_norms and role == "block",
    )


def model(blocks: int = 4, *, tied: bool = False) -> ModelSpec:
    """A model of equal blocks."""
    return ModelSpec(
        name="toy",
        source="toy.py:build",
        fingerprint="0123456789abcdef",
        layers=("embed", *["block"] * blocks, "head"),
        kinds=(kind("embed"), kind(), kind("head")),
        tied=tied,
        hidden_size=8,
        vocab_size=64,
    )


def plan(
    strategies: tuple[str, ...] = ("dp4-z3", "dp2-tp2s", "dp2-tp2s", "dp4-z3-r", "tp4", "dp4-z3"),
    *,
    world_size: int = 4,
    pp: int = 1,
    layers_per_stage: tuple[int, ...] = (),
    global_batch: int = 16,
    num_micro_batches: int = 2,
    predicted: Prediction | None = None,
) -> Plan:
    """A plan for `model(len(strategies) - 2)`."""
    return Plan(
        model=PlanModel(name="toy", source="toy.py:build", fingerprint="0123456789abcdef"),
        cluster=PlanCluster(
            name="local", device="cpu", world_size=world_size, ranks_per_node=world_size, memory_bytes=1 << 30
        ),
        request=Request(global_batch=global_batch, sequence=16, pins=(Pin.parse("embed: dp4-z3"),)),
        pp=pp,
        schedule="1f1b",
        num_micro_batches=num_micro_batches,
        layers_per_stage=layers_per_stage or (len(strategies),),
        strategies=tuple(Strategy.parse(short) for short in strategies),
        predicted=predicted,
        certificate=Certificate(
            objective_ns=3_000_000, lower_bound_ns=3_000_000, status="optimal", solver="pareto", verified_by=("brute",)
        ),
        versions={"autopar": "0.1.0"},
    )


def golden() -> dict[str, Plan | ClusterFile | ModelFile]:
    """The values of tests/golden by file name."""
    provenance = Provenance(
        machine="two cores", date="2026-01-02T03:04:05+00:00", command="autopar profile", versions={"torch": "2.13.0"}
    )
    memory = tuple(
        RankMemory(peak_bytes=1000 + rank, parts_bytes={"parameters": 600, "activations": 400 + rank})
        for rank in range(4)
    )
    cost = LayerCost(
        kind="block",
        tp=2,
        sequence_norms=True,
        samples=(1, 2, 4),
        forward_s=(0.001, 0.002, 0.004),
        backward_s=(0.002, 0.004, 0.008),
        parameter_bytes=288,
        trainable_bytes=288,
        largest_parameter_bytes=256,
        input_bytes=Line(fixed=0.0, per_sample=512.0),
        output_bytes=Line(fixed=0.0, per_sample=512.0),
        saved_bytes=Line(fixed=128.0, per_sample=2048.0),
        forward_peak_bytes=Line(fixed=128.0, per_sample=3072.0),
        backward_peak_bytes=Line(fixed=128.0, per_sample=4096.0),
        flops=Line(fixed=0.0, per_sample=1e6),
        calls=(
            TensorParallelCall(
                collective="reduce_scatter", phase="forward", size_bytes=Line(fixed=0.0, per_sample=512.0)
            ),
        ),
    )
    curve = LinkCurve(
        collective="all_reduce",
        shape=GroupShape(ranks=2, concurrent=2),
        size_bytes=(1024, 4096),
        seconds=(0.0001, 0.00025),
    )
    return {
        "plan.json": plan(
            predicted=Prediction(
                step_s=0.125, parts_s={"compute": 0.1, "collectives": 0.025}, memory=memory, worst_rank=3
            )
        ),
        "cluster.json": ClusterFile(
            cluster=ClusterSpec(
                name="local", device="cpu", device_name="cpu", world_size=4, ranks_per_node=4, memory_bytes=1 << 30
            ),
            links=LinkProfile(curves=(curve,), overlap_slowdown=1.25, overlap_origin="measured"),
            provenance=provenance,
        ),
        "model.json": ModelFile(
            model=model(),
            layers=LayerProfile(
                device="cpu", device_name="cpu", processes=4, sequence=16, dtype="float32", costs=(cost,)
            ),
            provenance=provenance,
        ),
    }


def measured(
    *, blocks: int = 4, world_size: int = 4, tp_degrees: tuple[int, ...] = (2, 4), tp_reason: str = ""
) -> tuple[ModelFile, ClusterFile]:
    """A model and a cluster as a profile would write them, with numbers by formula: what a search plans from."""
    kinds = (kind("embed"), replace(kind(tp_degrees=tp_degrees), tp_reason=tp_reason), kind("head"))
    costs = []
    for one in kinds:
        forms = [(1, False), *((degree, norms) for degree in one.tp_degrees for norms in (False, True))]
        for tp, norms in forms:
            size = 1_000_000 // tp
            kept = Line(fixed=0.0, per_sample=200_000 / tp)
            edge = Line(fixed=0.0, per_sample=10_000.0)
            call = TensorParallelCall(collective="all_reduce", phase="forward", size_bytes=edge)
            costs.append(
                LayerCost(
                    kind=one.name,
                    tp=tp,
                    sequence_norms=norms,
                    samples=(1, 2, 4),
                    forward_s=tuple(n * 1e-3 / tp for n in (1, 2, 4)),
                    backward_s=tuple(n * 2e-3 / tp for n in (1, 2, 4)),
                    parameter_bytes=size,
                    trainable_bytes=size,
                    largest_parameter_bytes=size // 2,
                    input_bytes=edge,
                    output_bytes=edge,
                    saved_bytes=kept,
                    forward_peak_bytes=Line(fixed=0.0, per_sample=250_000 / tp),
                    backward_peak_bytes=Line(fixed=float(size), per_sample=300_000 / tp),
                    flops=Line(fixed=0.0, per_sample=1e8 / tp),
                    calls=(call,) if tp > 1 else (),
                )
            )
    sizes = tuple(1 << power for power in range(10, 24, 2))
    curves = [
        LinkCurve(
            collective=collective,
            shape=GroupShape(ranks=ranks, concurrent=max(1, world_size // ranks)),
            size_bytes=sizes,
            seconds=tuple(1e-4 + size * 1e-9 for size in sizes),
        )
        for collective in COLLECTIVES
        for ranks in divisors(max(2, world_size))[1:]
    ]
    provenance = Provenance(machine="none", date="", command="tests", versions={})
    model_file = ModelFile(
        model=replace(model(blocks), kinds=kinds),
        layers=LayerProfile(
            device="cpu", device_name="cpu", processes=world_size, sequence=16, dtype="float32", costs=tuple(costs)
        ),
        provenance=provenance,
    )
    cluster_file = ClusterFile(
        cluster=ClusterSpec(
            name="local",
            device="cpu",
            device_name="cpu",
            world_size=world_size,
            ranks_per_node=world_size,
            memory_bytes=1 << 30,
        ),
        links=LinkProfile(curves=tuple(curves)),
        provenance=provenance,
    )
    return model_file, cluster_file


if __name__ == "__main__":
    for name, value in golden().items():
        value.save(GOLDEN / name)
