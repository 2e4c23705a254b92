"""What the tests of sequence parallelism run on real ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.runtime.models import build_model
from autopar.runtime.parallel import parallelize
from autopar.runtime.tensor_parallel import sequence
from tests.runtime.rank_jobs import make_plan


def local_rows(source: str, strategies: list[str]) -> str:
    """What parallelize says when queries take the rows of a mask as if their part were the whole sequence."""
    real = sequence.SequenceTeams.places

    def wrong(teams: Any, length: int, device: Any) -> Any:
        rows, columns = real(teams, length, device)
        return torch.arange(len(rows), device=device), columns

    sequence.SequenceTeams.places = wrong
    try:
        parallelize(build_model(source), make_plan(source, strategies, world=dist.get_world_size()))
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        sequence.SequenceTeams.places = real
    return "not caught"


def faulty(source: str, strategies: list[str], fault: str) -> str:
    """What parallelize says when the attention exchanges nothing, or puts the parts of others in a wrong order."""
    real = sequence._exchange
    faults: dict[str, Any] = {
        "own part only": lambda x, team, cut, joined: x,
        "wrong order": lambda x, team, cut, joined: real(x, team, cut, joined).flip(joined),
    }
    sequence._exchange = faults[fault]
    try:
        parallelize(build_model(source), make_plan(source, strategies, world=dist.get_world_size()))
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        sequence._exchange = real
    return "not caught"


def exchanged(heads: int, length: int) -> dict[str, float]:
    """There and back again: the error of an exchange against cutting the whole, and of the way back."""
    size, rank = dist.get_world_size(), dist.get_rank()
    team = sequence.Team(size, rank, dist.group.WORLD)
    whole = torch.randn(2, heads, length, 3, generator=torch.Generator().manual_seed(0))
    part = whole.chunk(size, 2)[rank].clone().requires_grad_()
    moved = sequence._Exchange.apply(part, team, -3, -2)
    back = sequence._Exchange.apply(moved, team, -2, -3)
    moved.sum().backward(retain_graph=True)
    assert part.grad is not None
    return {
        "there": float((moved - whole.chunk(size, 1)[rank]).abs().max()),
        "back": float((back - part).abs().max()),
        "gradient": float((part.grad - 1).abs().max()),
    }
