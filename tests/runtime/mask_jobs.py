"""What the tests of padded batches run on real ranks."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar.runtime.side_inputs
from autopar.errors import AutoparError
from autopar.runtime.batches import example_batch, labels_of
from autopar.runtime.parallel import ParallelModel
from autopar.runtime.tensor_parallel import sequence
from autopar.runtime.verify import compare
from tests.runtime.rank_jobs import make_plan, own_only


def kept_places(kind: str, samples: int, tokens: int, seed: int = 0) -> Tensor:
    """Which places of a batch are no padding: [samples, tokens]; "one" pads a sample of the first rank only."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.arange(tokens)
    lengths = torch.randint(tokens // 2, tokens + 1, (samples, 1), generator=generator)
    if kind == "left":
        return places >= tokens - lengths
    if kind == "one":
        lengths[:] = tokens
        lengths[0] = tokens // 2
    if kind == "rows":
        lengths[samples // 2 :: 3] = 0
    return places < lengths


def padded(kind: str, form: str, model: nn.Module, samples: int, tokens: int, seed: int) -> dict[str, Tensor]:
    """A batch of random tokens with padding and its mask in a form: "long", "bool", "additive" (4-D) or "4-D bool"."""
    batch = example_batch(model, samples=samples, sequence=tokens, seed=seed)
    kept = kept_places(kind, samples, tokens, seed)
    batch[labels_of(batch)][~kept] = -100
    if kind == "positions":
        batch["position_ids"] = (kept.long().cumsum(1) - 1).clamp(min=0)
    if form in ("additive", "4-D bool"):
        seen = kept[:, None, None, :] & torch.ones(tokens, tokens, dtype=torch.bool).tril()
        zeros = torch.zeros(seen.shape)
        batch["attention_mask"] = seen if form == "4-D bool" else zeros.masked_fill(~seen, torch.finfo().min)
    else:
        batch["attention_mask"] = kept if form == "bool" else kept.long()
    return batch


def padded_equals_one_process(
    source: str, strategies: list[str], kinds: list[str], form: str = "long", plant: str = "", **shape: Any
) -> dict[str, Any]:
    """Largest relative errors against one process, one step for each kind of padding."""
    plan = make_plan(source, strategies, world=dist.get_world_size(), **shape)
    samples, tokens = plan.request.global_batch, plan.request.sequence

    def batch_of(model: nn.Module, step: int) -> dict[str, Tensor]:
        return padded(kinds[step], form, model, samples, tokens, step)

    changed: list[Any] = []

    def tamper(parallel: ParallelModel) -> None:
        home, name, wrong = _PLANTS[plant]
        changed.append((home, name, getattr(home, name)))
        setattr(home, name, wrong(getattr(home, name)))

    try:
        found = compare(plan, steps=len(kinds), batch_of=batch_of, tamper=tamper if plant else None)
        return {**asdict(found), "agrees": found.agrees}
    except AutoparError as error:
        return {"agrees": False, "error": f"{type(error).__name__}: {error}"}
    finally:
        for one in changed:
            setattr(*one)


def _own_places(places: Any) -> Any:
    """Queries take the rows of a mask as if their part were the whole sequence."""

    def wrong(teams: Any, length: int, device: Any) -> Any:
        rows, columns = places(teams, length, device)
        return torch.arange(len(rows), device=device), columns

    return wrong


def _other_columns(places: Any) -> Any:
    """Keys take the columns of a mask from the other end."""

    def wrong(teams: Any, length: int, device: Any) -> Any:
        rows, columns = places(teams, length, device)
        return rows, columns.flip(0)

    return wrong


_PLANTS: dict[str, tuple[Any, str, Any]] = {
    "own samples": (autopar.runtime.side_inputs, "relayout", own_only),
    "own places": (sequence.SequenceTeams, "places", _own_places),
    "other columns": (sequence.SequenceTeams, "places", _other_columns),
}
