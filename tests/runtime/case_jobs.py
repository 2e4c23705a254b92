"""Jobs on real ranks for the cases of test_cases.py: inputs that broke other tools."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.runtime.batches import labels_of
from autopar.runtime.gradients import local_piece, whole, whole_parameter
from autopar.runtime.models import build_empty, build_model
from autopar.runtime.parallel import ParallelModel, parallelize
from autopar.runtime.structure import fingerprint
from autopar.runtime.verify import compare
from tests.runtime.rank_jobs import make_plan
from tests.runtime.saving_jobs import _started, _steps

PLAIN = "examples/gpt.py:build(width=32, heads=4, blocks=4, vocab=64, context=16)"


def tied_copies(source: str, strategies: list[str], **shape: Any) -> dict[str, Any]:
    """Every copy of the shared parameter on any rank after three clipped AdamW steps, as sums of its bits.

    The model begins without storage.
    """
    wrapped, optimizer = _started(source, strategies, shape, seed=0, build=build_empty)
    _steps(wrapped, optimizer, (0, 1, 2))
    tied = {"model.embed_tokens.weight", "lm_head.weight"}
    mine = [
        (entry.name, int(whole_parameter(entry).contiguous().view(torch.int32).long().sum()))
        for entry in wrapped.held
        if entry.name in tied
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {"copies": [copy for copies in everyone for copy in copies], "counted": _counted(wrapped)}


def _counted(wrapped: ParallelModel) -> int:
    """The parameters of the model, each once however often it is held: what the gradient norm counts."""
    own = 0.0
    for entry in wrapped.held:
        share = entry.share if isinstance(entry.share, float) else float(entry.share.mean())
        own += share * local_piece(entry.stepped).numel() if entry.counted else 0.0
    total = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(total)
    return round(float(total))


def uneven_tokens(source: str, strategies: list[str], counts: list[list[int]], **shape: Any) -> dict[str, Any]:
    """Against one process, where micro-batch i has counts[i][k] labels in sample k."""
    plan = make_plan(source, strategies, world=dist.get_world_size(), micro_batches=len(counts), **shape)

    def batch_of(model: nn.Module, step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(64, (plan.request.global_batch, plan.request.sequence), generator=generator)
        labels = tokens.clone()
        for sample, count in enumerate(count for row in counts for count in row):
            labels[sample, count + 1 :] = -100  # the first label of a sample is shifted away
        batch = {"input_ids": tokens, "labels": labels}
        assert int((batch[labels_of(batch)][:, 1:] != -100).sum()) == sum(map(sum, counts))
        return batch

    found = compare(plan, steps=2, batch_of=batch_of)
    return {"agrees": found.agrees, "loss": found.loss, "gradient": found.gradient, "norm": found.norm}


class Adapted(nn.Module):
    """A frozen linear layer in bfloat16 with a trained low-rank part in float32 beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.to(torch.bfloat16).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.to(torch.bfloat16)).to(x.dtype) + x @ self.down.T @ self.up.T


def _adapted() -> nn.Module:
    torch.manual_seed(0)
    model = build_model(PLAIN)
    model.requires_grad_(False)
    for block in model.blocks:  # type: ignore[union-attr]
        block.attention.qkv = Adapted(block.attention.qkv)  # type: ignore[union-attr]
        block.up = Adapted(block.up)  # type: ignore[union-attr]
    return model.eval()


def adapters(strategies: list[str], **shape: Any) -> dict[str, Any]:
    """Gradients of adapters on a frozen base against one process, and how many elements have optimizer states."""
    plan = make_plan(PLAIN, strategies, world=dist.get_world_size(), **shape)
    reference, model = _adapted(), _adapted()
    plan = dataclasses.replace(plan, model=dataclasses.replace(plan.model, fingerprint=fingerprint(model)))
    wrapped = parallelize(model, plan)
    optimizer = torch.optim.AdamW(wrapped.param_groups(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(64, (plan.request.global_batch, 9), generator=generator)
    batch = {"ids": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    expected = reference(**batch)[1]
    expected.backward()
    loss = wrapped.train_step(wrapped.shard_batch(batch))
    named = dict(reference.named_parameters())
    worst, trained = 0.0, 0
    for entry in wrapped.held:
        if entry.parameter.requires_grad:
            grad, actual = named[entry.name].grad, entry.stepped.grad
            assert grad is not None
            assert actual is not None
            worst = max(worst, float((whole(entry, actual) - grad).norm() / grad.norm()))
            trained += local_piece(entry.stepped).numel()
    optimizer.step()
    kept = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    states = sum(local_piece(value).numel() for value in kept)
    return {"loss": abs(float(loss) / float(expected) - 1), "gradient": worst, "trained": trained, "states": states}


def late_parameters(strategies: list[str], forward: bool = False, **shape: Any) -> str:
    """The words with which a model refuses to train parameters that were added after wrapping."""
    plan = make_plan(PLAIN, strategies, world=dist.get_world_size(), **shape)
    wrapped = parallelize(build_model(PLAIN), plan)
    block = next(iter(wrapped.stage.body.blocks().values()))
    block.up = Adapted(nn.Linear(32, 128))
    tokens = torch.randint(64, (plan.request.global_batch, 8))
    batch = wrapped.shard_batch({"ids": tokens, "targets": tokens})
    try:
        if forward:
            wrapped(**batch)
        else:
            wrapped.train_step(batch)
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def groups_made(source: str, strategies: list[str], **shape: Any) -> dict[str, Any]:
    """The rank sets for which a plan made process groups, as this rank knows them."""
    plan = make_plan(source, strategies, world=dist.get_world_size(), **shape)
    wrapped, _ = _started(source, strategies, shape, seed=0)
    made = dist.distributed_c10d._world.pg_names
    return {"sets": sorted(wrapped._groups._groups), "groups": len(made), "mesh": str(plan.mesh)}


def killed_while_saving(source: str, folder: str, strategies: list[str], moment: str, **shape: Any) -> None:
    """One good checkpoint, another step, and a save during which a rank is killed."""
    wrapped, optimizer = _started(source, strategies, shape, seed=0)
    _steps(wrapped, optimizer, (0, 1))
    wrapped.save(folder, optimizer)
    _steps(wrapped, optimizer, (2,))
    if moment == "writing" and dist.get_rank() == 1:
        dcp.save = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
    if moment == "renaming" and dist.get_rank() == 0:
        real = Path.rename

        def rename(path: Path, target: Any) -> Any:
            if path.name == ".checkpoint.new":
                os.kill(os.getpid(), signal.SIGKILL)
            return real(path, target)

        Path.rename = rename  # type: ignore[method-assign]
    wrapped.save(folder, optimizer)
