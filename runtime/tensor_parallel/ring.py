"""Attention of a rank's queries with the keys and values of all ranks of a context-parallel team, part after part.

The sequence is dealt out in pairs: of 2 n pieces the rank i of n has i and 2 n - 1 - i. Under a causal mask a part
from an earlier rank is met by all queries with its first piece, one from a later rank by the second piece of queries
with all of it, and the own part is causal in itself; every part costs each rank the same, and no score is computed
that the mask takes away. Flash attention gives with each part the logarithm of its sums of exponentials, by which
parts are merged (Liu et al., Ring Attention, arXiv 2310.01889); the backward is that of flash attention, part by part,
with the merged output and logarithm.

The parts are gathered at once and kept for the backward, or go around a ring, twice, and only the own one is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.flash import flash, flash_backward
from autopar.runtime.tensor_parallel.collectives import Team

_ALL = slice(None)


def attend(q: Tensor, k: Tensor, v: Tensor, team: Team, is_causal: bool, scale: float | None, around: bool) -> Tensor:
    """The output for the rank's queries, [samples, heads, places, width]; its parts dealt out in pairs where causal.

    around: send the parts around a ring instead of gathering them.
    """
    out: Tensor = _Attend.apply(q, k, v, team, is_causal, scale, around)
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, team: Team, is_causal: bool, scale: float | None, around: bool
    ) -> Tensor:
        own = torch.stack([k, v])
        held = own if around else _gathered(own, team)
        out, lse = q.new_empty(0), q.new_empty(0)
        for source, part in _parts(held, team, around):
            rows, columns, diagonal = _met(team.rank, source, is_causal, q.shape[-2] // 2)
            some, some_lse = flash(
                q[..., rows, :], part[0][..., columns, :], part[1][..., columns, :], diagonal, scale
            )
            if source == team.rank:
                out, lse = some.to(some_lse.dtype), some_lse.contiguous()
                continue
            both = torch.logaddexp(lse[..., rows], some_lse)
            before, now = (lse[..., rows] - both).exp()[..., None], (some_lse - both).exp()[..., None]
            out[..., rows, :] = out[..., rows, :] * before + some * now
            lse[..., rows] = both
        out = out.to(q.dtype)
        ctx.rest = team, is_causal, scale, around
        ctx.save_for_backward(q, held, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, held, out, lse = ctx.saved_tensors
        team, is_causal, scale, around = ctx.rest
        grad = grads[0].contiguous()
        to_q = torch.zeros_like(q, dtype=lse.dtype)
        to_all = None if around else torch.zeros_like(held)
        coming: Any = None
        for source, part in _parts(held, team, around):
            rows, columns, diagonal = _met(team.rank, source, is_causal, q.shape[-2] // 2)
            pieces = q[..., rows, :], part[0][..., columns, :], part[1][..., columns, :]
            results = out[..., rows, :], lse[..., rows]
            of_q, of_k, of_v = flash_backward(grad[..., rows, :], *pieces, *results, diagonal, scale)
            to_q[..., rows, :] += of_q
            to_part = to_all[source] if to_all is not None else torch.zeros_like(part) if coming is None else coming()
            to_part[0][..., columns, :] += of_k
            to_part[1][..., columns, :] += of_v
            coming = _passed_on(to_part, team) if around else None
        to_own = coming() if to_all is None else _summed(to_all, team)
        return to_q.to(q.dtype), to_own[0], to_own[1], None, None, None, None


def _met(place: int, source: int, is_causal: bool, piece: int) -> tuple[slice, slice, bool]:
    """Which queries meet which keys of the part that `source` had, and whether causally."""
    if not is_causal or source == place:
        return _ALL, _ALL, is_causal
    return (_ALL, slice(0, piece), False) if source < place else (slice(piece, None), _ALL, False)


def _parts(held: Tensor, team: Team, around: bool) -> Iterator[tuple[int, Tensor]]:
    """The rank that each part is from and the part, the own one first; the next one is under way meanwhile."""
    for step in range(team.ranks):
        source = (team.rank - step) % team.ranks
        if not around:
            yield source, held[source]
            continue
        coming = _passed_on(held, team) if step < team.ranks - 1 else None
        yield source, held
        held = held if coming is None else coming()


def _passed_on(x: Tensor, team: Team) -> Any:
    """Send x to the next rank of the team; calling the result waits for what comes from the one before."""
    if team.group is None:
        return lambda: x
    taken = torch.empty_like(x)
    give, take = [0] * team.ranks, [0] * team.ranks
    give[(team.rank + 1) % team.ranks] = take[team.rank - 1] = x.numel()
    work = dist.all_to_all_single(taken.view(-1), x.view(-1), take, give, group=team.group, async_op=True)

    def arrived(sent: Tensor = x) -> Tensor:
        work.wait()
        return taken

    return arrived


def _gathered(own: Tensor, team: Team) -> Tensor:
    every = own.new_empty((team.ranks, *own.shape))
    if team.group is None:
        return every.copy_(own.expand_as(every))
    dist.all_gather_single(every.view(-1), own.view(-1), group=team.group)
    return every


def _summed(every: Tensor, team: Team) -> Tensor:
    own = torch.empty_like(every[0])
    if team.group is None:
        return own.copy_(every[team.rank])
    dist.reduce_scatter_single(own.view(-1), every.view(-1), group=team.group)
    return own
