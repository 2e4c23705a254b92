"""Small random tables with what makes solvers fail: ties, non-metric moves, gaps, tight budgets, large transients."""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar.price import INFEASIBLE, CostTables, Int, score
from autopar.strategy import Strategy


def random_chain(seed: int, *, layers: int = 5, columns: int = 4) -> tuple[Int, Int, Int, int]:
    """time_ns, memory_bytes, transition_ns, budget_bytes; the budget is near that of some choice, nearly always."""
    rng = np.random.default_rng(seed)
    units, count = int(rng.integers(1, layers + 1)), int(rng.integers(1, columns + 1))
    kinds = rng.integers(0, rng.integers(1, units + 1), units)
    speed, size, moves = (int(rng.choice(choices)) for choices in ([3, 20, 1000], [3, 20, 1000], [1, 3, 10, 300]))
    time_ns = rng.integers(0, speed, (units, count))[kinds]
    memory = rng.integers(0, size, (units, count))[kinds]
    if rng.random() < 0.5:
        # Less memory costs time, so that the budget decides.
        time_ns, memory = np.sort(time_ns, axis=1), -np.sort(-memory, axis=1)
    transition = rng.integers(0, moves, (units, count, count) if rng.random() < 0.5 else (count, count))
    if rng.random() < 0.5 and transition.ndim == 2:
        np.fill_diagonal(transition, 0)
    some = [int(memory[layer, rng.integers(count)]) for layer in range(units)]
    budget = sum(some) + int(rng.integers(-1, 2))
    time_ns[rng.random((units, count)) < 0.08] = INFEASIBLE
    memory[rng.random((units, count)) < 0.02] = INFEASIBLE
    transition[rng.random(transition.shape) < 0.05] = INFEASIBLE
    return time_ns, memory, transition, budget


def random_table(seed: int, *, layers: int = 5, columns: int = 3, **fixed: Any) -> CostTables:
    """A table of this seed; the budgets are near those of some choice; `fixed` overrides fields."""
    rng = np.random.default_rng(seed)
    units, count = int(rng.integers(1, layers + 1)), int(rng.integers(1, columns + 1))
    stages = int(rng.integers(1, min(units, 4) + 1))
    speed, size, moves = (int(rng.choice(choices)) for choices in ([3, 20, 1000], [3, 20, 1000], [1, 3, 10, 300]))
    kinds = rng.integers(0, rng.integers(1, units + 1), units)
    time_ns = rng.integers(0, speed, (units, count))[kinds]
    state = rng.integers(0, size, (units, count))[kinds]
    saved = rng.integers(0, size // 2 + 1, (units, count))[kinds]
    transient = rng.integers(0, size * 2, (units, count))[kinds] * int(rng.integers(0, 2))
    if rng.random() < 0.5:
        time_ns, state = np.sort(time_ns, axis=1), -np.sort(-state, axis=1)
    transition = rng.integers(0, moves, (count, count))
    if rng.random() < 0.5:
        np.fill_diagonal(transition, 0)
    micro_batches = int(rng.choice([1, 2, 5, 16]))
    tied = bool(rng.random() < 0.3)
    some = rng.integers(0, count, units)
    some[-1] = some[0] if tied else some[-1]
    values: dict[str, Any] = {
        "stages": stages,
        "micro_batches": micro_batches,
        "schedule": "1f1b",
        "strategies": tuple(Strategy(dp=2**place) for place in range(count)),
        "time_ns": time_ns,
        "state_bytes": state,
        "saved_bytes": saved,
        "transient_bytes": transient,
        "transition_ns": transition,
        "entry_ns": rng.integers(0, moves, count),
        "exit_ns": rng.integers(0, moves, count),
        "p2p_ns": int(rng.integers(0, moves)),
        "layout": np.arange(count),
        "in_flight": tuple(min(stages - stage, micro_batches) for stage in range(stages)),
        "budget_bytes": (0,) * stages,
        "tied": tied,
    }
    cuts = np.sort(rng.choice(np.arange(1, units), stages - 1, replace=False)) if stages > 1 else np.array([], int)
    layers_per_stage = tuple(int(n) for n in np.diff([0, *cuts, units]))
    needed = score(CostTables(**values), layers_per_stage, tuple(int(s) for s in some)).stage_bytes
    values["budget_bytes"] = tuple(max(0, need + int(rng.integers(-1, 2))) for need in needed)
    time_ns[rng.random((units, count)) < 0.08] = INFEASIBLE
    return CostTables(**{**values, **fixed})
