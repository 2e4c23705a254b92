"""What every tensor of a block is on each tensor-parallel axis, and the communication that follows from it.

    REPLICATED  the whole value and the whole gradient on every rank
    SHARDED     this rank's part of a class of factors
    PARTIAL     the sum over the ranks is the value (a contraction over sharded factors); its gradient is whole
    LENT        the whole value, but the gradients of the ranks must still be added up
    SEQUENCE    this rank's part of the sequence (all axes at once), with sequence-parallel norms only

Edges that change a state carry an edit: `copies` (identity; backward all-reduce), `shares` (value / ranks; backward
identity), `gathers` (all-gather; backward reduce-scatter: SEQUENCE to LENT) and `slices` (own part; backward zeros
elsewhere: LENT to SEQUENCE). A PARTIAL tensor is reduced at its node: all-reduce with identity backward, or
reduce-scatter with all-gather backward where the result may be SEQUENCE.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from torch import fx

from autopar.runtime.tensor_parallel.factors import Factor, find, flat, leaves
from autopar.runtime.tensor_parallel.graph import (
    BlockGraph,
    is_getitem,
    is_tensor,
    names,
    numel,
    op_name,
    size_bytes,
)

State = Enum("State", "REPLICATED SHARDED PARTIAL LENT SEQUENCE")
Edge = tuple[fx.Node, fx.Node]
Classes = frozenset[Factor]

REPLICATED, SHARDED, PARTIAL, LENT, SEQUENCE = State

# f(a + b) = f(a) + f(b) for these, in their first argument.
LINEAR = names(
    "view reshape _unsafe_view transpose permute t unsqueeze squeeze expand contiguous clone to _to_copy type_as neg "
    "alias detach slice select flatten unflatten sum unbind split chunk split_with_sizes index roll view_as expand_as "
    "movedim swapaxes lift_fresh_copy detach_"
)


class IllegalClassesError(ValueError):
    """These classes cannot be sharded together on one axis."""


@dataclass
class Flow:
    """The states (before and after the reduction at each node) and the edits; axes are numbered from the outermost."""

    raw: dict[fx.Node, tuple[State, ...]] = field(default_factory=dict)
    state: dict[fx.Node, tuple[State, ...]] = field(default_factory=dict)
    copies: dict[Edge, set[int]] = field(default_factory=lambda: defaultdict(set))
    shares: dict[Edge, set[int]] = field(default_factory=lambda: defaultdict(set))
    gathers: set[Edge] = field(default_factory=set)
    slices: set[Edge] = field(default_factory=set)
    averages: dict[fx.Node, set[int]] = field(default_factory=lambda: defaultdict(set))
    reduces: dict[fx.Node, set[int]] = field(default_factory=dict)

    def is_sequence(self, node: fx.Node) -> bool:
        """Whether a node's tensor holds a part of the sequence."""
        return self.state[node][0] is SEQUENCE


def check_classes(graph: BlockGraph, classes: Classes) -> None:
    """Raise IllegalClassesError when a tensor would be sharded twice, or the block's input or output at all."""
    for node in graph.dims:
        for dims in graph.tensors_of(node):
            if sum(1 for dim in dims if touches(dim, classes)) > 1:
                raise IllegalClassesError("two dimensions of one tensor")
            if any(_twice(dim, classes) for dim in dims):
                raise IllegalClassesError("two factors of one dimension")
    if any(graph.leaves_of(node) & classes for node in (graph.residual, graph.main)):
        raise IllegalClassesError("the block's own activation")


def touches(factor: Factor, classes: Classes) -> bool:
    """Whether a factor contains one of these classes."""
    return not classes.isdisjoint(leaves(factor))


def _twice(factor: Factor, classes: Classes) -> bool:
    root = find(factor)
    if root.kind == "product" and sum(1 for part in flat(root) if touches(part, classes)) > 1:
        return True
    return any(_twice(part, classes) for part in root.parts)


def is_mixed(factor: Factor, classes: Classes) -> bool:
    """Whether only some segments of a dimension are sharded by these classes."""
    root = find(factor)
    hits = [touches(part, classes) for part in root.parts if find(part).size] if root.kind == "cat" else []
    return (any(hits) and not all(hits)) or any(is_mixed(part, classes) for part in root.parts)


def flow(
    graph: BlockGraph,
    axes: Sequence[Classes],
    sequence: Factor | None = None,
    forced: Iterable[tuple[int, fx.Node]] = (),
) -> Flow:
    """The states under these classes per axis, with the fewest reductions found at the earliest nodes.

    `forced` reductions are made wherever the node is PARTIAL. Rounds of one pass each, until no PARTIAL tensor meets
    an operator that is not linear in it. Raises IllegalClassesError.
    """
    reduced: dict[fx.Node, set[int]] = defaultdict(set)
    for axis, node in forced:
        reduced[node].add(axis)
    for _ in range(100):
        attempt = _Pass(graph, axes, sequence, reduced)
        missing = attempt.run()
        if not missing:
            return attempt.flow
        for axis, node in missing:
            reduced[attempt.earliest(node, axis)].add(axis)
    raise IllegalClassesError("no fixed point")


class _Pass:
    """One pass over the graph with a given set of reductions."""

    def __init__(
        self, graph: BlockGraph, axes: Sequence[Classes], sequence: Factor | None, reduced: dict[fx.Node, set[int]]
    ) -> None:
        self.graph, self.axes, self.sequence, self.reduced = graph, axes, sequence, reduced
        self.flow = Flow()
        self.classes: Classes = frozenset().union(*axes)
        self.limit = 1.01 * numel(graph.residual)
        self.held = {node: graph.leaves_of(node) & self.classes for node in graph.dims}

    def run(self) -> set[tuple[int, fx.Node]]:
        """Fill the flow; the reductions (axis, node) that are missing, empty when it is complete."""
        for node in self.graph.nodes:
            if node in self.graph.dims:
                missing = self._visit(node)
                if missing:
                    return missing
        missing = {
            (axis, node)
            for node in self.graph.outputs
            for axis, state in enumerate(self.flow.state[node])
            if state is PARTIAL
        }
        return missing or self._finish()

    def _finish(self) -> set[tuple[int, fx.Node]]:
        output = next(node for node in self.graph.nodes if node.op == "output")
        main = self.graph.main
        for node in self.graph.outputs:
            if self.sequence is not None and node is main:
                if not self._whole_sequence(node):
                    raise IllegalClassesError("the output does not keep the sequence")
                self._into_sequence(output, node)
            elif {SEQUENCE, LENT, SHARDED} & set(self.flow.state[node]):
                raise IllegalClassesError("a second output that other ranks hold other parts of")
        for node in self.flow.reduces:
            if numel(node) > self.limit:
                raise IllegalClassesError(f"a reduction of {tuple(node.meta['val'].shape)} inside the block")
        return set()

    def earliest(self, node: fx.Node, axis: int) -> fx.Node:
        """The first node of a chain of linear operators up to this one where the reduction is not larger."""
        while True:
            tensors = [x for x in node.all_input_nodes if x in self.flow.state]
            if (
                len(tensors) == 1
                and self.flow.state[tensors[0]][axis] is PARTIAL
                and op_name(node) in LINEAR | {"dropout"}
                and node not in self.graph.contracted
                and size_bytes(tensors[0]) <= size_bytes(node)
            ):
                node = tensors[0]
            else:
                return node

    def _put(self, node: fx.Node, states: tuple[State, ...]) -> None:
        self.flow.raw[node] = states
        due = {i for i in self.reduced.get(node, ()) if states[i] is PARTIAL}
        if due:
            self.flow.reduces[node] = due
            if self.sequence is not None and all(s is PARTIAL for s in states) and self._whole_sequence(node):
                self.flow.reduces[node] = set(range(len(states)))
                states = (SEQUENCE,) * len(states)
            else:
                states = tuple(REPLICATED if i in due else s for i, s in enumerate(states))
        self.flow.state[node] = states

    def _visit(self, node: fx.Node) -> set[tuple[int, fx.Node]]:
        count = range(len(self.axes))
        if node.op == "placeholder":
            if self.sequence is not None and node is self.graph.residual:
                self._put(node, (SEQUENCE,) * len(self.axes))
            else:
                self._put(node, tuple(SHARDED if self.held[node] & self.axes[i] else REPLICATED for i in count))
            return set()
        inputs = [x for x in node.all_input_nodes if x in self.flow.state]
        parts = [x for x in inputs if self.flow.is_sequence(x)]
        if parts and self._follows_sequence(node, inputs):
            missing = {(i, x) for x in inputs for i, s in enumerate(self.flow.state[x]) if s is PARTIAL}
            if not missing:
                for x in inputs:
                    self._into_sequence(node, x)
                self._put(node, (SEQUENCE,) * len(self.axes))
            return missing
        self.flow.gathers |= {(node, x) for x in parts}
        states, missing = [], set()
        for i in count:
            held = {x: LENT if x in parts else self.flow.state[x][i] for x in inputs}
            state, partial = self._on_axis(node, i, held)
            states.append(state)
            missing |= {(i, x) for x in partial}
        if not missing:
            self._put(node, tuple(states))
        return missing

    def _into_sequence(self, user: fx.Node, node: fx.Node) -> None:
        """The edits of an edge whose user works on its part of the sequence."""
        if self.flow.is_sequence(node):
            return
        copied = {i for i, state in enumerate(self.flow.state[node]) if state is REPLICATED}
        if copied:
            self.flow.copies[(user, node)] |= copied
        if self.sequence in self.graph.leaves_of(node):
            if not self._whole_sequence(node):
                raise IllegalClassesError("a side input has the sequence in two dimensions")
            self.flow.slices.add((user, node))

    def _whole_sequence(self, node: fx.Node) -> bool:
        """Whether each tensor of a node has the sequence in exactly one place."""
        return all(
            sum(leaf is self.sequence for dim in dims for leaf in leaves(dim)) == 1
            for dims in self.graph.tensors_of(node)
        )

    def _follows_sequence(self, node: fx.Node, inputs: list[fx.Node]) -> bool:
        """Whether a node can run on a part of the sequence: it treats places alike and nothing in it is sharded."""
        if self.held[node] or not self._whole_sequence(node):
            return False
        contracted = {leaf for f in self.graph.contracted.get(node, ()) for leaf in leaves(f)}
        blocked = {leaf for f in self.graph.blocked_at[node] for leaf in leaves(f)}
        if contracted & self.classes or self.sequence in contracted | blocked:
            return False
        # A large partial sum is reduced later: then the parts of the sequence are gathered to it instead.
        large = any(PARTIAL in self.flow.state[x] and numel(x) > self.limit for x in inputs)
        return not large and not any(SHARDED in self.flow.state[x] for x in inputs)

    def _on_axis(self, node: fx.Node, axis: int, held: dict[fx.Node, State]) -> tuple[State, list[fx.Node]]:
        """The state of a node on one axis, or the PARTIAL inputs that must be reduced before it."""
        classes, own = self.axes[axis], bool(self.held[node] & self.axes[axis])
        if is_getitem(node):
            (state,) = held.values()
            return (LENT if state is SHARDED and not own else state), []
        summed = [f for f in self.graph.contracted.get(node, ()) if touches(f, classes)]
        partial = [x for x, state in held.items() if state is PARTIAL]
        if partial:
            return (PARTIAL, []) if self._stays_partial(node, axis, held, bool(summed)) else (PARTIAL, partial)
        whole = [x for x, state in held.items() if state is REPLICATED]
        if summed:
            if own or any(is_mixed(f, classes) for f in summed):
                raise IllegalClassesError("a contraction that is sharded in part")
            if op_name(node) == "mean":
                self.flow.averages[node].add(axis)
            bias = _bias(node)
            for x in whole:
                (self.flow.shares if x is bias else self.flow.copies)[(node, x)].add(axis)
            return PARTIAL, []
        if own or any(state in (SHARDED, LENT) for state in held.values()):
            for x in whole:
                self.flow.copies[(node, x)].add(axis)
            return (SHARDED if own else LENT), []
        return REPLICATED, []

    def _stays_partial(self, node: fx.Node, axis: int, held: dict[fx.Node, State], summed: bool) -> bool:
        """Whether a node is linear in its PARTIAL inputs; records the edits of its other inputs."""
        name, first = op_name(node), node.args[0]
        others = [x for x, state in held.items() if state is not PARTIAL]
        is_partial = isinstance(first, fx.Node) and held.get(first) is PARTIAL
        if name in LINEAR:
            return is_partial and not summed and _is_floating(node)
        if name in ("dropout", "dropout_"):
            return node.args[1] == 0 or not node.args[2]
        if name in ("add", "add_", "sub"):
            if not all(isinstance(x, fx.Node) for x in node.args[:2]):
                return False
            if any(held[x] is not REPLICATED or not from_parameter(self.graph, x) for x in others):
                return False
            for x in others:
                self.flow.shares[(node, x)].add(axis)
            return True
        if name in ("mul", "mul_", "div", "div_"):
            single = len(held) - len(others) == 1 and (is_partial or name in ("mul", "mul_"))
            if not single or any(held[x] not in (REPLICATED, LENT) for x in others) or node.args[0] is node.args[1]:
                return False
            for x in others:
                if held[x] is REPLICATED:
                    self.flow.copies[(node, x)].add(axis)
            return True
        if name in ("index_add", "index_add_"):
            zeros = isinstance(first, fx.Node) and op_name(first) in ("zeros", "zeros_like", "new_zeros")
            source = node.args[3]
            return zeros and isinstance(source, fx.Node) and held.get(source) is PARTIAL
        return False


def _is_floating(node: fx.Node) -> bool:
    return not is_tensor(node) or bool(node.meta["val"].is_floating_point())


def _bias(node: fx.Node) -> object:
    """The argument that a contraction adds, or None."""
    name = op_name(node)
    if name == "linear":
        return node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    return node.args[0] if name in ("addmm", "baddbmm") else None


def from_parameter(graph: BlockGraph, node: fx.Node) -> bool:
    """Whether a tensor is a parameter or a linear function of one alone."""
    if node in graph.parameters:
        return True
    if node.op != "call_function" or op_name(node) not in LINEAR:
        return False
    sources: list[fx.Node] = [x for x in node.all_input_nodes if is_tensor(x)]
    if op_name(node) == "index" and isinstance(node.args[0], fx.Node):
        sources = [node.args[0]]
    return len(sources) == 1 and from_parameter(graph, sources[0])
