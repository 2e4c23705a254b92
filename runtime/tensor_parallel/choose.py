"""Which factors of a block each tensor-parallel axis shards, and which degrees that makes legal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from torch import fx

from autopar.axes import prime_factors
from autopar.runtime.tensor_parallel.factors import Factor, find, leaves
from autopar.runtime.tensor_parallel.graph import BlockGraph, numel, op_name
from autopar.runtime.tensor_parallel.states import (
    Classes,
    Flow,
    IllegalClassesError,
    State,
    check_classes,
    flow,
    touches,
)

# An axis keeps a class only when it spreads this fraction of the block's contractions per reduced residual.
MIN_FLOP_FRACTION = 0.02
MAX_REDUCTIONS_PER_CLASS = 4


@dataclass(frozen=True, eq=False)
class Candidate:
    """A factor that an axis may shard: its parameters, the parameter elements it spreads, and its group."""

    leaf: Factor
    parameters: tuple[str, ...]
    spread: float
    group: int

    @property
    def size(self) -> int:
        """The elements of the dimension that it is."""
        return self.leaf.size


@dataclass(frozen=True, eq=False)
class Option:
    """A set of classes on one axis with its flow, and reductions that are better made early."""

    flow: Flow
    early: frozenset[fx.Node]

    @property
    def volume(self) -> int:
        """Elements of all reductions."""
        return sum(numel(node) for node in self.flow.reduces)


@dataclass(eq=False)
class Choice:
    """The candidate classes of a block and the choice among them."""

    graph: BlockGraph
    _options: dict[Classes, Option | None] = field(default_factory=dict)

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """The legal classes, the one that spreads most parameters first.

        A class is a free factor of a parameter that is neither in the block's activation input nor in its output.
        Classes that share a parameter are one group (attention, MLP). In a group with attention scores only the
        classes that also spread the scores count: sharding the value dimension would repeat them on every rank.
        """
        graph = self.graph
        outside = graph.leaves_of(graph.residual) | graph.leaves_of(graph.main)
        users: dict[Factor, list[str]] = {}
        for node, name in graph.parameters.items():
            for leaf in dict.fromkeys(leaf for dim in graph.tensors_of(node)[0] for leaf in leaves(dim)):
                if leaf not in outside and not leaf.blocked:
                    users.setdefault(leaf, []).append(name)
        groups = _groups(users)
        scores = self._scores()
        with_scores = {groups[leaf] for leaf in users if leaf in scores}
        found = [
            Candidate(leaf, tuple(names), self.spread(frozenset([leaf])), groups[leaf])
            for leaf, names in users.items()
            if (leaf in scores or groups[leaf] not in with_scores) and self.option(frozenset([leaf]))
        ]
        return tuple(sorted(found, key=lambda c: -c.spread))

    def _scores(self) -> set[Factor]:
        """The leaves of all attention scores: of softmax results and of the queries' dims but the last."""
        graph, out = self.graph, set()
        for node in graph.dims:
            name = op_name(node)
            if name == "scaled_dot_product_attention":
                query = node.args[0]
                out |= {leaf for dim in graph.tensors_of(query)[0][:-1] for leaf in leaves(dim)}
            elif name in ("softmax", "_softmax"):
                out |= graph.leaves_of(node)
        return out

    def spread(self, classes: Classes) -> float:
        """Parameter elements in segments that these classes shard."""
        graph = self.graph
        return sum(
            numel(p) * max((_fraction(f, classes) for f in graph.tensors_of(p)[0]), default=0)
            for p in graph.parameters
        )

    def spread_flops(self, classes: Classes) -> float:
        """The fraction of the contractions' work that these classes spread."""
        graph, total, spread = self.graph, 0.0, 0.0
        for node, contracted in graph.contracted.items():
            if op_name(node) in ("sum", "mean"):
                continue
            work = float(numel(node) * prod(f.size for f in contracted))
            total += work
            spread += work * max(_fraction(f, classes) for f in [*graph.tensors_of(node)[0], *contracted])
        return spread / total if total else 0.0

    def option(self, classes: Classes) -> Option | None:
        """The flow when one axis shards these classes, or None when that is illegal."""
        if classes not in self._options:
            try:
                check_classes(self.graph, classes)
                self._options[classes] = self._fewest_reductions(classes)
            except IllegalClassesError:
                self._options[classes] = None
        return self._options[classes]

    def _fewest_reductions(self, classes: Classes) -> Option:
        """Also try to reduce right at a contraction that several reduced tensors come from."""
        best = Option(flow(self.graph, [classes]), frozenset())
        for node in self.graph.contracted:
            if best.flow.raw.get(node) == (State.PARTIAL,) and node not in best.flow.reduces:
                early = best.early | {node}
                try:
                    other = Option(flow(self.graph, [classes], forced=[(0, n) for n in early]), early)
                except IllegalClassesError:
                    continue
                if len(other.flow.reduces) < len(best.flow.reduces) and other.volume <= 1.5 * best.volume:
                    best = other
        return best

    def classes(self, axis_sizes: Sequence[int]) -> list[Classes]:
        """The classes that each axis shards, greedily from the outermost; an empty set where none divides."""
        axes: list[Classes] = []
        for i, size in enumerate(axis_sizes):
            chosen: Classes = frozenset()
            for candidate in self.candidates:
                cut = prod(axis_sizes[j] for j in range(i) if candidate.leaf in axes[j])
                if candidate.size // cut % size == 0 and self._is_worth(chosen, candidate):
                    chosen |= {candidate.leaf}
            axes.append(chosen)
        return axes

    def _is_worth(self, chosen: Classes, candidate: Candidate) -> bool:
        """Whether an axis that shards `chosen` should also shard this candidate."""
        wider = chosen | {candidate.leaf}
        option, before = self.option(wider), self.option(chosen) if chosen else None
        if option is None or self.spread(wider) <= self.spread(chosen):
            return False
        reductions = len(option.flow.reduces) - (len(before.flow.reduces) if before else 0)
        volume = option.volume - (before.volume if before else 0)
        gain = self.spread_flops(wider) - self.spread_flops(chosen)
        residuals = volume / numel(self.graph.residual)
        return reductions <= MAX_REDUCTIONS_PER_CLASS and (volume <= 0 or gain >= MIN_FLOP_FRACTION * residuals)

    @cached_property
    def groups(self) -> frozenset[int]:
        """The groups that some axis of 2 or more ranks can shard."""
        sizes = {p for c in self.candidates for p in prime_factors(c.size)}
        return frozenset(g for size in sizes for g in self.sharded_groups(self.classes([size])[0]))

    def sharded_groups(self, classes: Classes) -> set[int]:
        """The groups that these classes belong to."""
        return {c.group for c in self.candidates if c.leaf in classes}

    def why_illegal(self, axis_sizes: Sequence[int]) -> str | None:
        """Why these axes do not shard every group that can be sharded, or None."""
        if not self.groups:
            return "no factor of its parameters can be sharded"
        for size, classes in zip(axis_sizes, self.classes(axis_sizes), strict=True):
            missing = self.groups - self.sharded_groups(classes)
            if missing:
                names = ", ".join(self.describe(group) for group in sorted(missing))
                return f"an axis of {size} does not divide {names}"
        return None

    def describe(self, group: int) -> str:
        """A group in words: "heads 14 (kv 2 x 7)" or "width 1792"."""
        members = [c for c in self.candidates if c.group == group]
        scores = self._scores()
        if any(c.leaf in scores for c in members):
            # Key and value weights have the kv heads only, so the class with more parameters is the outer one.
            sizes = [c.size for c in sorted(members, key=lambda c: -len(c.parameters))]
            if len(sizes) == 1:
                return f"heads {sizes[0]}"
            return f"heads {prod(sizes)} (kv {' x '.join(map(str, sizes))})"
        return f"width {' x '.join(str(c.size) for c in members)}"


def _groups(users: dict[Factor, list[str]]) -> dict[Factor, int]:
    """A number per class; classes that share a parameter, directly or through others, have the same."""
    group = {leaf: i for i, leaf in enumerate(users)}
    for leaf, names in users.items():
        for other in users:
            if group[other] != group[leaf] and set(users[other]) & set(names):
                old = group[other]
                group = {f: group[leaf] if g == old else g for f, g in group.items()}
    return group


def _fraction(factor: Factor, classes: Classes) -> float:
    """The fraction of a dimension that lies in sharded segments."""
    root = find(factor)
    if root.kind == "leaf":
        return float(root in classes)
    if root.kind == "cat":
        return sum(find(part).size * _fraction(part, classes) for part in root.parts) / root.size
    return float(any(touches(part, classes) for part in root.parts)) and max(_fraction(p, classes) for p in root.parts)
