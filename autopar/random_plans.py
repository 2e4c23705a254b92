"""Random legal plans: drawn from all that legality allows, to see that what is called legal also runs and is right."""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby, product
from math import lcm
from random import Random
from typing import get_args

from autopar.axes import RankMesh, divisors
from autopar.legality import why_illegal, why_pipeline_not_runnable, why_schedule_illegal, why_sharding_illegal
from autopar.model import ModelSpec, layer_names
from autopar.plan import Plan, PlanCluster, PlanModel
from autopar.request import Request, Schedule
from autopar.schedules import why_stages_illegal
from autopar.strategy import Recompute, Strategy

_MOST_STAGES_PER_RANK, _MOST_ROUNDS = 3, 2
_TOKENS = 8


def random_plan(model: ModelSpec, *, world: int, seed: int, number: int) -> Plan:
    """The plan of this number that a seed draws for a model and so many ranks, whatever the other numbers.

    First the pipeline ranks (seldom all of them), schedule, stages and micro-batches, then a strategy for each layer
    by itself, each evenly among what is legal; embed and head alike where they share parameters. Samples and tokens
    are as few as the plan allows, or twice as many samples. Raises ValueError where no layer can run on so many ranks.
    """
    rng = Random(f"{seed}/{number}")
    layers = len(model.layers)
    cuts = [ranks for ranks in divisors(world) if ranks <= layers and why_pipeline_not_runnable(model, ranks) is None]
    pp = rng.choices(cuts, weights=[1 if ranks == world > 1 else 3 for ranks in cuts])[0]
    mesh = RankMesh.of(world_size=world, pp=pp, ranks_per_node=(per_node := rng.choice(divisors(world))))
    schedule, per_rank, micro_batches = rng.choice(_pipelines(pp, layers // pp))
    samples = mesh.ranks_per_stage * rng.choice((1, 2))
    sequence = lcm(2 * world, _TOKENS)
    ends = sorted(rng.sample(range(1, layers), pp * per_rank - 1))
    legal = {
        kind.name: [
            strategy
            for strategy in every_strategy(mesh.ranks_per_stage)
            if why_illegal(strategy, kind, mesh, micro_batch=samples, sequence=sequence) is None
            and (pp == 1 or why_sharding_illegal(strategy, schedule) is None)
        ]
        for kind in model.kinds
    }
    if not all(legal.values()):
        raise ValueError(f"nothing is legal for some layer of {model.name} on {mesh.ranks_per_stage} ranks")
    strategies = [rng.choice(legal[model.kind(layer).name]) for layer in range(layers)]
    if model.tied:
        strategies[-1] = strategies[0]
    return Plan(
        model=PlanModel(name=model.name, source=model.source, fingerprint=model.fingerprint),
        cluster=PlanCluster(
            name="random", device="cpu", world_size=world, ranks_per_node=per_node, memory_bytes=1 << 40
        ),
        request=Request(global_batch=samples * micro_batches, sequence=sequence),
        pp=pp,
        schedule=schedule,
        num_micro_batches=micro_batches,
        layers_per_stage=tuple(b - a for a, b in zip((0, *ends), (*ends, layers), strict=True)),
        strategies=tuple(strategies),
        versions={},
    )


def plan_words(plan: Plan) -> str:
    """A plan in one line: `2 stages (1f1b), 4 micro-batches, layers 3/3: embed dp2, 0-3 tp2, head dp2`."""
    names = layer_names(len(plan.strategies))
    runs = []
    for strategy, run in groupby(range(len(names)), key=lambda layer: plan.strategies[layer].short):
        places = list(run)
        runs.append(f"{names[places[0]]}{f'-{names[places[-1]]}' if places[1:] else ''} {strategy}")
    stages = f"{plan.num_stages} stages ({plan.schedule}) on {plan.pp} x " if plan.pp > 1 else ""
    cuts = f", layers {'/'.join(map(str, plan.layers_per_stage))}" if plan.pp > 1 else ""
    width = plan.mesh.ranks_per_stage
    return f"{stages}{width} ranks, {plan.num_micro_batches} micro-batches{cuts}: {', '.join(runs)}"


@lru_cache(maxsize=64)
def _pipelines(pp: int, most_stages: int) -> list[tuple[Schedule, int, int]]:
    """The legal (schedule, stages of a rank, micro-batches) with few of each."""
    if pp == 1:
        return [("1f1b", 1, count) for count in (1, 2, 3)]
    stages = range(1, min(most_stages, _MOST_STAGES_PER_RANK) + 1)
    return [
        (schedule, per_rank, count)
        for schedule, per_rank in product(get_args(Schedule), stages)
        if why_stages_illegal(schedule, pp=pp, stages_per_rank=per_rank) is None
        for count in range(1, _MOST_ROUNDS * pp * per_rank + 1)
        if why_schedule_illegal(schedule, pp=pp, num_micro_batches=count, stages_per_rank=per_rank) is None
    ]


@lru_cache(maxsize=64)
def every_strategy(ranks: int) -> tuple[Strategy, ...]:
    """Every strategy that the short form can name for so many ranks, legal or not."""
    found = []
    for tp, sp, cp, ep in product(divisors(ranks), repeat=4):
        dp, rest = divmod(ranks, tp * sp * cp * ep)
        if rest or not dp:
            continue
        shards = (None, *divisors(dp)[1:-1])
        for zero, shard, norms, recompute in product((0, 1, 2, 3), shards, (False, True), get_args(Recompute)):
            if (zero and dp == 1) or (shard and not zero) or (norms and tp == 1):
                continue
            found.append(
                Strategy(
                    dp=dp, zero=zero, shard=shard, tp=tp, sequence_norms=norms, sp=sp, cp=cp, ep=ep,
                    recompute=recompute,
                )
            )  # fmt: skip
    return tuple(found)
