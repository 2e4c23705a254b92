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


def run(store, suite):
    """The results of each of 4 processes, by case."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(Path(__file__).with_name("worker.py"))]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    processes = [subprocess.Popen([*command, str(rank), str(store), suite], **pipes) for rank in range(4)]
    try:
        outputs = [process.communicate(timeout=280) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert all(process.returncode == 0 for process in processes), outputs[0][1][-3000:]
    return json.loads(outputs[0][0].splitlines()[-1])


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    return run(tmp_path_factory.mktemp("ranks") / "store", "quick")


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    return run(tmp_path_factory.mktemp("ranks") / "store", "slow")


def of(results, case):
    """A case's results on all ranks; a traceback fails the test."""
    found = [rank.get(case, f"not reached: {list(rank.values())[-1]}") for rank in results]
    for value in found:
        assert not (isinstance(value, str) and ("Traceback" in value or "not reached" in value)), value
    return found


def check_errors(results, case):
    for found in of(results, case):
        if found is not None:
            assert found["error"] < TOLERANCE, found["worst"]


def check_fault(results, kind, named):
    for found in of(results, f"fault {kind}"):
        assert f"is wrong at {named}" in found


@pytest.mark.parametrize("case", ["llama_kv2 2x2", "llama_kv2 2x2s", "gpt2 2", "nano6 3s", "fsdp recompute"])
def test_plan_equals_the_unsharded_block(quick, case):
    check_errors(quick, case)


def test_one_graph_serves_all_blocks_and_their_recompute(quick):
    assert [found["graphs"] for found in of(quick, "fsdp recompute")] == [1] * 4


@pytest.mark.parametrize(("kind", "named"), [("copy", "the gradient of input 0"), ("contiguous", "the output")])
def test_check_plan_catches_a_planted_fault(quick, kind, named):
    check_fault(quick, kind, named)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*PLANS, "llama_eager 2s", "encoder 2s", "nano6 3", "fsdp plain"])
def test_every_plan_equals_the_unsharded_block(slow, case):
    check_errors(slow, case)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "named"), [("copy-s", "ln_1.weight"), ("share", "the output")])
def test_check_plan_catches_more_planted_faults(slow, kind, named):
    check_fault(slow, kind, named)


def test_check_plan_sees_no_fault_in_the_rounding_of_half_precision(quick):
    assert of(quick, "fault half") == ["no error"] * 4


@pytest.mark.slow
def test_check_plan_accepts_a_right_plan(slow):
    assert of(slow, "fault none") == ["no error"] * 4


@pytest.mark.slow
def test_dropout_is_equal_where_ranks_hold_the_same(slow):
    for found in of(slow, "dropout"):
        assert found["between_ranks"] < 1e-4
        assert found["recompute"] == 0.0
        assert found["other_seed"] > 0.1
