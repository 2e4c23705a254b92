"""Ranks that share the cores of a node: how fast each is, and a step in which they slow each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.programs import Program


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Ranks that share cores: speed[k-1] of each while k of its node compute, 1.0 where its seconds were measured;
    ranks of a stage, and of a node.
    """

    speed: tuple[float, ...]
    ranks_per_stage: int
    ranks_per_node: int

    @property
    def matters(self) -> bool:
        """Whether any rank is ever faster or slower than its seconds say."""
        if self.ranks_per_stage >= self.ranks_per_node:
            return self.speed[-1] != 1.0
        return any(speed != 1.0 for speed in self.speed)

    def at(self, computing: float) -> float:
        """The speed of a rank while so many compute, linear between whole numbers."""
        place = min(max(computing, 1.0), float(len(self.speed))) - 1
        low = int(place)
        high = min(low + 1, len(self.speed) - 1)
        return self.speed[low] + (self.speed[high] - self.speed[low]) * (place - low)


def shared_bars(
    made: Program, table: Sequence[tuple[float, float]], pp: int, send_s: float, sharing: Sharing
) -> list[tuple[float, float]]:
    """Start and end of each action while ranks of a node slow each other, from event to event, in O(actions * pp).

    A rank computes while it does not wait for collectives; all ranks of a stage do so together, and meet those of
    another stage of their node in the share of its action that is compute.
    """
    orders: list[list[int]] = [[] for _ in range(pp)]
    for place, rank in enumerate(made.ranks):
        orders[rank].append(place)
    per_node = max(1, sharing.ranks_per_node // sharing.ranks_per_stage)
    bars = [(0.0, 0.0)] * len(made.acts)
    arrived: list[float | None] = [0.0, *[None] * len(made.acts)]
    at, left, began = [0] * pp, [0.0] * pp, [0.0] * pp
    running: set[int] = set()
    now = 0.0
    while True:
        wake, started = float("inf"), True
        while started:
            # What takes no time is over at once, and what waited for it may begin.
            wake, started = float("inf"), False
            for rank in range(pp):
                while rank not in running and at[rank] < len(orders[rank]):
                    place = orders[rank][at[rank]]
                    there = arrived[made.sources[place]]
                    if there is None or there > now:
                        wake = wake if there is None else min(wake, there)
                        break
                    if table[made.codes[place]][0] > 0:
                        running.add(rank)
                        left[rank], began[rank] = 1.0, now
                        break
                    bars[place] = now, now
                    arrived[place + 1] = now + send_s
                    at[rank] += 1
                    started = True
        if not running and wake == float("inf"):
            return bars
        share = [0.0] * (-(-pp // per_node))
        parts = {}
        for rank in running:
            all_s, waits_s = table[made.codes[orders[rank][at[rank]]]]
            parts[rank] = all_s - waits_s, waits_s
            share[rank // per_node] += (all_s - waits_s) / all_s
        until = wake
        needs = {}
        for rank, (compute_s, waits_s) in parts.items():
            others = share[rank // per_node] - compute_s / (compute_s + waits_s)
            speed = sharing.at(sharing.ranks_per_stage * (1 + others))
            needs[rank] = waits_s + compute_s / speed
            until = min(until, now + left[rank] * needs[rank])
        for rank in list(running):
            took = (until - now) / needs[rank]
            place = orders[rank][at[rank]]
            if now + left[rank] * needs[rank] <= until or took >= left[rank] * (1 - 1e-12):
                running.remove(rank)
                bars[place] = began[rank], until
                arrived[place + 1] = until + send_s
                at[rank] += 1
            else:
                left[rank] -= took
        now = until
