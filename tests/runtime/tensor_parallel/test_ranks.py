"""4 gloo processes against one: outputs and all gradients of derived plans, FSDP2, recompute, planted faults."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOLERANCE = 1e-4
BLOCKS = ("llama", "llama_kv2", "gpt2", "nano")
PLANS = [f"{block} {sizes}{s}" for block in BLOCKS for sizes in ("2", "2x2") for s in ("", "s")]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results of each of the 4 ranks, by case."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).with_name("worker.py"))]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(store)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert all(process.returncode == 0 for process in processes), outputs[0][1][-3000:]
    return json.loads(outputs[0][0].splitlines()[-1])


def of(results, case):
    """A case's results on all ranks; a traceback fails the test."""
    found = [rank.get(case, f"not reached: {list(rank.values())[-1]}") for rank in results]
    for value in found:
        assert not (isinstance(value, str) and ("Traceback" in value or "not reached" in value)), value
    return found


@pytest.mark.parametrize("case", [*PLANS, "llama_eager 2s", "encoder 2s", "nano6 3", "nano6 3s"])
def test_plan_equals_the_unsharded_block(results, case):
    for found in of(results, case):
        if found is not None:
            assert found["error"] < TOLERANCE, found["worst"]


@pytest.mark.parametrize("case", ["fsdp plain", "fsdp recompute"])
def test_three_adamw_steps_under_fsdp(results, case):
    for found in of(results, case):
        assert found["error"] < TOLERANCE, found["worst"]
        assert found["graphs"] == 1


@pytest.mark.parametrize(
    ("kind", "named"),
    [("copy", "gradient of input 0"), ("copy-s", "ln_1.weight"), ("share", "the output"), ("contiguous", "the output")],
)
def test_check_plan_catches_a_planted_fault(results, kind, named):
    for found in of(results, f"fault {kind}"):
        assert f"is wrong at {named}" in found or f"is wrong at the {named}" in found


def test_check_plan_accepts_a_right_plan(results):
    assert of(results, "fault none") == ["no error"] * 4


def test_dropout_is_equal_where_ranks_hold_the_same(results):
    for found in of(results, "dropout"):
        assert found["between_ranks"] < 1e-4
        assert found["recompute"] == 0.0
        assert found["other_seed"] > 0.1
