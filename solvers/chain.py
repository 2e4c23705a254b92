"""The best strategy for every layer of one chain within a memory budget, exactly."""

from __future__ import annotations

import time as clock
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from autopar.price import INFEASIBLE, Int
from autopar.solvers.labels import MOST_LABELS, solve_segment
from autopar.solvers.segment import LARGEST_TOTAL_NS, Engine, Kind, Segment, groups_of, is_compiled, kind_of


@dataclass(frozen=True, kw_only=True)
class ChainChoice:
    """What was chosen for a chain, and how good it is.

    choice: one column per layer, None when nothing fits; objective_ns and memory_bytes: added up by `score_chain`;
    lower_bound_ns: no choice within the budget is below; status "optimal" when they agree, "gap" when not; labels:
    how many the search kept; elapsed_s.
    """

    status: Literal["optimal", "gap", "infeasible"]
    choice: tuple[int, ...] | None
    objective_ns: int | None
    memory_bytes: int | None
    lower_bound_ns: int
    labels: int
    elapsed_s: float

    @property
    def gap(self) -> float:
        """The part of the objective that is not proven necessary; 0 when nothing fits."""
        return 0.0 if self.objective_ns is None else 1 - self.lower_bound_ns / max(1, self.objective_ns)


def score_chain(time_ns: Int, memory_bytes: Int, transition_ns: Int, choice: tuple[int, ...]) -> tuple[int, int]:
    """Nanoseconds and bytes of a choice, added up from the tables and nothing else.

    Raises ValueError when the choice does not cover the chain or takes an infeasible entry.
    """
    if len(choice) != len(time_ns):
        raise ValueError(f"{len(choice)} choices for {len(time_ns)} layers")
    layers, columns = np.arange(len(choice)), np.array(choice, dtype=np.int64)
    pairs = columns[:-1], columns[1:]
    times = time_ns[layers, columns].tolist()
    moves = (transition_ns[layers[1:], *pairs] if transition_ns.ndim == 3 else transition_ns[pairs]).tolist()
    sizes = memory_bytes[layers, columns].tolist()
    if INFEASIBLE in times or INFEASIBLE in moves or INFEASIBLE in sizes:
        raise ValueError("the choice takes an infeasible entry")
    return sum(times) + sum(moves), sum(sizes)


def solve_chain(
    time_ns: ArrayLike,
    memory_bytes: ArrayLike,
    transition_ns: ArrayLike,
    budget_bytes: int,
    layout: ArrayLike | None = None,
    *,
    most_labels: int = MOST_LABELS,
    engine: Engine = "numpy",
) -> ChainChoice:
    """The choice of least time whose memory fits: sum of time and of transitions, sum of memory <= budget_bytes.

    time_ns, memory_bytes: int64[L, S], INFEASIBLE where a layer cannot take a strategy; transition_ns: int64[S, S] or
    [L, S, S], entry [l, a, b] is paid before layer l for going from a to b (row 0 is not used, INFEASIBLE forbids a
    pair); layout[S]: layout class of each strategy (found from transition_ns when None); engine: "numba" compiles
    the inner loops where it is installed, with the same result.

    Exact for any transitions. When more than `most_labels` candidates of one layer stay, times are rounded and the
    status is "gap" with a certified bound. Nothing fits: status "infeasible", nothing is raised.
    Raises ValueError for wrong shapes or types, negative entries, totals over 2^50 ns, or strategies of one layout
    class whose transitions differ.
    """
    began = clock.perf_counter()
    times, sizes, moves = (
        _int64(name, value)
        for name, value in (("time_ns", time_ns), ("memory_bytes", memory_bytes), ("transition_ns", transition_ns))
    )
    _check_shapes(times, sizes, moves)
    if moves.ndim == 3:
        moves = moves.copy()
        moves[0] = moves[1] if len(moves) > 1 else 0
    _check_values(times, sizes, moves)
    steps = moves[None] if moves.ndim == 2 else moves
    group, classes = groups_of(steps)
    if layout is not None:
        _check_layout(_int64("layout", layout), group)
    if moves.ndim == 2:
        step_order = np.zeros(len(times), dtype=np.int64)
    else:
        known: dict[bytes, int] = {}
        step_order = np.array([known.setdefault(step.tobytes(), len(known)) for step in classes], dtype=np.int64)
        classes = classes[np.unique(step_order, return_index=True)[1]]
    segment = _segment(times, sizes, group, classes, step_order, budget_bytes, is_compiled(engine))
    solved = None if segment is None else solve_segment(segment, most_labels=most_labels)
    if segment is None or solved is None or solved.path is None:
        return ChainChoice(
            status="infeasible",
            choice=None,
            objective_ns=None,
            memory_bytes=None,
            lower_bound_ns=INFEASIBLE,
            labels=0 if solved is None else solved.labels,
            elapsed_s=clock.perf_counter() - began,
        )
    path = zip(segment.order, solved.path, strict=True)
    choice = tuple(int(segment.kinds[kind].strategy[option]) for kind, option in path)
    objective, memory = score_chain(times, sizes, moves, choice)
    return ChainChoice(
        status="optimal" if solved.lower_ns == objective else "gap",
        choice=choice,
        objective_ns=objective,
        memory_bytes=memory,
        lower_bound_ns=solved.lower_ns,
        labels=solved.labels,
        elapsed_s=clock.perf_counter() - began,
    )


def _segment(
    times: Int, sizes: Int, group: Int, steps: Int, step_order: Int, budget: int, compiled: bool
) -> Segment | None:
    """The solver's form of the chain; None when a layer has no strategy at all."""
    known: dict[bytes, int] = {}
    kinds: list[Kind] = []
    order = []
    for t, m in zip(times, sizes, strict=True):
        key = t.tobytes() + m.tobytes()
        if key not in known:
            allowed = (t != INFEASIBLE) & (m != INFEASIBLE)
            kind = kind_of(t, m, np.zeros_like(m), group, allowed)
            if kind is None:
                return None
            known[key] = len(kinds)
            kinds.append(kind)
        order.append(known[key])
    return Segment(
        kinds=tuple(kinds),
        order=np.array(order, dtype=np.int64),
        steps=steps,
        step_order=step_order,
        budget_bytes=budget,
        compiled=compiled,
    )


def _int64(name: str, value: ArrayLike) -> Int:
    array = np.asarray(value)
    if not np.issubdtype(array.dtype, np.signedinteger):
        raise ValueError(f"{name} must be int64, is {array.dtype}")
    return array.astype(np.int64)


def _check_shapes(times: Int, sizes: Int, moves: Int) -> None:
    if times.ndim != 2 or not times.size or sizes.shape != times.shape:
        raise ValueError(f"time_ns and memory_bytes must both be [L, S], are {times.shape} and {sizes.shape}")
    layers, count = times.shape
    if moves.shape not in ((count, count), (layers, count, count)):
        raise ValueError(f"transition_ns must be [S, S] or [L, S, S] for {layers} x {count}, is {moves.shape}")


def _check_values(times: Int, sizes: Int, moves: Int) -> None:
    layers = len(times)
    if min(times.min(), sizes.min(), moves.min()) < 0:
        raise ValueError("a negative entry in time_ns, memory_bytes or transition_ns")
    largest = np.where(times == INFEASIBLE, 0, times).max(axis=1).astype(float).sum()
    largest += layers * float(np.where(moves == INFEASIBLE, 0, moves).max())
    if largest >= LARGEST_TOTAL_NS:
        raise ValueError("a chain whose total may reach 2^50 ns: use a coarser unit of time")
    if np.where(sizes == INFEASIBLE, 0, sizes).max(axis=1).astype(float).sum() >= LARGEST_TOTAL_NS:
        raise ValueError("a chain whose memory may reach 2^50 bytes: use a coarser unit of memory")


def _check_layout(layout: Int, group: Int) -> None:
    if layout.shape != group.shape:
        raise ValueError(f"layout must have one entry per strategy, is {layout.shape}")
    for name in np.unique(layout):
        if len(np.unique(group[layout == name])) > 1:
            raise ValueError(f"strategies of layout class {name} differ in transition_ns")
