"""Every schedule of torch with several stages a rank, strategies mixed, against one process; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.test_equality import GPT2, LLAMA4, PLAIN, TIED, check

Ranks = Callable[..., list[Any]]

INTERLEAVED = ("looped-bfs", "interleaved-1f1b")
SPLIT = ("interleaved-zero-bubble", "zbv", "dualpipev")
TWO_EACH = {"pp": 2, "layers_per_stage": [2, 2, 1, 1], "micro_batches": 4}

# Uneven stages; tensor parallel, ZeRO-2 and recompute in one stage; one sample a rank in a micro-batch.
MIXED: dict[str, tuple[str, list[str], int, dict[str, Any]]] = {
    "tied, sharded": (TIED, ["dp2-z2", "tp2", "dp2-z2-r", "tp2s", "dp2", "dp2-z2"], 4, TWO_EACH),
    "tied, replicated": (TIED, ["dp2", "tp2", "dp2-z2-r", "tp2s", "dp2-z1", "dp2"], 4, TWO_EACH),
    "tied, states cut": (TIED, ["dp2-z1", "tp2", "dp2-z1-r", "tp2s", "dp2", "dp2-z1"], 4, TWO_EACH),
    "fused weights": (GPT2, ["dp2", "tp2", "dp2-z2-r", "tp2s-r", "dp2", "dp2"], 4, TWO_EACH),
    "the ends alone": (LLAMA4, ["dp2", "tp2", "dp2-z2", "tp2s", "dp2-r", "dp2-z2"], 4,
                       {**TWO_EACH, "layers_per_stage": [1, 2, 2, 1]}),
    "a plain module": (PLAIN, ["dp2-z2", "tp2", "dp2-z2-r", "tp2s", "dp2-z2", "dp2"], 4, TWO_EACH),
    "shards of half": (LLAMA4, ["dp4-z2-h2", "dp2-z2-tp2", "dp4-z2-h2-r", "dp2-z2-tp2s-r", "dp4-z2", "dp4-z2-h2"], 8,
                       {**TWO_EACH, "global_batch": 16}),
    "six ranks": (LLAMA4, ["dp2", "tp2", "dp2-z2-r", "tp2s", "dp2", "dp2-z2"], 6,
                  {"pp": 3, "layers_per_stage": [1] * 6, "micro_batches": 6, "global_batch": 12}),
}  # fmt: skip
THREE_OR_ONE = [("looped-bfs", 3), ("interleaved-1f1b", 3), ("interleaved-zero-bubble", 3), (SPLIT[0], 1)]
SAMPLED = (("interleaved-1f1b", "the ends alone"), ("interleaved-zero-bubble", "fused weights"),
           ("zbv", "tied, sharded"), ("dualpipev", "tied, replicated"))  # fmt: skip


def equals_one_process(name: str, schedule: str, ranks: Ranks) -> None:
    source, strategies, size, shape = MIXED[name]
    shape = {**shape, "schedule": schedule}
    check(ranks("compare_with_one_process", size, source=source, strategies=strategies, **shape))


@pytest.mark.parametrize(("schedule", "name"), SAMPLED)
def test_two_stages_a_rank_equal_one_process(schedule: str, name: str, ranks: Ranks) -> None:
    equals_one_process(name, schedule, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MIXED, key=lambda name: MIXED[name][2]))
@pytest.mark.parametrize("schedule", [*INTERLEAVED, *SPLIT])
def test_every_schedule_equals_one_process(schedule: str, name: str, ranks: Ranks) -> None:
    equals_one_process(name, schedule, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", INTERLEAVED)
def test_zero_3_under_whole_backwards(schedule: str, ranks: Ranks) -> None:
    strategies = ["dp2-z3", "tp2", "dp2-z3-r", "tp2s", "dp2-z3", "dp2-z3"]
    shape = {**TWO_EACH, "schedule": schedule}
    check(ranks("compare_with_one_process", 4, source=LLAMA4, strategies=strategies, **shape))


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "per_rank"), THREE_OR_ONE)
def test_three_stages_a_rank_or_one(schedule: str, per_rank: int, ranks: Ranks) -> None:
    shape = {"pp": 2, "layers_per_stage": [1] * 6 if per_rank == 3 else [2, 4], "micro_batches": 4}
    strategies = ["dp2", "tp2", "dp2-z2-r", "tp2s", "dp2", "dp2-z2"]
    results = ranks("compare_with_one_process", 4, source=LLAMA4, strategies=strategies, schedule=schedule, **shape)
    check(results)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SPLIT)
def test_zero_3_under_split_backwards_is_wrong_and_so_refused(schedule: str, ranks: Ranks) -> None:
    shape = {"pp": 2, "layers_per_stage": [2, 1, 1, 2], "micro_batches": 4, "schedule": schedule}
    found = ranks("what_is_refused_is_wrong", 4, source=LLAMA4, strategies=["dp2-z3"] * 6, **shape)
    assert not all(one["agrees"] for one in found)
    with pytest.raises(AssertionError, match="ZeRO-3 frees the parameters"):
        ranks("compare_with_one_process", 4, source=LLAMA4, strategies=["dp2-z3"] * 6, **shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ends", ["dp2-z2", "dp2", "dp2-z1"], ids=["two sharded copies", "one parameter", "one parameter, states cut"]
)
def test_checkpoints_of_both_ends_on_one_rank(ends: str, ranks: Ranks, tmp_path: Path) -> None:
    several = {"strategies": [ends, "tp2", "dp2-z2-r", "tp2s", "dp2", ends], "schedule": "zbv", **TWO_EACH}
    one = {"strategies": ["dp4-z3", "dp2-tp2", "tp4", "dp4-z2", "dp4", "dp4-z3"]}
    for number, (writer, reader) in enumerate(((several, one), (one, several))):
        folder = str(tmp_path / str(number))
        written = ranks("saving_jobs:save_after_two_steps", 4, source=TIED, folder=folder, **writer)
        for found in ranks("saving_jobs:resume", 4, source=TIED, folder=folder, **reader):
            assert found["losses"] == pytest.approx(written[0]["losses"], rel=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zbv"])
def test_training_with_several_stages_a_rank_is_tracked(schedule: str, ranks: Ranks) -> None:
    strategies = ["dp2-z2", "tp2", "dp2-z2-r", "tp2s", "dp2", "dp2-z2"]
    source = LLAMA4.replace("vocab_size=64", "vocab_size=256")
    for found in ranks("train", 4, source=source, strategies=strategies, steps=4, schedule=schedule, **TWO_EACH):
        assert found["losses"][-1] < found["losses"][0]
        assert found["peak_memory_bytes"] > 0
