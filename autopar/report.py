"""Plans and measurements for people: tables, a loss curve, words. From values to text; prints nothing itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.measured import ClusterFile, ModelFile
from autopar.model import layer_names
from autopar.plan import Plan, Prediction
from autopar.schedules import stage_rank
from autopar.strategy import Strategy
from autopar.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from autopar.calibrating import Calibrated
    from autopar.demo import Demo
    from autopar.outcome import Outcome
    from autopar.runtime.counting import CountedPeak
    from autopar.runtime.verify import Comparison
    from autopar.runtime.verify_random import VerifiedPlan

_BARS = "▁▂▃▄▅▆▇█"
_PIPED_WIDTH = 110


@dataclass(frozen=True, kw_only=True)
class Run:
    """Neighbouring layers of one stage under one strategy: the first and last place of the chain."""

    first: int
    last: int
    stage: int
    strategy: Strategy


def runs(plan: Plan) -> tuple[Run, ...]:
    """The plan run by run: neighbouring blocks of one stage and strategy together, embed and head by themselves."""
    last = len(plan.strategies) - 1

    def kind(layer: int) -> tuple[str, int, Strategy]:
        role = {0: "embed", last: "head"}.get(layer, "block")
        return role, plan.stage_of(layer), plan.strategies[layer]

    found = []
    for (_, stage, strategy), layers in groupby(range(last + 1), key=kind):
        places = list(layers)
        found.append(Run(first=places[0], last=places[-1], stage=stage, strategy=strategy))
    return tuple(found)


def strategy_words(strategy: Strategy) -> str:
    """The strategy in words: `data parallel 4, ZeRO-3, recomputed`."""
    parts = [f"data parallel {strategy.dp}"] if strategy.dp > 1 else []
    if strategy.zero:
        over = f" over {strategy.shard}" if strategy.shard else ""
        parts.append(f"ZeRO-{strategy.zero}{over}")
    if strategy.tp > 1:
        norms = " with sequence-parallel norms" if strategy.sequence_norms else ""
        parts.append(f"tensor parallel {strategy.tp}{norms}")
    for degree, name in (
        (strategy.sp, "Ulysses"),
        (strategy.cp, "context parallel"),
        (strategy.ep, "expert parallel"),
    ):
        if degree > 1:
            parts.append(f"{name} {degree}")
    parts = parts or ["one rank"]
    if strategy.recompute != "none":
        parts.append({"full": "recomputed", "selective": "partly recomputed"}[strategy.recompute])
    return ", ".join(parts)


def plan_table(plan: Plan) -> Table:
    """The plan layer by layer: which layers stand where and how they are spread."""
    from rich.table import Table

    table = Table(title=f"plan for {plan.model.name or plan.model.source}", title_justify="left")
    for name in ("layers", "stage", "ranks", "strategy", "in words"):
        table.add_column(name, no_wrap=name != "in words")
    names, per_stage = layer_names(len(plan.strategies)), plan.mesh.ranks_per_stage
    for run in runs(plan):
        layers = names[run.first] if run.first == run.last else f"{names[run.first]}-{names[run.last]}"
        rank = stage_rank(plan.schedule, pp=plan.pp, stage=run.stage)
        ranks = span(rank * per_stage, (rank + 1) * per_stage - 1)
        table.add_row(layers, str(run.stage), ranks, run.strategy.short, strategy_words(run.strategy))
    return table


def span(first: int, last: int) -> str:
    """`3` or `0-3`."""
    return str(first) if first == last else f"{first}-{last}"


def plan_facts(plan: Plan) -> str:
    """The lines under the table: batch, schedule, what is predicted, and how good the plan is."""
    request = plan.request
    lines = [
        f"global batch {request.global_batch} in {plan.num_micro_batches} micro-batches of {plan.micro_batch}, "
        f"sequence {request.sequence}, {request.dtype}, {request.optimizer}, "
        + (f"{plan.num_stages} stages{_on_ranks(plan)} ({plan.schedule})" if plan.pp > 1 else "no pipeline")
    ]
    budget_bytes = request.memory_bytes or plan.cluster.usable_bytes
    if plan.predicted is not None:
        worst = plan.predicted.memory[plan.predicted.worst_rank]
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in worst.parts_bytes.items() if size)
        lines += [
            f"predicted step {format_seconds(plan.predicted.step_s)} ({plan.predicted.origin})"
            + _interval(plan.predicted),
            f"predicted peak {format_bytes(worst.peak_bytes)} on rank {plan.predicted.worst_rank} "
            f"of a budget of {format_bytes(budget_bytes)}: {parts}",
        ]
    if plan.not_runnable:
        lines.append(f"does not run yet: {'; '.join(plan.not_runnable)}")
    if plan.certificate is not None:
        certificate = plan.certificate
        how = "optimal" if certificate.status == "optimal" else f"within {max(certificate.gap, 1e-4):.2%} of optimal"
        checked = f", agreed by {', '.join(certificate.verified_by)}" if certificate.verified_by else ""
        lines.append(f"{how} for the tables of this profile, says solver {certificate.solver}{checked}")
    return "\n".join(lines)


def _on_ranks(plan: Plan) -> str:
    return f", {plan.stages_per_rank} a rank" if plan.stages_per_rank > 1 else ""


def outcome_parts(outcome: Outcome) -> list[RenderableType]:
    """What a run showed: the plan, predicted beside measured, the loss."""
    table = measured_table(outcome.plan, step_s=outcome.step_s, peak_memory_bytes=outcome.peak_memory_bytes)
    return [plan_table(outcome.plan), plan_facts(outcome.plan), table, loss_line(outcome.losses)]


def demo_parts(demo: Demo) -> list[RenderableType]:
    """What the demo showed, from the budget to the loss."""
    budget = (
        f"plain data parallelism needs {format_bytes(demo.plain_peak_bytes)} on a rank and does not fit "
        f"the budget of {format_bytes(demo.budget_bytes)}; this plan does"
    )
    return [budget, *outcome_parts(demo.outcome), comparison_words(demo.comparison), f"files: {demo.folder}"]


def comparison_words(comparison: Comparison) -> str:
    """How far the plan was from one process, and in which layer."""
    verdict = "verified: equal to" if comparison.agrees else "not verified: differs from"
    return (
        f"{verdict} one process over {comparison.steps} steps; relative errors: loss {comparison.loss:.1e}, "
        f"gradients {comparison.gradient:.1e} (largest: {comparison.parameter}, layer {comparison.layer}, "
        f"{comparison.strategy}), clipped norm {comparison.norm:.1e}, weights {comparison.weight:.1e}"
    )


def random_plans_words(found: Sequence[VerifiedPlan], *, nproc: int, seed: int) -> str:
    """How many random plans were equal to one process, and the largest errors among them."""
    agreed = sum(one.comparison.agrees for one in found)
    largest = {name: max(getattr(one.comparison, name) for one in found) for name in ("loss", "gradient", "weight")}
    return (
        f"verified: {agreed} of {len(found)} random plans of seed {seed} on {nproc} ranks equal to one process; "
        f"largest relative errors: loss {largest['loss']:.1e}, gradients {largest['gradient']:.1e}, "
        f"weights {largest['weight']:.1e}"
    )


def counted_tables(plan: Plan, found: Sequence[CountedPeak]) -> tuple[Table, Table]:
    """The counted peak of each pipeline rank beside the predicted one, and the parts of the highest."""
    from rich.table import Table

    width, memory = plan.mesh.ranks_per_stage, plan.predicted.memory if plan.predicted else None
    places = {one.rank: span(one.rank, one.rank + width - 1) for one in found}
    worst = max(found, key=lambda one: one.peak_bytes)
    peaks = Table(title=f"peak memory of {plan.model.name}", title_justify="left")
    parts = Table(title=f"what it is on ranks {places[worst.rank]}", title_justify="left")
    for table, first in ((peaks, "ranks"), (parts, "part")):
        for name in (first, "counted", "predicted", "difference"):
            table.add_column(name, justify="left" if name == first else "right", no_wrap=True)
    for one in found:
        _add_pair(peaks, places[one.rank], one.peak_bytes, memory[one.rank].peak_bytes if memory else None)
    expected = {**memory[worst.rank].parts_bytes} if memory else {}
    # What is on its way counts as an activation.
    expected["activations"] = expected.get("activations", 0) + expected.pop("transient", 0)
    for name, counted_bytes in worst.parts_bytes.items():
        _add_pair(parts, name, counted_bytes, expected.get(name, 0) if memory else None)
    if worst.host_bytes:
        _add_pair(parts, "in host memory", worst.host_bytes, None)
    return peaks, parts


def _add_pair(table: Table, name: str, counted_bytes: int, predicted_bytes: int | None) -> None:
    predicted, off = "-", "-"
    if predicted_bytes is not None:
        predicted, off = format_bytes(predicted_bytes), difference(predicted_bytes, counted_bytes)
    table.add_row(name, format_bytes(counted_bytes), predicted, off)


def _interval(predicted: Prediction) -> str:
    if predicted.step_s_interval is None:
        return ""
    low_s, high_s = predicted.step_s_interval
    return f", 80 % of such predictions within {format_seconds(low_s)} .. {format_seconds(high_s)}"


def calibration_parts(found: Calibrated, output: Path) -> tuple[RenderableType, ...]:
    """The factors of a calibration, and what they do to the error over the runs."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("factor", "value", "80 % interval"):
        table.add_column(column, justify="left" if column == "factor" else "right")
    for factor in found.factors:
        table.add_row(factor.name, f"{factor.value:.3f}", f"{factor.low:.3f} .. {factor.high:.3f}")
    calibration = found.file.cluster.calibration
    assert calibration is not None
    words = (
        f"{calibration.runs} runs: median error {found.before:.1%} before, {found.after:.1%} after; "
        f"80 % of predictions within a factor {math.exp(calibration.log_spread):.3f}"
    )
    return table, words, f"wrote {output}"


def measured_table(plan: Plan, *, step_s: float, peak_memory_bytes: Sequence[int]) -> Table:
    """Predicted beside measured: the step, then the peak memory of every rank."""
    from rich.table import Table

    table = Table(title="predicted and measured", title_justify="left")
    table.add_column("what", no_wrap=True)
    for name in ("predicted", "measured", "difference"):
        table.add_column(name, justify="right", no_wrap=True)
    predicted = plan.predicted
    table.add_row(
        "step",
        format_seconds(predicted.step_s) if predicted else "-",
        format_seconds(step_s),
        difference(predicted.step_s, step_s) if predicted else "-",
    )
    for rank, measured_bytes in enumerate(peak_memory_bytes):
        peak_bytes = predicted.memory[rank].peak_bytes if predicted else None
        table.add_row(
            f"peak memory, rank {rank}",
            "-" if peak_bytes is None else format_bytes(peak_bytes),
            format_bytes(measured_bytes),
            "-" if peak_bytes is None else difference(peak_bytes, measured_bytes),
        )
    return table


def difference(predicted: float, measured: float) -> str:
    """By how much the prediction is off, of the measured: `+3.2 %` is too high."""
    return f"{100 * (predicted - measured) / measured:+.1f} %" if measured else "-"


def model_table(file: ModelFile) -> Table:
    """The measured kinds of layers: how many, parameters, seconds of one sample, saved activations, tp degrees."""
    from rich.table import Table

    model, layers = file.model, file.layers
    title = f"{model.name or model.source}: sequence {layers.sequence}, {layers.dtype}, {layers.processes} processes"
    table = Table(title=title, title_justify="left")
    for name in ("kind", "layers", "parameters", "samples", "forward", "backward", "saved", "tp degrees"):
        table.add_column(name, no_wrap=True, justify="left" if name == "kind" else "right")
    for kind in model.kinds:
        cost = layers.find(kind.name)
        measured = ["-"] * 4
        if cost is not None:
            last = len(cost.samples) - 1
            measured = [
                str(cost.samples[last]),
                format_seconds(cost.forward_s[last]),
                format_seconds(cost.backward_s[last]),
                format_bytes(cost.saved_bytes.at(cost.samples[last])),
            ]
        degrees = ", ".join(str(degree) for degree in (1, *kind.tp_degrees))
        table.add_row(
            kind.name, str(model.layers.count(kind.name)), format_bytes(kind.parameter_bytes), *measured, degrees
        )
    return table


def cluster_table(file: ClusterFile) -> Table:
    """The measured collectives: for each group shape the time of the smallest and of the largest message."""
    from rich.table import Table

    cluster = file.cluster
    title = f"{cluster.world_size} ranks of {cluster.device_name}, {format_bytes(cluster.memory_bytes)} each"
    table = Table(title=title, title_justify="left")
    for name in ("collective", "ranks", "groups at once", "neighbours", "sizes", "smallest", "largest"):
        table.add_column(name, no_wrap=True, justify="left" if name == "collective" else "right")
    for curve in file.links.curves:
        ends = [f"{format_bytes(curve.size_bytes[i])} in {format_seconds(curve.seconds[i])}" for i in (0, -1)]
        shape = curve.shape
        near = "yes" if shape.contiguous else "no"
        sizes = str(len(curve.size_bytes))
        table.add_row(curve.collective, str(shape.ranks), str(shape.concurrent), near, sizes, *ends)
    return table


def sparkline(values: Sequence[float], width: int = 60) -> str:
    """The values as a line of bars, lowest to highest; neighbours are averaged where there are more than `width`."""
    count = min(width, len(values))
    edges = [i * len(values) // count for i in range(count + 1)] if count else []
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    if not means:
        return ""
    low, high = min(means), max(means)
    if not low < high:
        return _BARS[0] * count
    return "".join(_BARS[min(len(_BARS) - 1, int((v - low) / (high - low) * len(_BARS)))] for v in means)


def loss_line(losses: Sequence[float]) -> str:
    """The loss from first to last step, with its curve."""
    if not losses:
        return "no step was run"
    return f"loss {losses[0]:.3f} -> {losses[-1]:.3f} over {len(losses)} steps  {sparkline(losses)}"


def render(*parts: RenderableType, width: int | None = None, color: bool = False) -> str:
    """The parts as text, one under the other; plain unless `color`."""
    import io

    from rich.console import Console
    from rich.text import Text

    out = io.StringIO()
    console = Console(file=out, width=width or _PIPED_WIDTH, force_terminal=color, highlight=False, emoji=False)
    for part in parts:
        console.print(Text(part) if isinstance(part, str) else part, soft_wrap=isinstance(part, str))
    return out.getvalue()
