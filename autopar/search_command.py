"""What `autopar search` does with its options: search, write the files, and say what to show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.batch_choice import search_batches
from autopar.errors import RunError
from autopar.estimating import files
from autopar.formats import write_file
from autopar.measured import ModelFile
from autopar.report import plan_facts, plan_table
from autopar.request import SCHEDULES, Forbid, Optimizer, Pin, Request, Schedule
from autopar.searching import Progress
from autopar.units import dtype_name, parse_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command, as typed."""

    model: str
    cluster: str
    output: Path
    global_batches: tuple[int, ...]
    memory: str | None = None
    seq: int | None = None
    dtype: str | None = None
    optimizer: Optimizer = "adamw"
    pp: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = ()
    micro_batch_sizes: tuple[int, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    pins: tuple[str, ...] = ()
    forbids: tuple[str, ...] = ()
    max_strategies: int | None = None
    tp_across_nodes: bool = False
    allow_unrunnable: bool = False
    verify: bool = False
    frontier: Path | None = None
    what_if: str | None = None

    def request(self, model_file: ModelFile) -> Request:
        """The request that they make for the first global batch; InputError for one that is none."""
        return Request(
            global_batch=self.global_batches[0],
            sequence=self.seq or model_file.layers.sequence,
            dtype=dtype_name(self.dtype) if self.dtype is not None else model_file.layers.dtype,
            optimizer=self.optimizer,
            memory_bytes=parse_bytes(self.memory) if self.memory is not None else None,
            pp=self.pp,
            num_micro_batches=self.micro_batches,
            schedules=self.schedules or SCHEDULES,
            pins=tuple(Pin.parse(text) for text in self.pins),
            forbids=tuple(Forbid.parse(text) for text in self.forbids),
            max_strategies=self.max_strategies,
            tp_across_nodes=self.tp_across_nodes,
            allow_unrunnable=self.allow_unrunnable,
        )


@dataclass(frozen=True, kw_only=True)
class Found:
    """The text of plan.json, and the parts to show to people."""

    plan: str
    parts: tuple[RenderableType, ...]


def search_command(
    options: Options,
    *,
    progress: Progress,
    deadline: float | None,
    stop: Callable[[], bool],
    halted: Callable[[], bool],
) -> Found:
    """Search, write plan.json and what else was asked for. stop: Ctrl-C; halted: that, or the time limit.

    Raises as `search_files`; KeyboardInterrupt when stopped before anything was found.
    """
    model_file, cluster_file = files(options.model, options.cluster, sequence=options.seq)
    request = options.request(model_file)
    if options.what_if is not None:
        from autopar.frontier import changed_conditions

        changed_conditions(model_file, cluster_file, request, options.what_if)
    try:
        plan, tried = search_batches(
            model_file,
            cluster_file,
            request,
            options.global_batches,
            micro_batch_sizes=options.micro_batch_sizes,
            progress=progress,
            deadline=deadline,
            stop=stop,
            verify=options.verify,
        )
    except RunError:
        if stop():
            raise KeyboardInterrupt from None
        raise
    plan.save(options.output)
    request = plan.request
    parts: list[RenderableType] = [plan_table(plan), plan_facts(plan)]
    if len(tried) > 1:
        parts += list(map(str, tried))
    if options.frontier is not None and not halted():
        from autopar.charts import frontier_csv, frontier_svg, frontier_table
        from autopar.frontier import frontier

        found = frontier(model_file, cluster_file, request, progress=progress, stop=halted)
        plot = options.frontier.with_suffix(".svg")
        write_file(options.frontier, frontier_csv(found))
        write_file(
            plot, frontier_svg(found, title=f"{model_file.model.name} on {cluster_file.cluster.world_size} ranks")
        )
        parts += [frontier_table(found), f"files: {options.frontier}, {plot}"]
    if options.what_if is not None and not halted():
        from autopar.charts import what_if_table
        from autopar.frontier import what_if

        parts.append(what_if_table(what_if(model_file, cluster_file, request, options.what_if, now=plan, stop=halted)))
    return Found(plan=plan.dumps(), parts=tuple(parts))
