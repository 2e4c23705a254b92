"""Tables are made when they matter, and nothing else changes by it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster import Calibration
from autopar.cuts import cut_tables, legal_cuts
from autopar.price import INFEASIBLE
from autopar.solvers.pipeline import solve_pipeline
from autopar.solvers.quick import quick_bound
from tests.pricing import cluster_file, model_file, request


@pytest.mark.parametrize("compute_factor", [None, 0.5])
def test_floors_are_below_the_tables_and_spare_some_of_them(compute_factor: float | None) -> None:
    files = model_file(), cluster_file()
    if compute_factor is not None:
        calibration = Calibration(compute_factor=compute_factor)
        files = files[0], replace(files[1], cluster=replace(files[1].cluster, calibration=calibration))
    asked = request()
    legal, _ = legal_cuts(*files, asked)
    made, _ = cut_tables(*files, asked, legal)
    found = solve_pipeline(made.lower, shortlist=1, within=0.01, floors_ns=made.floors_ns)
    spared = len(made.cuts) - len(made.made)
    assert found
    assert spared > 0
    for floor_ns, tables in zip(made.floors_ns, made.lower, strict=True):
        assert 0 < floor_ns <= quick_bound(tables) < INFEASIBLE
    assert found == solve_pipeline(made.lower, shortlist=1, within=0.01)
