"""The options of `autopar search`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import autopar
from autopar.plan import Plan
from tests.command_line import SEARCH, Run, refused

INPUT = 3


def test_a_search_shows_and_writes_the_frontier_and_a_what_if(here: Run, folder: Path) -> None:
    options = ("--pp", "1", "--micro-batches", "2", "--frontier", "front.csv", "--what-if", "links*0.5")
    done = here((*SEARCH, "16", *options))
    assert done.returncode == 0, done.stderr
    for words in ("best step by memory", "front.svg", "what if links*0.5", "today's plan then"):
        assert words in done.stdout
    rows = (folder / "front.csv").read_text().splitlines()
    assert rows[0].startswith("memory_bytes,step_s,")
    assert len(rows) > 2
    assert (folder / "front.svg").read_text().startswith("<svg")
    assert Plan.load(folder / "out.json").pp == 1


def test_a_verified_search_with_bans_and_limits_records_them(here: Run, folder: Path) -> None:
    done = here((*SEARCH, "16", "--verify", "--forbid", "*: dp4", "--json"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["certificate"]["verified_by"] == ["OR-Tools CP-SAT", "HiGHS"]
    assert found["request"]["forbids"] == ["*: dp4"]
    limited = here((*SEARCH, "16", "--max-strategies", "1", "--memory", "24MB"))
    assert limited.returncode == 0, limited.stderr
    assert len(set(Plan.load(folder / "out.json").strategies[1:-1])) == 1


def test_one_call_in_python_has_what_the_command_has(here: Run, folder: Path) -> None:
    options = ("--memory", "24MB", "--dtype", "fp32", "--optimizer", "sgd-momentum", "--tp-across-nodes", "--verify")
    done = here((*SEARCH, "16", *options, "--time-limit", "600", "--json"))
    assert done.returncode == 0, done.stderr
    plan = autopar.search(
        "model.json", cluster="cluster.json", global_batch=16, memory="24MB", dtype="fp32", optimizer="sgd-momentum",
        tp_across_nodes=True, verify=True, time_limit_s=600.0,
    )  # fmt: skip
    assert plan.dumps().strip() == done.stdout.strip()
    assert plan.request.optimizer == "sgd-momentum"
    assert plan.request.tp_across_nodes
    assert plan.certificate is not None
    assert plan.certificate.verified_by


def test_a_plan_that_cannot_run_yet_says_so_and_is_refused(here: Run, folder: Path) -> None:
    done = here((*SEARCH, "16", "--allow-unrunnable", "--pin", "*: dp4-z1", "--pp", "1"))
    assert done.returncode == 0, done.stderr
    plan = Plan.load(folder / "out.json")
    assert plan.request.allow_unrunnable
    # Whoever makes a part run takes it from this list.
    if plan.not_runnable:
        assert "does not run yet" in done.stdout
        for command in ("run", "verify"):
            assert "search again without --allow-unrunnable" in refused(here, (command, "out.json"), folder, INPUT)


def test_batches_sizes_and_schedules_are_options(here: Run, folder: Path) -> None:
    options = ("--micro-batch-size", "4", "--pp", "2", "--schedule", "zbv", "--schedule", "interleaved-zero-bubble")
    done = here((*SEARCH, "8,16", *options))
    assert done.returncode == 0, done.stderr
    plan = Plan.load(folder / "out.json")
    assert (plan.micro_batch, plan.request.schedules) == (4, ("zbv", "interleaved-zero-bubble"))
    assert plan.schedule in plan.request.schedules
    for batch in (8, 16):
        assert f"global batch {batch}: " in done.stdout
    assert "--schedule" in refused(here, (*SEARCH, "8", "--schedule", "slow"), folder, 2)


def test_a_time_limit_of_nothing_is_exit_5(here: Run, folder: Path) -> None:
    assert "not a number of seconds" in refused(here, (*SEARCH, "16", "--time-limit", "nan"), folder, 2)
    assert "stopped before" in refused(here, (*SEARCH, "16", "--time-limit", "0"), folder, 5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--forbid", "*: fast"), "is not a strategy"),
        (("--forbid", "all z3"), "forbids nothing"),
        (("--what-if", "gpus*2"), "is not a change"),
        (("--frontier", "none/f.csv"), "there is no folder none"),
        (("--pin", "*: dp4", "--forbid", "*: dp4"), "pinned to what is forbidden"),
    ],
)
def test_bad_options_of_a_search_are_exit_3(here: Run, folder: Path, arguments: tuple[str, ...], words: str) -> None:
    assert words in refused(here, (*SEARCH, "16", *arguments), folder, INPUT)
