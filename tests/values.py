"""Fixed values for the tests: small ones by hand, those behind tests/golden, and profiles by formula.

`python -m tests.values` writes tests/golden again, after a schema change that CHANGELOG.md names.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

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
from autopar.outcome import Outcome
from autopar.plan import Certificate, Plan, PlanCluster, PlanModel, Prediction, RankMemory
from autopar.request import Pin, Request
from autopar.strategy import Strategy

GOLDEN = Path(__file__).parent / "golden"


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


def golden() -> dict[str, Any]:
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
    predicted = plan(
        predicted=Prediction(step_s=0.125, parts_s={"compute": 0.1, "collectives": 0.025}, memory=memory, worst_rank=3)
    )
    return {
        "plan.json": predicted,
        "run.json": Outcome(
            plan=predicted,
            step_s=0.13,
            peak_memory_bytes=(1000, 1000, 1000, 1024),
            losses=(5.5, 4.0, 3.25),
            verified=True,
        ),
        "cluster.json": ClusterFile(
            cluster=ClusterSpec(
                name="local",
                device="cpu",
                device_name="cpu",
                world_size=4,
                ranks_per_node=4,
                memory_bytes=1 << 30,
                compute_speedup=(3.0, 2.0, 1.25, 1.0),
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
