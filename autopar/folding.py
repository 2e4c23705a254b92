"""A plan for many ranks folded to few: the same kinds of strategies and schedule, each degree reduced, none gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, product

from autopar.axes import RankMesh, divisors
from autopar.errors import InputError
from autopar.legality import why_schedule_illegal
from autopar.plan import Plan
from autopar.strategy import Strategy

MOST_RANKS = 8
"""Plans of up to so many ranks are taken as they are."""


def fold_plan(plan: Plan, *, most: int = MOST_RANKS) -> Plan:
    """The plan on at most `most` ranks; itself where it has no more. Prediction and certificate are dropped.

    A pipeline gets two ranks with as many stages each as before, neighbouring stages joined; a degree becomes a
    divisor of itself above 1, with as many ranks for all layers; up to two micro-batches a stage stay.
    Raises InputError where the layers' degrees do not fit together on so few.
    """
    if plan.cluster.world_size <= most:
        return plan
    pp = min(plan.pp, 2)
    for width in divisors(plan.mesh.ranks_per_stage):
        mesh = RankMesh.of(world_size=pp * width, pp=pp)
        folded = {s: next(_folded(s, mesh), None) for s in set(plan.strategies)} if pp * width <= most else {}
        strategies = [found for s in plan.strategies if (found := folded.get(s)) is not None]
        if len(strategies) == len(plan.strategies):
            break
    else:
        raise InputError(
            f"the plan for {plan.cluster.world_size} ranks cannot be folded to {most}",
            why=f"no stage of {most // pp} ranks holds {', '.join(sorted({s.short for s in plan.strategies})[:6])}",
            fix="verify a plan with fewer different degrees, or start it inside torchrun on all of its ranks",
        )
    layers = _joined(plan.layers_per_stage, pp * plan.stages_per_rank)
    micro_batches = _micro_batches(plan, pp, len(layers))
    return replace(
        plan,
        cluster=replace(plan.cluster, world_size=pp * width, ranks_per_node=pp * width),
        request=replace(plan.request, global_batch=micro_batches * width),
        pp=pp,
        num_micro_batches=micro_batches,
        layers_per_stage=layers,
        strategies=tuple(strategies),
        predicted=None,
        certificate=None,
    )


def _folded(strategy: Strategy, mesh: RankMesh) -> Iterator[Strategy]:
    """The ways to put a strategy on a smaller mesh, every degree a divisor of what it was, above 1 where that was."""

    def smaller(degree: int) -> tuple[int, ...]:
        return divisors(degree)[1:] if degree > 1 else (1,)

    s = strategy
    for tp, sp, cp, ep in product(*(smaller(degree) for degree in (s.tp, s.sp, s.cp, s.ep))):
        dp, rest = divmod(mesh.ranks_per_stage, tp * sp * cp * ep)
        if rest or s.dp % max(dp, 1) or (dp > 1) != (s.dp > 1):
            continue
        shards = [part for part in divisors(dp)[1:-1] if s.shard % part == 0] if s.shard else [None]
        for shard in shards:
            smaller_one = replace(s, dp=dp, shard=shard, tp=tp, sp=sp, cp=cp, ep=ep)
            with suppress(ValueError):  # degrees that do not factor over the axes
                mesh.place(smaller_one)
                yield smaller_one


def _joined(layers_per_stage: tuple[int, ...], stages: int) -> tuple[int, ...]:
    """Neighbouring stages joined until so many are left, as evenly as their number allows."""
    count = len(layers_per_stage)
    ends = [stage * count // stages for stage in range(stages + 1)]
    return tuple(sum(layers_per_stage[a:b]) for a, b in pairwise(ends))


def _micro_batches(plan: Plan, pp: int, stages: int) -> int:
    """At most two micro-batches a stage, as many as the schedule takes."""
    most = min(plan.num_micro_batches, 2 * stages)
    counts: list[int] = [*range(most, 0, -1), *range(most + 1, 4 * stages + 1)]
    for count in counts:
        per_rank = stages // pp
        if why_schedule_illegal(plan.schedule, pp=pp, num_micro_batches=count, stages_per_rank=per_rank) is None:
            return count
    raise ValueError(f"{plan.schedule} takes no number of micro-batches on {stages} stages")
