"""The baselines: the usual dynamic program over a grid of whole MiB, and the same over layout classes. Needs numba.

best[v, s]: the least time of the layers so far within v MiB, the last of them with strategy s. The plain form tries
every pair of strategies, O(L V S^2); the form over layout classes O(L V (S + C^2)). Both go layer by layer from here,
so that a run can be given up.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from autopar.price import INFEASIBLE, Int

Float = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class GridResult:
    """Seconds, and the optimum on the grid (inf when nothing fits); None when the run was given up.

    layers: how many were done.
    """

    elapsed_s: float
    objective: float | None
    choice: tuple[int, ...] | None
    layers: int


@njit(cache=True)
def _layer(best: Float, time: Float, memory: Int, steps: Float, new: Float, mark: NDArray[np.uint8]) -> None:
    cells, count = best.shape
    for v in range(cells):
        for s in range(count):
            new[v, s] = np.inf
            if memory[s] <= v:
                row = best[v - memory[s]]
                least, at = np.inf, 0
                for before in range(count):
                    value = row[before] + steps[before, s]
                    if value < least:
                        least, at = value, before
                new[v, s] = least + time[s]
                mark[v, s] = at


@njit(cache=True)
def _class_layer(
    best: Float, time: Float, memory: Int, steps: Float, layout: Int, new: Float, mark: NDArray[np.uint8]
) -> None:
    cells, count = best.shape
    classes = len(steps)
    least, first = np.empty((cells, classes)), np.empty((cells, classes), dtype=np.uint8)
    found, at = np.empty(classes), np.empty(classes, dtype=np.uint8)
    for v in range(cells):
        found[:] = np.inf
        at[:] = 0
        for s in range(count):
            if best[v, s] < found[layout[s]]:
                found[layout[s]], at[layout[s]] = best[v, s], s
        for d in range(classes):
            least[v, d], first[v, d] = np.inf, 0
            for c in range(classes):
                if found[c] + steps[c, d] < least[v, d]:
                    least[v, d], first[v, d] = found[c] + steps[c, d], at[c]
    for v in range(cells):
        for s in range(count):
            new[v, s] = np.inf
            if memory[s] <= v:
                new[v, s] = least[v - memory[s], layout[s]] + time[s]
                mark[v, s] = first[v - memory[s], layout[s]]


def solve_grid(
    time_s: Float,
    memory_mib: Int,
    steps_s: Float,
    capacity_mib: int,
    *,
    layout: Int | None = None,
    limit_s: float = float("inf"),
) -> GridResult:
    """The optimum on the grid: over layout classes when `layout` names them, else over strategies.

    time_s[L, S] with inf where a layer cannot take a strategy; steps_s[S, S] or [L, S, S] (row 0 is not used).
    """
    began = time.perf_counter()
    layers, count = time_s.shape
    cells = capacity_mib + 1
    if cells < 1:
        return GridResult(elapsed_s=0.0, objective=float("inf"), choice=None, layers=layers)
    best, new = np.full((cells, count), np.inf), np.empty((cells, count))
    for s in range(count):
        best[int(memory_mib[0, s]) :, s] = time_s[0, s]
    marks = np.zeros((layers, cells, count), dtype=np.uint8)
    first = None if layout is None else np.unique(layout, return_index=True)[1]
    for layer in range(1, layers):
        if time.perf_counter() - began > limit_s:
            return GridResult(elapsed_s=time.perf_counter() - began, objective=None, choice=None, layers=layer)
        step = steps_s if steps_s.ndim == 2 else steps_s[layer]
        if layout is None or first is None:
            _layer(best, time_s[layer], memory_mib[layer], step, new, marks[layer])
        else:
            small = np.ascontiguousarray(step[np.ix_(first, first)])
            _class_layer(best, time_s[layer], memory_mib[layer], small, layout, new, marks[layer])
        best, new = new, best
    last = int(best[-1].argmin())
    objective = float(best[-1, last])
    choice: list[int] = []
    left = capacity_mib
    if np.isfinite(objective):
        for layer in range(layers - 1, -1, -1):
            choice.append(last)
            before = int(marks[layer, left, last])
            left -= int(memory_mib[layer, last])
            last = before
    return GridResult(
        elapsed_s=time.perf_counter() - began,
        objective=objective,
        choice=tuple(reversed(choice)) or None,
        layers=layers,
    )


def grid_inputs(
    time_ns: Int, memory_bytes: Int, transition_ns: Int, budget_bytes: int
) -> tuple[Float, Int, Float, int]:
    """The same tables for the grid: nanoseconds as floats, memory rounded up to MiB layer by layer."""
    mib = 1 << 20
    closed = (time_ns == INFEASIBLE) | (memory_bytes == INFEASIBLE)
    memory = np.where(closed, 0, memory_bytes)
    return (
        np.where(closed, np.inf, time_ns.astype(np.float64)),
        -(-memory // mib),
        np.where(transition_ns == INFEASIBLE, np.inf, transition_ns.astype(np.float64)),
        budget_bytes // mib,
    )
