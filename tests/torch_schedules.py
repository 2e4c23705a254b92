"""torch's own pipeline schedules, built over stages that do nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from autopar.request import Schedule

CLASS_NAMES: dict[Schedule, str] = {
    "1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "looped-bfs": "ScheduleLoopedBFS",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "interleaved-zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


def build(schedule: Schedule, pp: int, stages_per_rank: int, micro_batches: int) -> Any:
    """The schedule of rank 0; its `pipeline_order` holds all ranks. Raises what torch raises."""
    from torch.distributed import pipelining

    stages = [
        SimpleNamespace(
            stage_index=i * pp,
            num_stages=pp * stages_per_rank,
            group_size=pp,
            group_rank=0,
            is_last=False,
            is_first=i == 0,
            submod=None,
            has_backward=True,
            device=None,
        )
        for i in range(stages_per_rank)
    ]
    kind = getattr(pipelining, CLASS_NAMES[schedule])
    return kind(stages[0] if schedule in ("1f1b", "gpipe") else stages, micro_batches)
