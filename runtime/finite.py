"""Numbers that are not finite, seen by all ranks at once before an optimizer steps by them or a file holds them.

The sums that show them are the same on every rank, so that all go on or all stop; only then do the ranks ask each
other where it began.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import RunError
from autopar.runtime.fakes import has_numbers

if TYPE_CHECKING:
    from autopar.runtime.gradients import HeldParameter


def is_finite(tensor: Tensor) -> bool:
    """Whether all numbers of a tensor are finite; a fake one has none. One pass, without a copy."""
    if not tensor.is_floating_point() or not tensor.numel() or not has_numbers(tensor):
        return True
    return all(isfinite(float(end)) for end in torch.aminmax(tensor.detach()))


def refuse_loss(total: float, labels: float, mine: float, *, step: int) -> None:
    """Raise RunError on every rank where the summed loss of a step is not finite, or no label was counted.

    total, labels: sums over all ranks, the same on each; mine: this rank's part of the first.
    """
    if not isfinite(total):
        ranks = _ranks_where(not isfinite(mine))
        raise RunError(
            f"the loss is not finite in step {step}: {total} over {labels:.0f} labels, first on rank {ranks[0]}",
            why=f"the training diverged, or the batch holds such numbers; it is so on {_counted(ranks)}",
            fix="lower the learning rate, clip gradients, or check this step's batch; the weights are those before it",
        )
    if not labels:
        raise RunError(
            f"the loss is not finite in step {step}: the batch has no label",
            why="no label was counted on any rank",
            fix="check the labels",
        )


def refuse_gradients(norm: float, held: Sequence[HeldParameter], *, step: int) -> None:
    """Raise RunError on every rank where the norm of the whole gradient, the same on each, is not finite."""
    if isfinite(norm):
        return
    bad = next((e.name for e in held if e.local_grad is not None and not is_finite(e.local_grad)), "")
    names: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(names, bad)
    where = next(
        (f"first of {name} on rank {rank}" for rank, name in enumerate(names) if name), "its square overflows"
    )
    raise RunError(
        f"the gradient is not finite in step {step}: {where}",
        why=f"its norm is {norm} while the loss is finite",
        fix="lower the learning rate, or check this step's batch; the weights are those before it",
    )


def refuse_weights(bad: str, what: str, group: dist.ProcessGroup | None = None) -> None:
    """Raise RunError on every rank of the group (None: the world) when one names a parameter that is not finite."""
    names: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(names, bad, group=group)
    found = [name for name in names if name]
    if found:
        raise RunError(
            f"{what} is not saved: {found[0]} is not finite",
            why="the training diverged; what was saved before is kept",
            fix="go on from the checkpoint before, with a lower learning rate",
        )


def _ranks_where(bad: bool) -> list[int]:
    said: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(said, bad)
    return [rank for rank, one in enumerate(said) if one] or [0]  # finite parts may have an infinite sum


def _counted(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return "that rank alone"
    return f"{len(ranks)} ranks: {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"
