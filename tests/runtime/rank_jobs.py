"""What the tests run on real ranks. Each function is called on every rank inside a gloo group."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from autopar.plan import Plan, PlanCluster, PlanModel
from autopar.request import Request
from autopar.runtime.models import build_model, example_batch
from autopar.runtime.parallel import ParallelModel
from autopar.runtime.structure import fingerprint
from autopar.runtime.verify import compare
from autopar.strategy import Strategy


def make_plan(
    source: str,
    strategies: list[str],
    *,
    world: int,
    pp: int = 1,
    layers_per_stage: list[int] | None = None,
    global_batch: int = 8,
    micro_batches: int = 1,
    schedule: str = "1f1b",
    sequence: int = 8,
) -> Plan:
    model = build_model(source, device="meta")
    return Plan(
        model=PlanModel(name="test", source=source, fingerprint=fingerprint(model)),
        cluster=PlanCluster(name="test", device="cpu", world_size=world, ranks_per_node=world, memory_bytes=1 << 30),
        request=Request(global_batch=global_batch, sequence=sequence),
        pp=pp,
        schedule=schedule,  # type: ignore[arg-type]
        num_micro_batches=micro_batches,
        layers_per_stage=tuple(layers_per_stage or [len(strategies)]),
        strategies=tuple(Strategy.parse(s) for s in strategies),
        versions={},
    )


def compare_with_one_process(
    source: str, strategies: list[str], steps: int = 3, plant: str = "", masked: bool = False, **shape: Any
) -> dict[str, Any]:
    """Largest relative errors over the steps against one process. masked: uneven numbers of labels a sample."""
    plan = make_plan(source, strategies, world=dist.get_world_size(), **shape)

    def batch_of(model: torch.nn.Module, step: int) -> dict[str, torch.Tensor]:
        batch = example_batch(model, samples=plan.request.global_batch, sequence=plan.request.sequence, seed=step)
        labels = batch["labels"]
        labels[: len(labels) // 2, 2:] = -100
        return batch

    def tamper(parallel: ParallelModel) -> None:
        _PLANTS[plant](parallel)

    found = compare(plan, steps=steps, batch_of=batch_of if masked else None, tamper=tamper if plant else None)
    return {**asdict(found), "agrees": found.agrees}


def _average_one_layer(parallel: ParallelModel) -> None:
    """The first block averages its replicated gradients instead of summing them."""
    for entry in parallel.held:
        if entry.layer == 1 and entry.group is not None:
            size = dist.get_world_size(entry.group)
            entry.parameter.register_hook(lambda grad, n=size: grad / n)


def _average_one_sharded_layer(parallel: ParallelModel) -> None:
    """The first sharded block divides by its number of ranks, as fully_shard does by default."""
    for block in parallel.stage.body.blocks().values():
        if isinstance(block, FSDPModule):
            block.set_gradient_divide_factor(float(dist.get_world_size()))
            return


_PLANTS = {"average": _average_one_layer, "sharded average": _average_one_sharded_layer}
