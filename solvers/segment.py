"""One segment of the chain as the exact solver sees it: layer kinds with their options, layout classes, transitions.

Times and memories are kept relative to the cheapest of each kind, so that the floating-point bounds work on small
numbers; the constant parts are added again at the end, in integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autopar.price import INFEASIBLE, Int

FORBIDDEN = 1 << 60
"""A transition that cannot be taken, once masked: larger than any total, and two of them still fit into int64."""
LARGEST_TOTAL_NS = 1 << 50
"""Totals stay below this, so that float64 bounds are wrong by less than a quarter of a nanosecond."""

Float = NDArray[np.float64]

Engine = Literal["numpy", "numba"]
"""What runs the inner loops; the results are the same bit for bit."""


@cache
def is_compiled(engine: Engine) -> bool:
    """Whether the compiled loops run: when "numba" was asked for and it is installed; without it numpy runs.

    ValueError for other names. Nothing is imported here: numba takes half a second.
    """
    if engine not in ("numpy", "numba"):
        raise ValueError(f'engine must be "numpy" or "numba", is {engine!r}')
    return engine == "numba" and find_spec("numba") is not None


def distinct(values: Int) -> Int:
    """The distinct values, ascending: as `np.unique`, which loads numpy.ma (10 ms of a process)."""
    ordered = np.sort(values, axis=None)
    return ordered[np.concatenate([[True], ordered[1:] != ordered[:-1]])] if ordered.size else ordered


@dataclass(frozen=True, kw_only=True, eq=False)
class Kind:
    """The options of one kind of layer, without dominated ones, in the order (group, memory, time).

    time_ns and memory_bytes are relative to base_time_ns and base_memory_bytes (the least of the kind);
    transient_bytes is absolute; group: layout class; strategy: column of the caller's table.
    """

    base_time_ns: int
    base_memory_bytes: int
    time_ns: Int
    memory_bytes: Int
    transient_bytes: Int
    group: Int
    strategy: Int


@dataclass(frozen=True, kw_only=True, eq=False)
class Segment:
    """A chain of layers: layer l is of kind `order[l]`, the transition before it is `steps[step_order[l]]`.

    steps[Q, C, C]: nanoseconds from group to group, FORBIDDEN where impossible (`step_order[0]` is not used).
    Fits when sum of memory + max of transient <= budget_bytes. compiled: which form of the inner loops runs.
    """

    kinds: tuple[Kind, ...]
    order: Int
    steps: Int
    step_order: Int
    budget_bytes: int
    compiled: bool = False

    @cached_property
    def base_time_ns(self) -> int:
        """The part of the time that every choice has."""
        order: list[int] = self.order.tolist()
        return sum(self.kinds[kind].base_time_ns for kind in order)

    @cached_property
    def spare_bytes(self) -> int:
        """The budget less what every choice needs (without transients)."""
        order: list[int] = self.order.tolist()
        return self.budget_bytes - sum(self.kinds[kind].base_memory_bytes for kind in order)

    @cached_property
    def grid(self) -> Grid:
        """The options of all kinds in one padded block."""
        return Grid.of(self.kinds, self.steps.shape[1])

    def total(self, path: Int) -> tuple[int, int, int]:
        """Relative time and memory, and the largest transient, of the option index chosen at each layer."""
        chosen = [(self.kinds[kind], option) for kind, option in zip(self.order, path, strict=True)]
        time_ns = sum(int(kind.time_ns[option]) for kind, option in chosen)
        groups = [int(kind.group[option]) for kind, option in chosen]
        for layer in range(1, len(groups)):
            time_ns += int(self.steps[self.step_order[layer], groups[layer - 1], groups[layer]])
        memory = sum(int(kind.memory_bytes[option]) for kind, option in chosen)
        return time_ns, memory, max(int(kind.transient_bytes[option]) for kind, option in chosen)


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """Options of K kinds by class: [K, C, N], `option` -1 and infinite time where there is none."""

    time_ns: Float
    memory_bytes: Float
    transient_bytes: Float
    option: Int

    @classmethod
    def of(cls, kinds: tuple[Kind, ...], groups: int) -> Grid:
        """The grid of these kinds."""
        width = max(int(np.bincount(kind.group, minlength=groups).max()) for kind in kinds)
        shape = (len(kinds), groups, width)
        time_ns, memory, transient = np.full(shape, np.inf), np.zeros(shape), np.full(shape, np.inf)
        option = np.full(shape, -1, dtype=np.int64)
        for index, kind in enumerate(kinds):
            first = np.searchsorted(kind.group, np.arange(groups))
            place = np.arange(len(kind.group)) - first[kind.group]
            time_ns[index, kind.group, place] = kind.time_ns
            memory[index, kind.group, place] = kind.memory_bytes
            transient[index, kind.group, place] = kind.transient_bytes
            option[index, kind.group, place] = np.arange(len(kind.group))
        return cls(time_ns=time_ns, memory_bytes=memory, transient_bytes=transient, option=option)


def kind_of(
    time_ns: Int, memory_bytes: Int, transient_bytes: Int, group: Int, allowed: NDArray[np.bool_]
) -> Kind | None:
    """The options of one layer that are allowed and not dominated; None when there is none.

    An option is dominated by another of its class that is no worse in time, memory and transient (ties: the lower
    column stays). O(S^2) in numpy.
    """
    columns = np.flatnonzero(allowed)
    if not columns.size:
        return None
    rows = (transient_bytes[columns], time_ns[columns], memory_bytes[columns], group[columns])
    columns = columns[np.lexsort((columns, *rows))]
    t, m, x, g = time_ns[columns], memory_bytes[columns], transient_bytes[columns], group[columns]
    no_worse = (t[:, None] <= t) & (m[:, None] <= m) & (x[:, None] <= x) & (g[:, None] == g)
    # In this order a dominating option comes first, so the upper triangle is enough.
    keep = ~np.triu(no_worse, 1).any(axis=0)
    columns, t, m, x, g = columns[keep], t[keep], m[keep], x[keep], g[keep]
    base_t, base_m = int(t.min()), int(m.min())
    return Kind(
        base_time_ns=base_t,
        base_memory_bytes=base_m,
        time_ns=t - base_t,
        memory_bytes=m - base_m,
        transient_bytes=x,
        group=g,
        strategy=columns,
    )


def groups_of(transition_ns: Int) -> tuple[Int, Int]:
    """Layout classes of the strategies, and the transitions between classes, FORBIDDEN where INFEASIBLE.

    transition_ns[Q, S, S]; two strategies are of one class when all their rows and columns are equal. Returns
    group[S] and steps[Q, C, C].
    """
    count = transition_ns.shape[1]
    both = np.concatenate([transition_ns.transpose(1, 0, 2), transition_ns.transpose(2, 0, 1)], axis=2)
    found: dict[bytes, int] = {}
    group = np.array([found.setdefault(row.tobytes(), len(found)) for row in both.reshape(count, -1)], dtype=np.int64)
    first = np.array([int(np.flatnonzero(group == g)[0]) for g in range(len(found))], dtype=np.int64)
    steps = transition_ns[:, first[:, None], first[None, :]]
    return group, np.where(steps == INFEASIBLE, FORBIDDEN, steps)
