"""The graph of one rank: the block's graph at local sizes, with a module call for every edit of the flow.

Only size arguments change (views, expands, splits, slices, new tensors, repeats, convolution groups); no attribute of
the block is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, Literal

import torch
from torch import fx, nn

from autopar.runtime.tensor_parallel.collectives import (
    Copy,
    CopySome,
    ForkedRandom,
    Gather,
    Reduce,
    Scatter,
    Share,
    Slice,
    Team,
)
from autopar.runtime.tensor_parallel.factors import Dims, Factor, find, flat, leaves
from autopar.runtime.tensor_parallel.graph import BlockGraph, is_overload, names, op_name
from autopar.runtime.tensor_parallel.layout import DimLayout, ParameterLayout, dim_layout, take
from autopar.runtime.tensor_parallel.states import Classes, Flow, State, touches

aten = torch.ops.aten
VIEWS = names("view reshape transpose permute t unsqueeze squeeze expand slice select flatten unflatten alias")
EditKind = Literal["copy", "copy_some", "reduce", "share", "gather", "scatter", "slice"]


@dataclass(frozen=True)
class Edit:
    """One edit as it was placed: its axes, the node it acts on and the shape it acts on or yields (the whole)."""

    kind: EditKind
    axes: tuple[int, ...]
    source: fx.Node
    shape: tuple[int, ...]


class Take(nn.Module):
    """The part of a side input, buffer or constant that a rank works on."""

    def __init__(self, layout: ParameterLayout, axis_sizes: tuple[int, ...], coordinate: tuple[int, ...]) -> None:
        super().__init__()
        self.layout, self.axis_sizes, self.coordinate = layout, axis_sizes, coordinate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The part."""
        return take(x, self.layout, self.axis_sizes, self.coordinate)


@dataclass
class LocalGraph:
    """The rewritten graph with the modules that it calls, and the edits in it."""

    graph: fx.Graph
    modules: dict[str, nn.Module]
    edits: list[Edit]


@dataclass
class Rewriter:
    """Rewrites a block graph for the rank at `coordinate`; `teams` are the axes, then all of them together."""

    source: BlockGraph
    flow: Flow
    axes: Sequence[Classes]
    axis_sizes: tuple[int, ...]
    coordinate: tuple[int, ...]
    teams: Sequence[Team]
    sequence: Factor | None
    graph: fx.Graph = field(default_factory=fx.Graph)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    edits: list[Edit] = field(default_factory=list)
    _new: dict[fx.Node, fx.Node] = field(default_factory=dict)
    _edited: dict[tuple[EditKind, tuple[int, ...], fx.Node], fx.Node] = field(default_factory=dict)

    def run(self) -> LocalGraph:
        """The local graph."""
        for node in self.source.nodes:
            if op_name(node) == "_assert_tensor_metadata":
                continue
            copy = self.graph.node_copy(node, partial(self._edge, node))
            self._new[node] = copy
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function" and node in self.flow.state:
                _make_functional(node, copy)
                self._resize(node, copy)
                self._fork_random(node, copy)
                self._reduce(node)
        self.graph.lint()
        return LocalGraph(self.graph, self.modules, self.edits)

    # Sizes.

    @property
    def sequence_ranks(self) -> int:
        """The ranks that share the sequence where it is cut."""
        return prod(self.axis_sizes)

    def is_part(self, node: fx.Node) -> bool:
        """Whether a node works on a part of the sequence."""
        return self.flow.raw[node][0] is State.SEQUENCE

    def local(self, factor: Factor, part: bool = False) -> int:
        """The local size of a dimension; `part`: of a tensor that holds a part of the sequence."""
        root = find(factor)
        if root.kind == "leaf":
            cuts = prod(n for n, classes in zip(self.axis_sizes, self.axes, strict=True) if root in classes)
            return root.size // cuts // (self.sequence_ranks if part and root is self.sequence else 1)
        sizes = [self.local(f, part) for f in root.parts]
        return sum(sizes) if root.kind == "cat" else prod(sizes)

    def _shape(self, node: fx.Node, part: bool = False) -> list[int]:
        return [self.local(f, part) for f in self.source.tensors_of(node)[0]]

    def _layout(self, dims: Dims) -> ParameterLayout:
        return tuple(dim_layout(f, self.axes) for f in dims)

    def _outer(self, node: fx.Node) -> int:
        """The local elements of all dimensions outside the sequence."""
        outer = 1
        for dim in self.source.tensors_of(node)[0]:
            for factor in flat(dim):
                if self.sequence in leaves(factor):
                    return outer
                outer *= self.local(factor)
        raise ValueError(f"{node} has no sequence")

    # Edits.

    def _call(
        self, kind: EditKind, axes: tuple[int, ...], source: fx.Node, value: fx.Node, module: nn.Module
    ) -> fx.Node:
        name = f"tp_{kind}_{len(self.modules)}"
        self.modules[name] = module
        self.edits.append(Edit(kind, axes, source, tuple(self._shape(source))))
        return self.graph.call_module(name, (value,))

    def _team(self, axes: tuple[int, ...]) -> Team:
        return self.teams[axes[0]] if len(axes) == 1 else self.teams[-1]

    def _together(self, axes: set[int]) -> list[tuple[int, ...]]:
        """All axes at once where the edit is on all of them, otherwise one after the other."""
        return [tuple(sorted(axes))] if axes and len(axes) == len(self.axes) else [(i,) for i in sorted(axes)]

    def _once(
        self, kind: EditKind, axes: tuple[int, ...], source: fx.Node, value: fx.Node, module: nn.Module
    ) -> fx.Node:
        """The edit of a value, the same one for all its users."""
        key = (kind, axes, value)
        if key not in self._edited:
            self._edited[key] = self._call(kind, axes, source, value, module)
        return self._edited[key]

    def _edge(self, user: fx.Node, node: fx.Node) -> fx.Node:
        """The value of a node as its user sees it."""
        edge, value = (user, node), self._new[node]
        for axes in self._together(self.flow.copies.get(edge, set())):
            value = self._once("copy", axes, node, value, Copy(self._team(axes)))
        for axes in self._together(self.flow.shares.get(edge, set())):
            value = self._call("share", axes, node, value, Share(self._team(axes).ranks))
        everything = tuple(range(len(self.axes)))
        if edge in self.flow.gathers:
            gather = Gather(self.teams[-1], self._shape(node), self._outer(node))
            value = self._once("gather", everything, node, value, gather)
        if edge in self.flow.slices:
            part = Slice(self.teams[-1], self._shape(node, True), self._outer(node))
            value = self._once("slice", everything, node, value, part)
        return value

    def _reduce(self, node: fx.Node) -> None:
        for axis in sorted(self.flow.averages.get(node, ())):
            self._new[node] = self.graph.call_function(aten.div.Tensor, (self._new[node], self.axis_sizes[axis]))
        due = self.flow.reduces.get(node)
        if due is None:
            return
        if self.flow.is_sequence(node):
            axes = tuple(sorted(due))
            module: nn.Module = Scatter(self.teams[-1], self._shape(node, True), self._outer(node))
            self._new[node] = self._call("scatter", axes, node, self._new[node], module)
            return
        for axes in self._together(due):
            self._new[node] = self._call("reduce", axes, node, self._new[node], Reduce(self._team(axes)))

    def _fork_random(self, node: fx.Node, copy: fx.Node) -> None:
        """Draw other random numbers on ranks that hold other parts; the same ones where they hold the same."""
        cut = self._cut_axes(node)
        if not cut or not is_random(node):
            return
        name = f"tp_random_{len(self.modules)}"
        self.modules[name] = self._forked(copy, cut)
        self._new[node] = self.graph.call_module(name, copy.args, copy.kwargs)
        self.graph.erase_node(copy)

    def _cut_axes(self, node: fx.Node) -> list[int]:
        states = enumerate(self.flow.raw[node])
        return [i for i, state in states if state in (State.SHARDED, State.SEQUENCE)]

    def _forked(self, copy: fx.Node, cut: list[int], place: int = 0) -> ForkedRandom:
        """A random operator with a stream for each place along these axes, `place` being the outermost."""
        for axis in cut:
            place = place * self.axis_sizes[axis] + self.coordinate[axis]
        return ForkedRandom(copy.target, place)

    def _placeholder(self, node: fx.Node) -> None:
        """Cut side inputs, buffers and constants; add up the gradient of what only some axes cut."""
        if node not in self.flow.state or State.SHARDED not in self.flow.state[node]:
            return
        layout = self._layout(self.source.tensors_of(node)[0])
        sharded = {i for i, state in enumerate(self.flow.state[node]) if state is State.SHARDED}
        if node in self.source.parameters:
            for axis in sorted(sharded):
                for dim, part in enumerate(layout):
                    self._copy_some(node, axis, dim, part)
            return
        for axes in self._together(sharded):
            self._new[node] = self._call("copy", axes, node, self._new[node], Copy(self._team(axes)))
        name = f"tp_take_{len(self.modules)}"
        self.modules[name] = Take(layout, self.axis_sizes, self.coordinate)
        self._new[node] = self.graph.call_module(name, (self._new[node],))

    def _copy_some(self, node: fx.Node, axis: int, dim: int, layout: DimLayout) -> None:
        if not touches(self.source.tensors_of(node)[0][dim], self.axes[axis]):
            return
        places = layout.held_by_all(axis, self.axis_sizes)
        if len(places):
            module = CopySome(self.teams[axis], dim, torch.from_numpy(places))
            self._new[node] = self._call("copy_some", (axis,), node, self._new[node], module)

    # Size arguments.

    def _resize(self, node: fx.Node, copy: fx.Node) -> None:
        part = self.is_part(node)
        tensors = self.source.tensors_of(node)
        inputs = [x for x in node.all_input_nodes if x in self.flow.state]
        involved = [dim for x in [node, *inputs] for dims in self.source.tensors_of(x) for dim in dims]
        if all(self.local(dim, part) == find(dim).size for dim in involved):
            return
        sizes = [self.local(dim, part) for dim in tensors[0]]
        name, args = op_name(node), list(copy.args)
        first = self.source.tensors_of(inputs[0])[0] if inputs else []
        if name in ("view", "reshape", "_unsafe_view", "expand", "broadcast_to"):
            args[1] = sizes
        elif name in ("zeros", "ones", "full", "empty"):
            args[0] = sizes
        elif name in ("new_zeros", "new_ones", "new_full", "new_empty"):
            args[1] = sizes
        elif name == "unflatten":
            dim = args[1] % len(first)
            args[2] = sizes[dim : dim + len(args[2])]
        elif name == "repeat":
            lead = len(sizes) - len(first)
            before = [1] * lead + [self.local(f, part) for f in first]
            args[1] = [new // old for new, old in zip(sizes, before, strict=True)]
        elif name == "repeat_interleave":
            dim = (args[2] if len(args) > 2 else copy.kwargs["dim"]) % len(first)
            args[1] = sizes[dim] // self.local(first[dim], part)
            if copy.kwargs.get("output_size") is not None:
                copy.kwargs = dict(copy.kwargs, output_size=sizes[dim])
        elif name in ("conv1d", "conv2d", "conv3d") and len(args) > 6 and args[6] != 1:
            args[6] = self.local(first[1], part)
        elif node in self.source.cuts:
            args = self._recut(node, copy, args)
        copy.args = tuple(args)

    def _recut(self, node: fx.Node, copy: fx.Node, args: list[Any]) -> list[Any]:
        cut, name = self.source.cuts[node], op_name(node)
        part = self.is_part(node)
        if cut.pieces:
            copy.target, copy.kwargs = aten.split_with_sizes.default, {}
            return [args[0], [self.local(dims[cut.dim], part) for dims in self.source.tensors_of(node)], cut.dim]
        source = node.args[0]
        layout = dim_layout(self.source.tensors_of(source)[0][cut.dim], self.axes)
        if not layout.is_cut:
            return args
        index = layout.index(self.axis_sizes, (0,) * len(self.axes))
        start, stop = int((index < cut.start).sum()), int((index < cut.stop).sum())
        if name == "select":
            args[2] = start
            return args
        copy.target, copy.kwargs = aten.slice.Tensor, {}
        return [args[0], cut.dim, start, stop]


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers."""
    name, target = op_name(node), node.target
    if name in ("dropout", "dropout_", "feature_dropout", "native_dropout"):
        return bool(node.args[1] and node.args[2])
    if name == "scaled_dot_product_attention":
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0))
    return is_overload(target) and torch.Tag.nondeterministic_seeded in target.tags


def _make_functional(node: fx.Node, copy: fx.Node) -> None:
    """Replace an in-place operator where nothing else sees its target: edits may hand out views."""
    name, target = op_name(node), node.args[0] if node.args else None
    if not name.endswith("_") or name.endswith("__") or not isinstance(target, fx.Node) or len(target.users) > 1:
        return
    if target.op == "placeholder" or op_name(target) in VIEWS:
        return
    packet = getattr(aten, name[:-1], None)
    overload = getattr(packet, node.target._overloadname, None)
    if overload is not None:
        copy.target = overload
