"""Vocabulary parallelism: embedding and head cut along the words, on an unmodified model.

The model's forward stays in the boundary layout, each rank with its own samples. The lookup gathers the ids of the
group, looks up what the rank holds and sums by a reduce-scatter; the head gathers the hidden states and returns
ShardedLogits. Vocabularies that do not divide are padded inside with rows of zeros that nothing reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.plan import Plan
from autopar.runtime.ends import Vocabulary
from autopar.runtime.groups import RankGroups
from autopar.runtime.relayout import gather
from autopar.runtime.sharded_logits import ShardedLogits, WordRange
from autopar.runtime.stage import StageBody
from autopar.runtime.structure import Probe


@dataclass(frozen=True, kw_only=True)
class WordPlan:
    """How the ranks of a group hold the parameters of a vocabulary of `words`: equal runs of rows, the last padded."""

    tp: int
    words: int

    @property
    def rows(self) -> int:
        """The rows on each rank."""
        return -(-self.words // self.tp)

    @property
    def coordinates(self) -> tuple[tuple[int, ...], ...]:
        """The coordinates of each rank of the group."""
        return tuple((rank,) for rank in range(self.tp))

    def shard(self, name: str, tensor: Tensor, coordinate: tuple[int, ...]) -> Tensor:
        """The rows of a whole tensor that a rank holds, padded with zeros (a copy)."""
        start = min(coordinate[0] * self.rows, self.words)
        own = tensor[start : start + self.rows]
        return torch.cat([own, own.new_zeros(self.rows - len(own), *own.shape[1:])])

    def unshard(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor from the parts of all ranks, in rank order."""
        return torch.cat(list(parts))[: self.words]

    def held(self, group: dist.ProcessGroup) -> WordRange:
        """The words of this rank of the group."""
        rank = dist.get_rank(group)
        start = min(rank * self.rows, self.words)
        count = min(self.rows, self.words - start)
        return WordRange(group=group, ranks=self.tp, rank=rank, words=self.words, start=start, count=count)


def vocabulary_ends(plan: Plan, found: Probe, layers: range) -> dict[int, Vocabulary]:
    """The vocabulary-parallel ones among embedding and head in a part of the chain, by their layer."""
    ends = {0: found.lookup, len(plan.strategies) - 1: found.projection}
    return {layer: end for layer, end in ends.items() if layer in layers and plan.strategies[layer].tp > 1}


def cut_ends(
    body: StageBody,
    plan: Plan,
    ends: Mapping[int, Vocabulary],
    groups: RankGroups,
    known: dict[nn.Parameter, nn.Parameter],
) -> Mapping[int, tuple[str, WordPlan]]:
    """Cut the vocabulary-parallel ends of a stage for this rank, in place; by layer the module that was cut, and how.

    known: whole parameters and the local ones for them, to which these are added.
    """
    cut: dict[int, tuple[str, WordPlan]] = {}
    for layer, end in ends.items():
        strategy = plan.strategies[layer]
        module, words = body.model.get_submodule(end.path), WordPlan(tp=strategy.tp, words=end.words)
        cut_vocabulary(body.model, module, words, groups.along(plan.mesh.place(strategy).tp), known)
        cut[layer] = (end.path, words)
    return cut


def cut_vocabulary(
    model: nn.Module,
    module: nn.Module,
    plan: WordPlan,
    group: dist.ProcessGroup,
    known: dict[nn.Parameter, nn.Parameter],
) -> None:
    """Give the parameters of a lookup or projection this rank's rows, under all names that they have in the model."""
    for parameter in module.parameters(recurse=False):
        if parameter not in known and all(parameter is not local for local in known.values()):
            rows = plan.shard("", parameter.detach(), (dist.get_rank(group),))
            known[parameter] = nn.Parameter(rows, requires_grad=parameter.requires_grad)
    for owner in model.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter in known:
                setattr(owner, name, known[parameter])
    held = plan.held(group)
    if isinstance(module, nn.Embedding):
        module.forward = Lookup(module, held)
    else:
        assert isinstance(module, nn.Linear)
        module.forward = Projection(module, held)


class Lookup:
    """The forward of a cut embedding: that of the whole one, for this rank's ids (which lie along dimension 0)."""

    def __init__(self, table: nn.Embedding, held: WordRange) -> None:
        self.held, self._forward = held, table.forward
        padding = table.padding_idx
        if padding is not None:
            here = held.start <= padding < held.start + held.count
            table.padding_idx = padding - held.start if here else None

    def __call__(self, ids: Tensor) -> Tensor:
        """The rows of the ids, whichever ranks hold them."""
        held = self.held
        place = gather(ids, 0, held.group) - held.start
        mine = (place >= 0) & (place < held.count)
        found = self._forward(torch.where(mine, place, 0))
        found = torch.where(mine.view(*mine.shape, *[1] * (found.dim() - mine.dim())), found, 0.0)
        out: Tensor = _SumOwn.apply(found, held)
        return out


class Projection:
    """The forward of a cut nn.Linear: the logits of this rank's hidden states (along dimension 0)."""

    def __init__(self, linear: nn.Linear, held: WordRange) -> None:
        self.linear, self.held = linear, held

    def __call__(self, hidden: Tensor) -> Tensor:
        """The logits, cut along the words."""
        held, weight, bias = self.held, self.linear.weight, self.linear.bias
        if held.count < len(weight):
            weight, bias = weight[: held.count], None if bias is None else bias[: held.count]
        every = _GatherAll.apply(hidden, held)
        local = nn.functional.linear(every, weight, bias)
        return ShardedLogits.of(local.view(held.ranks, *hidden.shape[:-1], held.count), held, hidden.dim() - 1)


class _GatherAll(torch.autograd.Function):
    """What all ranks hold, along dimension 0; the backward sums the gradients of all for what this rank holds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: WordRange) -> Tensor:
        ctx.held = held
        return gather(x, 0, held.group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _sum_own(grads[0], ctx.held), None


class _SumOwn(torch.autograd.Function):
    """This rank's part along dimension 0 of the sum over all ranks; the backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: WordRange) -> Tensor:
        ctx.held = held
        return _sum_own(x, held)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return gather(grads[0], 0, ctx.held.group), None


def _sum_own(x: Tensor, held: WordRange) -> Tensor:
    x = x.contiguous()
    out = x.new_empty((x.shape[0] // held.ranks, *x.shape[1:]))
    dist.reduce_scatter_single(out, x, group=held.group)
    return out
