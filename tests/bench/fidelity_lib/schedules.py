"""What a published run waits for: the critical path of its pipeline, by the library's own engine.

A path is told by how often it passes each kind of operation, so that its length is linear in the seconds of each and
a fit need not simulate at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar import pipeline


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
    """Seconds of the step before its tail, and its path; 1F1B, interleaved where a rank has several stages.

    blocks: of each stage, in the order of the model; forward_s and backward_s of one block.
    """
    last = len(blocks) - 1
    stages = [
        pipeline.StageTimes(
            forward_s=n * forward_s + embed_s * (stage == 0) + head_forward_s * (stage == last),
            backward_s=n * backward_s + embed_s * (stage == 0) + head_backward_s * (stage == last),
        )
        for stage, n in enumerate(blocks)
    ]
    found = pipeline.critical_path(
        stages,
        schedule="1f1b" if len(blocks) == pp else "interleaved-1f1b",
        micro_batches=micro_batches,
        send_s=send_s,
        pp=pp,
    )
    passed = {
        kind: [found.actions.get((kind, stage), 0) for stage in range(last + 1)]
        for kind in ("F", "B")  # type: ignore[call-overload]
    }
    path = Path(
        block_forwards=sum(n * count for n, count in zip(blocks, passed["F"], strict=True)),
        block_backwards=sum(n * count for n, count in zip(blocks, passed["B"], strict=True)),
        embeds=passed["F"][0] + passed["B"][0],
        head_forwards=passed["F"][last],
        head_backwards=passed["B"][last],
        sends=found.sends,
    )
    return found.seconds, path
