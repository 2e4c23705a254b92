"""The whole loop on this machine, with a small Llama and real text: the order of the steps, and their files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.axes import RankMesh, divisors
from autopar.errors import InfeasibleError, InputError, RunError
from autopar.finalists import peak_bytes
from autopar.legality import why_batch_illegal
from autopar.measured import ClusterFile, ModelFile
from autopar.outcome import Outcome
from autopar.plan import Plan
from autopar.request import Pin, Request
from autopar.searching import search_files
from autopar.strategy import Strategy

if TYPE_CHECKING:
    from autopar.runtime.verify import Comparison

MODEL = (
    "LlamaConfig(hidden_size=128, intermediate_size=352, num_hidden_layers=6, num_attention_heads=8, "
    "num_key_value_heads=4, vocab_size=256, max_position_embeddings=128)"
)
SEQUENCE, SAMPLES_PER_RANK = 128, 4
TIGHTNESS = (0.7, 0.8, 0.9, 0.97)
"""The budget as a part of what plain data parallelism needs; the first that any plan fits is taken."""

Report = Callable[[Mapping[str, Any]], None]
Step = Callable[[str], AbstractContextManager[Report]]


@dataclass(frozen=True, kw_only=True)
class Demo:
    """What the demo found.

    plain_peak_bytes: what the leanest plain data parallelism needs on its worst rank; budget_bytes: what a rank was
    allowed; comparison: with one process; outcome: the plan, measured. The files are in `folder`.
    """

    folder: Path
    plain_peak_bytes: int
    budget_bytes: int
    comparison: Comparison
    outcome: Outcome


def run_demo(*, nproc: int, text: Path | None, steps: int, folder: Path, progress: Step) -> Demo:
    """Profile, search, verify and train on `nproc` local processes; every file is written as soon as it is there.

    text: what to train on, byte by byte, None for Python's help topics. Raises what the steps raise; RunError when the
    plan is not equal to one process.
    """
    from autopar.profiler.cluster import profile_cluster
    from autopar.profiler.models import profile_model
    from autopar.runtime.text import read_text
    from autopar.runtime.train import run_plan
    from autopar.runtime.verify import verify_plan

    if text is not None:
        read_text(text)
    _make_folder(folder)
    with progress("1/5 profile the cluster") as report:
        cluster = profile_cluster(nproc=nproc, device="cpu", progress=report, command="autopar demo")
    cluster.save(folder / "cluster.json")
    with progress("2/5 profile the model") as report:
        model = profile_model(MODEL, sequence=SEQUENCE, nproc=nproc, progress=report, command="autopar demo")
    model.save(folder / "model.json")
    request = Request(global_batch=SAMPLES_PER_RANK * nproc, sequence=SEQUENCE)
    with progress("3/5 search") as report:
        plain_peak_bytes = plain_data_parallel_bytes(model, cluster, request)
        plan, budget_bytes = tight_plan(model, cluster, request, plain_peak_bytes, report)
    plan.save(folder / "plan.json")
    with progress("4/5 verify against one process") as report:
        comparison = verify_plan(plan, progress=report)
    if not comparison.agrees:
        raise RunError(
            "the plan does not compute what one process computes",
            why=f"{comparison.parameter} (layer {comparison.layer}, {comparison.strategy}) is off",
            fix=f"report this as a bug with {folder / 'plan.json'}",
        )
    with progress(f"5/5 train {steps} steps") as report:
        run = run_plan(plan, text=None if text is None else str(text), steps=steps, progress=report)
    outcome = Outcome(
        plan=plan,
        step_s=run.step_s,
        peak_memory_bytes=run.peak_memory_bytes,
        losses=run.losses,
        verified=comparison.agrees,
    )
    outcome.save(folder / "run.json")
    return Demo(
        folder=folder,
        plain_peak_bytes=plain_peak_bytes,
        budget_bytes=budget_bytes,
        comparison=comparison,
        outcome=outcome,
    )


def plain_data_parallel_bytes(model: ModelFile, cluster: ClusterFile, request: Request) -> int:
    """What one rank needs when every layer is replicated, at the number of micro-batches that needs least."""
    world_size = cluster.cluster.world_size
    mesh = RankMesh.of(world_size=world_size, ranks_per_node=cluster.cluster.ranks_per_node)
    plain = Strategy(dp=world_size)
    pins = tuple(Pin(layers=layers, strategy=plain) for layers in ("embed", "*", "head"))
    peaks = []
    for count in divisors(request.global_batch):
        if why_batch_illegal(request.global_batch, count, mesh) is None:
            pinned = replace(request, pp=(1,), num_micro_batches=(count,), pins=pins, memory_bytes=1 << 59)
            peaks.append(peak_bytes(search_files(model, cluster, pinned).plan))
    return min(peaks)


def tight_plan(
    model: ModelFile, cluster: ClusterFile, request: Request, plain_peak_bytes: int, report: Report
) -> tuple[Plan, int]:
    """The best plan under a budget that plain data parallelism misses, and that budget in bytes."""
    for tightness in TIGHTNESS:
        budget_bytes = int(tightness * plain_peak_bytes)
        tight = replace(request, memory_bytes=budget_bytes)
        try:
            result = search_files(
                model,
                cluster,
                tight,
                progress=lambda phase, done, total: report({"what": phase, "done": done, "total": total}),
            )
        except InfeasibleError:
            if tightness == TIGHTNESS[-1]:
                raise
        else:
            return result.plan, budget_bytes
    raise AssertionError("unreachable")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be made", why=str(error), fix="choose another folder with --out") from None
