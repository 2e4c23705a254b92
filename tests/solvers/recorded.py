"""The recorded searches of a peer: the inputs and results of its dynamic program, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autopar.price import Int
from autopar.units import MIB

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "galvatron_dp"
UNITS_PER_S = 10**12
"""Picoseconds, because the tie-breakers of the recorded transitions are below a nanosecond."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedStage:
    """One problem of the peer: the layers of one stage beside one embedding strategy.

    time_s[L, S], transition_s[L, S, S] (row 0 is not paid), memory_mib[L, S] rounded up per layer and
    exact_mib[S] not rounded (equal for all layers); capacity_mib: the budget less what the embedding takes; other_s:
    its time; cost_s: the recorded optimum, other_s included, inf when nothing fitted; choice: its columns.
    """

    search: str
    embedding: int
    stage: int
    time_s: NDArray[np.float64]
    transition_s: NDArray[np.float64]
    memory_mib: NDArray[np.int32]
    exact_mib: NDArray[np.float64]
    capacity_mib: int
    other_s: float
    cost_s: float
    choice: tuple[int, ...]

    def chain(self) -> tuple[Int, Int, Int, int]:
        """time, memory, transition and budget for `solve_chain`: whole picoseconds, and bytes not rounded to MiB."""
        layers = len(self.time_s)
        memory = np.ceil(self.exact_mib * MIB).astype(np.int64)
        return (
            np.rint(self.time_s * UNITS_PER_S).astype(np.int64),
            np.broadcast_to(memory, (layers, len(memory))),
            np.rint(self.transition_s * UNITS_PER_S).astype(np.int64),
            self.capacity_mib * MIB,
        )


def recorded_stages(folder: Path = FOLDER) -> Iterator[RecordedStage]:
    """Every recorded problem, in the order of the files."""
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as file:
            dump = {name: file[name] for name in file.files}
        first = np.concatenate([[0], np.cumsum(dump["stage_layers"])])
        for embedding, stage in np.ndindex(*dump["dp_cost_s"].shape):
            yield RecordedStage(
                search=path.stem,
                embedding=int(embedding),
                stage=int(stage),
                time_s=dump[f"intra_cost_stage{stage}"],
                transition_s=dump[f"inter_cost_stage{stage}"],
                memory_mib=dump[f"mem_MB_stage{stage}"],
                exact_mib=dump["mem_float_MB"][stage],
                capacity_mib=int(dump["max_mem_MB"] - dump["other_mem_MB"][embedding, stage]),
                other_s=float(dump["other_time_s"][embedding, stage]),
                cost_s=float(dump["dp_cost_s"][embedding, stage]),
                choice=tuple(int(s) for s in dump["dp_strategy"][embedding, first[stage] : first[stage + 1]]),
            )
