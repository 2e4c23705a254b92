"""Jobs on real ranks about optimizers whose states lie in host memory, beside the same at home."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.batches import example_batch
from autopar.runtime.gradients import whole, whole_parameter
from autopar.runtime.models import build_model
from autopar.runtime.parallel import parallelize
from autopar.runtime.parallel_model import ParallelModel
from autopar.runtime.tracker import storage_key
from autopar.runtime.train import make_optimizer
from tests.runtime.rank_jobs import make_plan

KINDS = ("adamw", "adamw-offloaded")


def steps_beside_those_at_home(
    source: str, strategies: list[str], folder: str, plant: str = "", **shape: Any
) -> dict[str, Any]:
    """Largest difference of a weight after each of three clipped steps, and after a fourth from the other's files."""
    plans = [make_plan(source, strategies, world=dist.get_world_size(), optimizer=kind, **shape) for kind in KINDS]
    sides = [parallelize(build_model(source).eval(), plan) for plan in plans]
    optimizers = [torch.optim.AdamW(side.param_groups(), lr=0.01, weight_decay=0.1) for side in sides]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in optimizers]
    found: dict[str, Any] = {"weights": [], "masters": []}

    def step(number: int, side: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
        batch = example_batch(side.model, samples=plans[0].request.global_batch, sequence=8, seed=number)
        optimizer.zero_grad(set_to_none=number != 1)
        side.train_step(side.shard_batch(batch))
        side.clip_grad_norm_(0.5)
        if plant == "stale" and side is sides[1] and number == 1:
            next(e for e in side.held if e.in_host_memory).stepped.grad.zero_()  # type: ignore[union-attr]
        optimizer.step()

    def differences() -> None:
        pairs = list(zip(sides[0].held, sides[1].held, strict=True))
        found["weights"].append(max(float((whole_parameter(a) - whole_parameter(b)).abs().max()) for a, b in pairs))
        found["masters"].append(max(float((whole(a, a.stepped) - whole(b, b.stepped)).abs().max()) for a, b in pairs))

    for number in range(3):
        for side, optimizer, scheduler in zip(sides, optimizers, schedulers, strict=True):
            step(number, side, optimizer)
            scheduler.step()
        differences()
    for kind, side, optimizer in zip(KINDS, sides, optimizers, strict=True):
        side.save(f"{folder}/{kind}", optimizer)
    sides = [parallelize(build_model(source, seed=5).eval(), plan) for plan in plans]
    optimizers = [make_optimizer(side) for side in sides]
    for kind, side, optimizer in zip(reversed(KINDS), sides, optimizers, strict=True):
        side.load(f"{folder}/{kind}", optimizer)
        step(3, side, optimizer)
    differences()
    away = sides[1]
    mine = {storage_key(e.stepped.untyped_storage()) for e in away.held if e.parameter.requires_grad}
    used = {storage_key(_storage(e.parameter)) for e in away.held}
    return {**found, "apart": mine.isdisjoint(used), "host": all(e.in_host_memory for e in away.held)}


def _storage(parameter: torch.Tensor) -> torch.UntypedStorage:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.untyped_storage()


def own_loop(source: str, strategies: list[str]) -> float:
    """Largest difference of a weight after two steps of a loop of one's own, each of two backwards."""
    plans = [make_plan(source, strategies, world=dist.get_world_size(), optimizer=kind) for kind in KINDS]
    sides = [parallelize(build_model(source).eval(), plan) for plan in plans]
    for side in sides:
        optimizer = torch.optim.AdamW(side.param_groups(), lr=0.01)
        for number in range(4):
            batch = example_batch(side.model, samples=8, sequence=8, seed=number)
            side(**side.shard_batch(batch)).loss.backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    pairs = zip(sides[0].held, sides[1].held, strict=True)
    return max(float((whole_parameter(a) - whole_parameter(b)).abs().max()) for a, b in pairs)
