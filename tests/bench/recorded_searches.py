"""The optimum beside the recorded ones of a peer: `python -m tests.bench.recorded_searches`. Asserts nothing.

ratio: our optimum / the recorded one, embedding included, both in the peer's own cost; memory is not rounded up to
MiB per layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autopar.solvers import solve_chain
from tests.solvers.recorded import FOLDER, UNITS_PER_S, recorded_stages


@dataclass(kw_only=True)
class Tally:
    """What happened in one recorded search."""

    ratios: list[float] = field(default_factory=list)
    infeasible: int = 0
    found_where_infeasible: int = 0
    ms: list[float] = field(default_factory=list)


def main() -> None:
    """Print the table."""
    if not FOLDER.is_dir():
        raise SystemExit(f"no recorded searches in {FOLDER}")
    searches: dict[str, Tally] = {}
    for one in recorded_stages():
        tally = searches.setdefault(one.search, Tally())
        found = solve_chain(*one.chain())
        tally.ms.append(found.elapsed_s * 1e3)
        if not np.isfinite(one.cost_s):
            tally.infeasible += 1
            tally.found_where_infeasible += found.objective_ns is not None
        elif found.objective_ns is not None:
            tally.ratios.append((found.objective_ns / UNITS_PER_S + one.other_s) / one.cost_s)
    print("| search | problems | worst ratio | median ratio | best ratio | recorded infeasible (solved here) | ms |")
    print("|---|---|---|---|---|---|---|")
    for name, tally in searches.items():
        worst, median, best = (f"{value:.7f}" for value in np.quantile(tally.ratios, [1, 0.5, 0]))
        lost = f"{tally.infeasible} ({tally.found_where_infeasible})"
        count = len(tally.ratios) + tally.infeasible
        print(f"| {name} | {count} | {worst} | {median} | {best} | {lost} | {np.median(tally.ms):.1f} |")


if __name__ == "__main__":
    main()
