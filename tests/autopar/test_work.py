"""What a layer does in a step, counted by hand on textbook links."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.axes import Layout, RankMesh
from autopar.cluster import ClusterSpec, UpdateCost, ZeroCost
from autopar.measured import LayerCost
from autopar.request import Optimizer
from autopar.strategy import Strategy
from autopar.work import (
    ASSUMED_HOST_ACCESSES,
    ASSUMED_HOST_BYTES_PER_S,
    ASSUMED_HOST_MEMORY_BYTES_PER_S,
    ASSUMED_OPTIMIZER_ACCESSES,
    ASSUMED_OPTIMIZER_BYTES_PER_S,
    Work,
    exposed_s,
    layer_work,
    relayout_s,
    send_s,
)
from tests.pricing import ALPHA_S, BYTES_PER_S, cluster_file, curve_s, model_file

FILE, MODEL = cluster_file(), model_file()
MESH = RankMesh.of(world_size=4)
SIZE = 1 << 20


def _cost(tp: int = 1, norms: bool = False) -> LayerCost:
    cost = MODEL.layers.find("block", tp, norms)
    assert cost is not None
    return replace(cost, parameter_bytes=SIZE, trainable_bytes=SIZE)


def _work(
    short: str,
    samples: float = 4,
    *,
    cost: LayerCost | None = None,
    cluster: ClusterSpec = FILE.cluster,
    shared_bytes: int = 0,
    optimizer: Optimizer = "adamw",
    dtype: str = "float32",
) -> Work:
    strategy = Strategy.parse(short)
    return layer_work(
        cost or _cost(strategy.tp, strategy.sequence_norms),
        strategy,
        mesh=MESH,
        cluster=cluster,
        links=FILE.links,
        samples=samples,
        optimizer=optimizer,
        dtype=dtype,
        shared_bytes=shared_bytes,
    )


def _s(collective: str, ranks: int, size: float) -> float:
    return curve_s(collective, ranks, size, alpha_s=ALPHA_S, bytes_per_s=BYTES_PER_S)  # type: ignore[arg-type]


def test_replicas_reduce_once_a_step() -> None:
    work = _work("dp4")
    assert work.sync_s == pytest.approx(_s("all_reduce", 4, SIZE))
    assert (work.zero_forward_s, work.zero_backward_s, work.tp_forward_s) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(("tensors", "sends"), [(9, 4), (3, 3), (1, 1)])
def test_gradients_travel_in_buckets_of_4_mib_and_large_tensors_alone(tensors: int, sends: int) -> None:
    """14 MiB are four buckets, of fewer and larger tensors one each; nothing is smaller than a bucket for that."""
    size = 14 << 20
    cost = replace(_cost(), parameter_bytes=size, trainable_bytes=size, trainable_tensors=tensors)
    one = size / sends
    assert _work("dp4", cost=cost).sync_s == pytest.approx(sends * _s("all_reduce", 4, one), rel=0.01)
    scatter, gather = _s("reduce_scatter", 4, one), _s("all_gather", 4, one)
    assert _work("dp4-z1", cost=cost).sync_s == pytest.approx(sends * (scatter + gather), rel=0.01)
    small = replace(_cost(), trainable_tensors=tensors)
    assert _work("dp4-z1", cost=small) == _work("dp4-z1")


def test_shared_parameters_are_summed_and_stepped_once() -> None:
    """A head whose matrix, 3/4 of its bytes, is that of the embedding on the same stage."""
    whole, rest = _work("dp4-z1"), _work("dp4-z1", shared_bytes=SIZE * 3 // 4)
    assert rest.optimizer_s == pytest.approx(whole.optimizer_s / 4)
    scatter, gather = (_s(name, 4, SIZE // 4) for name in ("reduce_scatter", "all_gather"))
    assert rest.sync_s == pytest.approx(scatter + gather, rel=0.01)
    assert _work("dp4", shared_bytes=SIZE).sync_s == _work("dp4", shared_bytes=SIZE).optimizer_s == 0.0
    sharded = _work("dp4-z3", shared_bytes=SIZE)
    assert (sharded.gather_s, sharded.reduce_s) == (_work("dp4-z3").gather_s, _work("dp4-z3").reduce_s)


def test_zero_3_gathers_twice_and_reduces_in_every_micro_batch() -> None:
    two, three = _work("dp4-z2"), _work("dp4-z3")
    gather, scatter = _s("all_gather", 4, SIZE), _s("reduce_scatter", 4, SIZE)
    assert (two.zero_forward_s, three.zero_forward_s) == pytest.approx((gather, gather))
    assert (two.zero_backward_s, three.zero_backward_s) == pytest.approx((scatter, gather + scatter))
    assert three.sync_s == 0.0


def test_optimizer_time_is_cut_by_zero_only() -> None:
    whole = SIZE * ASSUMED_OPTIMIZER_ACCESSES["adamw"] / ASSUMED_OPTIMIZER_BYTES_PER_S["cpu"]
    assert _work("dp4").optimizer_s == pytest.approx(whole)
    assert _work("dp4-z3").optimizer_s == pytest.approx(whole / 4)


@pytest.mark.parametrize(
    ("short", "dtype", "down", "up"),
    [("dp4", "float32", 1.0, 1.0), ("dp4-z1", "bfloat16", 0.5, 0.25), ("dp4-z3", "bfloat16", 0.5, 0.5)],
)
def test_an_offloaded_step_moves_gradients_down_and_parameters_up(
    short: str, dtype: str, down: float, up: float
) -> None:
    """Of SIZE bytes in the plan's dtype: float32 gradients, and what the rank keeps (masters under ZeRO-3)."""
    work = _work(short, optimizer="adamw-offloaded", dtype=dtype)
    moved_s = SIZE * (down + up) / ASSUMED_HOST_BYTES_PER_S["cpu"]
    stepping_s = SIZE * down * ASSUMED_HOST_ACCESSES["adamw"] / ASSUMED_HOST_MEMORY_BYTES_PER_S["cpu"]
    assert work.optimizer_s == pytest.approx(moved_s + stepping_s)
    assert work.origin == "assumed"


def test_a_measured_end_of_a_step_counts_tensors_and_bytes() -> None:
    costs = [
        UpdateCost(optimizer="adamw", sharded=sharded, tensor_s=tensor_s, byte_s=2e-9)
        for sharded, tensor_s in ((False, 1e-3), (True, 5e-3))
    ]
    cluster = replace(FILE.cluster, updates=tuple(costs))
    cost = replace(_cost(), trainable_tensors=9)
    assert _work("dp4", cost=cost, cluster=cluster).optimizer_s == pytest.approx(9e-3 + SIZE * 2e-9)
    assert _work("dp4-z1", cost=cost, cluster=cluster).optimizer_s == pytest.approx(9e-3 + SIZE / 4 * 2e-9)
    assert _work("dp4-z3", cost=cost, cluster=cluster).optimizer_s == pytest.approx(45e-3 + SIZE / 4 * 2e-9)


def test_each_gather_and_scatter_of_zero_costs_more_than_its_collective() -> None:
    cluster = replace(FILE.cluster, zero=ZeroCost(call_s=1e-3, byte_s=1e-9))
    beside_s = 1e-3 + SIZE * 1e-9
    for short, backward in (("dp4-z2", 1), ("dp4-z3", 2)):
        plain, work = _work(short), _work(short, cluster=cluster)
        assert work.zero_forward_s == pytest.approx(plain.zero_forward_s + beside_s)
        assert work.zero_backward_s == pytest.approx(plain.zero_backward_s + backward * beside_s)
    assert _work("dp4-z1", cluster=cluster) == _work("dp4-z1")


def test_recompute_adds_a_forward_with_its_collectives() -> None:
    plain, again = _work("dp2-tp2"), _work("dp2-tp2-r")
    assert again.forward_s == plain.forward_s
    assert again.backward_s == pytest.approx(plain.backward_s + plain.forward_s)
    assert again.tp_backward_s == pytest.approx(plain.tp_backward_s + plain.tp_forward_s)
    activation = 4 * 64 * 32 * 4
    assert plain.tp_forward_s == pytest.approx(2 * _s("all_reduce", 2, activation), rel=0.03)


def test_all_is_exposed_unless_overlap_was_measured() -> None:
    links = FILE.links
    assert exposed_s(3.0, 10.0, links) == 3.0
    measured = replace(links, overlap_origin="measured", overlap_slowdown=1.2)
    assert exposed_s(3.0, 10.0, measured) == pytest.approx(0.2 * 3.0)
    assert exposed_s(10.0, 3.0, measured) == pytest.approx(3 * 1.2 + 7 - 3)


@given(st.floats(0, 10), st.floats(0, 10), st.floats(1, 3))
def test_overlap_never_costs_more_than_waiting(comm_s: float, compute_s: float, slowdown: float) -> None:
    measured = replace(FILE.links, overlap_origin="measured", overlap_slowdown=slowdown)
    assert -1e-9 <= exposed_s(comm_s, compute_s, measured) <= comm_s


def _move(a: Layout, b: Layout) -> tuple[float, float]:
    return relayout_s(a, b, mesh=MESH, cluster=FILE.cluster, links=FILE.links, activation_bytes=SIZE)


def test_relayout_gathers_what_changes_and_nothing_else() -> None:
    """Axes a0 a1 of two ranks each; an all-gather of axis a1 ends with the bytes of its group."""
    whole, outer, both = Layout(batch=()), Layout(batch=("a0",)), Layout(batch=("a0", "a1"))
    half, all_of_it = _s("all_gather", 2, SIZE // 2), _s("all_gather", 2, SIZE)
    assert _move(both, both) == (0.0, 0.0)
    assert _move(both, outer) == pytest.approx((half, 0.0))
    assert _move(outer, both) == pytest.approx((0.0, half))
    assert _move(both, whole) == pytest.approx((half + all_of_it, 0.0))
    sequence = Layout(batch=("a0",), sequence=("a1",))
    assert _move(both, sequence) == pytest.approx((half, half))
    assert _move(sequence, outer) == pytest.approx((half, 0.0))


def test_axes_after_the_first_difference_move_too() -> None:
    """Samples cut by a0 then a1 are not those cut by a1 alone: both axes are gathered, innermost first."""
    half, all_of_it = _s("all_gather", 2, SIZE // 2), _s("all_gather", 2, SIZE)
    there, back = _move(Layout(batch=("a0", "a1")), Layout(batch=("a1",)))
    assert (there, back) == pytest.approx((half + all_of_it, all_of_it))


def test_one_stage_sends_nothing() -> None:
    assert send_s(MESH, FILE.cluster, FILE.links, SIZE) == 0.0
    two = RankMesh.of(world_size=4, pp=2)
    assert send_s(two, FILE.cluster, FILE.links, SIZE) == pytest.approx(_s("p2p", 2, SIZE // 2))
