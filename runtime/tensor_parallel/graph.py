"""The exported graph of a block with the factors of every tensor in it."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import ConstantArgument, InputKind

from autopar.errors import InputError
from autopar.runtime.tensor_parallel.factors import Dims, Factor, FactorSpace, find, leaves

Shape = Dims | tuple[Dims, ...]


@dataclass(frozen=True)
class Cut:
    """Where a node cuts a dimension: into start:stop, or into pieces of these sizes."""

    dim: int
    start: int = 0
    stop: int = 0
    pieces: tuple[int, ...] = ()


@dataclass
class BlockGraph:
    """One block, traced for one input signature.

    dims: the factors of each tensor node (a tuple of them where it returns several); contracted: the factors a node
    sums over; cuts: where it slices; blocked_at: what its rule blocked; parameters, buffers, constants: their
    placeholders and names; inputs: the placeholder of each flat input (None for a constant); residual: the first
    floating-point input; main: the first output of its shape; unknown: operators without a rule and how often.
    """

    exported: torch.export.ExportedProgram
    dims: dict[fx.Node, Shape] = field(default_factory=dict)
    contracted: dict[fx.Node, Dims] = field(default_factory=dict)
    cuts: dict[fx.Node, Cut] = field(default_factory=dict)
    blocked_at: dict[fx.Node, Dims] = field(default_factory=dict)
    parameters: dict[fx.Node, str] = field(default_factory=dict)
    buffers: dict[fx.Node, str] = field(default_factory=dict)
    constants: dict[fx.Node, str] = field(default_factory=dict)
    inputs: list[fx.Node | None] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)
    space: FactorSpace = field(default_factory=FactorSpace)

    @property
    def nodes(self) -> list[fx.Node]:
        """All nodes in order."""
        return list(self.exported.graph.nodes)

    @property
    def residual(self) -> fx.Node:
        """The block's activation input."""
        for node in self.inputs:
            if node is not None and node.meta["val"].is_floating_point():
                return node
        raise InputError(
            "tensor parallelism needs a block with an activation as input",
            why="no floating-point tensor is among the block's inputs",
            fix="leave this block data parallel",
        )

    @property
    def main(self) -> fx.Node:
        """The block's activation output."""
        shape = self.residual.meta["val"].shape
        same = [node for node in self.outputs if node.meta["val"].shape == shape]
        return (same or self.outputs)[0]

    def leaves_of(self, node: fx.Node) -> set[Factor]:
        """All leaves in the dimensions of a node."""
        return {leaf for dims in self.tensors_of(node) for dim in dims for leaf in leaves(dim)}

    def tensors_of(self, node: fx.Node) -> tuple[Dims, ...]:
        """The dimensions of each tensor that a node returns."""
        dims = self.dims[node]
        return dims if isinstance(dims, tuple) else (dims,)

    def constant_value(self, node: fx.Node) -> Tensor | None:
        """The value of a constant that the graph carries, or None."""
        if node in self.constants:
            value = self.exported.constants.get(self.constants[node])
            return value if type(value) is Tensor and value.device.type != "meta" else None
        copies = ("lift_fresh_copy", "clone", "detach_", "detach", "to", "_to_copy")
        if node.op == "call_function" and op_name(node) in copies and is_tensor(node.args[0]):
            return self.constant_value(node.args[0])
        return None


def names(text: str) -> frozenset[str]:
    """The words of a text: operator names."""
    return frozenset(text.split())


def op_name(node: fx.Node) -> str:
    """The name of a node's operator without namespace and overload."""
    target: Any = node.target
    return (
        target._schema.name.split("::")[-1] if hasattr(target, "_schema") else getattr(target, "__name__", str(target))
    )


def is_overload(target: object) -> bool:
    """Whether a node's target is an operator of torch, not a Python function."""
    return isinstance(target, torch._ops.OpOverload)


def is_tensor(value: object) -> bool:
    """Whether an argument is a node that yields one tensor."""
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), Tensor)


def numel(node: fx.Node) -> int:
    """Elements of a node's tensor at global shapes."""
    return prod(node.meta["val"].shape)


def size_bytes(node: fx.Node) -> int:
    """Bytes of a node's tensor at global shapes."""
    return numel(node) * int(node.meta["val"].element_size())


def trace(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockGraph:
    """The graph of a block for these inputs, with its factors; raises InputError when it cannot be exported.

    About 0.1 s for a transformer block. Composite operators (linear, scaled_dot_product_attention) stay whole.
    """
    from autopar.runtime.tensor_parallel.rules import Op, factors_of

    try:
        exported = torch.export.export(block, args, kwargs, strict=False)
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"tensor parallelism cannot trace {type(block).__name__}",
            why=f"{type(error).__name__}: {first[:300]}",
            fix="remove data-dependent control flow from its forward, or leave it data parallel",
        ) from error
    graph = BlockGraph(exported)
    specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
    placeholders = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    for name, spec in specs.items():
        node = placeholders[name]
        if spec.kind == InputKind.USER_INPUT:
            constant = isinstance(spec.arg, ConstantArgument) or not is_tensor(node)
            graph.inputs.append(None if constant else node)
        elif spec.kind == InputKind.PARAMETER:
            graph.parameters[node] = str(spec.target)
        elif spec.kind == InputKind.BUFFER:
            graph.buffers[node] = str(spec.target)
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            graph.constants[node] = str(spec.target)
        if is_tensor(node):
            graph.dims[node] = [Factor(size) for size in node.meta["val"].shape]
    for node in exported.graph.nodes:
        if node.op == "call_function":
            graph.space.blocked_now = []
            factors_of(Op(graph, node))
            graph.blocked_at[node] = graph.space.blocked_now
        elif node.op == "get_attr":
            graph.unknown[f"get_attr {node.target}"] += 1
        elif node.op == "output":
            graph.outputs = [x for x in node.args[0] if is_tensor(x)]
    return graph


def batch_leaves(graph: BlockGraph) -> set[Factor]:
    """The leaves of the first dimension of the activation input."""
    return set(leaves(graph.tensors_of(graph.residual)[0][0]))


def sequence_leaf(graph: BlockGraph) -> Factor:
    """The factor of the activation's sequence dimension (dim 1 of 3); raises InputError when it is not one whole."""
    dims = graph.tensors_of(graph.residual)[0]
    root = find(dims[1]) if len(dims) == 3 else None
    if root is None or root.kind != "leaf" or root.size == 1:
        raise InputError(
            "sequence-parallel norms are not possible for this block",
            why="its activation is not [batch, sequence, hidden] with a sequence that stays whole",
            fix="use tensor parallelism without sequence-parallel norms",
        )
    return root


def is_getitem(node: fx.Node) -> bool:
    """Whether a node picks one result of a node that returns several."""
    return node.target is operator.getitem
