"""The ten faults planted one by one: each time the test that is about it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autopar import layer_memory, plan, roofline
from autopar.measured import Line
from autopar.plan import RankMemory
from autopar.units import MIB
from tests.autopar import test_faults as faults

Plant = Callable[[pytest.MonkeyPatch], None]


def no_second_gather(patch: pytest.MonkeyPatch) -> None:
    whole = faults.layer_work

    def planted(cost: Any, strategy: Any, **others: Any) -> Any:
        found = whole(cost, strategy, **others)
        return replace(found, zero_backward_s=found.zero_backward_s - found.gather_s * (strategy.zero == 3))

    patch.setattr(faults, "layer_work", planted)


def free_sync_with_dp_1(patch: pytest.MonkeyPatch) -> None:
    whole = faults.layer_work

    def planted(cost: Any, strategy: Any, **others: Any) -> Any:
        found = whole(cost, strategy, **others)
        return replace(found, sync_s=0.0) if strategy.sequence_norms or strategy.dp == 1 else found

    patch.setattr(faults, "layer_work", planted)


def whole_compute_on_every_rank(patch: pytest.MonkeyPatch) -> None:
    local, block = faults.local_cost, roofline.block
    patch.setattr(faults, "local_cost", lambda layers, kind, s: local(layers, kind, replace(s, sp=1, cp=1)))
    patch.setattr(roofline, "block", lambda shape, machine: block(replace(shape, cp=1), machine))


def any_batch_goes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(plan, "why_batch_illegal", lambda *a: None)
    patch.setattr(plan, "why_illegal", lambda *a, **k: None)


def logits_without_size(patch: pytest.MonkeyPatch) -> None:
    nothing = Line(fixed=0.0, per_sample=0.0)
    costs = tuple(
        replace(cost, saved_bytes=nothing, backward_peak_bytes=nothing) if cost.kind == "head" else cost
        for cost in faults.MODEL.layers.costs
    )
    patch.setattr(faults, "MODEL", replace(faults.MODEL, layers=replace(faults.MODEL.layers, costs=costs)))


def no_peak_of_recompute(patch: pytest.MonkeyPatch) -> None:
    whole = layer_memory.Unit.of

    def planted(*args: Any, **others: Any) -> Any:
        unit = whole(*args, **others)
        names = ("forward_peak_bytes", "backward_peak_bytes", "saved_bytes")
        return replace(unit, **dict.fromkeys(names, 0))

    patch.setattr(layer_memory.Unit, "of", planted)


def no_transient_of_the_optimizer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(layer_memory, "OPTIMIZER_TEMPORARIES", dict.fromkeys(layer_memory.OPTIMIZER_TEMPORARIES, 0))


def only_the_ends_decide(patch: pytest.MonkeyPatch) -> None:
    whole = faults.simulate

    def planted(stages: Any, **others: Any) -> Any:
        return whole([stages[0], *[stages[0]] * (len(stages) - 2), stages[-1]], **others)

    patch.setattr(faults, "simulate", planted)


def another_ramp_from_8_mib(patch: pytest.MonkeyPatch) -> None:
    whole = faults.seconds

    def planted(links: Any, collective: Any, shape: Any, size_bytes: float) -> Any:
        found = whole(links, collective, shape, size_bytes)
        return replace(found, seconds=found.seconds * (14 if size_bytes >= 8 * MIB else 1))

    patch.setattr(faults, "seconds", planted)


def one_scalar_a_byte(patch: pytest.MonkeyPatch) -> None:
    whole = faults.seconds

    def planted(links: Any, name: Any, shape: Any, size: float) -> Any:
        return replace(whole(links, name, shape, 1), seconds=size * 1e-11)

    patch.setattr(faults, "seconds", planted)


def the_mean_of_all_stages(patch: pytest.MonkeyPatch) -> None:
    whole = faults.predict

    def planted(*args: Any) -> Any:
        found = whole(*args)
        names = found.memory[0].parts_bytes
        mean = {n: sum(m.parts_bytes[n] for m in found.memory) // len(found.memory) for n in names}
        one = RankMemory(peak_bytes=sum(mean.values()), parts_bytes=mean)
        return replace(found, memory=(one,) * len(found.memory))

    patch.setattr(faults, "predict", planted)


def milliseconds_for_seconds(patch: pytest.MonkeyPatch) -> None:
    whole = faults.priced

    def planted(*args: Any) -> Any:
        found = whole(*args)
        return replace(found, predicted=replace(found.predicted, step_s=found.predicted.step_s * 1000))

    patch.setattr(faults, "priced", planted)


def mib_for_mb(patch: pytest.MonkeyPatch) -> None:
    cluster = faults.CLUSTER
    bytes_ = round(cluster.cluster.memory_bytes / 10**6) << 20
    patch.setattr(faults, "CLUSTER", replace(cluster, cluster=replace(cluster.cluster, memory_bytes=bytes_)))


PLANTED: list[tuple[Plant, Callable[..., None], tuple[Any, ...]]] = [
    (no_second_gather, faults.test_1_every_micro_batch_gathers_again_for_its_backward, ()),
    (free_sync_with_dp_1, faults.test_2_gradients_under_sequence_parallel_norms_are_not_free, ()),
    (free_sync_with_dp_1, faults.test_2_nor_are_they_under_a_cut_sequence_with_dp_1, ("sp16",)),
    (whole_compute_on_every_rank, faults.test_3_a_cut_sequence_divides_the_compute_and_the_activations, ("cp",)),
    (whole_compute_on_every_rank, faults.test_3_context_parallel_divides_the_compute, ()),
    (any_batch_goes, faults.test_4_a_batch_that_does_not_divide_is_not_one_sample_a_rank, ()),
    (logits_without_size, faults.test_5_recompute_has_a_peak_and_logits_have_a_size, ()),
    (no_peak_of_recompute, faults.test_5_what_is_recomputed_is_alive_once, ()),
    (no_transient_of_the_optimizer, faults.test_5_the_optimizer_has_temporaries, ()),
    (only_the_ends_decide, faults.test_6_a_slow_middle_stage_decides, ()),
    (another_ramp_from_8_mib, faults.test_7_twice_the_bytes_never_take_more_than_twice_as_long, ()),
    (one_scalar_a_byte, faults.test_8_a_small_all_reduce_takes_its_latency, ()),
    (the_mean_of_all_stages, faults.test_9_the_worst_stage_is_named_not_the_mean, ()),
    (milliseconds_for_seconds, faults.test_10_seconds_and_bytes_are_what_they_say, ()),
    (mib_for_mb, faults.test_10_seconds_and_bytes_are_what_they_say, ()),
]


@pytest.mark.parametrize(("plant", "test", "arguments"), PLANTED, ids=[entry[0].__name__ for entry in PLANTED])
def test_a_planted_fault_is_caught(
    plant: Plant, test: Callable[..., None], arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    test(*arguments)
    plant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(*arguments)
