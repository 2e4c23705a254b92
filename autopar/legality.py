"""What is legal, and why not: the one set of rules that the search space, the plan reader and the runtime share.

Each function returns None when all is well, otherwise the reason in words with its numbers.
"""

from __future__ import annotations

from autopar.axes import RankMesh, divisors
from autopar.model import LayerKind, ModelSpec, Role
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
        return (
            f"{strategy}: ZeRO-3 frees the parameters that the second part of a backward under {schedule} needs "
            "(measured: gradients missing, or off by 0.87 at the right loss); ZeRO-2 is right"
        )
    if schedule in SPLIT_BACKWARD and strategy.recompute == "selective":
        return (
            f"{strategy}: under {schedule} a backward goes twice through a layer, in two parts, which torch refuses "
            "under selective recompute; full recompute runs"
        )
    return None


def why_illegal(
    strategy: Strategy, kind: LayerKind, mesh: RankMesh, *, micro_batch: int, sequence: int, unrunnable: bool = False
) -> str | None:
    """Why layers of this kind cannot take this strategy on this mesh with this micro-batch and sequence.

    unrunnable: what the runtime of this version cannot run is legal too.
    """
    if strategy.ranks != mesh.ranks_per_stage:
        return f"{strategy} occupies {strategy.ranks} ranks, a stage has {mesh.ranks_per_stage}"
    try:
        mesh.place(strategy)
    except ValueError as error:
        return str(error)
    if micro_batch % (strategy.dp * strategy.ep):
        return f"a micro-batch of {micro_batch} samples is not divisible by dp {strategy.dp * strategy.ep}"
    reason = None if unrunnable else why_not_runnable(strategy, kind.role)
    if reason is None and strategy.ep > 1:
        reason = f"{strategy}: expert parallelism has no price yet"
    if reason is None:
        reason = (_why_block_illegal if kind.role == "block" else _why_outer_illegal)(strategy, kind)
    return reason or (_why_sequence_illegal(strategy, kind.tokens or sequence) if kind.role == "block" else None)


def _why_outer_illegal(strategy: Strategy, kind: LayerKind) -> str | None:
    if strategy.sequence_norms or strategy.sp > 1 or strategy.cp > 1:
        return f"{kind.role} runs data parallel, or vocabulary-parallel with tp, not as {strategy}"
    if strategy.recompute != "none":
        return f"{kind.role} is not recomputed"
    if strategy.tp > 1 and strategy.tp not in kind.tp_degrees:
        legal = ", ".join(map(str, (1, *kind.tp_degrees)))
        why = kind.tp_reason or "no vocabulary known"
        return f"{kind.role} is not cut along the vocabulary by tp {strategy.tp} ({why}); legal degrees: {legal}"
    return None


def _why_block_illegal(strategy: Strategy, kind: LayerKind) -> str | None:
    if strategy.tp > 1:
        if strategy.tp not in kind.tp_degrees:
            legal = ", ".join(map(str, (1, *kind.tp_degrees)))
            return f"tp {strategy.tp} does not divide {kind.class_name} ({kind.tp_reason}); legal degrees: {legal}"
        if strategy.sequence_norms and not kind.sequence_norms:
            return f"{kind.class_name} has no region outside tensor parallelism that can run on part of the sequence"
    if strategy.sp == strategy.cp == 1:
        return None
    if kind.attention is None:
        return f"{strategy}: nothing is known of the attention heads of {kind.class_name}"
    heads, kv_heads, ways = kind.attention.heads, kind.attention.kv_heads, strategy.tp * strategy.sp
    if (strategy.sp > 1 or strategy.cp > 1) and kind.sequence_reason:
        return f"{strategy}: the sequence of {kind.class_name} cannot be cut: {kind.sequence_reason}"
    if strategy.sp > 1 and (heads % ways or kv_heads % ways):
        beside = f" beside tp {strategy.tp}" if strategy.tp > 1 else ""
        return f"sp {strategy.sp}{beside} does not divide heads {heads} and kv heads {kv_heads} of {kind.class_name}"
    return None


def _why_sequence_illegal(strategy: Strategy, sequence: int) -> str | None:
    """The sequence is dealt out to norms and sp evenly, to cp in pairs: rank i takes the pieces i and 2 cp - 1 - i."""
    cut = strategy.sequence_pieces
    if sequence % cut == 0:
        return None
    causes = [f"tp {strategy.tp} with sequence-parallel norms"] if strategy.sequence_norms else []
    causes += [f"sp {strategy.sp}"] if strategy.sp > 1 else []
    causes += [f"twice cp {strategy.cp}"] if strategy.cp > 1 else []
    longer = -(-sequence // cut) * cut
    return f"sequence {sequence} is not divisible by {' times '.join(causes)}; the next legal length is {longer}"


def why_schedule_not_runnable(schedule: Schedule, dtype: str = "float32") -> str | None:
    """Why the runtime of this version cannot run a schedule with this dtype."""
    if schedule in SPLIT_BACKWARD and dtype == "bfloat16":
        return (
            f"{schedule} does not run in bfloat16 yet: torch adds up the gradients of its split backwards in it, "
            "not in float32 as everywhere else"
        )
    return None


def why_pipeline_not_runnable(model: ModelSpec, pp: int) -> str | None:
    """Why the runtime of this version cannot put the layers of a model on `pp` stages."""
    return f"{model.name} runs on one stage: {model.pipeline_reason}" if pp > 1 and model.pipeline_reason else None


def why_not_runnable(strategy: Strategy, role: Role = "block") -> str | None:
    """Why the runtime of this version cannot run a strategy in a layer of this role."""
    missing = {
        "sequence-parallel norms with sp or cp": strategy.sp * strategy.cp > 1 and strategy.sequence_norms,
        "expert parallelism": strategy.ep > 1,
    }
    for name, used in missing.items():
        if used:
            return f"{strategy}: {name} does not run yet"
    return None
