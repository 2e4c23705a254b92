from __future__ import annotations

import io
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import progress as progress_module
from autopar.plan import Plan
from autopar.progress import progress, time_left_s
from autopar.report import (
    difference,
    loss_line,
    measured_table,
    plan_facts,
    plan_table,
    render,
    runs,
    sparkline,
    strategy_words,
)
from autopar.strategy import Strategy
from tests.draws import plans
from tests.values import golden, plan


@settings(max_examples=40)
@given(plans())
def test_the_runs_cover_the_chain_once_and_never_mix(any_plan: Plan) -> None:
    found = runs(any_plan)
    assert [layer for run in found for layer in range(run.first, run.last + 1)] == list(
        range(len(any_plan.strategies))
    )
    for run in found:
        layers = range(run.first, run.last + 1)
        assert {any_plan.strategies[layer] for layer in layers} == {run.strategy}
        assert {any_plan.stage_of(layer) for layer in layers} == {run.stage}
    assert found[0].last == 0
    assert found[-1].first == len(any_plan.strategies) - 1


def test_embed_and_head_keep_their_own_line_under_one_strategy() -> None:
    same = plan(("dp4",) * 6)
    assert [(run.first, run.last) for run in runs(same)] == [(0, 0), (1, 4), (5, 5)]


def test_a_plan_is_shown_layer_by_layer() -> None:
    staged = plan(
        ("dp2", "tp2", "tp2", "dp2-z3-r", "dp2-z3-r", "dp2"), pp=2, layers_per_stage=(3, 3), num_micro_batches=4
    )
    rows = [line.split("│") for line in render(plan_table(staged)).splitlines() if "│" in line]
    cells = [[cell.strip() for cell in row[1:-1]] for row in rows]
    assert cells == [
        ["embed", "0", "0-1", "dp2", "data parallel 2"],
        ["0-1", "0", "0-1", "tp2", "tensor parallel 2"],
        ["2-3", "1", "2-3", "dp2-z3-r", "data parallel 2, ZeRO-3, recomputed"],
        ["head", "1", "2-3", "dp2", "data parallel 2"],
    ]
    facts = plan_facts(staged)
    assert "global batch 16 in 4 micro-batches of 4" in facts
    assert "2 stages (1f1b)" in facts
    assert "optimal" in facts


def test_predicted_stands_beside_measured_for_each_rank() -> None:
    value = golden()["plan.json"]
    assert isinstance(value, Plan)
    text = render(measured_table(value, step_s=0.1, peak_memory_bytes=[2000, 1001, 1002, 501]))
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    assert lines[0] == ["step", "125.0 ms", "100.0 ms", "+25.0 %"]
    assert lines[1] == ["peak memory, rank 0", "1000 B", "2.0 KiB".replace("2.0", "1.95"), "-50.0 %"]
    assert lines[4][3] == "+100.2 %"
    assert "1003 B on rank 3 of a budget of 1.00 GiB: parameters 600 B, activations 403 B" in plan_facts(value)
    assert "optimal for the tables of this profile, says solver pareto, agreed by brute" in plan_facts(value)
    bare = render(measured_table(plan(), step_s=0.1, peak_memory_bytes=[1] * 4))
    assert bare.count(" - ") == 10


@pytest.mark.parametrize(
    ("short", "words"),
    [
        ("dp1", "one rank"),
        ("dp8-z3-h4", "data parallel 8, ZeRO-3 over 4"),
        (
            "tp2-sp3-cp2-ep5-rs",
            "tensor parallel 2, Ulysses 3, context parallel 2, expert parallel 5, partly recomputed",
        ),
    ],
)
def test_strategies_in_words(short: str, words: str) -> None:
    assert strategy_words(Strategy.parse(short)) == words


@given(st.lists(st.floats(-1e6, 1e6), max_size=200), st.integers(1, 80))
def test_a_sparkline_has_one_bar_a_value_up_to_its_width(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    if len(values) <= width and values and min(values) < max(values):
        assert line[values.index(max(values))] == "█"
        assert line[values.index(min(values))] == "▁"


def test_losses_and_differences() -> None:
    assert loss_line([]) == "no step was run"
    assert loss_line([4.0, 3.0, 2.0]) == "loss 4.000 -> 2.000 over 3 steps  █▅▁"
    assert difference(105, 100) == "+5.0 %"
    assert difference(1, 0) == "-"


def test_progress_without_a_terminal_is_plain_lines_of_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "_QUIET_S", 0.0)
    out = io.StringIO()
    with progress("profile", file=out) as report:
        report({"done": 1, "total": 4, "what": "all_reduce", "rank": 0})
        time.sleep(0.01)
        report({"done": 2, "total": 4, "rank": 1})
        report({"note": "not a count"})
        report({"done": 2, "total": 4, "what": "all_gather", "rank": 0})
        report({"done": 4, "total": 4})
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["profile ...", "profile: 1 of 4 (all_reduce)"]
    assert lines[2].startswith("profile: 2 of 4, ")
    assert lines[2].endswith(" ms left (all_gather)")
    assert lines[3].startswith("profile: done in ")
    assert len(lines) == 4


def test_only_the_first_rank_of_torchrun_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    out = io.StringIO()
    with progress("profile", file=out) as report:
        report({"done": 1, "total": 4})
    assert out.getvalue() == ""


def test_progress_on_a_terminal_is_a_bar_with_the_time_left() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    with progress("profile", file=out) as report:
        report({"done": 1, "total": 4, "what": "all_reduce"})
    assert "profile" in out.getvalue()
    assert "1/4" in out.getvalue()


def test_a_failed_step_is_not_called_done() -> None:
    out = io.StringIO()
    with pytest.raises(RuntimeError), progress("profile", file=out):
        raise RuntimeError
    assert "done" not in out.getvalue()


def test_time_left() -> None:
    assert time_left_s(1, 4, 2.0) == 6.0
    assert time_left_s(0, 4, 2.0) is None
    assert time_left_s(4, 4, 2.0) == 0.0
