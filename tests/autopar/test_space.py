from __future__ import annotations

import pytest

from autopar.axes import RankMesh
from autopar.errors import InputError
from autopar.request import Pin
from autopar.space import StrategySpace, candidates
from autopar.strategy import Strategy
from tests.pricing import SEQUENCE, model_file, request

FILE = model_file()


def _space(world: int = 4, micro_batch: int = 16, *pins: str, blocks: int = 2, tied: bool = False) -> StrategySpace:
    file = model_file(blocks, tied=tied)
    asked = request(pins=tuple(Pin.parse(pin) for pin in pins))
    return StrategySpace.of(file.model, file.layers, RankMesh.of(world_size=world), asked, micro_batch)


def test_all_divisors_are_candidates() -> None:
    shorts = [s.short for s in candidates(RankMesh.of(world_size=6))]
    assert len(shorts) == len(set(shorts))
    for expected in ("dp6", "dp6-z3-r", "dp3-z2-tp2s", "dp2-tp3", "tp6s-r"):
        assert expected in shorts
    # Replicas and 3 ZeRO stages x 3 recompute, twice that with the two norms where tp > 1, and no ZeRO without dp.
    assert len(shorts) == 12 + 24 + 24 + 6


def test_embed_and_head_run_data_parallel_or_along_the_vocabulary() -> None:
    space = _space()
    for layer in (0, -1):
        assert [space.strategies[s].short for s in space.allowed[layer]] == [
            *("dp4", "dp4-z1", "dp4-z2", "dp4-z3"),
            *("dp2-tp2", "dp2-z1-tp2", "dp2-z2-tp2", "dp2-z3-tp2", "tp4"),
        ]
    assert len(space.allowed[1]) == 12 + 24 + 6


def test_reasons_name_heads_and_degrees() -> None:
    space = _space(6, 12)
    reasons = {(r.kind, r.strategy.short): r.reason for r in space.rejections}
    assert "heads 4" in reasons["block", "dp2-tp3"]
    assert "legal degrees: 1, 2, 4" in reasons["block", "dp2-tp3"]


def test_what_was_not_measured_is_left_out() -> None:
    layers = FILE.layers
    kept = tuple(cost for cost in layers.costs if cost.tp != 4)
    from dataclasses import replace

    space = StrategySpace.of(
        FILE.model, replace(layers, costs=kept), RankMesh.of(world_size=4), request(), micro_batch=16
    )
    assert all(space.strategies[s].tp != 4 for s in space.allowed[1])
    reason = next(r.reason for r in space.rejections if r.strategy.short == "tp4" and r.kind == "block")
    assert reason == "block was not measured at tp 4 (measured: tp [1, 2])"


def test_pins_are_masks() -> None:
    space = _space(4, 16, "0: tp4s-r", "head: dp4-z3")
    assert [[space.strategies[s].short for s in space.allowed[i]] for i in (1, 3)] == [["tp4s-r"], ["dp4-z3"]]
    assert len(space.allowed[2]) == 42


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        (["0: tp3-dp2"], "dp<N>"),
        (["0: dp2-tp1-ep2"], "expert parallelism"),
        (["embed: tp4s"], "embed runs data parallel, or vocabulary-parallel with tp"),
        (["0: dp2"], "occupies 2 ranks, a stage has 4"),
        (["0: tp4", "0-1: dp4"], "contradict each other on layer 0"),
        (["0-7: dp4"], "its blocks are 0-1"),
    ],
)
def test_illegal_pins_are_the_users_error(pins: list[str], words: str) -> None:
    with pytest.raises(InputError) as caught:
        _space(4, 16, *pins)
    assert words in str(caught.value)


def test_tied_layers_cannot_be_pinned_apart() -> None:
    with pytest.raises(InputError, match="share parameters"):
        _space(4, 16, "embed: dp4", "head: dp4-z3", tied=True)
    assert _space(4, 16, "embed: dp4", "head: dp4-z3").allowed


def test_a_short_sequence_forbids_sequence_parallel_norms() -> None:
    asked = request()
    from dataclasses import replace

    odd = replace(asked, sequence=SEQUENCE - 1)
    space = StrategySpace.of(FILE.model, FILE.layers, RankMesh.of(world_size=4), odd, micro_batch=16)
    assert Strategy.parse("tp4") in space.strategies
    assert Strategy.parse("tp4s") not in space.strategies
