"""What would make a request fit: each way out is a search, and says what it assumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import islice
from typing import Any

import pytest

from autopar import estimating
from autopar.errors import InfeasibleError
from autopar.measured import ClusterFile, LayerCost, Line, ModelFile, SelectiveCost
from autopar.plan import Plan, Prediction
from autopar.predict import predict
from autopar.relaxing import Demand, _shortened, conflicting, explained, relaxations
from autopar.request import SCHEDULES, Pin, Request
from autopar.searching import search_files
from autopar.units import MIB
from autopar.work import ASSUMED_HOST_ACCESSES, ASSUMED_HOST_BYTES_PER_S, ASSUMED_HOST_MEMORY_BYTES_PER_S
from tests import pricing
from tests.bench import whole_search
from tests.pricing import cluster_file, model_file

SELECTIVE_LINES = ("saved_bytes", "forward_peak_bytes", "backward_peak_bytes", "later_backward_peak_bytes")


def _predicted(plan: object) -> Prediction:
    assert isinstance(plan, Plan)
    assert plan.predicted is not None
    return plan.predicted


def test_states_in_host_memory_are_one_of_the_ways_out() -> None:
    case = replace(whole_search.CASES[0], blocks=4, devices=2, global_batch=2, vocabulary=4000, tied=False)
    files = whole_search.model_file(case), whole_search.cluster_file(case.devices)
    request = Request(
        global_batch=2, sequence=case.sequence, dtype="bfloat16", memory_bytes=MIB, pp=(1,), num_micro_batches=(1,)
    )
    with pytest.raises(InfeasibleError) as caught:
        search_files(*files, request)
    # A little less than the leanest plan needs, whatever else a device keeps.
    least = _predicted(caught.value.leanest)
    request = replace(request, memory_bytes=least.memory[least.worst_rank].peak_bytes - MIB)
    found = {one.change: one for one in islice(relaxations(caught.value, *files, request), 5)}
    way = found["optimizer states in host memory"]
    assert way.fits
    assert "assumed" in str(way)
    assert "20 GB/s" in str(way)
    there = _predicted(way.plan)
    assert there.memory[there.worst_rank].parts_bytes["optimizer"] == 0
    assert there.origin == "assumed"
    # The same plan at home: the states and, what is not gathered, the masters; and there the way and the step.
    home = replace(way.plan, request=request)
    here = predict(home, files[0].model, files[0].layers, files[1].cluster, files[1].links)
    states = here.memory[here.worst_rank].parts_bytes["optimizer"]
    assert states > 0
    device, held = "cuda", states / 2  # AdamW has two states, in float32 as the masters and gradients
    least_s = held * ASSUMED_HOST_ACCESSES["adamw"] / ASSUMED_HOST_MEMORY_BYTES_PER_S[device]
    least_s += held * 1.5 / ASSUMED_HOST_BYTES_PER_S[device]
    assert there.parts_s["optimizer"] == pytest.approx(least_s, rel=0.35)  # masters that are gathered go up whole
    assert there.parts_s["optimizer"] > here.parts_s["optimizer"]
    way.plan.check_runnable()
    assert way.plan.not_runnable == ()


def test_a_shorter_sequence_has_fewer_bytes_on_every_line() -> None:
    file = whole_search.model_file(whole_search.CASES[0])
    line = Line(fixed=7.0, per_sample=64.0)
    selective = SelectiveCost(**dict.fromkeys(SELECTIVE_LINES, line))
    costs = tuple(replace(cost, later_backward_peak_bytes=line, selective=selective) for cost in file.layers.costs)
    whole = replace(file, layers=replace(file.layers, costs=costs))
    half = _shortened(whole, whole.layers.sequence // 2)
    names = [field.name for field in fields(LayerCost) if isinstance(getattr(costs[0], field.name), Line)]
    assert len(names) == 7
    for before, after in zip(costs, half.layers.costs, strict=True):
        for name in names:
            one, other = getattr(before, name), getattr(after, name)
            assert (other.fixed, other.per_sample) == (one.fixed, one.per_sample / 2), name
        for name in SELECTIVE_LINES:
            assert getattr(after.selective, name) == replace(line, per_sample=32.0), name


def test_a_sequence_that_the_model_fixes_is_not_shortened() -> None:
    files = estimating.files("vit-base-16", "a100-80g:1x2")
    request = Request(
        global_batch=512,
        sequence=files[0].layers.sequence,
        dtype="bfloat16",
        memory_bytes=64 * MIB,
        num_micro_batches=(1,),
    )
    with pytest.raises(InfeasibleError) as caught:
        search_files(*files, request)
    changes = [one.change for one in relaxations(caught.value, *files, request)]
    assert changes
    assert not [change for change in changes if change.startswith("--seq")]
    half = _shortened(files[0], 98).layers
    for before, after in zip(files[0].layers.costs, half.costs, strict=True):
        assert (before == after) == (before.kind == "block")


def _fits(files: tuple[ModelFile, ClusterFile], request: Request) -> bool:
    try:
        search_files(*files, request)
    except InfeasibleError:
        return False
    return True


@pytest.mark.parametrize(
    ("narrow", "wanted"),
    [
        ({"pp": (2,), "num_micro_batches": (8,), "schedules": ("gpipe",)}, {"pp", "micro-batches", "schedule"}),
        ({"pins": ("0: dp4", "1: dp4-z3"), "max_strategies": 1}, {"pin", "max-strategies"}),
    ],
)
def test_schedules_and_the_number_of_strategies_are_in_the_conflict(narrow: dict[str, Any], wanted: set[str]) -> None:
    files = model_file(words_tp=(), attention=None), cluster_file()
    narrow = {**narrow, "pins": tuple(map(Pin.parse, narrow.get("pins", ())))}
    asked = pricing.request(16, memory_bytes=1_300_000 if narrow.get("pp") else 4_000_000, **narrow)
    with pytest.raises(InfeasibleError) as caught:
        search_files(*files, asked)
    named = conflicting(*files, asked)
    assert {name for name, _ in named} <= wanted
    assert {"schedule", "max-strategies"} & {name for name, _ in named}

    def only(demands: Sequence[Demand]) -> Request:
        kept = dict(demands)
        return replace(
            asked,
            pp=asked.pp if "pp" in kept else (),
            num_micro_batches=asked.num_micro_batches if "micro-batches" in kept else (),
            schedules=asked.schedules if "schedule" in kept else SCHEDULES,
            max_strategies=asked.max_strategies if "max-strategies" in kept else None,
            pins=tuple(pin for name, pin in demands if isinstance(pin, Pin)),
        )

    assert not _fits(files, only(named))
    for place in range(len(named)):
        assert _fits(files, only(named[:place] + named[place + 1 :]))
    found = {one.change: one for one in relaxations(caught.value, *files, asked)}
    for name in ("schedule", "max-strategies"):
        if name in {one for one, _ in named}:
            assert found[f"without --{name}"].fits
    words = str(explained(caught.value, *files, asked))
    assert "--schedule gpipe" in words or "--max-strategies 1" in words
