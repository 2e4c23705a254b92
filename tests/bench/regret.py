"""Step time and peak memory, predicted beside measured, for given plans of one small model on local ranks.

    python tests/bench/regret.py [--rounds 5] [--steps 2] [--json FILE] [--runs FILE] [--cluster FILE --model FILE]

Profiles this machine and the model, builds every plan in the same 4 processes, then takes `steps` steps of each plan
in turn, `rounds` times (interleaved: what slows the machine for a while slows all alike). Prints medians, ratios,
Kendall's tau between predicted and measured over all pairs and over those that differ by more than repeats do, and the
regret: how much slower the plan that the prediction puts first is than the fastest. The repeat error compares the
medians of odd and even rounds; nothing below it means anything. Their tau is what a perfect prediction could reach.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from autopar.calibrating import MeasuredRun, calibrate, run_line
from autopar.measured import ClusterFile, ModelFile
from autopar.plan import Plan, PlanCluster, PlanModel
from autopar.predict import predict
from autopar.profiler.cluster import profile_cluster
from autopar.profiler.models import profile_model
from autopar.request import Request
from autopar.runtime.launch import launch
from autopar.strategy import Strategy
from autopar.units import format_bytes, format_seconds

MODEL = (
    "LlamaConfig(hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8, "
    "num_key_value_heads=4, vocab_size=512, max_position_embeddings=256)"
)
SEQUENCE, GLOBAL_BATCH, WORLD = 128, 16, 4
COMMAND = "tests/bench/regret.py"

TRACKED = 3
"""Steps whose peak is tracked, of which the least counts.

gloo copies the input of a reduce-scatter, and its own thread, which frees the copy, sometimes does so when the rank
has already gone on to the next layer: then a whole layer's gradient is alive twice, on that rank, in that step.
"""

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


def measure_rank(payload: dict[str, Any], report: Any) -> list[dict[str, Any]]:
    """What this rank measured of each plan: `rounds_s`, the steps of each round, and `peak_bytes` of one step."""
    import torch
    import torch.distributed as dist

    from autopar.runtime.batches import batch_form
    from autopar.runtime.models import build_model
    from autopar.runtime.parallel import ParallelModel, parallelize
    from autopar.runtime.text import ByteBatches, default_text
    from autopar.runtime.tracker import LiveBytes

    def step(parallel: ParallelModel, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
        optimizer.zero_grad()
        parallel.train_step(batch)
        parallel.clip_grad_norm_(1.0)
        optimizer.step()

    built, found = [], []
    texts, rounds, steps = payload["plans"], payload["rounds"], payload["steps"]
    total = (rounds + 1) * len(texts)
    for number, text in enumerate(texts):
        plan = Plan.loads(text)
        model = build_model(plan.model.source, dtype=plan.request.dtype)
        batches = ByteBatches(
            text=default_text(), sequence=SEQUENCE, global_batch=GLOBAL_BATCH, form=batch_form(model)
        )
        parallel = parallelize(model, plan)
        optimizer = torch.optim.AdamW(parallel.param_groups(), lr=1e-4)
        batch = parallel.shard_batch(batches.batch(0))
        for _ in range(2):
            step(parallel, optimizer, batch)
        peaks_bytes = []
        for _ in range(TRACKED):
            optimizer.zero_grad()
            dist.barrier()
            with LiveBytes().adopt(parallel, parallel.receive_buffers, optimizer, batch) as live:
                step(parallel, optimizer, batch)
            peaks_bytes.append(live.peak_bytes)
        built.append((parallel, optimizer, batch))
        found.append(
            {"rounds_s": [], "peak_bytes": min(peaks_bytes), "late_bytes": max(peaks_bytes) - min(peaks_bytes)}
        )
        report({"done": number + 1, "total": total})
    for round_ in range(rounds):
        for number, (parts, entry) in enumerate(zip(built, found, strict=True)):
            step(*parts)  # the caches are another plan's
            times_s = []
            for _ in range(steps):
                dist.barrier()
                began = time.perf_counter()
                step(*parts)
                times_s.append(time.perf_counter() - began)
            entry["rounds_s"].append(times_s)
            report({"done": (round_ + 1) * len(built) + number + 1, "total": total})
    return found


def kendall_tau(a: Sequence[float], b: Sequence[float], *, tied: float = 0.0) -> tuple[float, int]:
    """Concordant minus discordant pairs over those whose `b` differ by a factor above 1 + tied; their number."""
    pairs = [(i, j) for i, j in combinations(range(len(a)), 2) if abs(math.log(b[i] / b[j])) > math.log1p(tied)]
    signs = [(a[i] - a[j]) * (b[i] - b[j]) for i, j in pairs]
    return (sum(s > 0 for s in signs) - sum(s < 0 for s in signs)) / max(1, len(signs)), len(pairs)


def held_out(cluster: ClusterFile, runs: Sequence[MeasuredRun]) -> tuple[list[float], int]:
    """What each run is predicted to take by a cluster calibrated on the other half, and how many intervals hold."""
    found, inside = [0.0] * len(runs), 0
    for half in (0, 1):
        fitted = calibrate(cluster, runs[1 - half :: 2]).file
        for number in range(half, len(runs), 2):
            run = runs[number]
            guess = predict(run.plan, run.model.model, run.model.layers, fitted.cluster, fitted.links)
            assert guess.step_s_interval is not None
            found[number] = guess.step_s
            inside += guess.step_s_interval[0] <= run.step_s <= guess.step_s_interval[1]
    return found, inside


def progress(event: dict[str, Any]) -> None:
    if event.get("rank") == 0 and sys.stderr.isatty():
        print(f"\r{event['done']}/{event['total']} ", end="", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--runs", type=Path, help="write the runs as `autopar calibrate` reads them")
    parser.add_argument("--cluster", type=Path, help="a cluster.json instead of a profile; with --model")
    parser.add_argument("--model", type=Path)
    arguments = parser.parse_args()
    if arguments.cluster:
        cluster, model = ClusterFile.load(arguments.cluster), ModelFile.load(arguments.model)
    else:
        cluster = profile_cluster(nproc=WORLD, command=COMMAND)
        model = profile_model(MODEL, sequence=SEQUENCE, nproc=WORLD, command=COMMAND)
    chosen = plans(model, cluster)
    load = os.getloadavg()[0]
    print(f"machine: {cluster.provenance.machine}, {cluster.provenance.date}; load {load:.1f}", flush=True)
    payload = {"plans": [p.dumps() for p in chosen], "rounds": arguments.rounds, "steps": arguments.steps}
    target = f"{Path(__file__).resolve()}:measure_rank"
    results = launch(target, payload, nproc=WORLD, device="cpu", timeout_s=1800, progress=progress)
    rows, repeats, halves = [], [], []
    for number, plan in enumerate(chosen):
        ranks = [result[number] for result in results]
        rounds = [
            [max(times) for times in zip(*(rank["rounds_s"][r] for rank in ranks), strict=True)]
            for r in range(arguments.rounds)
        ]
        odd, even = (statistics.median(t for r in rounds[first::2] for t in r) for first in (1, 0))
        repeats.append(abs(math.log(odd / even)))
        halves.append((odd, even))
        guess = predict(plan, model.model, model.layers, cluster.cluster, cluster.links)
        memory, peak = [entry.peak_bytes for entry in guess.memory], [rank["peak_bytes"] for rank in ranks]
        worst = max(range(WORLD), key=lambda rank: abs(memory[rank] / peak[rank] - 1))
        rows.append(
            {
                "plan": f"pp{plan.pp} m{plan.num_micro_batches} {plan.schedule} "
                + " ".join(s.short for s in plan.strategies),
                "predicted_s": guess.step_s,
                "measured_s": statistics.median(t for r in rounds for t in r),
                "parts_s": guess.parts_s,
                "predicted_bytes": memory[worst],
                "measured_bytes": peak[worst],
                "late_bytes": max(rank["late_bytes"] for rank in ranks),
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
    # The repeat error compares halves; a median over all rounds repeats better, a difference of two worse.
    repeat = math.expm1(statistics.median(repeats))
    tau, pairs = kendall_tau(predicted, measured)
    clear, clear_pairs = kendall_tau(predicted, measured, tied=repeat)
    odds, evens = zip(*halves, strict=True)
    between, _ = kendall_tau(odds, evens)
    first, fastest = predicted.index(min(predicted)), measured.index(min(measured))
    regret = measured[first] / measured[fastest] - 1
    errors = sorted(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True))
    memory_errors = sorted(abs(r["predicted_bytes"] / r["measured_bytes"] - 1) for r in rows)
    print(
        f"{len(rows)} plans: Kendall tau {tau:.2f} over {pairs} pairs, {clear:.2f} over the {clear_pairs} that differ "
        f"by more than repeats ({repeat:.1%}), {between:.2f} between odd and even rounds; regret {regret:.1%}; "
        f"step error: median {statistics.median(errors):.1%}, largest {errors[-1]:.1%}; "
        f"memory error: largest {memory_errors[-1]:.1%}; load {os.getloadavg()[0]:.1f}"
    )
    lines = [run_line(plan, row["measured_s"]) for plan, row in zip(chosen, rows, strict=True)]
    if arguments.runs:
        arguments.runs.write_text("".join(lines))
    runs = [MeasuredRun(plan=p, model=model, step_s=s) for p, s in zip(chosen, measured, strict=True)]
    calibrated, inside = held_out(cluster, runs)
    print(
        f"calibrated on one half and judged on the other, both ways: step error: median "
        f"{statistics.median(abs(p / m - 1) for p, m in zip(calibrated, measured, strict=True)):.1%}, Kendall tau "
        f"{kendall_tau(calibrated, measured)[0]:.2f}; {inside} of {len(runs)} within the 80 % interval"
    )
    print(f"predicted fastest {rows[first]['plan']}\nmeasured fastest  {rows[fastest]['plan']}")
    if arguments.json:
        summary = {"kendall_tau": tau, "kendall_tau_clear": clear, "clear_pairs": clear_pairs, "regret": regret}
        summary |= {
            "kendall_tau_of_halves": between,
            "repeat_error": repeat,
            "median_error": statistics.median(errors),
            "load": load,
        }
        arguments.json.write_text(json.dumps({"rows": rows, **summary}, indent=1))


if __name__ == "__main__":
    main()
