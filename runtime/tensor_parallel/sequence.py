"""Sequence parallelism: a block on a part of the sequence, with its attention shared out between the ranks.

Every operator but scaled_dot_product_attention treats places alike and runs on the own part. Around the attention
queries, keys, values and its output change hands with Ulysses (sp: all-to-all), so that a rank has all of the sequence
for a part of the heads; with context parallelism (cp) keys and values are gathered for the rank's own queries. Side
inputs that carry the sequence are whole and cut where they meet a part; masks are whole, and a rank takes the rows and
columns by their places in the whole sequence. Gradients of parameters are partial sums, which whoever holds the
parameters adds up over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from autopar.runtime.flash import takes
from autopar.runtime.relayout import dealt_order
from autopar.runtime.tensor_parallel.collectives import Copy, Team, gather_parts
from autopar.runtime.tensor_parallel.factors import Dims, Factor, leaves
from autopar.runtime.tensor_parallel.graph import BlockGraph, op_name, sequence_leaf
from autopar.runtime.tensor_parallel.rewrite import Rewriter, is_random
from autopar.runtime.tensor_parallel.ring import attend
from autopar.runtime.tensor_parallel.states import IllegalClassesError

ATTENTION = "scaled_dot_product_attention"


@dataclass(frozen=True, eq=False)
class SequenceTeams:
    """The ranks that share the sequence of some samples: `whole` all of them, in the order of their parts.

    sp, cp: those among which heads change hands, and those that gather keys and values. own: the parts that this rank
    has after the exchange; every: those that it has after the gather too, in this order. axes: of the parts, outermost
    first: the size of each and whether it deals the sequence out in pairs (cp). around: keys and values go around a
    ring instead of being gathered.
    """

    whole: Team
    sp: Team
    cp: Team
    own: tuple[int, ...]
    every: tuple[int, ...]
    axes: tuple[tuple[int, bool], ...]
    around: bool = False

    @classmethod
    def alone(cls, sp: int, cp: int) -> SequenceTeams:
        """The first rank's, without groups: collectives only change shapes."""
        parts = tuple(range(sp * cp))
        return cls(Team(sp * cp, 0), Team(sp, 0), Team(cp, 0), parts[:sp], parts, ((cp, True), (sp, False)))

    def places(self, sequence: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The places in the whole sequence of this rank's queries, and of the keys and values."""
        parts = self.parts(sequence)
        rows, columns = (torch.from_numpy(parts[list(some)].flatten()) for some in (self.own, self.every))
        return rows.to(device), columns.to(device)

    def parts(self, sequence: int) -> NDArray[np.int64]:
        """The places in the whole sequence that each rank of `whole` holds: [ranks, sequence / ranks]."""
        order = np.arange(sequence) if self.cp.ranks == 1 else dealt_order(sequence, self.axes)
        return order.reshape(self.whole.ranks, -1)

    def part(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of a tensor that has the whole sequence along `dim`."""
        if self.cp.ranks == 1:
            return x.chunk(self.whole.ranks, dim)[self.whole.rank]
        places = torch.from_numpy(self.parts(x.shape[dim])[self.whole.rank].copy())
        return x.index_select(dim, places.to(x.device))


@dataclass(frozen=True, eq=False)
class SequenceFlow:
    """Which nodes hold a part of the sequence, and on which edges a whole tensor is cut."""

    sequence: Factor
    parts: frozenset[fx.Node]
    cuts: frozenset[tuple[fx.Node, fx.Node]]


def attentions(graph: BlockGraph) -> list[fx.Node]:
    """The attention operators of a block."""
    return [node for node in graph.nodes if node.op == "call_function" and op_name(node) == ATTENTION]


def sequence_flow(graph: BlockGraph) -> SequenceFlow:
    """The parts of a block whose sequence is cut around its attention; IllegalClassesError when that cannot be."""
    sequence = sequence_leaf(graph)
    parts: set[fx.Node] = set()
    cuts: set[tuple[fx.Node, fx.Node]] = set()
    for node in graph.nodes:
        if node is graph.residual:
            parts.add(node)
        if node.op != "call_function" or node not in graph.dims:
            continue
        inputs = [x for x in node.all_input_nodes if x in graph.dims]
        inside = [x for x in inputs if x in parts]
        if not inside:
            continue
        if op_name(node) == ATTENTION:
            _check_attention(graph, node, parts, sequence)
        else:
            summed = {leaf for f in graph.contracted.get(node, ()) for leaf in leaves(f)}
            blocked = {leaf for f in graph.blocked_at.get(node, ()) for leaf in leaves(f)}
            carry = [x for x in inputs if x in parts or _places(graph, x, sequence)]
            if sequence in summed | blocked or not all(_once(graph, x, sequence) for x in (node, *carry)):
                raise IllegalClassesError(f"{op_name(node)} {tuple(_shape(node))} needs the whole sequence")
            cuts |= {(node, x) for x in carry if x not in parts}
        parts.add(node)
    if graph.main not in parts:
        raise IllegalClassesError("the output does not keep the sequence")
    if any(node in parts for node in graph.outputs if node is not graph.main):
        raise IllegalClassesError("a second output carries the sequence")
    return SequenceFlow(sequence, frozenset(parts), frozenset(cuts))


def _shape(node: fx.Node) -> Sequence[int]:
    return getattr(node.meta["val"], "shape", ())


def _places(graph: BlockGraph, node: fx.Node, sequence: Factor) -> int:
    """How often the sequence occurs in the tensors of a node, at most."""
    return max(sum(leaf is sequence for dim in dims for leaf in leaves(dim)) for dims in graph.tensors_of(node))


def _once(graph: BlockGraph, node: fx.Node, sequence: Factor) -> bool:
    """Whether each tensor of a node has the sequence in exactly one place."""
    return all(sum(leaf is sequence for dim in dims for leaf in leaves(dim)) == 1 for dims in graph.tensors_of(node))


def _check_attention(graph: BlockGraph, node: fx.Node, parts: set[fx.Node], sequence: Factor) -> None:
    """Queries, keys and values are [..., heads, sequence, width] of this sequence; a mask is whole."""
    for x in node.args[:3]:
        dims: Dims = graph.tensors_of(x)[0] if isinstance(x, fx.Node) else []
        if x not in parts or len(dims) < 3 or leaves(dims[-2]) != [sequence] or not _once(graph, x, sequence):
            raise IllegalClassesError("an attention that is not over the block's own sequence")
    if any(x in parts for x in node.all_input_nodes if x not in node.args[:3]):
        raise IllegalClassesError("an attention mask that is made of the hidden state")


@dataclass
class SequenceRewriter(Rewriter):
    """Rewrites a block graph for one of the ranks that share a sequence, beside tensor parallelism if there is any."""

    parts: SequenceFlow = field(kw_only=True)
    sharing: SequenceTeams = field(kw_only=True)

    @property
    def sequence_ranks(self) -> int:
        """The ranks that share the sequence."""
        return self.sharing.whole.ranks

    def is_part(self, node: fx.Node) -> bool:
        """Whether a node works on a part of the sequence."""
        return node in self.parts.parts

    def _edge(self, user: fx.Node, node: fx.Node) -> fx.Node:
        value = super()._edge(user, node)
        if (user, node) in self.parts.cuts:
            part = TakePart(self.sharing, self.parts.sequence.size, self._shape(node, True), self._outer(node))
            value = self._once("slice", (), node, value, part)
        return value

    def _placeholder(self, node: fx.Node) -> None:
        """The gradient of a side input is the sum over the parts."""
        side = node in self.source.inputs and node is not self.source.residual
        if side and node.meta["val"].is_floating_point():
            name = f"sp_copy_{len(self.modules)}"
            self.modules[name] = Copy(self.sharing.whole)
            self._new[node] = self.graph.call_module(name, (self._new[node],))
        super()._placeholder(node)

    def _fork_random(self, node: fx.Node, copy: fx.Node) -> None:
        if not self.is_part(node):
            super()._fork_random(node, copy)
            return
        target: Any = copy.target
        random = is_random(node)
        if random:
            target = self._forked(copy, self._cut_axes(node), self.sharing.whole.rank)
        if op_name(node) == ATTENTION:
            target = SplitAttention(self.sharing, target)
        elif not random:
            return
        name = f"sp_{op_name(node)}_{len(self.modules)}"
        self.modules[name] = target
        self._new[node] = self.graph.call_module(name, copy.args, copy.kwargs)
        self.graph.erase_node(copy)


class TakePart(nn.Module):
    """This rank's part of a sequence that it holds whole; the backward has zeros at the other places.

    shape: of the part; outer: the elements of all dimensions outside the sequence.
    """

    def __init__(self, teams: SequenceTeams, length: int, shape: list[int], outer: int) -> None:
        super().__init__()
        self.teams, self.length, self.shape, self.outer = teams, length, shape, outer

    def forward(self, x: Tensor) -> Tensor:
        """The part."""
        return self.teams.part(x.reshape(self.outer, self.length, -1)).reshape(self.shape)


class SplitAttention(nn.Module):
    """The attention of one rank: on its part of the heads (sp), with its part of the queries (cp)."""

    def __init__(self, teams: SequenceTeams, attention: Any) -> None:
        super().__init__()
        self.teams, self.attention = teams, attention

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """The own part of the sequence, of all heads, from the same of queries, keys and values."""
        sp, cp, mask = self.teams.sp, self.teams.cp, attn_mask
        if sp.ranks > 1:
            q, k, v = (_Exchange.apply(x, sp, -3, -2) for x in (q, k, v))
            if mask is not None and mask.dim() > 2 and mask.shape[-3] > 1:
                mask = mask.chunk(sp.ranks, -3)[sp.rank]
        if cp.ranks > 1 and mask is None and not dropout_p and takes(q, k, v, is_causal):
            out = attend(q, k, v, cp, is_causal, kwargs.get("scale"), self.teams.around)
            return _Exchange.apply(out, sp, -2, -3) if sp.ranks > 1 else out
        if cp.ranks > 1:
            k, v = (_whole_sequence(x, cp) for x in (k, v))
            rows, columns = self.teams.places(k.shape[-2], q.device)
            if mask is not None:
                mask = mask.index_select(-2, rows) if mask.shape[-2] > 1 else mask
                mask = mask.index_select(-1, columns) if mask.shape[-1] > 1 else mask
            if is_causal:
                mask, is_causal = rows[:, None] >= columns, False
        out = self.attention(q, k, v, mask, dropout_p, is_causal, **kwargs)
        return _Exchange.apply(out, sp, -2, -3) if sp.ranks > 1 else out


def _whole_sequence(x: Tensor, team: Team) -> Tensor:
    """Keys or values of all ranks; the backward sums what the ranks' queries want of them."""
    shape = [*x.shape[:-2], x.shape[-2] * team.ranks, x.shape[-1]]
    return gather_parts(x, team, shape, prod(x.shape[:-2]))


class _Exchange(torch.autograd.Function):
    """From the whole of dimension `cut` and a part of `joined` to the reverse; the backward goes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team, cut: int, joined: int) -> Tensor:
        ctx.rest = (team, joined, cut)
        return _exchange(x, team, cut, joined)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _exchange(grads[0], *ctx.rest), None, None, None


def _exchange(x: Tensor, team: Team, cut: int, joined: int) -> Tensor:
    given = torch.stack(x.chunk(team.ranks, cut))
    taken = torch.empty_like(given)
    if team.group is None:
        taken.copy_(given[team.rank].expand_as(taken))
    else:
        dist.all_to_all_single(taken, given, group=team.group)
    return torch.cat(taken.unbind(), joined)
