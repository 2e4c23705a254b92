"""How long the simulation of a step takes: interleaved medians, first call (the program is built) and later calls.

    python tests/bench/pipeline_speed.py [--rounds 9]

Every case has its turn in every round. CPU milliseconds of this process, so that other programs matter little.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from autopar.orders import actions
from autopar.pipeline import StageTimes, simulate, step
from autopar.programs import program
from autopar.request import Schedule
from autopar.runtime.machine import cpu_name
from autopar.sharing import Sharing

CASES: list[tuple[Schedule, int, int, int, float | None]] = [
    ("1f1b", 8, 1, 64, 5.0),
    ("1f1b", 64, 1, 512, 250.0),
    ("gpipe", 64, 1, 512, 250.0),
    ("interleaved-1f1b", 8, 4, 64, None),
    ("zbv", 8, 2, 64, None),
    ("dualpipev", 64, 2, 512, None),
]
"""Schedule, ranks, stages a rank, micro-batches, the limit in milliseconds that it must keep."""


def _ms(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return 1e3 * (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    found: dict[tuple[int, str], list[float]] = {}
    for _ in range(rounds):
        for number, (schedule, pp, each, count, _) in enumerate(CASES):
            stages = [StageTimes(forward_s=1.0 + s % 3, backward_s=2.0) for s in range(pp * each)]
            asked: dict[str, Any] = {"schedule": schedule, "micro_batches": count, "send_s": 0.01, "pp": pp}
            sharing = Sharing(speed=(2.0, *[1.0] * (pp - 1)), ranks_per_stage=1, ranks_per_node=pp)
            actions.cache_clear()
            program.cache_clear()
            calls: dict[str, Callable[[], object]] = {
                "first": partial(step, stages, **asked),
                "again": partial(step, stages, **asked),
            }
            calls["timeline"] = partial(simulate, stages, **asked)
            if pp <= 8:
                calls["shared cores"] = partial(step, stages, sharing=sharing, **asked)
            for name, call in calls.items():
                found.setdefault((number, name), []).append(_ms(call))
    print(f"{cpu_name()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(
        f"{'schedule':<18} ranks stages micro-batches  {'first':>8} {'again':>8} {'timeline':>9} {'shared':>8}  limit"
    )
    late = False
    for number, (schedule, pp, each, count, limit) in enumerate(CASES):
        columns = ("first", "again", "timeline", "shared cores")
        medians = [statistics.median(found[number, c]) if (number, c) in found else None for c in columns]
        words = " ".join(f"{'' if m is None else format(m, '.2f'):>8}" for m in medians)
        over = limit is not None and max(medians[:2]) > limit  # type: ignore[type-var]
        late |= over
        print(f"{schedule:<18} {pp:>5} {each:>6} {count:>13}  {words}  {limit or ''} {'LATE' if over else ''}")
    sys.exit(1 if late else 0)


if __name__ == "__main__":
    main()
