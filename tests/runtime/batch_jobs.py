"""Batches that ranks cannot run together, in a loop of the user's and in a train step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import InputError
from autopar.runtime.batches import example_batch
from autopar.runtime.models import build_model
from autopar.runtime.parallel import parallelize
from tests.runtime.rank_jobs import make_plan


def _batch(kind: str, model: Any, samples: int, tokens: int) -> dict[str, Tensor]:
    other = dist.get_rank() == 1
    length = {"length": tokens - 2, "longer on one rank": tokens + tokens * other}.get(kind, tokens)
    batch = example_batch(model, samples=samples - (kind == "a sample less" and other), sequence=length)
    if kind == "a mask on one rank" and not other:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    return batch


def refused(source: str, strategies: list[str], kind: str, **shape: Any) -> dict[str, str]:
    """What a rank says of such a batch, in each way to run it; then the loss of a good one shows that all goes on."""
    plan = make_plan(source, strategies, world=dist.get_world_size(), **shape)
    model = build_model(source)
    tokens = plan.request.sequence
    parallel = parallelize(model, plan)
    ways: dict[str, Any] = {"train_step": parallel.train_step}
    if plan.pp == 1:
        ways["forward"] = lambda batch: parallel(**batch)
    found = {}
    for name, run in ways.items():
        try:
            run(_batch(kind, model, parallel.local_batch, tokens))
        except InputError as error:
            found[name] = str(error)
        run(_batch("good", model, parallel.local_batch, tokens))
        parallel.zero_grad()
    return found
