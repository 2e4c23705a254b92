"""What the tests run on real ranks. Each function is called on every rank inside a gloo group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from autopar.plan import Plan, PlanCluster, PlanModel
from autopar.request import Request
from autopar.runtime.gradients import whole
from autopar.runtime.models import build_model, example_batch
from autopar.runtime.parallel import parallelize
from autopar.runtime.structure import fingerprint
from autopar.strategy import Strategy

LEARNING_RATE, EPS, MAX_NORM = 1e-2, 1e-5, 0.5


def make_plan(
    source: str,
    model: torch.nn.Module,
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
    """Largest relative errors of loss, gradients and weights over the steps, against the same steps in one process."""
    torch.manual_seed(0)
    reference = _perturbed(build_model(source))
    model = _perturbed(build_model(source))
    plan = make_plan(source, model, strategies, world=dist.get_world_size(), **shape)
    parallel = parallelize(model, plan)
    if plant:
        _plant(plant, parallel)
    one = torch.optim.AdamW(reference.parameters(), lr=LEARNING_RATE, eps=EPS)
    many = torch.optim.AdamW(parallel.param_groups(), lr=LEARNING_RATE, eps=EPS)
    named = dict(reference.named_parameters(remove_duplicate=False))
    worst: dict[str, Any] = {"loss": 0.0, "gradient": 0.0, "weight": 0.0, "norm": 0.0, "where": ""}
    for step in range(steps):
        batch = example_batch(reference, samples=plan.request.global_batch, sequence=plan.request.sequence, seed=step)
        if masked:
            label = next(name for name in ("labels", "targets") if name in batch)
            batch[label][: len(batch[label]) // 2, 2:] = -100
        output = reference(**batch)
        expected = output.loss if hasattr(output, "loss") else output[1]
        expected.backward()
        loss = parallel.train_step(parallel.shard_batch(batch))
        worst["loss"] = max(worst["loss"], _relative(loss, expected))
        floor = 1e-5 * max(float(p.grad.norm()) for p in reference.parameters() if p.grad is not None)
        for entry in parallel.held:
            grad = named[entry.name].grad
            assert grad is not None
            assert entry.parameter.grad is not None
            error = float((whole(entry, entry.parameter.grad) - grad).norm()) / max(floor, float(grad.norm()))
            if error > worst["gradient"]:
                worst["gradient"], worst["where"] = error, entry.name
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), MAX_NORM)
        worst["norm"] = max(worst["norm"], _relative(parallel.clip_grad_norm_(MAX_NORM), norm))
        one.step()
        many.step()
        one.zero_grad()
        many.zero_grad()
        for entry in parallel.held:
            expected_weight = named[entry.name].detach()
            actual = whole(entry, entry.parameter)
            worst["weight"] = max(worst["weight"], float((actual - expected_weight).norm() / expected_weight.norm()))
    worst["parameters"] = sorted(entry.name for entry in parallel.held)
    return worst


def _perturbed(model: torch.nn.Module) -> torch.nn.Module:
    """Zero biases and unit norms hide errors."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


def _relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return abs(float(actual) - float(expected)) / abs(float(expected))


def _plant(fault: str, parallel: Any) -> None:
    import dataclasses

    if fault == "average":
        # One layer averages its gradient instead of summing it.
        changed = []
        for entry in parallel.held:
            if entry.layer == 1 and entry.group is not None:
                size = dist.get_world_size(entry.group)
                entry.parameter.register_hook(lambda grad, n=size: grad / n)
            changed.append(dataclasses.replace(entry))
        parallel.held = tuple(changed)
    elif fault == "fsdp-average":
        from torch.distributed.fsdp import FSDPModule

        for module in parallel.stage.body.blocks().values():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(2.0)
                break
    else:
        raise ValueError(fault)
