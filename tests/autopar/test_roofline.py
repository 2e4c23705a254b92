from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar import roofline

MACHINE = roofline.Machine(
    product_flops_per_s=100e12,
    head_flops_per_s=100e12,
    attention_flops_per_s=100e12,
    memory_bytes_per_s=1e12,
    product_share=0.8,
    head_share=0.8,
    product_edge=200.0,
    row_edge=200.0,
    head_edge=200.0,
    attention_share=0.4,
    scores_passes=12.0,
    streamed_share=0.8,
    misaligned=0.2,
    misaligned_heads=0.5,
    loss_passes=1.5,
    launch_s=1e-5,
)
SHAPE = roofline.Shape(
    hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, gated=1, vocab=128256, samples=2, sequence=4096
)


def test_large_products_take_flops_over_reached_peak() -> None:
    seconds = roofline.product_s(1e7, 1 << 20, 1 << 20, flops_per_s=80e12, edge=200.0, row_edge=200.0, misaligned=0.2)
    assert seconds == pytest.approx(2 * 1e7 * 2**40 / 80e12, rel=1e-3)


def test_block_products_count_every_matrix() -> None:
    bare = replace(MACHINE, product_edge=0.0, row_edge=0.0)
    products, last = roofline.block_products_s(SHAPE, bare)
    elements = 4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert products == pytest.approx(2 * 8192 * elements / 80e12)
    assert last == pytest.approx(2 * 8192 * 4096 * 14336 / 80e12)


def test_a_launch_bound_block_takes_the_host_seconds() -> None:
    small = replace(SHAPE, samples=1, sequence=1)
    slow_host = replace(MACHINE, launch_s=1.0)
    assert roofline.block(small, slow_host).forward_s == pytest.approx(1.0, rel=1e-3)


def test_context_parallel_divides_the_compute() -> None:
    whole, half = roofline.block(SHAPE, MACHINE), roofline.block(replace(SHAPE, cp=2), MACHINE)
    assert half.forward_s == pytest.approx(whole.forward_s / 2, rel=0.05)
    assert half.attention_s == pytest.approx(whole.attention_s / 2)


def test_unfused_attention_pays_for_its_scores() -> None:
    plain = replace(SHAPE, fused_attention=0)
    assert roofline.attention_s(plain, MACHINE)[0] > 2 * roofline.attention_s(SHAPE, MACHINE)[0]


@pytest.mark.parametrize(("width", "slower"), [(14336, 1.0), (14400 + 8, 1.2)])
def test_partial_tiles_cost(width: int, slower: float) -> None:
    def seconds(misaligned: float) -> float:
        return float(
            roofline.product_s(8192, 4096, width, flops_per_s=8e13, edge=0.0, row_edge=0.0, misaligned=misaligned)
        )

    assert seconds(0.2) / seconds(0.0) == pytest.approx(slower)


def test_arrays_and_numbers_agree() -> None:
    many = replace(SHAPE, samples=np.array([1.0, 2.0, 4.0]), tp=np.array([1.0, 2.0, 8.0]))
    found = roofline.block(many, MACHINE)
    for i, (samples, tp) in enumerate([(1, 1), (2, 2), (4, 8)]):
        one = roofline.block(replace(SHAPE, samples=samples, tp=tp), MACHINE)
        assert found.forward_s[i] == pytest.approx(float(one.forward_s), rel=1e-12)
        assert found.backward_s[i] == pytest.approx(float(one.backward_s), rel=1e-12)


@given(
    samples=st.integers(1, 64),
    sequence=st.sampled_from([128, 1024, 4096, 32768]),
    tp=st.sampled_from([1, 2, 4, 8]),
    norms=st.booleans(),
    fused=st.booleans(),
)
def test_more_tokens_never_take_less_and_more_ranks_never_more(
    samples: int, sequence: int, tp: int, norms: bool, fused: bool
) -> None:
    shape = replace(
        SHAPE, samples=samples, sequence=sequence, tp=tp, sequence_norms=int(norms), fused_attention=int(fused)
    )
    base = roofline.block(shape, MACHINE)
    more = roofline.block(replace(shape, samples=samples + 1), MACHINE)
    assert more.forward_s >= base.forward_s
    assert more.backward_s >= base.backward_s
    if tp < 8:
        wider = replace(shape, tp=2 * tp)
        # Smaller tiles may eat what the division gives, never more than that (launches apart).
        bare = replace(MACHINE, launch_s=0.0)
        assert roofline.block(wider, bare).forward_s <= roofline.block(shape, bare).forward_s * 1.001
