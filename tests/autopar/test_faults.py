"""The ten faults of other cost models (design: cost model, section 7), each against a count by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from autopar import roofline, shipped
from autopar.comm import seconds, shape_of
from autopar.derived import local_cost
from autopar.errors import InputError
from autopar.estimating import Degrees, files, priced, uniform
from autopar.measured import GroupShape, LayerProfile, Line
from autopar.pipeline import StageTimes, simulate
from autopar.plan import Plan, Prediction
from autopar.predict import predict
from autopar.strategy import Strategy
from autopar.units import MIB
from autopar.work import layer_work
from tests.autopar.test_roofline import MACHINE, SHAPE

MODEL, CLUSTER = files("llama2-7b", "a100-80g:2x8", sequence=4096)


def plan_of(degrees: Degrees, batch: int = 256) -> Plan:
    return uniform(MODEL, CLUSTER, degrees, global_batch=batch)


def price(plan: Plan, layers: LayerProfile = MODEL.layers) -> Prediction:
    return predict(plan, MODEL.model, layers, CLUSTER.cluster, CLUSTER.links)


def work(strategy: str, samples: float = 2.0):
    plan, chosen = plan_of(Degrees()), Strategy.parse(strategy)
    cost = local_cost(MODEL.layers, MODEL.model.kind(1), chosen)
    assert cost is not None
    return layer_work(
        cost,
        chosen,
        mesh=plan.mesh,
        cluster=CLUSTER.cluster,
        links=replace(CLUSTER.links, overlap_origin="assumed"),
        samples=samples,
        optimizer="adamw",
    )


def test_1_every_micro_batch_gathers_again_for_its_backward() -> None:
    cost = MODEL.layers.find("block")
    assert cost is not None
    shape = shape_of(plan_of(Degrees()).mesh, plan_of(Degrees()).mesh.names, 8)
    gather = seconds(CLUSTER.links, "all_gather", shape, cost.parameter_bytes).seconds
    assert work("dp16-z3").zero_backward_s - work("dp16-z2").zero_backward_s == pytest.approx(gather)
    one, four = price(plan_of(Degrees(zero=3))), price(plan_of(Degrees(zero=3, num_micro_batches=4)))
    assert four.parts_s["zero_communication"] > 2 * one.parts_s["zero_communication"]


def test_2_gradients_under_sequence_parallel_norms_are_not_free() -> None:
    """All replicas of parameters reduce: dp 2 beside tp 8, and all 16 ranks of embedding and head."""
    assert work("dp2-tp8s", 16.0).sync_s > 0
    assert (
        price(plan_of(Degrees(tp=8, sequence_norms=True))).parts_s["gradient_sync"]
        > work("dp2-tp8s", 16.0).sync_s * 32
    )


@pytest.mark.parametrize("strategy", ["sp16", "cp16", "sp8-cp2", "tp2-sp8"])
def test_2_nor_are_they_under_a_cut_sequence_with_dp_1(strategy: str) -> None:
    """16 ranks hold the parameters (8 where tp cuts them) and none holds another sample: all of them reduce."""
    chosen, mesh = Strategy.parse(strategy), plan_of(Degrees()).mesh
    assert chosen.dp == 1
    size_bytes = MODEL.model.kind(1).parameter_bytes / chosen.tp
    names = tuple(name for name in mesh.names if name not in mesh.place(chosen).tp)
    expected_s = seconds(CLUSTER.links, "all_reduce", shape_of(mesh, names, 8), size_bytes).seconds
    assert work(strategy, 16.0).sync_s == pytest.approx(expected_s, rel=1e-3)


@pytest.mark.parametrize("axis", ["sp", "cp"])
def test_3_a_cut_sequence_divides_the_compute_and_the_activations(axis: str) -> None:
    """Four samples on each rank, or all samples of four ranks cut in four: the same tokens, scores and products."""
    whole, cut = work("dp16", 4.0), work(f"dp4-{axis}4", 16.0)
    assert cut.forward_s == pytest.approx(whole.forward_s, rel=1e-6)
    assert cut.backward_s == pytest.approx(whole.backward_s, rel=1e-6)
    assert cut.sequence_forward_s > 0
    costs = [local_cost(MODEL.layers, MODEL.model.kind(1), Strategy.parse(s)) for s in ("dp16", f"dp4-{axis}4")]
    assert costs[0] is not None
    assert costs[1] is not None
    # Context parallelism keeps the gathered keys and values: 2 x 2 bytes an element, 3/4 of which are the others'.
    gathered = 0.75 * 16 * 4096 * 4096 * 2 * 2 if axis == "cp" else 0.0
    assert costs[1].saved_bytes.at(16) == pytest.approx(costs[0].saved_bytes.at(4) + gathered)


def test_3_context_parallel_divides_the_compute() -> None:
    whole, half = roofline.block(SHAPE, MACHINE), roofline.block(replace(SHAPE, cp=2), MACHINE)
    assert half.backward_s == pytest.approx(whole.backward_s / 2, rel=0.05)


def test_4_a_batch_that_does_not_divide_is_not_one_sample_a_rank() -> None:
    with pytest.raises(InputError, match="batch is not legal"):
        plan_of(Degrees(), batch=12)


def test_5_recompute_has_a_peak_and_logits_have_a_size() -> None:
    block, head = MODEL.layers.find("block"), MODEL.layers.find("head")
    assert block is not None
    assert head is not None
    tokens = 4096
    assert head.saved_bytes.at(1) >= 4 * tokens * 32000
    assert head.backward_peak_bytes.at(1) >= 12 * tokens * 32000
    kept, again = price(plan_of(Degrees(zero=3))), price(plan_of(Degrees(zero=3, recompute="full")))
    samples = 256 / 16
    # 32 inputs stay, and one block's whole saved set is there while it is computed again.
    assert again.memory[0].peak_bytes < kept.memory[0].peak_bytes / 3
    floor = 32 * block.input_bytes.at(samples) + max(block.saved_bytes.at(samples), head.saved_bytes.at(samples))
    assert again.memory[0].peak_bytes > floor
    ddp = price(plan_of(Degrees(), batch=16))
    assert ddp.memory[0].peak_bytes > 4 * 2 * shipped.architectures()["llama2-7b"].parameter_count


def test_5_what_is_recomputed_is_alive_once() -> None:
    """With a head of no size, the peak is where the last block has all that it keeps without recompute."""
    block = MODEL.layers.find("block")
    assert block is not None
    nothing = Line(fixed=0.0, per_sample=0.0)
    names = ("saved_bytes", "forward_peak_bytes", "backward_peak_bytes")
    costs = [replace(c, **dict.fromkeys(names, nothing)) if c.kind == "head" else c for c in MODEL.layers.costs]
    again = price(plan_of(Degrees(zero=3, recompute="full")), replace(MODEL.layers, costs=tuple(costs)))
    parts, samples = again.memory[0].parts_bytes, 256 / 16
    alive = parts["activations"] + parts["transient"]
    assert alive >= 32 * block.input_bytes.at(samples) + block.saved_bytes.at(samples)


def test_5_the_optimizer_has_temporaries() -> None:
    """Next to no activations: the peak is AdamW's step, with two temporaries of the largest parameter in fp32."""
    model, cluster = files("llama2-7b", "a100-80g:2x8", sequence=8)
    found = priced(uniform(model, cluster, Degrees(), global_batch=16), model, cluster).predicted
    assert found is not None
    arch = shipped.architectures()["llama2-7b"]
    # Parameters in 16 bits and in fp32, gradients and two moments in fp32.
    states = (2 + 4 + 4 + 8) * arch.parameter_count
    assert found.memory[0].peak_bytes >= states + 2 * 4 * 32000 * 4096


def test_6_a_slow_middle_stage_decides() -> None:
    stages = [StageTimes(forward_s=1.0, backward_s=2.0)] * 4
    slow = [*stages[:1], StageTimes(forward_s=2.0, backward_s=4.0), *stages[2:]]
    even = simulate(stages, schedule="1f1b", micro_batches=16, send_s=0.0).step_s
    uneven = simulate(slow, schedule="1f1b", micro_batches=16, send_s=0.0).step_s
    assert uneven >= 16 * 6.0 > even


def test_7_twice_the_bytes_never_take_more_than_twice_as_long() -> None:
    for shape in (GroupShape(ranks=8), GroupShape(ranks=16, nodes=2), GroupShape(ranks=4, nodes=2, concurrent=4)):
        times = [seconds(CLUSTER.links, "all_reduce", shape, size * MIB).seconds for size in (1, 2, 4, 8, 16, 32)]
        assert all(1 <= after / before <= 2 + 1e-9 for before, after in pairwise(times))


def test_8_a_small_all_reduce_takes_its_latency() -> None:
    shape = GroupShape(ranks=16, nodes=2)
    small, large = (seconds(CLUSTER.links, "all_reduce", shape, size).seconds for size in (1, 256 * MIB))
    assert small > 2e-5
    assert large < 256 * MIB * small  # not one scalar of seconds a byte


def test_9_the_worst_stage_is_named_not_the_mean() -> None:
    found = price(plan_of(Degrees(pp=4, num_micro_batches=64)))
    peaks = [memory.peak_bytes for memory in found.memory]
    assert found.memory[found.worst_rank].peak_bytes == max(peaks) > 1.1 * sum(peaks) / len(peaks)
    parameters = [memory.parts_bytes["parameters"] for memory in found.memory]
    # Embedding and head stand on the ends alone: 32000 x 4096 elements of 2 bytes, with masters of 4.
    assert parameters[0] - parameters[4] == (2 + 4) * 32000 * 4096


def test_10_seconds_and_bytes_are_what_they_say() -> None:
    arch = shipped.architectures()["llama2-7b"]
    found = priced(plan_of(Degrees(zero=3, recompute="full")), MODEL, CLUSTER).predicted
    assert found is not None
    utilisation = 6 * arch.parameter_count * 256 * 4096 / (found.step_s * 16 * 312e12)
    assert 0.2 < utilisation < 0.7
    assert found.memory[0].parts_bytes["parameters"] == pytest.approx(4 * arch.parameter_count / 16, rel=1e-4)
    assert CLUSTER.cluster.memory_bytes == 80 * 10**9
