"""Seeded random legal plans: what legality calls legal runs, and computes what one process computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import AutoparError, RunError
from autopar.legality import why_not_runnable
from autopar.plan import Plan
from autopar.random_plans import every_strategy, plan_words
from autopar.runtime import verify_random
from autopar.runtime.verify import Comparison
from autopar.runtime.verify_random import VerifiedPlan, draw_plans
from autopar.strategy import Strategy
from autopar.verify_command import Wanted, verify_command
from tests.runtime.test_equality import GPT2, LLAMA4, PLAIN, TIED, check

Ranks = Callable[..., list[Any]]

_COMMON = (
    "hidden_size=48, intermediate_size=72, num_hidden_layers=4, num_attention_heads=6, vocab_size=66, "
    "max_position_embeddings=64, num_key_value_heads=3"
)
LLAMA6, QWEN2, TIED6 = f"LlamaConfig({_COMMON})", f"Qwen2Config({_COMMON})", f"MistralConfig({_COMMON})"
GPT2_6 = "GPT2Config(n_embd=48, n_layer=4, n_head=6, vocab_size=66, n_positions=64)"
SUITE = [
    (LLAMA6, 6), (QWEN2, 6), (GPT2_6, 6), (LLAMA6, 3), (GPT2_6, 3), (PLAIN, 2), (TIED, 2), (QWEN2, 2),
    (LLAMA4, 4), (TIED, 4), (GPT2, 4), (PLAIN, 4), (QWEN2, 4), (LLAMA4, 8), (GPT2, 8), (TIED, 8),
]  # fmt: skip
PLANS_EACH = 3


def agrees(plans: tuple[Plan, ...], ranks: Ranks, size: int) -> None:
    for results in zip(*ranks("compare_plans", size, plans=[plan.dumps() for plan in plans]), strict=True):
        check(list(results))


def test_a_few_random_plans_equal_one_process(ranks: Ranks) -> None:
    agrees(draw_plans(TIED, nproc=4, count=3, seed=2), ranks, 4)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "size"), SUITE)
def test_random_plans_equal_one_process(source: str, size: int, ranks: Ranks) -> None:
    agrees(draw_plans(source, nproc=size, count=PLANS_EACH, seed=11), ranks, size)


PARTS = [s.short for s in every_strategy(4) if why_not_runnable(s, "block") is None]


@pytest.mark.slow
@pytest.mark.parametrize("short", PARTS)
def test_each_strategy_alone_equals_one_process(short: str, ranks: Ranks) -> None:
    strategy = Strategy.parse(short)
    drawn = draw_plans(LLAMA4, nproc=4, count=1, seed=0)[0]
    ends = strategy if strategy.tp * strategy.sp * strategy.cp == 1 else Strategy(dp=4)
    ends = replace(ends, recompute="none")
    plan = replace(
        drawn,
        pp=1,
        schedule="1f1b",
        num_micro_batches=2,
        layers_per_stage=(6,),
        strategies=(ends, *(strategy for _ in range(4)), ends),
        request=replace(drawn.request, global_batch=8),
    )
    agrees((plan,), ranks, 4)


def test_the_same_seed_draws_the_same_plans_and_all_are_legal() -> None:
    plans = draw_plans(LLAMA4, nproc=4, count=250, seed=5)
    assert plans[:20] == draw_plans(LLAMA4, nproc=4, count=20, seed=5)
    assert plans[:20] != draw_plans(LLAMA4, nproc=4, count=20, seed=6)
    piped = [plan for plan in plans if plan.pp > 1]
    assert {plan.schedule for plan in piped} == {
        "1f1b", "gpipe", "looped-bfs", "interleaved-1f1b", "interleaved-zero-bubble", "zbv", "dualpipev"
    }  # fmt: skip
    assert {plan.pp for plan in plans} == {1, 2, 4}
    assert {plan.stages_per_rank for plan in piped} == {1, 2, 3}
    used = {strategy.short for plan in plans for strategy in plan.strategies[1:-1]}
    assert used >= {s.short for s in every_strategy(4) if why_not_runnable(s, "block") is None and s.sp * s.cp == 1}
    assert max(len({s.short for s in plan.strategies}) for plan in plans) >= 5


def test_a_plan_that_disagrees_is_named_with_its_first_diverging_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = draw_plans(LLAMA4, nproc=2, count=2, seed=0)
    good = Comparison(
        loss=0.0, gradient=0.0, weight=0.0, norm=0.0, parameter="a", layer="0", strategy="dp2", parameters=9, steps=3
    )
    bad = replace(good, gradient=0.5, parameter="model.layers.1.mlp.up_proj.weight", layer="1", strategy="tp2")
    found = tuple(
        VerifiedPlan(number=number, plan=plan_words(plan), comparison=one)
        for number, (plan, one) in enumerate(zip(plans, (good, bad), strict=True))
    )
    monkeypatch.setattr(verify_random, "verify_random", lambda *args, **kwargs: found)
    answer = verify_command(Wanted(model=LLAMA4, nproc=2, count=2), progress=lambda event: None)
    assert "1 of 2 random plans of seed 0 on 2 ranks" in answer.words
    with pytest.raises(RunError) as error:
        answer.check()
    assert plan_words(plans[1]) in error.value.what
    assert "model.layers.1.mlp.up_proj.weight, layer 1, tp2" in error.value.why


@pytest.mark.slow
def test_verify_runs_random_plans_and_names_one_that_does_not_run(tmp_path: Path) -> None:
    answer = verify_command(Wanted(model=PLAIN, nproc=2, count=3, seed=1), progress=lambda event: None)
    answer.check()
    assert "3 of 3 random plans" in answer.words
    dropped = tmp_path / "dropping.py"
    dropped.write_text(
        "import os\nfrom autopar.runtime.loading import load_file\nfrom pathlib import Path\n"
        f"gpt = load_file(Path({str(Path('examples/gpt.py').resolve())!r}))\n"
        "class Wrong(gpt.GPT):\n"
        "    def forward(self, ids, targets=None):\n"
        "        logits, loss = super().forward(ids, targets)\n"
        "        return logits, None if loss is None or os.environ.get('RANK') == '1' else loss\n"
        "def build():\n    return Wrong(64, 32, 4, 4, 32)\n"
    )
    with pytest.raises(AutoparError, match="plan 0 of seed 1 does not run: "):
        verify_command(Wanted(model=f"{dropped}:build", nproc=2, count=1, seed=1), progress=lambda event: None)
