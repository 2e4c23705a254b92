"""Which operations a step waits for: the critical path of a pipeline, simulated event by event.

The order is 1F1B, interleaved over `chunks` virtual stages as Megatron-LM and torch do it; with one chunk it is the
order of autopar.pipeline, which a test compares. A path is told by how often it passes each kind of operation, so that
its length is linear in the seconds of each and a fit need not simulate at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Path:
    """How often the critical path passes each kind of operation: of blocks, embedding (both ways), head, and sends."""

    block_forwards: float
    block_backwards: float
    embeds: float
    head_forwards: float
    head_backwards: float
    sends: float

    @property
    def counts(self) -> tuple[float, ...]:
        """The counts in order."""
        return tuple(vars(self).values())


def order(pp: int, stage: int, micro_batches: int, chunks: int) -> list[tuple[bool, int, int]]:
    """What one rank does: (is forward, virtual stage, micro-batch) in order."""
    total = micro_batches * chunks
    group = pp if chunks > 1 else 1

    def virtual(k: int, forward: bool) -> tuple[bool, int, int]:
        if chunks == 1:
            return forward, stage, k
        cycle, within = divmod(k, group * chunks)
        chunk, place = divmod(within, group)
        if not forward:
            chunk = chunks - 1 - chunk
        return forward, chunk * pp + stage, cycle * group + place

    # A last group that is not full runs as if it were; its missing micro-batches are left out.
    slots = total if chunks == 1 else -(-micro_batches // group) * group * chunks
    forwards = [op for op in (virtual(k, True) for k in range(slots)) if op[2] < micro_batches]
    backwards = [op for op in (virtual(k, False) for k in range(slots)) if op[2] < micro_batches]
    warm = pp - stage - 1 if chunks == 1 else (pp - stage - 1) * 2 + (chunks - 1) * pp
    warm = min(warm, total)
    found = forwards[:warm]
    for i in range(total - warm):
        found += [forwards[warm + i], backwards[i]]
    return found + backwards[total - warm :]


def critical_path(
    blocks: Sequence[int],
    *,
    pp: int,
    micro_batches: int,
    forward_s: float,
    backward_s: float,
    embed_s: float,
    head_forward_s: float,
    head_backward_s: float,
    send_s: float,
) -> tuple[float, Path]:
    """Seconds of the step before its tail, and its path; in O(ranks * chunks * micro-batches).

    blocks: of each virtual stage; forward_s and backward_s of one block; a send costs the arrow, not the rank.
    Raises ValueError when the order waits for itself.
    """
    virtual = len(blocks)
    chunks, m = virtual // pp, micro_batches
    forwards = [n * forward_s for n in blocks]
    backwards = [n * backward_s for n in blocks]
    forwards[0] += embed_s
    backwards[0] += embed_s
    forwards[-1] += head_forward_s
    backwards[-1] += head_backward_s
    size = virtual * m
    ends = [-1.0] * (2 * size)
    before = [-1] * (2 * size)
    orders = [
        [(virtual_stage * m + i) + (0 if forward else size) for forward, virtual_stage, i in order(pp, s, m, chunks)]
        for s in range(pp)
    ]
    done, clock, last = [0] * pp, [0.0] * pp, [-1] * pp
    remaining = 2 * size
    last_forward = size - m
    while remaining:
        stuck = remaining
        for stage in range(pp):
            ops, now, at, prev = orders[stage], done[stage], clock[stage], last[stage]
            while now < len(ops):
                op = ops[now]
                if op < size:
                    source = op - m if op >= m else -1
                    length = forwards[op // m]
                else:
                    source = op + m if op - size < last_forward else op - size
                    length = backwards[(op - size) // m]
                wait = 0.0
                if source >= 0:
                    wait = ends[source]
                    if wait < 0:
                        break
                    if source != op - size:
                        wait += send_s
                if wait > at:
                    at, before[op] = wait, source
                else:
                    before[op] = prev
                at += length
                ends[op] = at
                prev = op
                now += 1
                remaining -= 1
            done[stage], clock[stage], last[stage] = now, at, prev
        if remaining == stuck:
            raise ValueError(f"{pp} stages of {chunks} chunks and {m} micro-batches wait for themselves")
    step = max(clock)
    return step, _path(last[clock.index(step)], before, blocks, m, size, pp)


def _path(op: int, before: list[int], blocks: Sequence[int], m: int, size: int, pp: int) -> Path:
    counts = [0.0] * 6
    virtual = len(blocks)
    while op >= 0:
        backward, place = op >= size, (op % size) // m
        counts[1 if backward else 0] += blocks[place]
        counts[2] += place == 0
        if place == virtual - 1:
            counts[4 if backward else 3] += 1
        source = before[op]
        if source >= 0 and (source % size) // m % pp != place % pp:
            counts[5] += 1
        op = source
    return Path(
        block_forwards=counts[0],
        block_backwards=counts[1],
        embeds=counts[2],
        head_forwards=counts[3],
        head_backwards=counts[4],
        sends=counts[5],
    )
