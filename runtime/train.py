"""`autopar run`: train under a plan on real ranks, and measure step time and peak memory beside the prediction."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import InputError
from autopar.formats import from_plain
from autopar.plan import Plan
from autopar.request import OFFLOADED
from autopar.runtime.activity import activity
from autopar.runtime.batches import batch_form, example_batch, takes_text, vocab_size
from autopar.runtime.launch import HANG_TIMEOUT_S, Progress, launch
from autopar.runtime.models import build_empty, import_model, refuse_shipped
from autopar.runtime.parallel import ParallelModel, parallelize
from autopar.runtime.step_check import LAST
from autopar.runtime.text import ByteBatches, check_vocabulary, default_text, read_text
from autopar.runtime.tracker import LiveBytes
from autopar.runtime.world import check_device

LEARNING_RATE, MAX_NORM = {"adamw": 3e-3, "sgd": 0.3, "sgd-momentum": 0.03}, 1.0
_STEPS = "steps"
"""Where a checkpoint keeps the number of steps so far: among the settings of the optimizer."""

TRACKED_STEP = 2
"""The step (from 0) whose memory is tracked: the optimizer's state exists by then. It is not timed."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a training run showed.

    losses: per step; step_s: median over the timed steps of the slowest rank; steps_s: those steps;
    peak_memory_bytes: per rank, live tensors at the peak of one whole step, optimizer included.
    """

    losses: tuple[float, ...]
    step_s: float
    steps_s: tuple[float, ...]
    peak_memory_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _RankRun:
    losses: tuple[float, ...]
    steps_s: tuple[float, ...]
    peak_memory_bytes: int


def run_plan(
    plan: Plan,
    *,
    text: str | None = None,
    steps: int = 30,
    save: str | None = None,
    resume: str | None = None,
    timeout_s: float = HANG_TIMEOUT_S,
    progress: Progress | None = None,
) -> Run:
    """Train so many steps of the plan's optimizer, byte by byte on a text (a file, or the topics of pydoc).

    A model that takes no text (images, speech, classes) runs on random numbers.

    Starts the plan's ranks as local processes, or runs as one of them inside torchrun. save: a folder for a checkpoint
    after the last step; resume: one to go on from, with its optimizer and at its place in the text; timeout_s: as in
    `autopar.parallelize`, and the longest that may pass without a step (twice that to the first). Raises InputError
    for a text, model or checkpoint that do not fit, RunError when a rank fails or the loss is not finite, ValueError
    for less than one step.
    """
    if steps < 1:
        raise ValueError(f"steps must be >= 1, not {steps}")
    # In the ranks these would fail only after their start.
    refuse_shipped(plan.model.source)
    check_device(plan)
    if text is not None:
        read_text(text)
    results = launch(
        "autopar.runtime.train:train_rank",
        {
            "plan": plan.dumps(),
            "text": text,
            "steps": steps,
            "save": save,
            "resume": resume,
            "timeout_s": timeout_s,
        },
        nproc=plan.cluster.world_size,
        # The ranks' own watch comes first: it knows more.
        timeout_s=2 * timeout_s + 60,
        renewed=True,
        device=plan.cluster.device,
        progress=progress,
    )
    ranks = [from_plain(_RankRun, result, "run") for result in results]
    slowest = [max(times) for times in zip(*(rank.steps_s for rank in ranks), strict=True)]
    return Run(
        losses=ranks[0].losses,
        step_s=statistics.median(slowest),
        steps_s=tuple(slowest),
        peak_memory_bytes=tuple(rank.peak_memory_bytes for rank in ranks),
    )


def prepare(payload: dict[str, Any]) -> None:
    """Load, once for all ranks, what building the model imports; `launch` calls it."""
    import_model(Plan.loads(payload["plan"]).model.source)


def train_rank(payload: dict[str, Any], report: Progress) -> dict[str, Any]:
    """One rank's part of the run as plain data; the target of `launch`."""
    plan, steps = Plan.loads(payload["plan"]), int(payload["steps"])
    model = build_empty(plan.model.source, dtype=plan.request.dtype)
    batch_of = batches_for(model, plan, payload["text"])
    device = torch.device("cuda", torch.cuda.current_device()) if plan.cluster.device == "cuda" else "cpu"
    if not any(p.is_meta for p in model.parameters()):
        model = model.to(device)
    parallel = parallelize(
        model, plan, weights=payload.get("resume"), timeout_s=payload.get("timeout_s", HANG_TIMEOUT_S)
    )
    optimizer = make_optimizer(parallel)
    first = 0
    if payload.get("resume") is not None:
        momentum = optimizer.param_groups[0].get("momentum")
        parallel.load_optimizer(payload["resume"], optimizer)
        _same_momentum(optimizer, momentum, plan)
        first = _steps_done(optimizer)
    losses, times_s, peak_bytes = [], [], 0
    for step in range(steps):
        batch = parallel.shard_batch(batch_of(first + step))
        with activity.during(f"barrier before step {step + 1}"):
            dist.barrier()
        if step == TRACKED_STEP:
            optimizer.zero_grad()
            with LiveBytes().adopt(parallel, parallel.receive_buffers, optimizer, batch) as live:
                losses.append(float(one_step(parallel, optimizer, batch)))
            peak_bytes = live.peak_bytes
        else:
            began = time.perf_counter()
            losses.append(float(one_step(parallel, optimizer, batch)))
            # The first steps warm up: allocator, shapes of the pipeline, optimizer state.
            if step > TRACKED_STEP or steps <= TRACKED_STEP + 1:
                times_s.append(time.perf_counter() - began)
        if step == LAST - 1 and parallel.step_check.is_off:
            report({"warning": f"step {LAST}: {parallel.step_check.words}"})
        report({"done": step + 1, "total": steps, "loss": losses[-1]})
    if payload.get("save") is not None:
        for group in optimizer.param_groups:
            group[_STEPS] = first + steps
        parallel.save(payload["save"], optimizer)
    return asdict(_RankRun(losses=tuple(losses), steps_s=tuple(times_s), peak_memory_bytes=peak_bytes))


def batches_for(model: nn.Module, plan: Plan, text: str | None) -> Callable[[int], dict[str, torch.Tensor]]:
    """The global batch of each step: windows of a text, or random numbers for a model that takes no text.

    Raises InputError for a text that does not fit the model.
    """
    samples, sequence = plan.request.global_batch, plan.request.sequence
    if takes_text(model):
        check_vocabulary(vocab_size(model))
        content = default_text() if text is None else read_text(text)
        return ByteBatches(text=content, sequence=sequence, global_batch=samples, form=batch_form(model)).batch
    if text is not None:
        raise InputError(
            f"{type(model).__name__} takes no text",
            why="its input or its labels are no words",
            fix="leave --text out: it then runs on random numbers, to measure; train on your data with parallelize",
        )
    return lambda step: example_batch(model, samples=samples, sequence=sequence, seed=step)


def make_optimizer(parallel: ParallelModel) -> torch.optim.Optimizer:
    """The optimizer that the plan was made for, over this rank's part of the model."""
    asked = parallel.plan.request.optimizer
    kind = next((name for name, offloaded in OFFLOADED.items() if offloaded == asked), asked)
    # In host memory the step is what it costs, and torch's fused one reads and writes each number once.
    settings: dict[str, Any] = {"lr": LEARNING_RATE[kind], "fused": True if kind != asked else None}
    groups = parallel.param_groups()
    if kind == "adamw":
        return torch.optim.AdamW(groups, **settings)
    return torch.optim.SGD(groups, momentum=0.9 if kind == "sgd-momentum" else 0.0, **settings)


def _same_momentum(optimizer: torch.optim.Optimizer, planned: float | None, plan: Plan) -> None:
    """Raise InputError where a checkpoint brought another momentum than the plan has memory for."""
    saved = optimizer.param_groups[0].get("momentum")
    if bool(saved) != bool(planned):
        raise InputError(
            f"the checkpoint was trained {'with' if saved else 'without'} momentum",
            why=f"the plan is for {plan.request.optimizer}, and the settings of a checkpoint go on",
            fix=f"search with --optimizer {'sgd-momentum' if saved else 'sgd'}, or begin anew with the weights alone",
        )


def _steps_done(optimizer: torch.optim.Optimizer) -> int:
    """The steps that a loaded optimizer has made; 0 where neither our own count nor its states tell."""
    counted = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
    return int(optimizer.param_groups[0].get(_STEPS, max(counted, default=0)))


def one_step(
    parallel: ParallelModel, optimizer: torch.optim.Optimizer, batch: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """The global mean loss of one optimizer step."""
    optimizer.zero_grad()
    loss = parallel.train_step(batch)
    parallel.clip_grad_norm_(MAX_NORM)
    optimizer.step()
    return loss
