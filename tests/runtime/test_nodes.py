"""Several nodes: one torchrun agent a node, here two on this machine, against one agent with all ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runtime.rank_jobs import make_plan

ROOT = Path(__file__).parents[2]
SOURCE = "examples/gpt.py:build"


def agents(nodes: int, each: int, plan: Path, port: int) -> list[str]:
    """The losses that the first rank printed; all agents must end well."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--nproc-per-node", str(each)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    started = [
        subprocess.Popen(
            [*command, "--node-rank", str(node), str(ROOT / "examples" / "train.py"), str(plan), "--steps", "3"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT,
        )
        for node in range(nodes)
    ]  # fmt: skip
    try:
        outs = [agent.communicate(timeout=240) for agent in started]
    finally:
        for agent in started:
            agent.kill()
    assert [agent.returncode for agent in started] == [0] * nodes, outs
    return re.findall(r"step \d+: loss [\d.]+", "".join(out for out, _ in outs))


@pytest.mark.slow
def test_two_agents_train_as_one(tmp_path: Path) -> None:
    strategies = ["dp2-z1", "tp2", "dp2-z3", "tp2", "dp2-z3", "dp2"]
    shape = {"pp": 2, "layers_per_stage": [3, 3], "micro_batches": 2, "global_batch": 4, "sequence": 32}
    plan = make_plan(SOURCE, strategies, world=4, **shape)  # type: ignore[arg-type]
    two_nodes = replace(plan, cluster=replace(plan.cluster, ranks_per_node=2))
    for name, one in (("one", plan), ("two", two_nodes)):
        one.save(tmp_path / f"{name}.json")
    whole = agents(1, 4, tmp_path / "one.json", 29511)
    assert len(whole) == 3
    assert agents(2, 2, tmp_path / "two.json", 29512) == whole
