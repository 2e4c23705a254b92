"""The collectives of a tensor-parallel block as autograd functions, wrapped in modules that the local graph calls.

Without a process group (`Team.group` None) each only changes shapes as the real one would, so that one process can
time and trace one rank's work. A sequence part is described by `outer`: the elements of all dimensions outside the
sequence, which then is the middle of [outer, sequence, inner]. Gradients are sums; no collective scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.runtime.fakes import FakeTensor


@dataclass(frozen=True)
class Team:
    """The ranks of one axis, or of all axes together: how many, which of them this one is, and their group."""

    ranks: int
    rank: int
    group: Any = None


def _all_reduce(x: Tensor, team: Team) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    if team.group is not None:
        dist.all_reduce(x, group=team.group)
    return x


def _all_gather(x: Tensor, team: Team, shape: list[int], outer: int) -> Tensor:
    """The whole of this shape from the parts of all ranks."""
    x = x.contiguous()
    parts = x.new_empty((team.ranks, outer, x.numel() // outer))
    if team.group is None:
        parts.copy_(x.view(1, outer, -1))
    else:
        dist.all_gather_single(parts.view(-1), x.view(-1), group=team.group)
    return parts.transpose(0, 1).reshape(shape)


def _reduce_scatter(x: Tensor, team: Team, shape: list[int], outer: int) -> Tensor:
    """This rank's part, of this shape, of the sum over all ranks."""
    parts = x.reshape(outer, team.ranks, -1).transpose(0, 1).contiguous()
    if team.group is None:
        # On a CPU gloo adds up in a copy of its input.
        summed = parts.clone() if parts.device.type == "cpu" else parts
        return summed[team.rank].clone().view(shape)
    out = x.new_empty(shape)
    dist.reduce_scatter_single(out.view(-1), parts.view(-1), group=team.group)
    return out


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team) -> Tensor:
        ctx.team = team
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _all_reduce(grad, ctx.team), None


class _CopySome(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team, dim: int, places: Tensor) -> Tensor:
        ctx.team, ctx.dim, ctx.places = team, dim, places
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        places = ctx.places.to(grad.device)
        summed = _all_reduce(grad.index_select(ctx.dim, places), ctx.team)
        return grad.index_copy(ctx.dim, places, summed), None, None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team) -> Tensor:
        return _all_reduce(x, team)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        return x / ranks

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team, shape: list[int], outer: int) -> Tensor:
        ctx.rest = (team, list(x.shape), outer)
        return _all_gather(x, team, shape, outer)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _reduce_scatter(grad, *ctx.rest), None, None, None


def gather_parts(x: Tensor, team: Team, shape: list[int], outer: int) -> Tensor:
    """The whole, of this shape, from the parts of all ranks; the backward is a reduce-scatter."""
    whole: Tensor = _Gather.apply(x, team, shape, outer)
    return whole


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team, shape: list[int], outer: int) -> Tensor:
        ctx.rest = (team, list(x.shape), outer)
        return _reduce_scatter(x, team, shape, outer)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _all_gather(grad, *ctx.rest), None, None, None


class _OnTeam(nn.Module):
    """A collective of one team."""

    def __init__(self, team: Team) -> None:
        super().__init__()
        self.team = team


class _OnSequence(nn.Module):
    """A collective between the whole sequence and the parts of the ranks; `shape` is that of its result."""

    def __init__(self, team: Team, shape: list[int], outer: int) -> None:
        super().__init__()
        self.team, self.shape, self.outer = team, shape, outer


class Copy(_OnTeam):
    """Identity; the backward adds up the gradients of all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """The same value."""
        return _Copy.apply(x, self.team) if x.requires_grad else x


class CopySome(nn.Module):
    """Identity; the backward adds up the gradients at the places of a dimension that all ranks hold."""

    def __init__(self, team: Team, dim: int, places: Tensor) -> None:
        super().__init__()
        self.team, self.dim, self.places = team, dim, places

    def forward(self, x: Tensor) -> Tensor:
        """The same value."""
        return _CopySome.apply(x, self.team, self.dim, self.places) if x.requires_grad else x


class Reduce(_OnTeam):
    """The sum over all ranks; identity backward."""

    def forward(self, x: Tensor) -> Tensor:
        """The sum."""
        return _Reduce.apply(x, self.team)


class Share(nn.Module):
    """1 / ranks of the value, so that the later sum has it once; identity backward."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        """The share."""
        return _Share.apply(x, self.ranks)


class Gather(_OnSequence):
    """The whole sequence from its parts; the backward is a reduce-scatter."""

    def forward(self, x: Tensor) -> Tensor:
        """The whole."""
        return _Gather.apply(x, self.team, self.shape, self.outer)


class Scatter(_OnSequence):
    """This rank's part of the sequence of the sum over all ranks; the backward is an all-gather."""

    def forward(self, x: Tensor) -> Tensor:
        """The part of the sum."""
        return _Scatter.apply(x, self.team, self.shape, self.outer)


class Slice(_OnSequence):
    """This rank's part of a sequence that it holds whole; the backward has zeros at the other places."""

    def forward(self, x: Tensor) -> Tensor:
        """The part."""
        return x.reshape(self.outer, self.team.ranks, -1)[:, self.team.rank].reshape(self.shape)


class ForkedRandom(nn.Module):
    """A random operator that draws from a stream of its own for each `place` among the ranks.

    The seed comes from the default CPU generator, which must be in the same state on all ranks of the group: then
    replicated dropout stays equal on them, and activation checkpointing, which restores that state, draws the same
    numbers again.
    """

    def __init__(self, target: Any, place: int) -> None:
        super().__init__()
        self.target, self.place = target, place

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The operator's result."""
        if isinstance(x, FakeTensor):  # nothing is drawn where there are no numbers
            return self.target(x, *args, **kwargs)
        seed = int(torch.randint(2**62, ())) + self.place
        devices = [x.device] if x.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            return self.target(x, *args, **kwargs)
