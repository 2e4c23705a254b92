"""The command line. It only speaks: the rooms do the work, and are imported by the command that needs them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Annotated, Literal, NoReturn, cast

import typer

from autopar.errors import AutoparError
from autopar.formats import check_writable
from autopar.interrupts import INTERRUPTED, interrupt_stops, leave_at_once, step
from autopar.options import (
    Json,
    Nproc,
    Out,
    PlanFile,
    Seq,
    Settings,
    Steps,
    Text,
    answer,
    batches,
    schedules,
    seconds,
    settings,
    shown,
    usage_error,
)
from autopar.profile_command import profile_app
from autopar.request import Optimizer, Schedule
from autopar.runtime.launch import HANG_TIMEOUT_S

_CLICK_ERROR: type[Exception] = next(k for k in typer.BadParameter.__mro__ if k.__name__ == "ClickException")

app = typer.Typer(
    name="autopar",
    help="Find, prove and run the best layer-wise hybrid-parallel plan for a PyTorch model.",
    epilog="Exit codes: 0 done, 1 bug, 2 usage, 3 bad input, 4 nothing fits, 5 run failed, 130 interrupted.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(profile_app, name="profile")


def _version(wanted: bool) -> None:
    if wanted:
        from autopar import __version__

        print(f"autopar {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Options that stand before the command."""


@app.command()
def search(
    model: Annotated[str, typer.Option(help="A model.json of `profile model`, or a shipped name (llama2-7b).")],
    cluster: Annotated[
        str, typer.Option(help="A cluster.json of `profile cluster`, or a shipped name (h100-80g:8x8).")
    ],
    global_batch: Annotated[
        str, typer.Option(metavar="N[,N]", callback=batches, help="Samples of a step; of several the best one.")
    ],
    memory: Annotated[str | None, typer.Option(help="Budget of one rank, e.g. 24GiB (default: all it has).")] = None,
    seq: Seq = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16, ... (default: as profiled).")] = None,
    optimizer: Annotated[Optimizer, typer.Option(help="What steps the parameters, and where.")] = "adamw",
    pp: Annotated[list[int] | None, typer.Option(min=1, help="Allow this many stages (repeatable).")] = None,
    micro_batches: Annotated[list[int] | None, typer.Option(min=1, help="Allow this many (repeatable).")] = None,
    micro_batch_size: Annotated[
        list[int] | None, typer.Option(min=1, help="Allow this many samples of one (repeatable).")
    ] = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(callback=schedules, help="Allow this pipeline schedule (repeatable; default: 1f1b, gpipe)."),
    ] = None,
    pin: Annotated[list[str] | None, typer.Option(help='Fix layers, e.g. "0-3: dp4-z3" (repeatable).')] = None,
    forbid: Annotated[list[str] | None, typer.Option(help='Forbid, e.g. "*: tp4" or "0-3: r" (repeatable).')] = None,
    max_strategies: Annotated[
        int | None, typer.Option(min=1, help="At most so many different ones in blocks.")
    ] = None,
    tp_across_nodes: Annotated[bool, typer.Option("--tp-across-nodes", help="Let tp groups leave a node.")] = False,
    allow_unrunnable: Annotated[
        bool, typer.Option("--allow-unrunnable", help="Also plan what the runtime cannot run yet.")
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Let two other solvers check the bound.")] = False,
    time_limit: Annotated[
        float | None, typer.Option(min=0.0, callback=seconds, help="Seconds; then the best so far.")
    ] = None,
    frontier: Annotated[Path | None, typer.Option(help="Also the best step by memory: FILE.csv and FILE.svg.")] = None,
    what_if: Annotated[str | None, typer.Option(help='Also after a change: "links*0.5", "memory-2GiB".')] = None,
    output: Out = Path("plan.json"),
    json: Json = False,
) -> None:
    """Find the fastest plan that fits. Loads no torch. Ctrl-C keeps the best one so far."""
    from autopar.search_command import Options, search_command

    check_writable(output)
    if frontier is not None:
        check_writable(frontier)
    options = Options(
        model=model,
        cluster=cluster,
        output=output,
        global_batches=tuple(map(int, global_batch.split(","))),
        memory=memory,
        seq=seq,
        dtype=dtype,
        optimizer=optimizer,
        pp=tuple(pp or ()),
        micro_batches=tuple(micro_batches or ()),
        micro_batch_sizes=tuple(micro_batch_size or ()),
        schedules=cast(tuple[Schedule, ...], tuple(schedule or ())),
        pins=tuple(pin or ()),
        forbids=tuple(forbid or ()),
        max_strategies=max_strategies,
        tp_across_nodes=tp_across_nodes,
        allow_unrunnable=allow_unrunnable,
        verify=verify,
        frontier=frontier,
        what_if=what_if,
    )
    deadline = None if time_limit is None else monotonic() + time_limit
    with step("search") as report, interrupt_stops() as stopped:
        found = search_command(
            options,
            progress=lambda phase, done, total: report({"what": phase, "done": done, "total": total}),
            deadline=deadline,
            stop=stopped,
            halted=lambda: stopped() or (deadline is not None and monotonic() >= deadline),
        )
    answer(found.plan if json else shown(*found.parts))
    if stopped():
        raise KeyboardInterrupt


@app.command()
def estimate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A shipped name (llama2-7b) or a model.json.")],
    cluster: Annotated[str, typer.Option(help="A shipped name (a100-80g:8x8: nodes x ranks) or a cluster.json.")],
    global_batch: Annotated[int, typer.Option(min=1, max=1 << 30, help="Samples of one step over all ranks.")] = 1024,
    plan: Annotated[Path | None, typer.Option(help="Price this plan.json instead of the degrees below.")] = None,
    dp: Annotated[int | None, typer.Option(min=1, help="Data parallel (default: what the others leave).")] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    zero: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")] = 0,
    norms: Annotated[bool, typer.Option("--sequence-norms", help="Sequence-parallel norms beside tp.")] = False,
    recompute: Annotated[bool, typer.Option(help="Recompute every block in the backward.")] = False,
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")] = 1,
    schedule: Annotated[Schedule, typer.Option(help="Order of micro-batches through the pipeline.")] = "1f1b",
    stages_per_rank: Annotated[int | None, typer.Option(min=1, help="Stages of a rank (default: the fewest).")] = None,
    seq: Seq = None,
    allow_unrunnable: Annotated[
        bool, typer.Option("--allow-unrunnable", help="Also price what the runtime cannot run yet.")
    ] = False,
    trace: Annotated[Path | None, typer.Option(help="Write the simulated step as a Chrome trace (Perfetto).")] = None,
    json: Json = False,
) -> None:
    """Price one plan for a model on a cluster, also for machines that are not here. Loads no torch."""
    from autopar.estimating import Degrees, files, priced, uniform
    from autopar.formats import write_file
    from autopar.plan import Plan
    from autopar.report import plan_facts, plan_table
    from autopar.traces import chrome_trace

    model_file, cluster_file = files(model, cluster, sequence=seq)
    if plan is not None:
        chosen = Plan.load(plan)
    else:
        again: Literal["full", "none"] = "full" if recompute else "none"
        degrees = Degrees(
            dp=dp,
            tp=tp,
            pp=pp,
            zero=zero,
            sequence_norms=norms,
            recompute=again,
            num_micro_batches=micro_batches,
            schedule=schedule,
            stages_per_rank=stages_per_rank,
        )
        chosen = uniform(
            model_file, cluster_file, degrees, global_batch=global_batch, allow_unrunnable=allow_unrunnable
        )
    found = priced(chosen, model_file, cluster_file)
    if trace is not None:
        write_file(trace, chrome_trace(found, model_file, cluster_file))
    answer(found.dumps() if json else shown(plan_table(found), plan_facts(found)))


@app.command()
def run(
    plan: PlanFile,
    text: Text = None,
    steps: Steps = 20,
    save: Annotated[Path | None, typer.Option(help="Write a checkpoint to this folder after the last step.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on from this checkpoint, of any plan of the model.")] = None,
    timeout: Annotated[
        float, typer.Option(min=1.0, callback=seconds, help="End when no rank gets on for so many seconds.")
    ] = HANG_TIMEOUT_S,
    json: Json = False,
) -> None:
    """Train by PLAN in local processes, byte by byte on a text; measured beside predicted."""
    from autopar.outcome import Outcome
    from autopar.plan import Plan
    from autopar.report import outcome_parts

    planned = Plan.load(plan)
    planned.check_runnable()
    from autopar.runtime.train import run_plan

    with step("run") as report:
        done = run_plan(
            planned,
            text=None if text is None else str(text),
            steps=steps,
            save=None if save is None else str(save),
            resume=None if resume is None else str(resume),
            timeout_s=timeout,
            progress=report,
        )
    outcome = Outcome(plan=planned, step_s=done.step_s, peak_memory_bytes=done.peak_memory_bytes, losses=done.losses)
    answer(outcome.dumps() if json else shown(*outcome_parts(outcome)))


@app.command()
def calibrate(
    cluster: Annotated[Path, typer.Argument(metavar="CLUSTER", help="A cluster.json.")],
    runs: Annotated[Path, typer.Option(help="Measured runs: JSON objects with a plan and its step_s.")],
    output: Out,
    model: Annotated[Path | None, typer.Option(help="The model.json of runs that name none.")] = None,
    json: Json = False,
) -> None:
    """Correct CLUSTER by measured runs; its predictions then carry an 80 % interval. Loads no torch."""
    from autopar import calibrating, report

    found = calibrating.calibrate_files(cluster, runs, model=model, output=output)
    answer(found.dumps() if json else shown(*report.calibration_parts(found, output)))


@app.command()
def verify(
    plan: Annotated[Path | None, typer.Argument(metavar="PLAN", help="A plan.json.")] = None,
    model: Annotated[str | None, typer.Option(help="MODEL, to verify random plans for it instead.")] = None,
    set_: Settings = None,
    nproc: Nproc = None,
    random_plans: Annotated[int, typer.Option(min=1, max=10_000, help="How many random legal plans.")] = 20,
    seed: Annotated[int, typer.Option(help="The same seed draws the same plans.")] = 0,
    fake: Annotated[
        bool, typer.Option("--fake", help="Count PLAN's memory here instead, for any world size.")
    ] = False,
    json: Json = False,
) -> None:
    """Compare PLAN, or random legal plans of --model, with one process on a small replica: loss and every gradient."""
    from autopar.verify_command import Wanted, verify_command

    wanted = Wanted(
        plan=plan,
        model=model,
        settings=settings(set_ or ()),
        nproc=nproc or 4,
        count=random_plans,
        seed=seed,
        fake=fake,
    )
    with step("verify") as report:
        found = verify_command(wanted, progress=report)
    answer(found.json if json else found.words)
    found.check()


@app.command()
def demo(
    nproc: Annotated[int, typer.Option(min=1, max=64, help="How many local processes.")] = 4,
    text: Text = None,
    steps: Steps = 30,
    out: Annotated[Path, typer.Option(help="The folder for its files.")] = Path("autopar-demo"),
    json: Json = False,
) -> None:
    """The whole loop on this machine: profile, search, verify, train a small Llama on real text."""
    from autopar.demo import run_demo
    from autopar.report import demo_parts

    done = run_demo(nproc=nproc, text=text, steps=steps, folder=out, progress=step)
    answer(done.outcome.dumps() if json else shown(*demo_parts(done)))


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: the one place that turns an error into words and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a table must not fail on an ASCII terminal
    signal.signal(signal.SIGINT, leave_at_once)
    try:
        code = typer.main.get_command(app).main(args=arguments, prog_name="autopar", standalone_mode=False)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        # All is done: a late Ctrl-C must not turn it into a death by signal.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    except AutoparError as error:
        _end(error)
    except _CLICK_ERROR as error:
        _end(usage_error(error))
    except (KeyboardInterrupt, typer.Abort):
        # What was started is ended by now; a second Ctrl-C must not change that to a death by signal.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("interrupted: files already written are kept", file=sys.stderr)
        sys.exit(INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _end(error: AutoparError) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
