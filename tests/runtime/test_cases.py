"""Cases C10, C16, C18, C19 and C23: inputs that broke other tools, and the right behaviour."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autopar.axes import RankMesh
from autopar.runtime.models import build_model
from autopar.strategy import Strategy
from tests.runtime.test_equality import LLAMA4, TIED

Ranks = Callable[..., list[Any]]

PP2 = {"pp": 2, "layers_per_stage": [3, 3], "micro_batches": 2}
ZBV = {"pp": 2, "layers_per_stage": [2, 2, 1, 1], "micro_batches": 4, "schedule": "zbv"}
MIXTRAL = (
    "MixtralConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, vocab_size=64, "
    "max_position_embeddings=64, num_key_value_heads=2, num_local_experts=6)"
)


@pytest.mark.slow
def test_c10_clipping_over_several_meshes_equals_one_process(ranks: Ranks) -> None:
    strategies = ["dp4-z3", "dp2-z3-tp2", "dp4-z2", "tp4", "dp2-tp2s", "dp4-z1"]
    for found in ranks("compare_with_one_process", 4, source=MIXTRAL, strategies=strategies, steps=2):
        assert found["norm"] <= 1e-5
        assert found["agrees"], found


def test_c16_process_groups_are_one_for_each_set_of_ranks(ranks: Ranks) -> None:
    shorts = ["dp4-z2", "dp2-tp2", "tp4", "dp4-z3-h2", "dp2-z3-tp2s", "dp4-z2"]
    mesh = RankMesh.of(world_size=4)
    placed = [mesh.place(Strategy.parse(short)) for short in shorts]
    used = {axes for p in placed for axes in (p.tp, p.dp, p.dp_shard, p.dp_replicate)} | {
        (name,) for name in mesh.names
    }
    sets = {group for axes in used - {()} for group in mesh.groups(axes)} | {(0, 1, 2, 3)}
    for rank, found in enumerate(ranks("case_jobs:groups_made", 4, source=LLAMA4, strategies=shorts)):
        assert {tuple(ranks) for ranks in found["sets"]} == sets
        assert found["groups"] <= len([group for group in sets if rank in group])


@pytest.mark.parametrize(
    ("strategies", "shape"),
    [
        pytest.param(["dp4-z3", "dp4-z3", "dp4", "dp4-z2", "dp4-z3", "dp4-z3"], {}, marks=pytest.mark.slow),
        pytest.param(["dp2"] * 6, PP2, marks=pytest.mark.slow),
        (["dp2-z3", "tp2", "tp2s", "tp2", "tp2", "dp2-z3"], PP2),
        pytest.param(["dp2-z2", "tp2", "tp2s", "tp2", "tp2", "dp2-z2"], ZBV, marks=pytest.mark.slow),
        pytest.param(["dp2-z1", "tp2", "dp2", "tp2", "tp2", "dp2-z1"], ZBV, marks=pytest.mark.slow),
    ],
)
def test_c18_tied_copies_stay_equal_bit_by_bit(strategies: list[str], shape: dict[str, Any], ranks: Ranks) -> None:
    found = ranks("case_jobs:tied_copies", 4, source=TIED, strategies=strategies, **shape)[0]
    assert len({bits for _, bits in found["copies"]}) == 1
    # A replicated parameter that one rank uses at both ends is there once.
    once = not shape or (shape is ZBV and "z2" not in strategies[0])
    assert once != any(name == "lm_head.weight" for name, _ in found["copies"])
    assert found["counted"] == sum(p.numel() for p in build_model(TIED, device="meta").parameters())


@pytest.mark.parametrize(
    ("strategies", "shape"),
    [
        (["dp4", "dp4-z3", "dp4-z2", "dp4-z1", "dp4-z3-r", "dp4"], {"micro_batches": 2}),
        pytest.param(["dp2", "dp2", "dp2-z3", "dp2-r", "dp2", "dp2"], PP2, marks=pytest.mark.slow),
        pytest.param(["dp2", "dp2", "dp2-z2", "dp2-r", "dp2", "dp2"], ZBV, marks=pytest.mark.slow),
    ],
)
def test_c19_adapters_on_a_frozen_base_of_another_dtype(
    strategies: list[str], shape: dict[str, Any], ranks: Ranks
) -> None:
    for found in ranks("case_jobs:adapters", 4, strategies=strategies, **shape):
        assert found["loss"] <= 1e-5
        assert found["gradient"] <= 1e-4
        assert found["states"] == 2 * found["trained"]


@pytest.mark.parametrize("forward", [False, True])
def test_c19_parameters_that_appear_after_wrapping_are_refused(forward: bool, ranks: Ranks) -> None:
    for words in ranks("case_jobs:late_parameters", 4, strategies=["dp4", "dp4-z3", *["dp4"] * 4], forward=forward):
        assert "4 parameters appeared after autopar.parallelize" in words
        assert "blocks.0.up.base.weight" in words


UNEVEN = [[2, 8], [60, 30], [0, 50], [50, 0]]


@pytest.mark.parametrize(
    ("strategies", "shape"),
    [
        (["dp2", "dp2-z3", "tp2", "dp2-z1", "dp2-z2", "dp2"], {}),
        pytest.param(["dp1"] * 6, {**PP2, "counts": [[n] for row in UNEVEN for n in row]}, marks=pytest.mark.slow),
    ],
)
def test_c23_micro_batches_of_few_and_many_tokens(strategies: list[str], shape: dict[str, Any], ranks: Ranks) -> None:
    shape = {"counts": UNEVEN, **{key: value for key, value in shape.items() if key != "micro_batches"}}
    for found in ranks("case_jobs:uneven_tokens", 2, source=LLAMA4, strategies=strategies, sequence=62, **shape):
        assert found["agrees"], found


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["writing", "renaming"])
def test_a_rank_killed_while_saving_leaves_the_previous_checkpoint(moment: str, ranks: Ranks, tmp_path: Path) -> None:
    shape = {"strategies": ["dp2", "tp2", "dp2-z3", "tp2", "dp2-z1", "dp2"], "source": TIED}
    folder = str(tmp_path / "checkpoint")
    whole = ranks("saving_jobs:save_after_two_steps", 2, folder=str(tmp_path / "other"), **shape)
    with pytest.raises(AssertionError, match="gone or silent"):
        ranks("case_jobs:killed_while_saving", 2, folder=folder, moment=moment, timeout_s=60, **shape)
    for found in ranks("saving_jobs:resume", 2, folder=folder, **shape):
        assert found["losses"] == pytest.approx(whole[0]["losses"], rel=2e-6)
    for found in ranks("saving_jobs:save_after_two_steps", 2, folder=folder, **shape):  # and the next save clears up
        assert found["losses"] == pytest.approx(whole[0]["losses"], rel=2e-6)
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []
