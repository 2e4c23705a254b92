"""The integer program agrees with the solver and with brute force, and objects to a wrong choice."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.errors import RunError
from autopar.price import Choice
from autopar.solvers import certify, solve_table
from autopar.solvers.brute import brute_table, every_choice
from autopar.solvers.certificate import CP_SAT, HIGHS
from autopar.solvers.counted import nothing_at_or_below
from autopar.solvers.ilp import cp_sat
from tests.solvers.random_tables import random_table


def test_both_provers_agree() -> None:
    for seed in range(25):
        tables = random_table(seed)
        assert certify(tables, solve_table(tables)) == (CP_SAT, HIGHS), seed


def test_the_program_alone_equals_brute_force() -> None:
    for seed in range(200, 230):
        tables = random_table(seed)
        expected = brute_table(tables)
        assert cp_sat(tables).objective_ns(tables) == (None if expected is None else expected[0]), seed


def test_the_count_form_never_refutes_what_exists() -> None:
    proven = 0
    for seed in range(60):
        tables = random_table(seed)
        best = solve_table(tables)
        if best.strategies is None:
            continue
        assert not nothing_at_or_below(tables, best.lower_bound_ns), seed
        proven += nothing_at_or_below(tables, best.lower_bound_ns - 1)
    assert proven > 20


def test_a_worse_choice_is_objected_to() -> None:
    for seed in range(60):
        tables = random_table(seed)
        best = solve_table(tables)
        fitting = [(r.objective_ns, n, s) for n, s, r in every_choice(tables) if r.fits]
        worst = max(fitting, default=None)
        if worst is None or worst[0] == best.lower_bound_ns:
            continue
        wrong = Choice(status="optimal", layers_per_stage=worst[1], strategies=worst[2], lower_bound_ns=worst[0])
        with pytest.raises(RunError, match="contradicts"):
            certify(tables, wrong)
        honest = replace(wrong, status="gap", lower_bound_ns=best.lower_bound_ns)
        assert certify(tables, honest) == (CP_SAT,)
        return
    pytest.fail("no table with a choice worse than the best")


def test_planning_loads_no_solver_library_and_certifying_prints_nothing() -> None:
    code = (
        "import sys; import autopar.solvers\n"
        "assert not {'ortools', 'pulp', 'highspy', 'torch'} & set(sys.modules)\n"
        "from tests.solvers.random_tables import random_table\n"
        "table = random_table(4)\n"
        "autopar.solvers.certify(table, autopar.solvers.solve_table(table))\n"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=root)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
