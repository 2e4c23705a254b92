"""Rules of operators that look up, scatter, pad or create tensors."""

from __future__ import annotations

import torch

from autopar.runtime.tensor_parallel.factors import Dims, Factor
from autopar.runtime.tensor_parallel.graph import Cut, Shape, is_tensor
from autopar.runtime.tensor_parallel.rules import Op, rule


@rule("embedding")
def _embedding(op: Op) -> Shape:
    table = op.dims(0)
    op.block(table[0])
    return [*op.dims(1), table[1]]


@rule("index")
def _index(op: Op) -> Shape:
    dims, indices = op.dims(), op.args[1]
    places = [i for i, x in enumerate(indices) if x is not None]
    if len(places) == 1:
        sliced = _constant_slice(op, dims, places[0])
        if sliced is not None:
            return sliced
    if any(indices[p].meta["val"].dtype == torch.bool for p in places):
        raise ValueError("boolean index")
    op.block([dims[p] for p in places])
    lookups = [op.of(indices[p]) for p in places]
    rank = max(len(lookup) for lookup in lookups)
    together = places == list(range(places[0], places[-1] + 1))
    at = places[0] if together else 0
    shared = op.broadcast(lookups, op.sizes[at : at + rank])
    rest = [f for i, f in enumerate(dims) if i not in places]
    return [*rest[:at], *shared, *rest[at:]]


def _constant_slice(op: Op, dims: Dims, place: int) -> Dims | None:
    """The factors when a constant index is a run of neighbours, which is a slice."""
    value = op.graph.constant_value(op.args[1][place])
    if value is None or value.dim() != 1 or value.dtype == torch.bool or not value.numel():
        return None
    value = value % dims[place].size
    first, count = int(value[0]), len(value)
    if not torch.equal(value, torch.arange(count) + first):
        return None
    dims[place] = op.space.cut(dims[place], first, first + count)
    op.graph.cuts[op.node] = Cut(place, first, first + count)
    return dims


@rule("index_select")
def _index_select(op: Op) -> Shape:
    dims = op.dims()
    op.block(dims[op.args[1]])
    dims[op.args[1]] = (op.dims(2) or [Factor(1)])[0]
    return dims


@rule("gather")
def _gather(op: Op) -> Shape:
    dims, index = op.dims(), op.dims(2)
    along = op.args[1] % len(dims)
    for i, factor in enumerate(dims):
        if i != along and factor.size == index[i].size:
            op.space.unify(factor, index[i])
        else:
            op.block(factor)
    op.block(index[along])
    return index


@rule("index_add", "index_add_")
def _index_add(op: Op) -> Shape:
    dims, source = op.dims(), op.dims(3)
    along = op.args[1] % len(dims)
    op.block([dims[along], source[along]])
    for i, factor in enumerate(dims):
        if i != along:
            op.space.unify(factor, source[i])
    return dims


@rule("index_put", "index_put_")
def _index_put(op: Op) -> Shape:
    dims, source, indices = op.dims(), op.dims(2), op.args[1]
    op.block([dims[i] for i, x in enumerate(indices) if x is not None])
    rest = len(dims) - len(indices)
    for i in range(1, rest + 1):
        if len(source) >= i and source[-i].size == dims[-i].size:
            op.space.unify(source[-i], dims[-i])
    op.block(source[: max(0, len(source) - rest)])
    return dims


@rule("scatter", "scatter_", "scatter_add", "scatter_add_")
def _scatter(op: Op) -> Shape:
    dims = op.dims()
    along = op.args[1] % len(dims)
    for other in op.args[2:4]:
        if is_tensor(other):
            for i, factor in enumerate(op.of(other)):
                if i != along and factor.size == dims[i].size:
                    op.space.unify(dims[i], factor)
                else:
                    op.block([dims[i], factor])
    op.block(dims[along])
    return dims


@rule("constant_pad_nd", "pad")
def _pad(op: Op) -> Shape:
    dims, pads = op.dims(), op.args[1]
    for i in range(len(pads) // 2):
        if pads[2 * i] or pads[2 * i + 1]:
            op.block(dims[-1 - i])
            dims[-1 - i] = op.barrier(op.sizes[len(dims) - 1 - i])
    return dims


@rule("arange", "tril", "triu", "one_hot", "eye", "bucketize", "linspace", "histc", "bincount", "rand", "randn")
def _by_place(op: Op) -> Shape:
    for dims in op.tensors():
        op.block(dims)
    return [op.barrier(size) for size in op.sizes]


@rule("zeros", "ones", "full", "empty", "scalar_tensor", "new_zeros", "new_ones", "new_full", "new_empty")
def _create(op: Op) -> Shape:
    return [Factor(size) for size in op.sizes]
