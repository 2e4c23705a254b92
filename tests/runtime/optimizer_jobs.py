"""Jobs on real ranks about optimizers: which parts they hold, and their steps against one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.runtime.batches import example_batch
from autopar.runtime.gradients import local_piece, whole_parameter
from autopar.runtime.losses import loss_of
from autopar.runtime.models import build_model
from autopar.runtime.parallel import parallelize
from autopar.runtime.tracker import storage_bytes
from autopar.runtime.train import train_rank
from tests.runtime.rank_jobs import make_plan

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "eps": 1e-4}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01, "eps": 1e-4}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01, "eps": 1e-4}),
}


def steps_of_optimizers(source: str, strategies: list[str], **shape: Any) -> dict[str, float]:
    """For each optimizer the largest relative error of a weight against one process, after three clipped steps."""
    plan = make_plan(source, strategies, world=dist.get_world_size(), **shape)
    worst = {}
    for name, (kind, settings) in OPTIMIZERS.items():
        reference, wrapped = build_model(source).eval(), parallelize(build_model(source).eval(), plan)
        one, many = kind(reference.parameters(), **settings), kind(wrapped.param_groups(), **settings)
        for step in range(3):
            batch = example_batch(reference, samples=plan.request.global_batch, sequence=8, seed=step)
            expected = loss_of(reference(**batch))
            assert expected is not None
            expected.backward()
            wrapped.train_step(wrapped.shard_batch(batch))
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
            wrapped.clip_grad_norm_(0.5)
            for optimizer in (one, many):
                optimizer.step()
                optimizer.zero_grad(set_to_none=step != 1)
        named = dict(reference.named_parameters(remove_duplicate=False))
        pairs = [(whole_parameter(e), named[e.name].detach()) for e in wrapped.held]
        worst[name] = max(float((found - want).norm() / want.norm()) for found, want in pairs)
    return worst


def run_and_resume(source: str, strategies: list[str], folder: str, **shape: Any) -> dict[str, Any]:
    """Losses of four steps of `autopar run` and of the last two after a resume; with the plan and the tracked peak."""
    text = make_plan(source, strategies, world=dist.get_world_size(), **shape).dumps()

    def run(**payload: Any) -> dict[str, Any]:
        return train_rank({"plan": text, "text": None, **payload}, lambda event: None)

    whole, half = run(steps=4), run(steps=2, save=folder)
    rest = run(steps=2, resume=folder)
    peak = whole["peak_memory_bytes"]
    return {"plan": text, "whole": whole["losses"], "parts": [*half["losses"], *rest["losses"]], "peak": peak}


def refused_optimizers(source: str, strategies: list[str]) -> dict[str, str]:
    """The words with which the first step of each is refused, and whether a weight had changed by then."""
    plan = make_plan(source, strategies, world=dist.get_world_size())
    wrapped = parallelize(build_model(source).eval(), plan)
    batch = wrapped.shard_batch(example_batch(wrapped.model, samples=plan.request.global_batch, sequence=8))
    said = {}
    for kind in (torch.optim.LBFGS, torch.optim.Adafactor):
        groups = wrapped.param_groups()
        optimizer = kind(groups if kind is not torch.optim.LBFGS else groups[0]["params"])
        wrapped.train_step(batch)
        before = [local_piece(e.stepped).detach().clone() for e in wrapped.held]
        try:
            optimizer.step(lambda: 0.0) if kind is torch.optim.LBFGS else optimizer.step()  # type: ignore[call-arg]
            said[kind.__name__] = "not refused"
        except AutoparError as error:
            said[kind.__name__] = str(error)
        optimizer.zero_grad()
        assert all(torch.equal(a, local_piece(e.stepped)) for a, e in zip(before, wrapped.held, strict=True))
    return said


def state_bytes(source: str, strategies: list[str]) -> dict[str, int]:
    """Bytes of what this rank's AdamW keeps, of its parameters, and of gradients after a step; no DTensor among them.

    A DTensor in a step costs torch some 50 us an operation, unwrapping and wrapping.
    """
    plan = make_plan(source, strategies, world=dist.get_world_size())
    wrapped = parallelize(build_model(source).eval(), plan)
    optimizer = torch.optim.AdamW(wrapped.param_groups())
    wrapped.train_step(wrapped.shard_batch(example_batch(wrapped.model, samples=8, sequence=8)))
    optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    grads = [e.local_grad for e in wrapped.held if e.local_grad is not None]
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "plain": all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in (*moments, *stepped, *grads)),
        "moments": storage_bytes([local_piece(m) for m in moments]),
        "parameters": storage_bytes([local_piece(e.parameter.data) for e in wrapped.held]),
        "with rows": storage_bytes([[local_piece(e.parameter.data), e.stepped.data] for e in wrapped.held]),
        "gradients": storage_bytes(grads),
    }
