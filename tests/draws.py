"""Hypothesis strategies for the values of the ground floor."""

from __future__ import annotations

from hypothesis import strategies as st

from autopar.axes import divisors
from autopar.cluster import ClusterSpec, UpdateCost, ZeroCost
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

words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)
names = st.text("abcdefghijklmnopqrstuvwxyz_.0123456789", min_size=1, max_size=12)
counts = st.integers(0, 1 << 40)
seconds = st.floats(1e-9, 1e5, allow_nan=False)
lines = st.builds(Line, fixed=st.floats(0, 1e12), per_sample=st.floats(0, 1e12))
updates = st.builds(
    UpdateCost, optimizer=st.just("adamw"), sharded=st.booleans(), tensor_s=st.floats(0, 1), byte_s=st.floats(0, 1)
)
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
        recompute=draw(st.sampled_from(("none", "full", "selective"))),
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
    optimizer=st.sampled_from(("adamw", "sgd", "sgd-momentum")),
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
        lower_bound_ns=st.just(0),
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
            updates=draw(st.lists(updates, max_size=2).map(tuple)),
            zero=draw(st.none() | st.builds(ZeroCost, call_s=st.floats(0, 1), byte_s=st.floats(0, 1))),
            compute_speedup=tuple(draw(st.floats(0.1, 10)) for _ in range(ranks_per_node * draw(st.integers(0, 1)))),
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
