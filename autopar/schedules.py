"""Pipeline schedules: how many stages a rank holds under each, and which rank holds which stage.

The stages of a plan are counted along the chain of layers, `pp` ranks times the stages of a rank. Loop style deals
them out in turn (rank = stage mod pp); V style gives each rank one stage on the way out and one on the way back, so
that the first rank has both ends of the chain.
"""

from __future__ import annotations

from autopar.request import Schedule

PLAIN: tuple[Schedule, ...] = ("1f1b", "gpipe")
"""Schedules of one stage a rank and whole backwards: the ones that have tables of their own."""

V_SHAPED: tuple[Schedule, ...] = ("zbv", "dualpipev")
"""Schedules whose ranks hold stages r and 2 pp - 1 - r."""

SPLIT_BACKWARD: tuple[Schedule, ...] = ("interleaved-zero-bubble", "zbv", "dualpipev")
"""Schedules that run (some) backwards in two parts: gradients of the inputs first, of the weights later."""


def why_stages_illegal(schedule: Schedule, *, pp: int, stages_per_rank: int) -> str | None:
    """Why a rank cannot hold so many stages; None when it can. One rank alone holds one stage under any schedule."""
    if pp == 1:
        return None if stages_per_rank == 1 else f"one pipeline rank holds one stage, not {stages_per_rank}"
    if schedule in ("1f1b", "gpipe"):
        legal, words = stages_per_rank == 1, "one stage"
    elif schedule in V_SHAPED:
        legal, words = stages_per_rank == 2, "exactly 2 stages"
    elif schedule == "interleaved-zero-bubble":
        legal, words = stages_per_rank >= 1, "one stage or more"
    else:
        legal, words = stages_per_rank >= 2, "2 stages or more"
    return None if legal else f"{schedule} puts {words} on a rank, not {stages_per_rank}"


def stage_rank(schedule: Schedule, *, pp: int, stage: int) -> int:
    """The pipeline rank that holds a stage."""
    if schedule in V_SHAPED and pp > 1:
        return stage if stage < pp else 2 * pp - 1 - stage
    return stage % pp


def rank_stages(schedule: Schedule, *, pp: int, rank: int, stages_per_rank: int) -> tuple[int, ...]:
    """The stages of a pipeline rank, in the order of the chain."""
    if schedule in V_SHAPED and pp > 1:
        return (rank, 2 * pp - 1 - rank)
    return tuple(range(rank, pp * stages_per_rank, pp))
