"""What is legal, and why not: the one set of rules that the search space, the plan reader and the runtime share.

Each function returns None when all is well, otherwise the reason in words with its numbers.
"""

from __future__ import annotations

from autopar.axes import RankMesh, divisors
from autopar.model import LayerKind
from autopar.request import Schedule
from autopar.schedules import SPLIT_BACKWARD, why_stages_illegal
from autopar.strategy import Strategy


def why_batch_illegal(global_batch: int, num_micro_batches: int, mesh: RankMesh) -> str | None:
    """Why this batch cannot be cut into the micro-batches of this mesh.

    A micro-batch crosses stages, enters the embedding and leaves the head cut over all ranks of a stage, so their
    number must divide it.
    """
    ranks = mesh.ranks_per_stage
    if global_batch % num_micro_batches:
        return f"global batch {global_batch} is not divisible by {num_micro_batches} micro-batches"
    micro_batch = global_batch // num_micro_batches
    if micro_batch % ranks:
        legal = [m for m in divisors(global_batch) if global_batch // m % ranks == 0]
        near = sorted({global_batch // ranks * ranks or ranks, (global_batch // ranks + 1) * ranks})
        hint = f"legal micro-batch counts: {legal}" if legal else f"legal global batches near it: {near}"
        return (
            f"a micro-batch of {micro_batch} samples (global batch {global_batch} in {num_micro_batches}) "
            f"is not divisible by the {ranks} ranks of a stage; {hint}"
        )
    return None


def why_schedule_illegal(
    schedule: Schedule, *, pp: int, num_micro_batches: int, stages_per_rank: int = 1
) -> str | None:
    """Why this schedule cannot run so many stages with so few micro-batches: the conditions of torch's schedules."""
    reason = why_stages_illegal(schedule, pp=pp, stages_per_rank=stages_per_rank)
    if reason or pp == 1:
        return reason
    stages, count = pp * stages_per_rank, num_micro_batches
    if schedule in ("1f1b", "dualpipev") and count < stages:
        return f"{schedule} needs at least as many micro-batches as stages: {count} for {stages}"
    if schedule in ("interleaved-1f1b", "interleaved-zero-bubble"):
        rounds = max(1, count // pp)
        if count % rounds:
            near = f"{count // rounds * rounds} or {(count // pp + 1) * pp}"
            return f"{schedule} runs {count} micro-batches in {rounds} rounds over {pp} ranks, unevenly; try {near}"
    return None


def why_sharding_illegal(strategy: Strategy, schedule: Schedule) -> str | None:
    """Why a layer cannot take this strategy under this schedule, where it could under others."""
    if schedule in SPLIT_BACKWARD and strategy.zero == 3:
        return f"{strategy}: ZeRO-3 frees the parameters that the second part of a backward under {schedule} needs"
    return None


def why_illegal(strategy: Strategy, kind: LayerKind, mesh: RankMesh, *, micro_batch: int, sequence: int) -> str | None:
    """Why layers of this kind cannot take this strategy on this mesh with this micro-batch and sequence."""
    if strategy.ranks != mesh.ranks_per_stage:
        return f"{strategy} occupies {strategy.ranks} ranks, a stage has {mesh.ranks_per_stage}"
    try:
        mesh.place(strategy)
    except ValueError as error:
        return str(error)
    if micro_batch % (strategy.dp * strategy.ep):
        return f"a micro-batch of {micro_batch} samples is not divisible by dp {strategy.dp * strategy.ep}"
    if kind.role != "block":
        if strategy.tp > 1 or strategy.sp > 1 or strategy.cp > 1 or strategy.ep > 1:
            return f"{kind.role} runs data parallel only, not as {strategy}"
        if strategy.recompute != "none":
            return f"{kind.role} is not recomputed"
    elif strategy.tp > 1:
        if strategy.tp not in kind.tp_degrees:
            legal = ", ".join(map(str, (1, *kind.tp_degrees)))
            return f"tp {strategy.tp} does not divide {kind.class_name} ({kind.tp_reason}); legal degrees: {legal}"
        if strategy.sequence_norms and not kind.sequence_norms:
            return f"{kind.class_name} has no region outside tensor parallelism that can run on part of the sequence"
        if strategy.sequence_norms and sequence % strategy.tp:
            longer = -(-sequence // strategy.tp) * strategy.tp
            return (
                f"sequence {sequence} is not divisible by tp {strategy.tp} with sequence-parallel norms; "
                f"the next legal length is {longer}"
            )
    return why_not_runnable(strategy)


def why_schedule_not_runnable(schedule: Schedule) -> str | None:
    """Why the runtime of this version cannot run a schedule."""
    return None if schedule in ("1f1b", "gpipe") else f"the schedule {schedule} does not run yet"


def why_not_runnable(strategy: Strategy) -> str | None:
    """Why the runtime of this version cannot run a strategy, wherever it stands."""
    missing = {
        "Ulysses sequence parallelism": strategy.sp > 1,
        "context parallelism": strategy.cp > 1,
        "expert parallelism": strategy.ep > 1,
        "selective recompute": strategy.recompute == "selective",
    }
    for name, used in missing.items():
        if used:
            return f"{strategy}: {name} does not run yet"
    return None
