"""`autopar verify --fake` as a command: counted beside predicted, and exit code 5 where they are far apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from autopar.errors import InputError, RunError, UsageError
from autopar.plan import Plan, Prediction, RankMemory
from autopar.report import span
from autopar.runtime.counting import CountedPeak, count_peaks
from autopar.verify_command import Wanted, verify_command
from tests.runtime.rank_jobs import make_plan
from tests.runtime.test_equality import LLAMA4

WORLD = 64


def silent(event: Any) -> None:
    pass


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan for 64 ranks that nobody has here, made for GPUs, its prediction what is counted."""
    strategies = ["dp32", "dp32-z3", "dp32-z1-r", "dp32-z2", "dp32-z3-h4", "dp32"]
    made = make_plan(LLAMA4, strategies, world=WORLD, pp=2, layers_per_stage=[3, 3], global_batch=128, micro_batches=2)
    made = replace(made, cluster=replace(made.cluster, device="cuda"))
    counted = count_peaks(made)
    assert not dist.is_initialized()
    memory = [RankMemory(peak_bytes=one.peak_bytes, parts_bytes={}) for one in counted for _ in range(WORLD // 2)]
    return replace(made, predicted=Prediction(step_s=1.0, parts_s={}, memory=tuple(memory), worst_rank=0))


def with_factor(plan: Plan, factor: float) -> Plan:
    """The plan whose last stage is predicted to need so many times what is counted."""
    assert plan.predicted is not None
    memory = [
        replace(one, peak_bytes=round(one.peak_bytes * (factor if rank >= WORLD // 2 else 1)))
        for rank, one in enumerate(plan.predicted.memory)
    ]
    return replace(plan, predicted=replace(plan.predicted, memory=tuple(memory)))


def answer(plan: Plan, folder: Path) -> Any:
    plan.save(folder / "plan.json")
    return verify_command(Wanted(plan=folder / "plan.json", fake=True), progress=silent)


def test_counted_beside_predicted(plan: Plan, tmp_path: Path) -> None:
    found = answer(with_factor(plan, 1.05), tmp_path)
    found.check()
    body = json.loads(found.json)
    assert (body["kind"], body["within"], body["tolerance"]) == ("autopar.counted", True, 0.1)
    assert [one["rank"] for one in body["ranks"]] == [0, 32]
    assert all(sum(one["parts_bytes"].values()) == one["peak_bytes"] for one in body["ranks"])
    assert span(32, 63) in found.words
    assert "+5.0 %" in found.words
    # The same every time.
    assert [one["peak_bytes"] for one in body["predicted"]][:1] == [body["ranks"][0]["peak_bytes"]]


def test_a_prediction_that_is_far_off_fails(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan.predicted is not None
    known = [
        CountedPeak(rank=rank, peak_bytes=plan.predicted.memory[rank].peak_bytes, parts_bytes={})
        for rank in (0, WORLD // 2)
    ]
    monkeypatch.setattr("autopar.runtime.counting.count_peaks", lambda plan, progress: known)
    for factor in (0.85, 1.15):
        with pytest.raises(RunError, match="off by 15%, more than 10%") as error:
            answer(with_factor(plan, factor), tmp_path).check()
        assert error.value.exit_code == 5
    answer(replace(plan, predicted=None), tmp_path).check()


@pytest.mark.parametrize(
    "arguments",
    [{"model": "LlamaConfig", "fake": True}, {"plan": Path("plan.json"), "settings": {"a": 1}}, {"fake": True}],
)
def test_arguments_that_do_not_go_together(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Wanted(**arguments)


def test_settings_reach_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def stop(source: str, **others: Any) -> Callable[..., Any]:
        seen.append(source)
        raise InputError("seen")

    monkeypatch.setattr("autopar.runtime.verify_random.verify_random", stop)
    with pytest.raises(InputError):
        verify_command(Wanted(model="LlamaConfig(hidden_size=64)", settings={"hidden_size": 32}), progress=silent)
    assert seen == ["LlamaConfig(hidden_size=32)"]


def test_a_model_whose_course_depends_on_numbers_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "asking.py"
    file.write_text(
        "from pathlib import Path\nfrom autopar.runtime.loading import load_file\n"
        f"gpt = load_file(Path({str(Path('examples/gpt.py').resolve())!r}))\n"
        "class Asking(gpt.GPT):\n"
        "    def forward(self, ids, targets=None):\n"
        "        return super().forward(ids if float(self.norm.weight.sum()) > 0 else ids, targets)\n"
        "def build():\n    return Asking(64, 32, 4, 4, 32)\n"
    )
    made = make_plan(f"{file}:build", ["dp4"] * 6, world=4)
    with pytest.raises(InputError, match="cannot be counted without running it"):
        count_peaks(made)
    assert not dist.is_initialized()


@pytest.mark.slow
def test_states_in_host_memory_are_a_category_of_their_own(plan: Plan) -> None:
    strategies = ["dp4-z1", "dp4-z1", "dp4-z3", "dp4", "dp4-z2", "dp4-z1"]
    home = make_plan(LLAMA4, strategies, world=4, optimizer="adamw")
    away = replace(home, request=replace(home.request, optimizer="adamw-offloaded"))
    (here,), (there,) = count_peaks(home), count_peaks(away)
    assert here.host_bytes == 0
    assert there.parts_bytes["optimizer"] == 0
    assert there.parts_bytes["parameters"] == here.parts_bytes["parameters"]
    assert sum(there.parts_bytes.values()) == there.peak_bytes < here.peak_bytes
    # Copies of what is stepped, their gradients, and two states: twice the states but for a step's number each.
    states = here.parts_bytes["optimizer"]
    assert 2 * states - 100 <= there.host_bytes <= 2 * states
