"""Jobs on real ranks about models that were built without storage."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar.runtime.gradients
from autopar.errors import AutoparError
from autopar.runtime.gradients import local_piece, whole_parameter
from autopar.runtime.models import build_model
from autopar.runtime.parallel import ParallelModel, parallelize
from autopar.runtime.recording import empty_weights
from autopar.runtime.verify import compare
from tests.bench.empty_weights import plan_of, source_of, wrap_rank
from tests.runtime.rank_jobs import make_plan


def built(source: str, seed: int = 0, dtype: str = "float32") -> nn.Module:
    """The model of `build_model` without storage."""
    with empty_weights():
        model = build_model(source, seed=seed, dtype=dtype)
    assert all(p.is_meta for p in model.parameters())
    return model


def as_from_real_weights(
    source: str, strategies: list[str], plant: str = "", loaded: str = "", **shape: Any
) -> dict[str, Any]:
    """Where the same plan of the same model, built plainly and wrapped, holds something else on this rank.

    loaded: take the weights of files that another plan wrote: "weights", "checkpoint".
    """
    plan = make_plan(source, strategies, world=dist.get_world_size(), **shape)
    dtype = plan.request.dtype
    real = parallelize(build_model(source, dtype=dtype), plan)
    folder = _written(real, loaded) if loaded else None
    original = autopar.runtime.gradients.shard_of
    try:
        if plant == "another shard":
            autopar.runtime.gradients.shard_of = lambda parameter, full: original(parameter, full.roll(1, 0))
        model = built(source, seed=1 if loaded else 0, dtype=dtype)
        if loaded:  # as if made on the meta device, of which nothing is known
            model = _forgotten(model)
        found = parallelize(model, plan, weights=folder)
    finally:
        autopar.runtime.gradients.shard_of = original
    _PLANTS[plant](found)
    return {"differ": differences(real, found), "held": len(found.held)}


def _written(real: ParallelModel, loaded: str) -> str:
    import tempfile

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    target = f"{folder[0]}/files"
    real.export(target) if loaded == "weights" else real.save(target)
    return target


def _forgotten(model: nn.Module) -> nn.Module:
    """The same model with parameters on the meta device that have no history."""
    memo: dict[int, Any] = {id(p): nn.Parameter(torch.empty_like(p), p.requires_grad) for p in model.parameters()}
    return copy.deepcopy(model, memo)


def differences(real: ParallelModel, found: ParallelModel) -> list[str]:
    """What differs, bit by bit, between what two wrapped models hold on this rank."""
    wrong = []
    for want, got in zip(real.held, found.held, strict=True):
        same = want.name == got.name and want.stands_in == got.stands_in
        for a, b in ((want.stepped, got.stepped), (want.parameter, got.parameter)):
            x, y = local_piece(a.detach()), local_piece(b.detach())
            same = same and x.dtype == y.dtype and x.device == y.device and torch.equal(x, y)
            same = same and a.requires_grad == b.requires_grad
        views = [e.stepped.untyped_storage().data_ptr() == e.parameter.untyped_storage().data_ptr()
                 for e in (want, got) if e.rows is not None]  # fmt: skip
        if not same or len(set(views)) > 1:
            wrong.append(got.name)
    names = [[name for name, _ in m.stages.named_parameters(remove_duplicate=False)] for m in (real, found)]
    wrong += sorted(set(names[0]) ^ set(names[1]))
    theirs = dict(found.stages.named_buffers(remove_duplicate=False))
    for name, buffer in real.stages.named_buffers(remove_duplicate=False):
        other = theirs.pop(name)
        if other.is_meta or other.dtype != buffer.dtype or not torch.equal(buffer, other):
            wrong.append(name)
    return [*wrong, *theirs]


def _leave_a_buffer_empty(found: ParallelModel) -> None:
    for name, buffer in found.stages.named_buffers():
        if name.endswith("inv_freq"):
            buffer.copy_(torch.zeros_like(buffer))


def _break_a_tie(found: ParallelModel) -> None:
    head = found.model.lm_head
    head.weight = nn.Parameter(head.weight.detach().clone() + 1e-3)


_PLANTS: dict[str, Any] = {
    "": lambda found: None,
    "another shard": lambda found: None,
    "empty buffer": _leave_a_buffer_empty,
    "broken tie": _break_a_tie,
}


def against_one_process(source: str, strategies: list[str], plant: str, **shape: Any) -> dict[str, Any]:
    """The comparison with one process where a buffer was left empty or a tie broken while wrapping."""
    plan = make_plan(source, strategies, world=dist.get_world_size(), **shape)
    try:
        found = compare(plan, steps=2, tamper=_PLANTS[plant])
    except AutoparError as error:  # one parameter more than before
        return {"agrees": "appeared after autopar.parallelize" not in str(error)}
    return {"agrees": found.agrees, "gradient": found.gradient}


def unequal_seeds() -> float:
    """The largest distance of a parameter to rank 0's model, where every rank was seeded differently."""
    source = "GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64)"
    plan = make_plan(source, ["dp2-z3", "tp2", "dp2", "dp2-z3"], world=2)
    wrapped = parallelize(built(source, seed=dist.get_rank()), plan)
    named = dict(build_model(source, seed=0).named_parameters())
    return max(float((whole_parameter(e) - named[e.name]).abs().max()) for e in wrapped.held)


def wrapping_peak(plan: str) -> list[dict[str, int]]:
    """The bytes of building and wrapping a model without storage, and plainly."""
    source = source_of(12, width=128)
    text = plan_of(plan, source, 12, dist.get_world_size()).dumps()
    payload = {"source": source, "plan": text}
    return [wrap_rank({**payload, "empty": empty}, lambda event: None) for empty in (True, False)]


class Adapted(nn.Module):
    """A linear layer without numbers, frozen, and a real low-rank part beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.full((4, base.in_features), 0.1))
        self.up = nn.Parameter(torch.full((base.out_features, 4), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def refused(case: str) -> str:
    """The words with which parallelize refuses a model without numbers."""
    source = (
        "LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)"
    )
    plan = make_plan(source, ["dp2"] * 4, world=2)
    try:
        if case == "no source":
            parallelize(build_model(source, device="meta"), plan)
        elif case == "written afterwards":
            model = built(source)
            nn.init.zeros_(model.lm_head.weight)
            parallelize(model, plan)
        elif case == "empty buffer":
            model = built(source)
            model.register_buffer("table", torch.empty(3, device="meta"))
            parallelize(model, plan)
        elif case == "other models":
            model = built(source)
            if dist.get_rank():
                with empty_weights():
                    model.lm_head.weight = nn.Parameter(torch.ones(64, 32))
            parallelize(model, plan)
        elif case == "no such files":
            parallelize(built(source), plan, weights="nowhere")
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def buffers_recomputed(source: str) -> bool:
    """Whether a Hugging Face model from the meta device has the buffers of a plain one."""
    plan = make_plan(source, ["dp2"] * 4, world=2)
    real = parallelize(build_model(source), plan)
    found = parallelize(build_model(source, device="meta"), plan, weights=_written(real, "weights"))
    return differences(real, found) == []


def adapters() -> list[str]:
    """What differs where real adapters were added to a model without numbers."""
    import dataclasses

    from autopar.runtime.structure import fingerprint

    source = "examples/gpt.py:build(width=32, heads=4, blocks=4, vocab=64, context=16)"
    models = [build_model(source), built(source)]
    for model in models:
        for block in model.blocks:
            block.up = Adapted(block.up)
    plan = make_plan(source, ["dp2", "dp2-z3", "tp2", "dp2-z1", "dp2-z2", "dp2"], world=2)
    plan = dataclasses.replace(plan, model=dataclasses.replace(plan.model, fingerprint=fingerprint(models[0])))
    real, found = (parallelize(model, plan) for model in models)
    return differences(real, found)
