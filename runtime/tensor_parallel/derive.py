"""Tensor-parallel plans of a block, derived from its exported graph."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from torch import fx, nn

from autopar.axes import prime_factors
from autopar.errors import InputError
from autopar.model import Attention
from autopar.runtime.tensor_parallel.calls import calls_of
from autopar.runtime.tensor_parallel.choose import Choice
from autopar.runtime.tensor_parallel.collectives import Team
from autopar.runtime.tensor_parallel.factors import Factor
from autopar.runtime.tensor_parallel.graph import BlockGraph, sequence_leaf
from autopar.runtime.tensor_parallel.layout import BlockPlan, DimLayout, ParameterLayout, dim_layout
from autopar.runtime.tensor_parallel.rewrite import LocalGraph, Rewriter
from autopar.runtime.tensor_parallel.sequence import (
    SequenceFlow,
    SequenceRewriter,
    SequenceTeams,
    attentions,
    sequence_flow,
)
from autopar.runtime.tensor_parallel.skeleton import Skeleton, in_order, parameter_names
from autopar.runtime.tensor_parallel.states import Classes, Flow, IllegalClassesError, flow


@dataclass(eq=False)
class Derivation:
    """What tensor parallelism a block's graph allows, for one input signature.

    names: every parameter name with the one under which the graph has it (aliases share storage), None when the
    forward does not use it.
    """

    class_name: str
    graph: BlockGraph
    names: dict[str, str | None]
    shapes: dict[str, tuple[int, ...]]
    trainable: frozenset[str]

    @cached_property
    def choice(self) -> Choice:
        """The candidate classes and the choice among them."""
        return Choice(self.graph)

    def degrees(self, limit: int) -> tuple[int, ...]:
        """The legal degrees from 2 to `limit`: every axis shards attention and MLP, where the block has them."""
        return tuple(n for n in range(2, limit + 1) if self.choice.why_illegal(prime_factors(n)) is None)

    @cached_property
    def reason(self) -> str:
        """The sizes that limit the degrees: "heads 14 (kv 2 x 7), width 1792"."""
        choice = self.choice
        words = [choice.describe(group) for group in choice.groups]
        return ", ".join(sorted(words)) or "no factor of its parameters can be sharded"

    def why_no_sequence_norms(self, axis_sizes: tuple[int, ...]) -> str | None:
        """Why these axes cannot run with sequence-parallel norms, or None."""
        try:
            self.plan(axis_sizes, sequence_norms=True)
        except InputError as error:
            return error.why
        return None

    def why_no_cut_sequence(self) -> str | None:
        """Why the block cannot run on parts of the sequence around its attention, or None."""
        try:
            sequence_flow(self.graph)
        except InputError as error:
            return error.why
        except IllegalClassesError as error:
            return str(error)
        return None if self.attention else "it has no scaled_dot_product_attention of its own"

    @cached_property
    def attention(self) -> Attention | None:
        """The heads of the block's attention operators as they run, None without any or where they differ."""
        found = set()
        for node in attentions(self.graph):
            q, k = (x.meta["val"].shape for x in node.args[:2] if isinstance(x, fx.Node))
            if len(q) < 3 or len(k) < 3 or q[-3] % k[-3]:
                return None
            found.add((int(q[-3]), int(k[-3]), int(q[-1])))
        if len(found) != 1:
            return None
        ((heads, kv_heads, head_dim),) = found
        return Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim)

    def plan(self, axis_sizes: tuple[int, ...], sequence_norms: bool = False, sp: int = 1, cp: int = 1) -> BlockPlan:
        """The plan for prime axes, outermost first; raises InputError when they are not legal.

        sp, cp: Ulysses and context parallelism over so many ranks; then there may be no axis.
        """
        if (not axis_sizes and sp == cp == 1) or any(len(prime_factors(n)) != 1 for n in axis_sizes):
            raise ValueError(f"axis sizes must be primes, not {axis_sizes}")
        solved = solve(self, axis_sizes, sequence_norms, sp, cp)
        local = rewrite(solved, None, (0,) * len(axis_sizes), SequenceTeams.alone(sp, cp))
        return BlockPlan(
            axis_sizes=tuple(axis_sizes),
            sequence_norms=sequence_norms,
            layouts=solved.layouts,
            calls=calls_of(self.graph, local.edits, set(self.trainable)),
            sp=sp,
            cp=cp,
        )


@dataclass(frozen=True, eq=False)
class Solved:
    """The classes of each axis, the flow under them and the layout of each parameter; `parts` of a cut sequence."""

    graph: BlockGraph
    axis_sizes: tuple[int, ...]
    axes: list[Classes]
    flow: Flow
    sequence: Factor | None
    layouts: dict[str, ParameterLayout]
    parts: SequenceFlow | None = None


def derivation_of(skeleton: Skeleton, graph: BlockGraph) -> Derivation:
    """The derivation of a traced skeleton."""
    by_id: dict[int, str] = {}
    used = set(graph.parameters.values())
    parameters = dict(skeleton.block.named_parameters(remove_duplicate=False))
    for name, p in parameters.items():
        if name in used:
            by_id[id(p)] = name
    return Derivation(
        class_name=type(skeleton.block).__name__,
        graph=graph,
        names={name: by_id.get(id(p)) for name, p in parameters.items()},
        shapes={name: tuple(p.shape) for name, p in parameters.items()},
        trainable=frozenset(name for name, p in parameters.items() if p.requires_grad),
    )


def derive(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Derivation:
    """What tensor parallelism the graph of a block allows, for inputs like these.

    The block may be real, fake or on meta; it is not changed and no value is read. About 0.1 s for a transformer
    block. Raises InputError when the block cannot be exported.
    """
    skeleton, kwargs = Skeleton(block), in_order(parameter_names(block), kwargs)
    return derivation_of(skeleton, skeleton.trace(args, kwargs, block.training))


def solve(
    derivation: Derivation, axis_sizes: tuple[int, ...], sequence_norms: bool, sp: int = 1, cp: int = 1
) -> Solved:
    """The classes, states and layouts on these axes; raises InputError when they are not legal."""
    if sp * cp > 1:
        return _with_cut_sequence(derivation, axis_sizes, sequence_norms, sp, cp)
    choice, graph, size = derivation.choice, derivation.graph, prod(axis_sizes)
    what = f"tensor parallel {size}{'s' if sequence_norms else ''} is not possible for {derivation.class_name}"
    why = choice.why_illegal(axis_sizes)
    if why:
        legal = ", ".join(map(str, (1, *derivation.degrees(max(size, 16)))))
        raise InputError(what, why=f"{why} ({derivation.reason})", fix=f"use one of tp {legal}")
    axes = choice.classes(axis_sizes)
    options = [choice.option(classes) for classes in axes]
    forced = [(i, node) for i, option in enumerate(options) if option for node in option.early]
    sequence = sequence_leaf(graph) if sequence_norms else None
    if sequence is not None and sequence.size % size:
        raise InputError(
            what, why=f"{size} ranks do not divide the sequence of {sequence.size}", fix="pad the sequence"
        )
    try:
        states = flow(graph, axes, sequence, forced)
    except IllegalClassesError as error:
        raise InputError(what, why=str(error), fix="use tensor parallelism without sequence-parallel norms") from error
    by_name = {
        name: tuple(dim_layout(dim, axes) for dim in graph.tensors_of(node)[0])
        for node, name in graph.parameters.items()
    }
    layouts = {
        name: by_name[source] if source is not None else tuple(DimLayout(k) for k in derivation.shapes[name])
        for name, source in derivation.names.items()
    }
    return Solved(graph, tuple(axis_sizes), axes, states, sequence, layouts)


def _with_cut_sequence(
    derivation: Derivation, axis_sizes: tuple[int, ...], sequence_norms: bool, sp: int, cp: int
) -> Solved:
    graph, what = derivation.graph, f"sp {sp} with cp {cp} is not possible for {derivation.class_name}"
    fix = "leave this block without sp and cp"
    why = derivation.why_no_cut_sequence()
    if why is None and sequence_norms:
        why = "sequence-parallel norms cut the same sequence"
    if why is not None:
        raise InputError(what, why=why, fix=fix)
    parts, attention = sequence_flow(graph), derivation.attention
    ways = prod(axis_sizes) * sp
    if attention is None or attention.heads % ways or attention.kv_heads % ways:
        raise InputError(what, why=f"{attention} is not divisible by {ways} ranks", fix=fix)
    if parts.sequence.size % (sp * cp):
        raise InputError(what, why=f"{sp * cp} ranks do not divide the sequence of {parts.sequence.size}", fix=fix)
    if axis_sizes:
        return replace(solve(derivation, axis_sizes, False), sequence=parts.sequence, parts=parts)
    states = Flow(raw=dict.fromkeys(graph.dims, ()), state=dict.fromkeys(graph.dims, ()))
    layouts = {name: tuple(DimLayout(k) for k in shape) for name, shape in derivation.shapes.items()}
    return Solved(graph, (), [], states, parts.sequence, layouts, parts)


def rewrite(
    solved: Solved, teams: list[Team] | None, coordinate: tuple[int, ...], sharing: SequenceTeams | None = None
) -> LocalGraph:
    """The graph of the rank at these coordinates; `teams` are the axes and then all together, None: no groups.

    sharing: the ranks that share the sequence, where it is cut.
    """
    if teams is None:
        teams = make_teams(solved.axis_sizes, coordinate, None)
    if solved.parts is not None:
        assert sharing is not None
        return SequenceRewriter(
            solved.graph,
            solved.flow,
            solved.axes,
            solved.axis_sizes,
            coordinate,
            teams,
            solved.sequence,
            parts=solved.parts,
            sharing=sharing,
        ).run()
    return Rewriter(
        solved.graph, solved.flow, solved.axes, solved.axis_sizes, coordinate, teams, solved.sequence
    ).run()


def make_teams(axis_sizes: tuple[int, ...], coordinate: tuple[int, ...], groups: Any) -> list[Team]:
    """The teams of each axis and of all axes together, on these process groups (None: none)."""
    place = 0
    for size, at in zip(axis_sizes, coordinate, strict=True):
        place = place * size + at
    shapes = [*zip(axis_sizes, coordinate, strict=True), (prod(axis_sizes), place)]
    if groups is None:
        return [Team(*shape) for shape in shapes]
    if not axis_sizes:
        return []
    every = list(groups) if len(axis_sizes) > 1 else [groups[0], groups[0]]
    if len(every) != len(shapes):
        raise ValueError(f"{len(axis_sizes)} axes need {len(shapes)} process groups, not {len(every)}")
    return [Team(*shape, group) for shape, group in zip(shapes, every, strict=True)]
