"""`verify` of a plan for many ranks starts few processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar.strategy import Strategy
from autopar.verify_command import verify_command
from tests.runtime.test_verify import SMALL, plan_of


@pytest.mark.slow
def test_a_plan_for_sixty_four_gpus_is_verified_on_few_processes(tmp_path: Path) -> None:
    plan = plan_of(SMALL, "bfloat16")
    many = replace(
        plan,
        cluster=replace(plan.cluster, world_size=64, ranks_per_node=8),
        request=replace(plan.request, global_batch=256),
        pp=4,
        num_micro_batches=8,
        layers_per_stage=(1, 1, 1, 1),
        strategies=tuple(Strategy.parse(s) for s in ("dp16-z3", "dp4-tp4s", "dp8-z3-tp2-r", "dp16")),
    )
    many.save(tmp_path / "plan.json")
    answer = verify_command(tmp_path / "plan.json", None, nproc=4, count=1, seed=0, progress=lambda event: None)
    answer.check()
    assert "folded from 64 ranks to 2 stages (1f1b) on 2 x 4 ranks, 4 micro-batches, layers 2/2" in answer.words
