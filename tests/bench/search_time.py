"""How long the exact search takes beside the usual one: `python -m tests.bench.search_time`. Asserts nothing.

Same tables, same run, medians of 5, interleaved, in seconds of the processor (all methods run on one thread); a
method that has used up its limit is not repeated, a single run that does is given up. Needs numba (the extra `fast`).
Three tables, chosen by --parts:

chains: one chain on one stage, a whole call of `solve_chain` on the caller's arrays (checks included) in numpy and in
numba; against the grid of MiB over strategies and over layout classes, both compiled, from arrays in their own form.
whole: every number of stages and micro-batches, `solve_pipeline` with a shortlist of 8; tables made beforehand.
growth: the whole search in numpy as layers and GPUs grow.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

import numba
import numpy as np

from autopar.runtime.machine import cpu_name
from autopar.solvers import ChainChoice, solve_chain, solve_pipeline
from tests.bench.cost_tables import Case, ChainTables, cases, chain_tables, decoder, pipeline_tables, scaled
from tests.bench.memory_grid import GridResult, grid_inputs, solve_grid
from tests.solvers.recorded import recorded_stages

REPEATS = 5
METHODS = ("grid", "class grid", "numpy", "numba")


def machine() -> str:
    """Where and when this runs."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores of {cpu_name()}, load {load}, "
        f"Python {platform.python_version()}, numpy {np.__version__}, numba {numba.__version__}"
    )


def check_the_baseline() -> str:
    """How far the grid is from the recorded optima of the dumps."""
    worst, count = 0.0, 0
    for one in recorded_stages():
        found = solve_grid(one.time_s, one.memory_mib.astype(np.int64), one.transition_s, one.capacity_mib)
        assert found.objective is not None
        cost = found.objective + one.other_s
        if np.isfinite(one.cost_s) or np.isfinite(cost):
            worst = max(worst, abs(cost / one.cost_s - 1))
        count += 1
    return (
        f"The grid reproduces {count} recorded optima with a relative difference of {worst:.0e}."
        if count
        else "No recordings."
    )


def shown(seconds: float) -> str:
    """Milliseconds in three digits."""
    ms = seconds * 1e3
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def median_times(methods: dict[str, Callable[[], object]], limit_s: float) -> dict[str, list[float]]:
    """The times of each method, interleaved, until 5 or until it has used up its limit."""
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(REPEATS):
        for name, call in methods.items():
            if sum(times[name]) < limit_s:
                began = time.process_time()
                call()
                times[name].append(time.process_time() - began)
    return times


def compare_chain(case: Case, tables: ChainTables, limit_s: float) -> str:
    """One row of the table of chains."""
    arrays = (tables.time_ns, tables.memory_bytes, tables.transition_ns, tables.budget_bytes)
    inputs = grid_inputs(*arrays)
    grids: dict[str, GridResult] = {}
    choices: dict[str, ChainChoice] = {}

    def on_grid(name: str, layout: np.ndarray | None) -> None:  # type: ignore[type-arg]
        grids[name] = solve_grid(*inputs, layout=layout, limit_s=limit_s)

    def exact(engine: str) -> None:
        choices[engine] = solve_chain(*arrays, layout=tables.layout, engine=engine)  # type: ignore[arg-type]

    times = median_times(
        {
            "grid": partial(on_grid, "grid", None),
            "class grid": partial(on_grid, "class grid", tables.layout),
            "numpy": partial(exact, "numpy"),
            "numba": partial(exact, "numba"),
        },
        limit_s,
    )
    one = choices["numpy"]
    if replace(one, elapsed_s=0.0) != replace(choices["numba"], elapsed_s=0.0):
        raise SystemExit(f"{case.name}: numpy and numba differ")
    cells, medians = [], {}
    for name in METHODS:
        medians[name] = statistics.median(times[name])
        given_up = name in grids and grids[name].objective is None
        if given_up:
            # Layers take equally long.
            medians[name] *= (len(tables.time_ns) - 1) / max(1, grids[name].layers - 1)
        count = "" if len(times[name]) == REPEATS else f" ({len(times[name])}x)"
        cells.append(
            (f"> {limit_s * 1e3:.0f}, about {shown(medians[name])}" if given_up else shown(medians[name])) + count
        )
    ratios = [
        f"{medians[base] / medians[ours]:.0f}x" for base in ("grid", "class grid") for ours in ("numpy", "numba")
    ]
    found = grids["grid"].objective
    if found is None:
        found = grids["class grid"].objective
    if one.objective_ns is None or found is None:
        lost = "-"
    elif not np.isfinite(found):
        lost = "nothing fits"
    else:
        lost = f"{100 * (found / one.objective_ns - 1):.4f} %"
    layers, count = tables.time_ns.shape
    return f"| {case.name} | {layers} x {count} | {' | '.join(cells)} | {' | '.join(ratios)} | {lost} | {one.status} |"


def chains(chosen: list[Case], limit_s: float) -> None:
    """Print the table of chains."""
    print("| chain | layers x strategies | grid ms | class grid ms | numpy ms | numba ms |", end="")
    print(" grid / numpy | grid / numba | class / numpy | class / numba | lost by the grid | status |")
    print("|---" * 12 + "|")
    for case in chosen:
        print(compare_chain(case, chain_tables(case), limit_s), flush=True)


def whole(chosen: list[Case], limit_s: float) -> None:
    """Print the table of whole searches."""
    print("| search | tables | making them ms | numpy ms | numba ms | stages x micro-batches | objective s | status |")
    print("|---" * 8 + "|")
    for case in chosen:
        began = time.process_time()
        tables = pipeline_tables(case)
        made_s = time.process_time() - began
        found = {engine: solve_pipeline(tables, engine=engine) for engine in ("numpy", "numba")}  # type: ignore[arg-type]
        if found["numpy"] != found["numba"]:
            raise SystemExit(f"{case.name}: numpy and numba differ")
        times = median_times(
            {engine: partial(solve_pipeline, tables, engine=engine) for engine in ("numpy", "numba")}, limit_s
        )
        best = found["numpy"][0] if found["numpy"] else None
        took = " | ".join(shown(statistics.median(times[engine])) for engine in ("numpy", "numba"))
        row = f"| {case.name} | {len(tables)} | {shown(made_s)} | {took} |"
        if best is None:
            print(f"{row} - | - | nothing fits |", flush=True)
        else:
            at = tables[best.table]
            status = "optimal" if best.lower_bound_ns == best.objective_ns else "gap"
            print(f"{row} {at.stages} x {at.micro_batches} | {best.objective_ns / 1e9:.3f} | {status} |", flush=True)


def growth(limit_s: float) -> None:
    """Print the time of whole searches as layers and GPUs grow; nothing larger after one over the limit."""
    base = Case(
        name="7B",
        layers=decoder(32, 4096, 11008, 1.0, 4096, 32000),
        devices=8,
        global_batch=64,
        micro_batches=8,
        budget_gib=24,
    )
    devices = (8, 64, 512, 4096, 16384)
    print("| layers | " + " | ".join(f"{count} GPUs" for count in devices) + " |")
    print("|---" * (1 + len(devices)) + "|")
    slow: set[int] = set()
    for layers in (32, 64, 128, 256, 512, 1024):
        cells: list[str] = []
        for count in devices:
            if count in slow:
                cells.append("-")
                continue
            tables = pipeline_tables(replace(scaled(base, layers=layers, devices=count), budget_gib=24 * layers / 32))
            began = time.process_time()
            found = solve_pipeline(tables, stop=lambda began=began: time.process_time() - began > limit_s)
            took = time.process_time() - began
            gap = 1 - found[0].lower_bound_ns / found[0].objective_ns if found else 0.0
            cells.append(f"{shown(took)}{f' (gap {100 * gap:.2g} %)' if gap else ''}")
            if took >= limit_s:
                slow.add(count)
        print(f"| {layers} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--limit-s", type=float, default=20.0, help="of each method and case")
    parser.add_argument("--parts", default="chains,whole", help="of chains,whole,growth")
    asked = parser.parse_args()
    chosen = [case for case in cases() if asked.only in case.name]
    print(machine())
    print(check_the_baseline())
    # Compile, or load what was compiled, before anything is timed.
    warm = Case(name="warm-up", layers=chosen[0].layers[:4], devices=8, global_batch=64, micro_batches=8, budget_gib=8)
    compare_chain(warm, chain_tables(warm), asked.limit_s)
    for case in chosen:
        tables = chain_tables(case)
        solve_chain(tables.time_ns, tables.memory_bytes, tables.transition_ns, tables.budget_bytes, engine="numba")
    parts = asked.parts.split(",")
    if "chains" in parts:
        print()
        chains(chosen, asked.limit_s)
    if "whole" in parts:
        print()
        whole(chosen, asked.limit_s)
    if "growth" in parts:
        print()
        growth(asked.limit_s)
    print()
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
