"""From values to numbers: the tables that a solver optimises over, and the one way to add up a choice.

One table is one way to cut the machine and the batch: `stages` stages, `micro_batches` micro-batches and a schedule.
A choice cuts the chain of layers into stages and gives each layer one strategy of the table's list.

    T_i = entry + sum of time over the layers of stage i + transitions between neighbours inside it + exit + p2p
    objective = sum_i T_i + (micro_batches - 1) * max_i T_i
    memory_i = sum over layers of (state + in_flight_i * saved) + max over layers of transient  <=  budget_i

The once-per-step costs (gradient sync, optimizer) are in `time_ns` divided by the micro-batches: exact for one stage,
an approximation for more, which the simulation of the finalists settles.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autopar.request import Schedule
from autopar.strategy import Strategy

INFEASIBLE = int(np.iinfo(np.int64).max)
"""The entry of a strategy that a layer cannot take; masked before anything is added."""

Int = NDArray[np.int64]


class OutOfRange(ValueError):  # noqa: N818  (what is wrong with a table, not an error by its name)
    """Totals of a table may leave the range in which a solver is exact."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CostTables:
    """int64 nanoseconds and bytes of every layer under every strategy, read-only.

    strategies: S of them, in a fixed order; time_ns[U, S]: forward, backward, recompute, collectives on the critical
    path of one micro-batch plus once-per-step costs / micro_batches; state_bytes[U, S]: what stays for the whole
    step; saved_bytes[U, S]: what one in-flight micro-batch keeps; transient_bytes[U, S]: what exists only while that
    layer works (the largest of a stage counts); transition_ns[S, S]: from the layout of one strategy to the next,
    forward and backward of one micro-batch; entry_ns[S], exit_ns[S]: from and to the boundary layout of stages (not
    paid at the two ends of the chain); p2p_ns: paid once by each stage but the last, per micro-batch, both
    directions; layout[S]: the layout class, strategies of one class have equal transition rows and columns;
    in_flight[P]: live micro-batches of each stage; budget_bytes[P]; tied: embed and head must take one strategy.
    """

    stages: int
    micro_batches: int
    schedule: Schedule
    strategies: tuple[Strategy, ...]
    time_ns: Int
    state_bytes: Int
    saved_bytes: Int
    transient_bytes: Int
    transition_ns: Int
    entry_ns: Int
    exit_ns: Int
    p2p_ns: int
    layout: Int
    in_flight: tuple[int, ...]
    budget_bytes: tuple[int, ...]
    tied: bool = False

    def __post_init__(self) -> None:
        units, count = self.time_ns.shape
        shapes = {
            "time_ns": (units, count),
            "state_bytes": (units, count),
            "saved_bytes": (units, count),
            "transient_bytes": (units, count),
            "transition_ns": (count, count),
            "entry_ns": (count,),
            "exit_ns": (count,),
            "layout": (count,),
        }
        for field in fields(self):
            value: Any = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                if value.dtype != np.int64 or value.shape != shapes[field.name]:
                    raise ValueError(
                        f"CostTables.{field.name} must be int64 {shapes[field.name]}, is {value.dtype} {value.shape}"
                    )
                if value.size and value.min() < 0:
                    raise ValueError(f"CostTables.{field.name} has a negative entry")
                value = value.copy()
                value.flags.writeable = False
                object.__setattr__(self, field.name, value)
        if len(self.strategies) != count:
            raise ValueError(f"CostTables has {len(self.strategies)} strategies for {count} columns")
        if len(self.in_flight) != self.stages or len(self.budget_bytes) != self.stages:
            raise ValueError("CostTables.in_flight and budget_bytes need one entry a stage")

    @property
    def feasible(self) -> NDArray[np.bool_]:
        """bool[U, S]: which strategies each layer can take."""
        return np.asarray(self.time_ns != INFEASIBLE)

    def with_less(self, less_bytes: int) -> CostTables:
        """The tables with so much less memory on every stage."""
        return replace(self, budget_bytes=tuple(max(0, budget - less_bytes) for budget in self.budget_bytes))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a solver chose in one table.

    layers_per_stage and strategies (columns of the table), None when nothing fits; lower_bound_ns: no choice of this
    table is below it; status "optimal" when objective and bound agree.
    """

    status: Literal["optimal", "gap", "infeasible"]
    layers_per_stage: tuple[int, ...] | None
    strategies: tuple[int, ...] | None
    lower_bound_ns: int
    labels: int = 0


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a choice adds up to: nanoseconds of a step, nanoseconds and bytes of each stage, and whether it fits."""

    objective_ns: int
    stage_ns: tuple[int, ...]
    stage_bytes: tuple[int, ...]
    fits: bool


def score(tables: CostTables, layers_per_stage: tuple[int, ...], strategies: tuple[int, ...]) -> Score:
    """What this choice costs, added up from the tables and nothing else, in O(layers).

    Raises ValueError when the choice does not cover the chain, takes an infeasible entry or breaks `tied`.
    """
    units = tables.time_ns.shape[0]
    if len(layers_per_stage) != tables.stages or sum(layers_per_stage) != units or len(strategies) != units:
        raise ValueError(f"{layers_per_stage} / {len(strategies)} does not cover {units} layers in {tables.stages}")
    if any(count < 1 for count in layers_per_stage):
        raise ValueError(f"a stage without layers: {layers_per_stage}")
    rows, chosen = np.arange(units), np.array(strategies)
    time = tables.time_ns[rows, chosen]
    if (time == INFEASIBLE).any():
        raise ValueError("the choice takes an infeasible entry")
    if tables.tied and strategies[0] != strategies[-1]:
        raise ValueError("embed and head are tied but differ")
    state, saved = tables.state_bytes[rows, chosen], tables.saved_bytes[rows, chosen]
    transient, moves = tables.transient_bytes[rows, chosen], tables.transition_ns[chosen[:-1], chosen[1:]]
    stage_ns, stage_bytes = [], []
    first = 0
    for stage, count in enumerate(layers_per_stage):
        end = first + count
        time_ns = sum(time[first:end].tolist()) + sum(moves[first : end - 1].tolist())
        if stage > 0:
            time_ns += int(tables.entry_ns[chosen[first]])
        if stage < tables.stages - 1:
            time_ns += int(tables.exit_ns[chosen[end - 1]]) + tables.p2p_ns
        size = sum(state[first:end].tolist()) + tables.in_flight[stage] * sum(saved[first:end].tolist())
        stage_bytes.append(size + int(transient[first:end].max()))
        stage_ns.append(time_ns)
        first = end
    return Score(
        objective_ns=sum(stage_ns) + (tables.micro_batches - 1) * max(stage_ns),
        stage_ns=tuple(stage_ns),
        stage_bytes=tuple(stage_bytes),
        fits=all(size <= budget for size, budget in zip(stage_bytes, tables.budget_bytes, strict=True)),
    )
