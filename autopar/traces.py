"""The simulated step as a trace to look at (Chrome, Perfetto): what ranks do, their collectives, their memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autopar.measured import ClusterFile, ModelFile
from autopar.orders import actions
from autopar.pipeline import Operation, simulate
from autopar.plan import Plan, RankMemory
from autopar.predict import Known, Simulated, rank_memory, simulated
from autopar.schedules import stage_rank

_COMPUTE, _COMMUNICATION = 0, 1
_US = 1e6


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The most that a rank holds while it is at one operation."""

    operation: Operation
    memory: RankMemory


def memory_over_time(plan: Plan, model: ModelFile, cluster: ClusterFile) -> tuple[tuple[Moment, ...], ...]:
    """Per pipeline rank, each action of its step and its optimizer with what it holds then.

    The highest of a rank's moments is its peak, but for parameters and states before the first action.
    """
    found = simulated(plan, model.model, model.layers, cluster.cluster, cluster.links)
    line = simulate(found.times, send_s=found.send_s, **found.asked)
    known = Known()
    ranks = []
    for rank in range(plan.pp):
        moments: list[RankMemory] = []
        rank_memory(plan, rank, model.model, model.layers, known, moments)
        at = {(op.kind, op.stage, op.micro_batch): op for op in line.operations if op.rank == rank}
        order = actions(plan.schedule, plan.pp, rank, plan.num_micro_batches, plan.stages_per_rank)
        last = Operation(start_s=line.step_s, end_s=line.step_s, rank=rank, stage=-1, micro_batch=-1, kind="optimizer")
        places = [*(at[action] for action in order), at.get(("optimizer", -1, -1), last)]
        ranks.append(tuple(Moment(operation=op, memory=memory) for op, memory in zip(places, moments, strict=True)))
    return tuple(ranks)


def chrome_trace(plan: Plan, model: ModelFile, cluster: ClusterFile) -> str:
    """The step as Chrome trace events: a process a pipeline rank, compute and communication its threads, memory a
    counter by parts in MB. Times are microseconds; colours and stacking are the viewer's.
    """
    found = simulated(plan, model.model, model.layers, cluster.cluster, cluster.links)
    line = simulate(found.times, send_s=found.send_s, **found.asked)
    events: list[dict[str, Any]] = []
    for rank in range(plan.pp):
        stages = ", ".join(map(str, plan.stages_of_rank(rank)))
        label = {"name": f"pipeline rank {rank}, stages {stages}"}
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": label})
        for thread, name in ((_COMPUTE, "compute"), (_COMMUNICATION, "communication")):
            events.append({"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": name}})
    for op in line.operations:
        events += _bars(op, plan, found)
    for rank, moments in enumerate(memory_over_time(plan, model, cluster)):
        for moment in moments:
            parts = {name: round(size / 1e6, 3) for name, size in moment.memory.parts_bytes.items()}
            start_us = moment.operation.start_s * _US
            events.append({"ph": "C", "pid": rank, "name": "memory [MB]", "ts": start_us, "args": parts})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _bar(rank: int, thread: int, name: str, start_s: float, end_s: float, **more: object) -> dict[str, Any]:
    bar = {"ph": "X", "pid": rank, "tid": thread, "name": name, "ts": start_s * _US, "dur": (end_s - start_s) * _US}
    return bar | ({"args": more} if more else {})


def _bars(op: Operation, plan: Plan, found: Simulated) -> Iterator[dict[str, Any]]:
    """An operation, the collectives within it, and the send that follows it."""
    if op.stage < 0:
        thread = _COMPUTE if op.kind == "optimizer" else _COMMUNICATION
        yield _bar(op.rank, thread, op.kind, op.start_s, op.end_s)
        return
    name = f"{op.kind} stage {op.stage} micro-batch {op.micro_batch}"
    yield _bar(op.rank, _COMPUTE, name, op.start_s, op.end_s, stage=op.stage, micro_batch=op.micro_batch)
    work = found.works[op.stage]
    row = {"F": work.forward_row, "B": work.backward_row}.get(op.kind)
    if row is not None and row.run[0] > 0:
        # Ranks that share cores, and ZeRO-2 layers that need no gather, make an action longer or shorter.
        stretch = (op.end_s - op.start_s) / row.run[0]
        layers = plan.stage_layers(op.stage)
        for span in row.run[1]:
            if span.kind != "compute":
                layer = layers[span.layer] if op.kind == "F" else layers[len(layers) - 1 - span.layer]
                start_s, end_s = (op.start_s + stretch * at for at in (span.start_s, span.end_s))
                yield _bar(op.rank, _COMMUNICATION, span.kind, start_s, end_s, layer=layer)
    after = op.stage + 1 if op.kind == "F" else op.stage - 1
    if op.kind != "W" and 0 <= after < plan.num_stages and found.send_s:
        to = stage_rank(plan.schedule, pp=plan.pp, stage=after)
        if to != op.rank:
            yield _bar(op.rank, _COMMUNICATION, f"send to rank {to}", op.end_s, op.end_s + found.send_s)
