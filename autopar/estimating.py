"""A plan of uniform degrees for a shipped or profiled model and cluster, priced: `autopar estimate`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from autopar.errors import InputError
from autopar.measured import ClusterFile, ModelFile
from autopar.plan import Plan, PlanCluster, PlanModel
from autopar.predict import predict
from autopar.request import Request, Schedule
from autopar.schedules import why_stages_illegal
from autopar.strategy import Recompute, Strategy


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """One strategy for all blocks; embedding and head are data parallel over the same ranks.

    stages_per_rank: None for the fewest that the schedule takes.
    """

    dp: int | None = None
    tp: int = 1
    pp: int = 1
    zero: int = 0
    sequence_norms: bool = False
    recompute: Recompute = "none"
    num_micro_batches: int = 1
    schedule: Schedule = "1f1b"
    stages_per_rank: int | None = None


def files(model: str, cluster: str, *, sequence: int | None = None) -> tuple[ModelFile, ClusterFile]:
    """The model and the cluster: `.json` files, or shipped names; InputError for anything else.

    On a shipped cluster the layers have the seconds of its device, whatever the file says: those of the machine where
    it was profiled are none there.
    """
    if _is_file(model) and _is_file(cluster):
        return ModelFile.load(model), ClusterFile.load(cluster)
    # Not loaded where only files are read.
    from autopar import shipped
    from autopar.elsewhere import on_device

    if _is_file(model):
        found = ModelFile.load(model)
        machine, device = shipped.cluster(cluster)
        return on_device(found, device), machine
    if _is_file(cluster):
        raise InputError(
            f"{model} has no seconds on {cluster}",
            why="a shipped model is priced by the figures of a shipped device",
            fix="profile the model on that machine (`autopar profile model`), or name a shipped cluster",
        )
    machine, device = shipped.cluster(cluster)
    return shipped.model(model, device, sequence=sequence), machine


def _is_file(text: str) -> bool:
    return text.endswith(".json") or os.sep in text or os.path.exists(text)


def uniform(
    model: ModelFile,
    cluster: ClusterFile,
    degrees: Degrees,
    *,
    global_batch: int,
    allow_unrunnable: bool = False,
) -> Plan:
    """The plan of these degrees, checked against what the runtime can run; InputError otherwise."""
    world, d = cluster.cluster.world_size, degrees
    width = world // d.pp
    dp = d.dp if d.dp is not None else max(1, width // d.tp)
    if dp * d.tp * d.pp != world:
        raise InputError(
            f"dp {dp} x tp {d.tp} x pp {d.pp} is not the {world} ranks of {cluster.cluster.name}",
            why=f"they make {dp * d.tp * d.pp}",
            fix="leave out --dp, or choose degrees whose product is the number of ranks",
        )
    blocks = model.model.num_blocks
    each = d.stages_per_rank
    if each is None:
        each = next(n for n in (1, 2) if why_stages_illegal(d.schedule, pp=d.pp, stages_per_rank=n) is None)
    reason = why_stages_illegal(d.schedule, pp=d.pp, stages_per_rank=each)
    if reason:
        raise InputError(f"{each} stages a rank are not legal", why=reason, fix="leave out --stages-per-rank")
    stages = d.pp * each
    if stages > blocks:
        what = f"pp {d.pp}" if each == 1 else f"pp {d.pp} with {each} stages a rank"
        raise InputError(f"{what} is more than the {blocks} blocks", why="each stage needs one", fix="a smaller pp")
    block = Strategy(
        dp=dp,
        zero=d.zero if dp > 1 else 0,
        tp=d.tp,
        sequence_norms=d.sequence_norms and d.tp > 1,
        recompute=d.recompute,
    )
    outer = Strategy(dp=width, zero=d.zero if width > 1 else 0)
    even, more = divmod(blocks, stages)
    # What does not divide goes to the middle stages first: the ends hold embedding and head.
    order = [*range(1, stages - 1), 0, stages - 1] if stages > 1 else [0]
    counts = [even + (stage in order[:more]) for stage in range(stages)]
    counts[0] += 1
    counts[-1] += 1
    spec = cluster.cluster
    plan = Plan(
        model=PlanModel(name=model.model.name, source=model.model.source, fingerprint=model.model.fingerprint),
        cluster=PlanCluster(
            name=spec.name,
            device=spec.device,
            world_size=world,
            ranks_per_node=spec.ranks_per_node,
            memory_bytes=spec.memory_bytes,
        ),
        request=Request(
            global_batch=global_batch,
            sequence=model.layers.sequence,
            dtype=model.layers.dtype,
            allow_unrunnable=allow_unrunnable,
        ),
        pp=d.pp,
        schedule=d.schedule,
        num_micro_batches=d.num_micro_batches,
        layers_per_stage=tuple(counts),
        strategies=(outer, *[block] * blocks, outer),
        versions={},
    )
    plan.check(model.model, unrunnable=plan.request.allow_unrunnable)
    return plan


def priced(plan: Plan, model: ModelFile, cluster: ClusterFile) -> Plan:
    """The plan with its prediction."""
    plan.check(model.model, unrunnable=True)
    spec = cluster.cluster
    if (plan.cluster.world_size, plan.cluster.ranks_per_node) != (spec.world_size, spec.ranks_per_node):
        raise InputError(
            f"the plan is for {plan.cluster.world_size} ranks, {plan.cluster.ranks_per_node} a node",
            why=f"{spec.name} has {spec.world_size}, {spec.ranks_per_node} a node",
            fix="name the plan's cluster, or search again",
        )
    predicted = predict(plan, model.model, model.layers, spec, cluster.links)
    return replace(plan, predicted=predicted)
