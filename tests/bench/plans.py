"""Step time and peak memory, predicted beside measured, for given plans of one small model on local ranks.

    python tests/bench/plans.py [--rounds 3] [--steps 8] [--json FILE]

Profiles this machine and the model, then runs every plan `rounds` times in turn (interleaved), and prints medians,
ratios, Kendall's tau between predicted and measured, and the regret of the plan that the prediction puts first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from autopar.measured import ClusterFile, ModelFile
from autopar.plan import Plan, PlanCluster, PlanModel
from autopar.predict import predict
from autopar.profiler.cluster import profile_cluster
from autopar.profiler.models import profile_model
from autopar.request import Request
from autopar.runtime.train import run_plan
from autopar.strategy import Strategy
from autopar.units import format_bytes, format_seconds

MODEL = (
    "LlamaConfig(hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8, "
    "num_key_value_heads=4, vocab_size=512, max_position_embeddings=256)"
)
SEQUENCE, GLOBAL_BATCH, WORLD = 128, 16, 4

ONE_STAGE: list[tuple[str, int]] = [
    ("dp4 dp4 dp4 dp4 dp4 dp4", 1),
    ("dp4-z3 dp4-z3 dp4-z3 dp4-z3 dp4-z3 dp4-z3", 1),
    ("dp4-z3 dp4-z3 dp4-z3 dp4-z3 dp4-z3 dp4-z3", 4),
    ("dp4-z2 dp4-z2 dp4-z2 dp4-z2 dp4-z2 dp4-z2", 1),
    ("dp4 dp4-r dp4-r dp4-r dp4-r dp4", 1),
    ("dp4 tp4 tp4 tp4 tp4 dp4", 1),
    ("dp4 tp4s tp4s tp4s tp4s dp4", 1),
    ("dp4 dp2-tp2 dp2-tp2 dp2-tp2 dp2-tp2 dp4", 1),
    ("dp4-z3 dp2-z3-tp2s dp2-z3-tp2s tp4 tp4 dp4", 1),
    ("dp4-z3 dp4-z3 tp4 dp4-z3-r dp2-tp2 dp4-z3", 2),
]
TWO_STAGES: list[tuple[str, int]] = [
    ("dp2 dp2 dp2 dp2 dp2 dp2", 2),
    ("dp2 dp2 dp2 dp2 dp2 dp2", 8),
    ("dp2-z3 dp2-z3 dp2-z3 dp2-z3 dp2-z3 dp2-z3", 4),
    ("dp2 tp2 tp2 dp2 dp2 dp2", 4),
    ("dp2 tp2s tp2s tp2s tp2s dp2", 4),
    ("dp2 dp2-r dp2-r dp2 dp2 dp2", 4),
]
FOUR_STAGES: list[tuple[str, int]] = [
    ("dp1 dp1 dp1 dp1 dp1 dp1", 4),
    ("dp1 dp1 dp1 dp1 dp1 dp1", 16),
    ("dp1 dp1-r dp1 dp1-r dp1 dp1", 8),
]


def plans(model: ModelFile, cluster: ClusterFile) -> list[Plan]:
    """The plans of the benchmark, for what was measured."""
    shapes = [(s, m, 1, (6,)) for s, m in ONE_STAGE]
    shapes += [(s, m, 2, (3, 3)) for s, m in TWO_STAGES]
    shapes += [(s, m, 4, (2, 1, 1, 2)) for s, m in FOUR_STAGES]
    made = []
    for strategies, micro_batches, pp, cuts in shapes:
        for schedule in ("1f1b", "gpipe") if pp == 2 and micro_batches == 4 else ("1f1b",):
            plan = Plan(
                model=PlanModel(name=model.model.name, source=MODEL, fingerprint=model.model.fingerprint),
                cluster=PlanCluster(
                    name="bench",
                    device="cpu",
                    world_size=WORLD,
                    ranks_per_node=WORLD,
                    memory_bytes=cluster.cluster.memory_bytes,
                ),
                request=Request(global_batch=GLOBAL_BATCH, sequence=SEQUENCE),
                pp=pp,
                schedule=schedule,  # type: ignore[arg-type]
                num_micro_batches=micro_batches,
                layers_per_stage=cuts,
                strategies=tuple(Strategy.parse(s) for s in strategies.split()),
                versions={},
            )
            plan.check(model.model)
            made.append(plan)
    return made


def kendall_tau(a: list[float], b: list[float]) -> float:
    """Concordant minus discordant pairs, over all pairs."""
    signs = [(a[i] - a[j]) * (b[i] - b[j]) for i, j in combinations(range(len(a)), 2)]
    return (sum(s > 0 for s in signs) - sum(s < 0 for s in signs)) / len(signs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cluster = profile_cluster(nproc=WORLD, command="tests/bench/plans.py")
    model = profile_model(MODEL, sequence=SEQUENCE, nproc=WORLD, command="tests/bench/plans.py")
    chosen = plans(model, cluster)
    print(f"machine: {cluster.provenance.machine}, {cluster.provenance.date}; load {os.getloadavg()[0]:.1f}")
    measured_s: list[list[float]] = [[] for _ in chosen]
    peaks: list[tuple[int, ...]] = [() for _ in chosen]
    for _ in range(arguments.rounds):
        for number, plan in enumerate(chosen):
            run = run_plan(plan, steps=arguments.steps)
            measured_s[number].append(run.step_s)
            peaks[number] = run.peak_memory_bytes
    rows: list[dict[str, Any]] = []
    for plan, times, peak in zip(chosen, measured_s, peaks, strict=True):
        guess = predict(plan, model.model, model.layers, cluster.cluster, cluster.links)
        memory = [entry.peak_bytes for entry in guess.memory]
        worst = max(range(WORLD), key=lambda rank: abs(memory[rank] / peak[rank] - 1))
        rows.append(
            {
                "plan": f"pp{plan.pp} m{plan.num_micro_batches} {plan.schedule} "
                + " ".join(s.short for s in plan.strategies),
                "predicted_s": guess.step_s,
                "measured_s": statistics.median(times),
                "predicted_bytes": memory[worst],
                "measured_bytes": peak[worst],
            }
        )
    for row in rows:
        print(
            f"{format_seconds(row['predicted_s']):>9} {format_seconds(row['measured_s']):>9} "
            f"{row['predicted_s'] / row['measured_s'] - 1:+6.1%}   "
            f"{format_bytes(row['predicted_bytes']):>9} {format_bytes(row['measured_bytes']):>9} "
            f"{row['predicted_bytes'] / row['measured_bytes'] - 1:+6.1%}   {row['plan']}"
        )
    predicted, measured = [r["predicted_s"] for r in rows], [r["measured_s"] for r in rows]
    tau = kendall_tau(predicted, measured)
    regret = measured[predicted.index(min(predicted))] / min(measured) - 1
    errors = sorted(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True))
    print(
        f"{len(rows)} plans: Kendall tau {tau:.2f}, regret {regret:.1%}, "
        f"median step error {statistics.median(errors):.1%}; load {os.getloadavg()[0]:.1f}"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "kendall_tau": tau, "regret": regret}, indent=1))


if __name__ == "__main__":
    main()
