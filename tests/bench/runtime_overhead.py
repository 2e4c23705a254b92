"""What the runtime costs beside a script written by hand: the same plan, the same processes, steps in turn.

    python -m tests.bench.runtime_overhead [--nproc 4] [--repeats 15] [--json]

For each of four plans and two sizes of model (a small step, where calls count, and one that computes): the throughput
of the wrapped model over that of plain FSDP2, DDP, tensor parallelism or pipelining (`plain_scripts.py`), as the
median over pairs of steps with a 90 % interval; the seconds that wrapping took; the peak of live tensors of a step.
Before it measures, the two must agree on the loss of their steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from math import comb
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.plan import Plan, PlanCluster, PlanModel
from autopar.request import Request
from autopar.runtime.batches import example_batch
from autopar.runtime.launch import Progress, launch
from autopar.runtime.models import build_model, import_model
from autopar.runtime.parallel import parallelize
from autopar.runtime.structure import fingerprint
from autopar.runtime.tracker import LiveBytes
from autopar.strategy import Strategy
from autopar.units import format_bytes
from tests.bench.plain_scripts import pipelined, replicated, sharded, tensor_parallel

BLOCKS = 4
SIZES = {"small": (64, 176, 32, 8), "computing": (256, 688, 128, 8)}
"""Width, width of the MLP, tokens and samples of a step."""

PLANS: dict[str, tuple[Any, str, str, bool]] = {
    "ZeRO-3": (sharded, "dp{n}-z3", "dp{n}-z3", False),
    "replicated": (replicated, "dp{n}", "dp{n}", False),
    "tensor parallel": (tensor_parallel, "dp{n}", "tp{n}", False),
    "1F1B": (pipelined, "dp1", "dp1", True),
}
"""The script by hand, the strategy of embedding and head, that of the blocks, whether it is a pipeline."""


def source_of(size: str) -> str:
    """The MODEL string of a size."""
    width, wide, tokens, _ = SIZES[size]
    return (
        f"LlamaConfig(hidden_size={width}, intermediate_size={wide}, num_hidden_layers={BLOCKS}, "
        f"num_attention_heads=4, num_key_value_heads=4, vocab_size=512, max_position_embeddings={tokens})"
    )


def plan_of(name: str, size: str, world: int) -> Plan:
    """The plan of a name: uniform blocks between an embedding and a head."""
    _, ends, blocks, piped = PLANS[name]
    source, (_, _, tokens, samples) = source_of(size), SIZES[size]
    shorts = [ends, *[blocks] * BLOCKS, ends]
    per_stage = [BLOCKS // world + (stage < BLOCKS % world) for stage in range(world)]
    return Plan(
        model=PlanModel(name="llama", source=source, fingerprint=fingerprint(build_model(source, device="meta"))),
        cluster=PlanCluster(name="here", device="cpu", world_size=world, ranks_per_node=world, memory_bytes=1 << 34),
        request=Request(global_batch=samples, sequence=tokens),
        pp=world if piped else 1,
        schedule="1f1b",
        num_micro_batches=2 * world if piped else 1,
        layers_per_stage=(per_stage[0] + 1, *per_stage[1:-1], per_stage[-1] + 1) if piped else (BLOCKS + 2,),
        strategies=tuple(Strategy.parse(short.format(n=world)) for short in shorts),
        versions={},
    )


def prepare(payload: dict[str, Any]) -> None:
    """Load, once for all ranks, what they import."""
    import_model(source_of("small"))


def bench_rank(payload: dict[str, Any], report: Progress) -> list[dict[str, Any]]:
    """One row for each size and plan; the target of `launch`."""
    rows, cases = [], [(size, name) for size in SIZES for name in PLANS]
    for done, (size, name) in enumerate(cases):
        report({"done": done, "total": len(cases)})
        rows.append(_measure(name, size, int(payload["repeats"])))
    return rows


def _measure(name: str, size: str, repeats: int) -> dict[str, Any]:
    world = dist.get_world_size()
    plan = plan_of(name, size, world)
    by_hand, by_plan = build_model(plan.model.source), build_model(plan.model.source)
    began = time.perf_counter()
    wrapped = parallelize(by_plan, plan)
    wrapping_s = time.perf_counter() - began
    began = time.perf_counter()
    parameters, plain_step = PLANS[name][0](by_hand, world, plan.num_micro_batches)
    by_hand_s = time.perf_counter() - began
    dtensors = [p for p in parameters if isinstance(p, DTensor)]
    others = [p for p in parameters if not isinstance(p, DTensor)]
    optimizers = (
        torch.optim.AdamW([{"params": group} for group in (dtensors, others) if group], lr=1e-3),
        torch.optim.AdamW(wrapped.param_groups(), lr=1e-3),
    )
    batch = wrapped.shard_batch(
        example_batch(wrapped.model, samples=plan.request.global_batch, sequence=plan.request.sequence)
    )
    sides = ((plain_step, optimizers[0]), (wrapped.train_step, optimizers[1]))

    def step(side: int) -> tuple[float, float]:
        run, optimizer = sides[side]
        optimizer.zero_grad()
        dist.barrier()
        began = time.perf_counter()
        loss = float(run(batch))
        optimizer.step()
        slowest = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest), loss

    for _ in range(3):  # warm up, and see that both compute the same
        losses = [step(side)[1] for side in (0, 1)]
        assert abs(losses[0] / losses[1] - 1) < 1e-4, (name, losses)
    peaks = []
    for side in (0, 1):
        with LiveBytes().adopt((parameters, wrapped)[side], optimizers[side], batch) as live:
            step(side)
        peaks.append(live.peak_bytes)
    times = []
    for turn in range(repeats):
        measured = {side: step(side)[0] for side in ((0, 1) if turn % 2 else (1, 0))}
        times.append((measured[0], measured[1]))
    return {
        "plan": name, "size": size, "times_s": times, "wrapping_s": wrapping_s, "by_hand_s": by_hand_s,
        "peak_bytes": peaks,
    }  # fmt: skip


def interval(values: list[float], confidence: float = 0.9) -> tuple[float, float]:
    """The narrowest pair of order statistics, equally far from both ends, between which the median surely lies."""
    ordered, n = sorted(values), len(values)
    for skip in range(n // 2, -1, -1):
        if 1 - 2 * sum(comb(n, k) for k in range(skip + 1)) / 2**n >= confidence:
            return ordered[skip], ordered[n - 1 - skip]
    return ordered[0], ordered[-1]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = launch(
        f"{Path(__file__).resolve()}:bench_rank", {"repeats": options.repeats}, nproc=options.nproc, timeout_s=1200
    )
    if options.json:
        print(json.dumps(results[0]))
        return
    print(f"{options.nproc} processes, {options.repeats} pairs of steps; throughput of the wrapped model by hand = 1")
    names = ("size", "plan", "by hand", "ratio", "90 %", "wrapping", "by hand")
    print("{:10} {:16} {:>9} {:>6}  {:13} {:>9} {:>8} peak of a step".format(*names))
    for place, row in enumerate(results[0]):
        ratios = [hand / wrapped for hand, wrapped in row["times_s"]]
        low, high = interval(ratios)
        hand_s = statistics.median(hand for hand, _ in row["times_s"])
        peaks = [max(result[place]["peak_bytes"][side] for result in results) for side in (0, 1)]
        print(
            f"{row['size']:10} {row['plan']:16} {hand_s * 1e3:6.1f} ms {statistics.median(ratios):6.3f}  "
            f"{low:.3f}-{high:.3f}   {row['wrapping_s']:7.2f} s {row['by_hand_s']:6.2f} s "
            f"{format_bytes(peaks[1])} for {format_bytes(peaks[0])} by hand"
        )


if __name__ == "__main__":
    main()
