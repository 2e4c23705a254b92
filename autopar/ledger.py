"""The live bytes of one rank by part, and the highest moment."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.plan import RankMemory

PARTS = ("parameters", "gradients", "optimizer", "unsharded", "communication", "activations", "transient")


class OverBudgetError(Exception):
    """A moment is higher than a ledger may get: the rest need not be looked at."""


@dataclass(kw_only=True)
class Ledger:
    """Live bytes by part, and a copy of them at the highest moment; OverBudgetError for one above most_bytes.

    place: of the layer that works now, None between layers; peak_place: of the one that worked at the highest moment.
    """

    live: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    total_bytes: int = 0
    peak_bytes: int = -1
    peak: dict[str, int] = field(default_factory=dict)
    moment: RankMemory | None = None
    recording: bool = False
    most_bytes: int | None = None
    place: int | None = None
    peak_place: int | None = None

    def add(self, part: str, size_bytes: int) -> None:
        """From now on so much more of this part is alive (negative: less)."""
        self.live[part] += size_bytes
        self.total_bytes += size_bytes

    def look(self, transient_bytes: int, communication_bytes: int = 0) -> None:
        """Note this moment, with so much more on top."""
        moment_bytes = self.total_bytes + transient_bytes + communication_bytes
        if moment_bytes > self.peak_bytes:
            if self.most_bytes is not None and moment_bytes > self.most_bytes:
                raise OverBudgetError
            self.peak_bytes, self.peak_place = moment_bytes, self.place
            self.peak = dict(self.live)
            self.peak["transient"] += transient_bytes
            self.peak["communication"] += communication_bytes
        if self.recording and (self.moment is None or moment_bytes > self.moment.peak_bytes):
            parts = dict(self.live)
            parts["transient"] += transient_bytes
            parts["communication"] += communication_bytes
            self.moment = RankMemory(peak_bytes=moment_bytes, parts_bytes=parts)
