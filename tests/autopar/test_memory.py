"""The walk against counts by hand; its bounds against the walk."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.bounds import lower_bound, upper_bound
from autopar.layer_memory import Unit
from autopar.memory import edge_bytes, walk
from autopar.orders import actions, in_flight
from autopar.request import SCHEDULES, Optimizer, Schedule

PLAIN = Unit(
    zero=0,
    shards=1,
    recompute=False,
    parameter_bytes=100,
    trainable_bytes=100,
    largest_parameter_bytes=20,
    input_bytes=10,
    output_bytes=10,
    saved_bytes=50,
    forward_peak_bytes=70,
    backward_peak_bytes=190,
)


def _zero(zero: int, unit: Unit = PLAIN, shards: int = 4) -> Unit:
    return replace(unit, zero=zero, shards=shards)


def test_one_replica_by_hand() -> None:
    """States 100 + 200; the backward needs its input 10 and its working set 190, with the new gradients in it."""
    peak = walk([PLAIN], actions("1f1b", 1, 0, 1), optimizer="adamw")
    assert peak.peak_bytes == 100 + 200 + 10 + 190
    assert peak.parts_bytes == {
        "parameters": 100,
        "gradients": 0,
        "optimizer": 200,
        "unsharded": 0,
        "communication": 0,
        "activations": 50,
        "transient": 150,
    }


def test_a_second_micro_batch_adds_one_gradient_at_a_time() -> None:
    """Gradients 100 stay; the second backward makes 190 - 100 + 50 on top: the saved set outweighs one gradient."""
    peak = walk([PLAIN], actions("1f1b", 1, 0, 2), optimizer="adamw")
    assert peak.peak_bytes == 100 + 100 + 200 + 10 + 140
    assert peak.parts_bytes["gradients"] == 100


def test_the_optimizer_step_can_be_the_peak() -> None:
    idle = replace(PLAIN, input_bytes=0, output_bytes=0, saved_bytes=0, forward_peak_bytes=0, backward_peak_bytes=100)
    peak = walk([idle], actions("1f1b", 1, 0, 1), optimizer="adamw")
    assert peak.peak_bytes == 400 + 2 * 20
    assert peak.parts_bytes["transient"] == 40


def test_one_zero_3_unit_by_hand() -> None:
    """Shares 25 + 50; in the backward the gathered 100, the input 10 and the working set 190 with whole gradients."""
    peak = walk([_zero(3)], actions("1f1b", 1, 0, 1), optimizer="adamw")
    assert peak.peak_bytes == 25 + 50 + 100 + 10 + 190
    assert peak.parts_bytes["unsharded"] == 100


def test_two_zero_3_units_by_hand() -> None:
    """Unit 0 works backwards: both shares, one gradient share, its gathered 100, and unit 1's reduce input of 100."""
    peak = walk([_zero(3), _zero(3)], actions("1f1b", 1, 0, 1), optimizer="adamw")
    first = 50 + 100 + 25 + 100 + 100 + 10 + 190
    # Unit 1: unit 0 saved 50 and its gather buffer of 100 is ahead, no reduce input yet.
    second = 50 + 100 + 100 + 50 + 100 + 10 + 190
    assert peak.peak_bytes == max(first, second) == 600


def test_zero_1_holds_a_bucket_beside_whole_gradients_at_the_end() -> None:
    """Parameters 100, a quarter of 200 for the optimizer, gradients 100 and, being few, all of them in one bucket."""
    idle = replace(PLAIN, input_bytes=0, output_bytes=0, saved_bytes=0, forward_peak_bytes=0, backward_peak_bytes=100)
    peak = walk([_zero(1, idle)], actions("1f1b", 1, 0, 1), optimizer="adamw")
    assert peak.peak_bytes == 100 + 50 + 100 + 100
    for steady in (False, True):
        bound = upper_bound(_zero(1, replace(idle, backward_peak_bytes=0)), optimizer="adamw", steady=steady)
        assert bound.state_bytes >= 100 + 50 + 100 + 100
    assert peak.parts_bytes["gradients"] == 100


def test_replicas_sum_their_gradients_through_a_copy_of_two_buckets_at_most() -> None:
    """Few bytes lie twice in one bucket at the end; of 64 MiB in three layers each, two buckets of 4 MiB do."""
    idle = replace(PLAIN, input_bytes=0, output_bytes=0, saved_bytes=0, forward_peak_bytes=0, backward_peak_bytes=100)
    alone, summed = (
        walk([replace(idle, summed=summed)], actions("1f1b", 1, 0, 1), optimizer="adamw") for summed in (False, True)
    )
    assert alone.peak_bytes == 100 + 200 + 100 + 2 * 20
    assert summed.peak_bytes == 100 + 200 + 100 + 100
    size = 64 << 20
    big = replace(idle, summed=True, parameter_bytes=size, trainable_bytes=size, backward_peak_bytes=size)
    assert walk([big] * 3, actions("1f1b", 1, 0, 1), optimizer="adamw").peak_bytes == 3 * 4 * size + (8 << 20)
    bound = upper_bound(big, optimizer="adamw", steady=True)
    assert 3 * bound.state_bytes + bound.transient_bytes >= 3 * 4 * size + (8 << 20)


def test_a_bucket_of_zero_1_is_of_a_size_that_models_do_not_change() -> None:
    """Of 64 MiB in each of three layers 4 MiB are copied, and each rank's quarter of a bucket has come before."""
    size = 64 << 20
    big = replace(
        PLAIN, parameter_bytes=size, trainable_bytes=size, largest_parameter_bytes=1 << 20, backward_peak_bytes=size
    )
    peak = walk([_zero(1, big)] * 3, actions("1f1b", 1, 0, 1), optimizer="adamw")
    assert peak.peak_bytes == 3 * (size + size // 2 + size) + (5 << 20)
    bound = upper_bound(_zero(1, big), optimizer="adamw", steady=True)
    assert 3 * bound.state_bytes + bound.transient_bytes >= peak.peak_bytes


def test_a_bucket_of_layers_with_other_shards_is_within_the_bound() -> None:
    stage = [
        replace(
            _zero(1, replace(PLAIN, parameter_bytes=size, trainable_bytes=size, backward_peak_bytes=size)),
            shards=shards,
            input_bytes=0,
            output_bytes=0,
            saved_bytes=0,
        )
        for size, shards in ((31 << 17, 8), (4 << 17, 2))
    ]
    peak = walk(stage, actions("1f1b", 1, 0, 1), optimizer="sgd").peak_bytes
    bounds = [upper_bound(unit, optimizer="sgd", steady=True) for unit in stage]
    assert peak <= sum(b.state_bytes + b.saved_bytes for b in bounds) + max(b.transient_bytes for b in bounds)


def test_zero_2_stays_whole_between_forward_and_backward() -> None:
    two, three = (walk([_zero(z)] * 3, actions("1f1b", 1, 0, 1), optimizer="adamw") for z in (2, 3))
    # The last unit's backward: three whole units, three saved sets.
    assert two.peak_bytes == 75 + 150 + 300 + 2 * 50 + 10 + 190
    # The middle unit's: one gradient share, one whole unit, a buffer ahead and one behind, two saved sets.
    assert three.peak_bytes == 75 + 150 + 25 + 100 + 200 + 50 + 10 + 190


def test_recompute_keeps_inputs_only() -> None:
    many = [replace(PLAIN, recompute=True)] * 10
    peak = walk(many, actions("1f1b", 1, 0, 1), optimizer="adamw")
    # First backward: 10 inputs, one working set; later ones trade an input for a gradient of 100, up to the last.
    assert peak.peak_bytes == 10 * 300 + 9 * 100 + 10 + 190


def test_gpipe_keeps_all_micro_batches() -> None:
    peak = walk([PLAIN], actions("gpipe", 2, 0, 5), optimizer="adamw", buffers_bytes=7, held_bytes=3)
    assert peak.parts_bytes["activations"] == 5 * (50 + 3)
    assert peak.parts_bytes["communication"] == 7


def test_ends_of_stages() -> None:
    assert edge_bytes(8, stage=0, pp=1, micro_batches=4) == (0, 0)
    assert edge_bytes(8, stage=0, pp=3, micro_batches=4) == (40, 8)
    assert edge_bytes(8, stage=1, pp=3, micro_batches=4) == (72, 8)
    assert edge_bytes(8, stage=2, pp=3, micro_batches=4) == (32, 0)


def test_buffers_of_both_neighbours_are_alive_while_a_replica_works() -> None:
    """Unit 0 is gathered ahead and unit 2 is still being reduced while unit 1 works backwards."""
    big = replace(_zero(3), parameter_bytes=4000, trainable_bytes=4000, backward_peak_bytes=4000)
    work = replace(PLAIN, backward_peak_bytes=20000)
    peak = walk([big, work, big], actions("1f1b", 1, 0, 1), optimizer="adamw")
    assert peak.parts_bytes["communication"] == 8000
    bound = upper_bound(work, optimizer="adamw", steady=False, before_bytes=4000, after_bytes=4000)
    others = upper_bound(big, optimizer="adamw", steady=False, before_bytes=4000, after_bytes=4000)
    total = bound.state_bytes + bound.saved_bytes + 2 * (others.state_bytes + others.saved_bytes)
    assert peak.peak_bytes <= total + max(bound.transient_bytes, others.transient_bytes)
    assert bound.transient_bytes > others.transient_bytes


small = st.integers(0, 1000)


@st.composite
def units(draw: st.DrawFn) -> Unit:
    """Any unit whose numbers hold together: peaks hold the saved set, the gradients and what goes in and out."""
    parameters, edge, saved = draw(small), draw(small), draw(small)
    trainable = draw(st.integers(0, parameters))
    out, zero = draw(small), draw(st.sampled_from((0, 1, 2, 3)))
    return Unit(
        zero=zero,
        shards=draw(st.sampled_from((2, 3, 4))) if zero else 1,
        recompute=draw(st.booleans()),
        parameter_bytes=parameters,
        trainable_bytes=trainable,
        largest_parameter_bytes=draw(st.integers(0, parameters)),
        input_bytes=edge,
        output_bytes=out,
        saved_bytes=saved,
        forward_peak_bytes=draw(small),
        backward_peak_bytes=draw(small),
        relayout=draw(st.booleans()),
        summed=zero == 0 and draw(st.booleans()),
    )


@settings(max_examples=150, deadline=None)
@given(
    st.lists(units(), min_size=1, max_size=5),
    st.sampled_from(SCHEDULES),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from(("adamw", "sgd")),
)
def test_the_walk_lies_between_its_bounds(
    stage: list[Unit], schedule: Schedule, count: int, micro_batches: int, optimizer: Optimizer
) -> None:
    stage[0] = replace(stage[0], relayout=False)
    for place in range(count):
        live = in_flight(schedule, count, place, micro_batches)
        peak = walk(stage, actions(schedule, count, place, micro_batches), optimizer=optimizer).peak_bytes
        whole = [unit.parameter_bytes if unit.zero else 0 for unit in stage]
        upper = [
            upper_bound(
                unit,
                optimizer=optimizer,
                steady=live < micro_batches,
                before_bytes=max(whole[:i], default=0),
                after_bytes=max(whole[i + 1 :], default=0),
                arriving_bytes=stage[i - 1].output_bytes if i else 0,
            )
            for i, unit in enumerate(stage)
        ]
        lower = [
            lower_bound(unit, optimizer=optimizer, steady=live < micro_batches, last=i == len(stage) - 1)
            for i, unit in enumerate(stage)
        ]
        totals = [
            sum(b.state_bytes + live * b.saved_bytes for b in bounds) + max(b.transient_bytes for b in bounds)
            for bounds in (lower, upper)
        ]
        assert totals[0] <= peak <= totals[1]


@settings(max_examples=100, deadline=None)
@given(st.lists(units(), min_size=1, max_size=5), st.integers(1, 4))
def test_more_shards_never_need_more(stage: list[Unit], micro_batches: int) -> None:
    peaks = []
    for shards in (2, 4, 8):
        cut = [replace(unit, shards=shards if unit.zero else 1) for unit in stage]
        peaks.append(walk(cut, actions("1f1b", 1, 0, micro_batches), optimizer="adamw").peak_bytes)
    assert peaks == sorted(peaks, reverse=True)


@settings(max_examples=100, deadline=None)
@given(st.lists(units(), min_size=1, max_size=5), st.sampled_from(SCHEDULES), st.integers(1, 4))
def test_parts_add_up_and_none_is_negative(stage: list[Unit], schedule: Schedule, micro_batches: int) -> None:
    peak = walk(stage, actions(schedule, 2, 0, micro_batches), optimizer="adamw")
    assert sum(peak.parts_bytes.values()) == peak.peak_bytes
    assert min(peak.parts_bytes.values()) >= 0


def test_without_trained_parameters_there_is_no_state_but_the_parameters() -> None:
    frozen = replace(PLAIN, trainable_bytes=0)
    peak = walk([frozen], actions("1f1b", 1, 0, 1), optimizer="adamw")
    assert (peak.parts_bytes["gradients"], peak.parts_bytes["optimizer"]) == (0, 0)


@pytest.mark.parametrize("micro_batches", [3, 6, 40])
def test_the_steady_state_repeats(micro_batches: int) -> None:
    stage = [PLAIN, _zero(3), replace(PLAIN, recompute=True)]
    peaks = {walk(stage, actions("1f1b", 2, 0, m), optimizer="adamw").peak_bytes for m in (3, micro_batches)}
    assert len(peaks) == 1
