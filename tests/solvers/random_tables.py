"""Small random tables with what makes solvers fail: ties, non-metric moves, gaps, tight budgets, large transients."""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar.price import INFEASIBLE, CostTables
from autopar.strategy import Strategy


def random_table(seed: int, *, layers: int = 5, columns: int = 3, **fixed: Any) -> CostTables:
    """A table of this seed; `fixed` overrides fields."""
    rng = np.random.default_rng(seed)
    units = int(rng.integers(1, layers + 1))
    count = int(rng.integers(1, columns + 1))
    stages = int(rng.integers(1, min(units, 4) + 1))
    scale, size = (int(rng.choice([3, 20, 1000])) for _ in range(2))
    moves = int(rng.choice([1, 3, 300]))
    kinds = rng.integers(0, rng.integers(1, units + 1), units)
    time_ns = rng.integers(0, scale, (units, count))[kinds]
    state, saved = rng.integers(0, size, (units, count))[kinds], rng.integers(0, size // 2 + 1, (units, count))[kinds]
    transient = rng.integers(0, size * 2, (units, count))[kinds] * int(rng.integers(0, 2))
    time_ns[rng.random((units, count)) < 0.1] = INFEASIBLE
    transition = rng.integers(0, moves, (count, count))
    if rng.random() < 0.5:
        np.fill_diagonal(transition, 0)
    micro_batches = int(rng.choice([1, 2, 5, 16]))
    in_flight = tuple(min(stages - stage, micro_batches) for stage in range(stages))
    middle = (state + saved).mean() * units / stages + transient.mean()
    budget = tuple(int(middle * rng.uniform(0.3, 1.6)) for _ in range(stages))
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
        "in_flight": in_flight,
        "budget_bytes": budget,
        "tied": bool(rng.random() < 0.3),
    }
    return CostTables(**{**values, **fixed})
