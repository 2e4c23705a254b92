"""What a run showed beside what was predicted: the content of run.json, and of `--json`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from autopar.formats import dumps, write_file
from autopar.plan import Plan

RUN_KIND, RUN_SCHEMA = "autopar.run", 1


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A plan with what was measured of it.

    step_s: one optimizer step of the slowest rank; peak_memory_bytes: per rank; losses: per step; verified: whether
    the plan was equal to one process, None where nobody looked.
    """

    plan: Plan
    step_s: float
    peak_memory_bytes: tuple[int, ...]
    losses: tuple[float, ...]
    verified: bool | None = None

    def dumps(self) -> str:
        """One JSON object; `predicted` and `measured` have the same keys. `predicted` is null without a prediction."""
        predicted = self.plan.predicted
        fields: dict[str, Any] = {
            "plan": json.loads(self.plan.dumps()),
            "predicted": None
            if predicted is None
            else {
                "step_s": predicted.step_s,
                "peak_memory_bytes": [rank.peak_bytes for rank in predicted.memory],
            },
            "measured": {"step_s": self.step_s, "peak_memory_bytes": self.peak_memory_bytes},
            "losses": self.losses,
            "verified": self.verified,
        }
        return dumps(RUN_KIND, RUN_SCHEMA, fields)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the object as a file, whole or not at all."""
        write_file(path, self.dumps())
