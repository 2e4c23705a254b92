"""Mixed precision on real ranks against one process that does by hand what it means."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.batches import example_batch, labels_of
from autopar.runtime.gradients import whole, whole_parameter
from autopar.runtime.losses import loss_of
from autopar.runtime.models import build_model
from autopar.runtime.parallel import ParallelModel, parallelize
from tests.runtime.rank_jobs import make_plan


def mixed_against_one_process(
    source: str, strategies: list[str], exact: bool = True, plant: str = "", **shape: Any
) -> dict[str, Any]:
    """Largest relative errors over three AdamW steps with clipping; weights are the float32 masters.

    The reference keeps float32 weights, runs every rank's part of every micro-batch on their bfloat16 copy, and adds
    the gradients up in float32. exact: the wrapped model gets the float32 weights, otherwise already rounded ones.
    """
    plan = make_plan(source, strategies, world=dist.get_world_size(), dtype="bfloat16", **shape)
    low = build_model(source, dtype="float32").eval()
    if not exact:
        low = low.to(torch.bfloat16)  # rotary tables too, as in the wrapped model
    masters = {name: torch.nn.Parameter(p.detach().float().clone()) for name, p in low.named_parameters()}
    for p in low.parameters():
        p.data = p.data.to(torch.bfloat16)
    given = build_model(source, dtype="float32").eval()
    wrapped = parallelize(given if exact else given.to(torch.bfloat16), plan)
    if plant:
        _PLANTS[plant](wrapped)
    one = torch.optim.AdamW(masters.values(), lr=1e-2, eps=1e-4)
    many = torch.optim.AdamW(wrapped.param_groups(), lr=1e-2, eps=1e-4)
    worst = dict.fromkeys(("first", "loss", "gradient", "norm", "weight", "rounded"), 0.0)
    worst_name = ""
    for step in range(3):
        batch = example_batch(low, samples=plan.request.global_batch, sequence=plan.request.sequence, seed=step)
        batch[labels_of(batch)][: plan.request.global_batch // 2, 3:] = -100
        total, count = 0.0, 0
        for micro in range(plan.num_micro_batches):
            for place in range(plan.mesh.ranks_per_stage):
                chunk = {
                    k: v.chunk(plan.num_micro_batches)[micro].chunk(plan.mesh.ranks_per_stage)[place]
                    for k, v in batch.items()
                }
                labels = int((chunk[labels_of(batch)][:, 1:] != -100).sum())
                mean = loss_of(low(**chunk))
                assert mean is not None
                (mean.float() * labels).backward()
                total, count = total + float(mean) * labels, count + labels
                for name, p in low.named_parameters():
                    assert p.grad is not None
                    master = masters[name]
                    master.grad = p.grad.float() if master.grad is None else master.grad + p.grad.float()
                    p.grad = None
        for master in masters.values():
            assert master.grad is not None
            master.grad /= count
        loss = wrapped.train_step(wrapped.shard_batch(batch))
        worst["loss"] = max(worst["loss"], abs(float(loss) * count / total - 1))
        floor = 1e-4 * max(float(m.grad.norm()) for m in masters.values() if m.grad is not None)
        for entry in wrapped.held:
            grad = masters[_first(low, entry.name)].grad
            assert grad is not None
            assert entry.stepped.grad is not None
            assert entry.stepped.grad.dtype == torch.float32
            error = float((whole(entry, entry.stepped.grad) - grad).norm()) / max(floor, float(grad.norm()))
            if not error <= worst["gradient"]:
                worst["gradient"], worst_name = error, entry.name
        worst["first"] = worst["first"] or worst["gradient"]
        norm = torch.nn.utils.clip_grad_norm_(masters.values(), 0.5)
        worst["norm"] = max(worst["norm"], abs(float(wrapped.clip_grad_norm_(0.5)) / float(norm) - 1))
        for optimizer in (one, many):
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for name, p in low.named_parameters():
                p.copy_(masters[name])
        for entry in wrapped.held:
            master = masters[_first(low, entry.name)].detach()
            error = float((whole(entry, entry.stepped) - master).norm() / master.norm())
            worst["weight"] = max(worst["weight"], error)
            used = whole_parameter(entry).to(torch.bfloat16)
            wrong = float((used != master.to(torch.bfloat16)).float().mean())
            worst["rounded"] = max(worst["rounded"], wrong)
    return {"parameter": worst_name, **worst}


def _first(model: torch.nn.Module, name: str) -> str:
    """The name under which named_parameters gives a parameter that has several."""
    wanted = model.get_parameter(name)
    return next(other for other, p in model.named_parameters() if p is wanted)


def _sum_in_low(parallel: ParallelModel) -> None:
    """Replicated layers add their micro-batches up in bfloat16."""

    def rounded(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.copy_(parameter.grad.to(torch.bfloat16))

    for entry in parallel.held:
        if entry.stands_in:
            entry.parameter.register_post_accumulate_grad_hook(rounded)


_PLANTS = {"sum in bfloat16": _sum_in_low}
