"""Compute and communication of one rank beside each other while it works through a row of layers.

Gathers and reduce-scatters share one queue, first come, first served. The gather of a layer is issued when its turn
comes within the prefetch depth: depth 0, when the compute before the layer is over; depth 1, when the sharded layer
before it begins. A layer's compute waits for its gather; its reduce-scatter is issued when its compute is over, and
all must be over at the end. While both streams run each is slowed down (design: cost model, section 3).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Span:
    """What one stream does: layer is the place in the row."""

    start_s: float
    end_s: float
    kind: Literal["compute", "gather", "reduce"]
    layer: int


@lru_cache(maxsize=4096)
def beside(
    computes_s: tuple[float, ...],
    gathers_s: tuple[float, ...],
    reduces_s: tuple[float, ...],
    *,
    depth: int = 1,
    slowdown: float = 1.0,
) -> tuple[float, tuple[Span, ...]]:
    """Seconds until both streams are done, and what they did; 0 where a layer gathers or reduces nothing.

    slowdown: how much longer each takes while both run. O(layers).
    """
    units = [i for i, seconds in enumerate(gathers_s) if seconds > 0]
    queue: deque[tuple[Literal["gather", "reduce"], int, float]] = deque()
    spans: list[Span] = []
    gathered = {i for i, seconds in enumerate(gathers_s) if seconds <= 0}
    now = 0.0
    issued = layer = 0
    left = computes_s[0] if computes_s else 0.0
    began = queue_began = -1.0

    def issue() -> int:
        """Queue the gathers that the compute's place allows; how many there are now."""
        count = issued
        while count < len(units) and layer >= (units[count - depth] if count >= depth else 0):
            queue.append(("gather", units[count], gathers_s[units[count]]))
            count += 1
        return count

    issued = issue()
    while layer < len(computes_s) or queue:
        computing = layer < len(computes_s) and layer in gathered
        if computing and began < 0:
            began = now
        if queue and queue_began < 0:
            queue_began = now
        pace = slowdown if computing and queue else 1.0
        wait = min([left] * computing + [seconds for _, _, seconds in list(queue)[:1]])
        now += wait * pace
        if queue:
            kind, place, seconds = queue[0]
            queue[0] = (kind, place, seconds - wait)
            if seconds <= wait:
                queue.popleft()
                spans.append(Span(start_s=queue_began, end_s=now, kind=kind, layer=place))
                queue_began = -1.0
                if kind == "gather":
                    gathered.add(place)
        if computing:
            left -= wait
            if left <= 0:
                spans.append(Span(start_s=began, end_s=now, kind="compute", layer=layer))
                if reduces_s[layer] > 0:
                    queue.append(("reduce", layer, reduces_s[layer]))
                layer, began = layer + 1, -1.0
                left = computes_s[layer] if layer < len(computes_s) else 0.0
                issued = issue()
    return now, tuple(spans)


def behind(
    computes_s: tuple[float, ...], gathers_s: tuple[float, ...], reduces_s: tuple[float, ...]
) -> tuple[float, tuple[Span, ...]]:
    """The same where the host waits for every collective (torch's FSDP on CPUs does): one after another."""
    now, spans = 0.0, []
    kinds: tuple[Literal["gather", "compute", "reduce"], ...] = ("gather", "compute", "reduce")
    for layer, lengths in enumerate(zip(gathers_s, computes_s, reduces_s, strict=True)):
        for kind, seconds in zip(kinds, lengths, strict=True):
            if seconds > 0:
                spans.append(Span(start_s=now, end_s=now + seconds, kind=kind, layer=layer))
                now += seconds
    return now, tuple(spans)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a rank does in one action, layer by layer in its order; slowdown None: the host waits for collectives."""

    computes_s: tuple[float, ...]
    gathers_s: tuple[float, ...]
    reduces_s: tuple[float, ...]
    slowdown: float | None

    @cached_property
    def run(self) -> tuple[float, tuple[Span, ...]]:
        """Seconds and spans; collectives beside the compute never cost more than to wait for them."""
        alone = behind(self.computes_s, self.gathers_s, self.reduces_s)
        if self.slowdown is None or alone[0] == sum(self.computes_s):
            return alone
        together = beside(self.computes_s, self.gathers_s, self.reduces_s, slowdown=self.slowdown)
        return min(alone, together, key=lambda found: found[0])

    @property
    def added_s(self) -> float:
        """What the collectives add to the compute."""
        return max(0.0, self.run[0] - sum(self.computes_s))
