"""What each operator does to factors: the context of a rule, its register, and the rules that move dimensions.

An operator without a rule blocks all factors of its inputs and outputs: that can only lose parallelism.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.runtime.tensor_parallel.factors import Dims, Factor, find, product, segments
from autopar.runtime.tensor_parallel.graph import BlockGraph, Cut, Shape, is_overload, is_tensor, names, op_name


class Op:
    """One node as its rule sees it: arguments, factors of tensors, and what the rule may record."""

    def __init__(self, graph: BlockGraph, node: fx.Node) -> None:
        self.graph, self.node, self.space = graph, node, graph.space
        self.name, self.value = op_name(node), node.meta.get("val")
        self.args: tuple[Any, ...] = node.args

    @property
    def sizes(self) -> list[int]:
        """The sizes of the node's one output tensor."""
        return list(self.value.shape)

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """An argument given by position or by name."""
        return self.args[position] if len(self.args) > position else self.node.kwargs.get(name, default)

    def of(self, node: Any) -> Dims:
        """The factors of a node that is one tensor (a copy)."""
        dims = self.graph.dims[node]
        if isinstance(dims, tuple):
            raise TypeError(f"{node} is not one tensor")
        return list(dims)

    def dims(self, position: int = 0) -> Dims:
        """The factors of the tensor argument at a position (a copy)."""
        return self.of(self.args[position])

    def tensors(self) -> list[Dims]:
        """The factors of all tensor inputs."""
        return [self.of(x) for x in self.node.all_input_nodes if is_tensor(x)]

    def block(self, factors: Factor | Sequence[Factor]) -> None:
        """Block factors, for this operator's sake."""
        self.space.block(factors, self.name)

    def barrier(self, size: int) -> Factor:
        """A new factor that cannot be sharded."""
        return Factor(size, blocked=self.name)

    def contract(self, factors: Dims) -> None:
        """Record that the node sums over these factors."""
        self.graph.contracted.setdefault(self.node, []).extend(factors)

    def broadcast(self, inputs: Sequence[Dims], sizes: Sequence[int]) -> Dims:
        """The factors of tensors broadcast together to these sizes."""
        out: Dims = []
        for dim in range(-len(sizes), 0):
            same = [t[dim] for t in inputs if len(t) >= -dim and t[dim].size == sizes[dim] != 1]
            for other in same[1:]:
                self.space.unify(same[0], other)
            out.append(same[0] if same else Factor(sizes[dim]))
        return out


Rule = Callable[[Op], Shape]
RULES: dict[str, Rule] = {}


def rule(*operators: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators of these names."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(operators, function))
        return function

    return register


# Elementwise operators that do not carry torch.Tag.pointwise.
POINTWISE = names(
    "dropout dropout_ to type_as contiguous clone _to_copy detach detach_ alias masked_fill masked_fill_ where gelu "
    "gelu_ silu silu_ softplus lift_fresh_copy float feature_dropout fill_ zero_ bernoulli rand_like zeros_like "
    "ones_like full_like empty_like copy_ pow clamp clip square square_ relu relu_ logical_not nan_to_num add_ mul_ "
    "div_ native_dropout isin leaky_relu hardtanh selu mish round floor erfinv rsub floor_divide polar complex real "
    "imag"
)


def factors_of(op: Op) -> None:
    """Apply the rule of a node and store its factors; without a rule, or where one fails, block everything."""
    from autopar.runtime.tensor_parallel import rules_index, rules_math  # noqa: F401  they register themselves

    graph, node = op.graph, op.node
    if node.target is operator.getitem:
        source, index = node.args
        graph.dims[node] = graph.tensors_of(source)[index]
        return
    if op.value is None:
        return
    if is_overload(node.target):
        apply = RULES.get(op.name)
        if apply is None and (torch.Tag.pointwise in node.target.tags or op.name in POINTWISE):
            apply = pointwise
        if apply is not None:
            try:
                graph.dims[node] = apply(op)
                return
            except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
                graph.unknown[f"{op.name}: {type(error).__name__} {error}"[:100]] += 1
                opaque(op)
                return
    graph.unknown[op.name] += 1
    opaque(op)


def opaque(op: Op) -> None:
    """Block all factors of the node's inputs and give its outputs blocked ones."""
    graph = op.graph
    for source in op.node.all_input_nodes:
        if source in graph.dims:
            for dims in graph.tensors_of(source):
                op.block(dims)
    graph.contracted.pop(op.node, None)
    if isinstance(op.value, Tensor):
        graph.dims[op.node] = [op.barrier(size) for size in op.sizes]
    elif isinstance(op.value, tuple | list):
        graph.dims[op.node] = tuple([op.barrier(k) for k in getattr(t, "shape", ())] for t in op.value)


def pointwise(op: Op) -> Shape:
    """Elementwise with broadcasting: equal positions are equal factors."""
    inputs = op.tensors()
    if isinstance(op.value, Tensor):
        return op.broadcast(inputs, op.sizes)
    return tuple(op.broadcast(inputs, list(t.shape)) for t in op.value)


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "squeeze", "unsqueeze")
def _view(op: Op) -> Shape:
    out = op.space.view(op.dims(), op.sizes)
    if out is None:
        op.block(op.dims())
        return [op.barrier(size) for size in op.sizes]
    return out


@rule("transpose", "swapaxes")
def _transpose(op: Op) -> Shape:
    dims = op.dims()
    i, j = op.args[1], op.args[2]
    dims[i], dims[j] = dims[j], dims[i]
    return dims


@rule("t", "numpy_T")
def _reverse(op: Op) -> Shape:
    return op.dims()[::-1]


@rule("permute")
def _permute(op: Op) -> Shape:
    return [op.dims()[d] for d in op.args[1]]


@rule("movedim")
def _movedim(op: Op) -> Shape:
    dims = op.dims()
    moved = dims.pop(op.args[1])
    dims.insert(op.args[2] % (len(dims) + 1), moved)
    return dims


@rule("expand", "expand_as", "broadcast_to")
def _expand(op: Op) -> Shape:
    return op.broadcast([op.dims()], op.sizes)


@rule("repeat")
def _repeat(op: Op) -> Shape:
    sizes = op.sizes
    dims = [Factor(1)] * (len(sizes) - len(op.dims())) + op.dims()
    return [f if f.size == k else product([Factor(k // f.size), f]) for k, f in zip(sizes, dims, strict=True)]


@rule("repeat_interleave")
def _repeat_interleave(op: Op) -> Shape:
    times, dim = op.args[1], op.arg(2, "dim")
    if not isinstance(times, int) or dim is None:
        raise TypeError("repeats differ")
    dims = op.dims()
    dims[dim] = product([dims[dim], Factor(times)])
    return dims


@rule("slice", "narrow")
def _slice(op: Op) -> Shape:
    dims = op.dims()
    dim = op.arg(1, "dim", 0) % len(dims)
    size = find(dims[dim]).size
    if op.name == "narrow":
        start, stop, step = op.args[2], op.args[2] + op.args[3], 1
    else:
        start, stop, step = op.arg(2, "start") or 0, op.arg(3, "end"), op.arg(4, "step", 1)
    stop = size if stop is None else stop
    start, stop = (max(0, min(k + size if k < 0 else k, size)) for k in (start, stop))
    if step != 1:
        parts = op.space.view([dims[dim]], [size // step, step]) if start < step and size % step == 0 else None
        op.block(dims[dim] if parts is None else parts[1])
        dims[dim] = op.barrier(op.sizes[dim]) if parts is None else parts[0]
        return dims
    dims[dim] = op.space.cut(dims[dim], start, stop)
    op.graph.cuts[op.node] = Cut(dim, start, stop)
    return dims


@rule("select")
def _select(op: Op) -> Shape:
    dims = op.dims()
    dim = op.args[1] % len(dims)
    taken = find(dims.pop(dim))
    index = op.args[2] % taken.size
    if taken.kind == "cat":
        op.space.cut(taken, index, index + 1)
        op.graph.cuts[op.node] = Cut(dim, index, index + 1)
    else:
        op.block(taken)
    return dims


@rule("unbind")
def _unbind(op: Op) -> Shape:
    dims = op.dims()
    op.block(dims.pop(op.arg(1, "dim", 0)))
    return tuple(list(dims) for _ in op.value)


@rule("chunk", "split", "split_with_sizes", "tensor_split")
def _split(op: Op) -> Shape:
    dims = op.dims()
    dim, start, out = op.arg(2, "dim", 0) % len(dims), 0, []
    pieces = tuple(piece.shape[dim] for piece in op.value)
    for piece in pieces:
        cut = list(dims)
        cut[dim] = op.space.cut(dims[dim], start, start + piece)
        start += piece
        out.append(cut)
    op.graph.cuts[op.node] = Cut(dim, pieces=pieces)
    return tuple(out)


@rule("cat", "concat")
def _cat(op: Op) -> Shape:
    sizes = op.sizes
    parts = [op.of(x) for x in op.args[0] if len(op.of(x)) == len(sizes)]
    dim = op.arg(1, "dim", 0) % len(sizes)
    for other in parts[1:]:
        for i in range(len(sizes)):
            if i != dim:
                op.space.unify(parts[0][i], other[i])
    out = list(parts[0])
    if len(parts) > 1:
        out[dim] = Factor(sizes[dim], kind="cat", parts=[s for part in parts for s in segments(part[dim])])
    return out


@rule("stack")
def _stack(op: Op) -> Shape:
    parts = [op.of(x) for x in op.args[0]]
    for other in parts[1:]:
        for x, y in zip(parts[0], other, strict=True):
            op.space.unify(x, y)
    dim = op.arg(1, "dim", 0) % len(op.sizes)
    return [*parts[0][:dim], op.barrier(op.sizes[dim]), *parts[0][dim:]]
