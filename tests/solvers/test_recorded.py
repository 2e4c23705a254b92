"""On the recorded searches of a peer: never slower than what it found, within memory that it would have rounded up."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

from autopar.solvers import score_chain, solve_chain
from autopar.units import MIB
from tests.solvers.recorded import FOLDER, UNITS_PER_S, recorded_stages

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the recorded searches are not beside this checkout")


def test_the_optimum_is_at_most_the_recorded_one() -> None:
    solved = 0
    for one in recorded_stages():
        name = (one.search, one.embedding, one.stage)
        time, memory, transition, budget = one.chain()
        found = solve_chain(time, memory, transition, budget)
        if not np.isfinite(one.cost_s):
            continue
        solved += 1
        # The record says what it means: its choice costs its cost, and fits.
        recorded, recorded_bytes = score_chain(time, memory, transition, one.choice)
        assert recorded / UNITS_PER_S + one.other_s == pytest.approx(one.cost_s, rel=1e-9), name
        assert recorded_bytes <= budget, name
        assert found.status == "optimal", name
        assert found.choice is not None, name
        assert found.objective_ns is not None, name
        assert found.objective_ns <= recorded, name
        needed_mib = sum(float(one.exact_mib[s]) for s in found.choice)
        assert needed_mib <= one.capacity_mib + len(found.choice) / MIB, name
    assert solved > 20


def test_with_the_rounded_memory_the_optimum_is_the_recorded_one() -> None:
    for one in recorded_stages():
        time, _, transition, _ = one.chain()
        found = solve_chain(time, one.memory_mib.astype(np.int64), transition, one.capacity_mib)
        name = (one.search, one.embedding, one.stage)
        assert (found.objective_ns is None) == (not np.isfinite(one.cost_s)), name
        if found.objective_ns is not None:
            assert found.objective_ns / UNITS_PER_S + one.other_s == pytest.approx(one.cost_s, rel=1e-9), name


@pytest.mark.slow
@pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")
def test_the_baseline_of_the_benchmark_is_the_recorded_program() -> None:
    from tests.bench.memory_grid import solve_grid

    for one in recorded_stages():
        memory = one.memory_mib.astype(np.int64)
        found = solve_grid(one.time_s, memory, one.transition_s, one.capacity_mib)
        name = (one.search, one.embedding, one.stage)
        assert found.objective is not None
        assert found.objective + one.other_s == pytest.approx(one.cost_s, rel=1e-12), name
        assert (found.choice is None) == (not np.isfinite(one.cost_s)), name
        if found.choice is not None:
            used = int(memory[np.arange(len(memory)), list(found.choice)].sum())
            assert used <= one.capacity_mib, name
