"""What one forward shows of the blocks of a model: their order, forms, inputs, and what depends on other layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.runtime.arguments import Key, argument, named_arguments, tensor_arguments
from autopar.runtime.chains import Lists, own_settings
from autopar.runtime.structure import BlockForm, BlockInputs, Side, parameters_of
from autopar.runtime.trees import tree_map

Shape = tuple[int, ...]
K = TypeVar("K", Key, int)


class Phases(Protocol):
    """Where a forward is; block: the number of the next one; handed: what code outside the blocks may take of them."""

    phase: str
    block: int
    handed: dict[int, Tensor]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a side input comes from: what block `made` returned at `place`; or, with place 0, code outside the blocks,
    block `made` being the first to get it. number: tells those apart; fresh: it was made right before that block."""

    made: int
    place: int
    number: int = 0
    fresh: bool = True


@dataclass(kw_only=True, eq=False)
class Run:
    """One block's part of a forward.

    hidden: the key of its hidden state; hidden_shape: of what it returned; direct: it got what the block before it
    returned; shapes: of its tensors by key; outputs: of what it returned beside the hidden state, by place; learned:
    the keys of side inputs that depend on parameters, or on what other blocks returned beside the hidden state;
    sources: where those come from, by key.
    """

    path: str
    hidden: int | str
    direct: bool
    shapes: dict[Key, Shape]
    learned: tuple[Key, ...]
    sources: dict[Key, Source]
    captured: Any
    output_length: int = 0
    hidden_shape: Shape = ()
    outputs: dict[int, Shape]


class Seen:
    """Hooks on the blocks of a model; `take` returns what they saw since the last time and begins again.

    Each block gets its hidden state, and hands on what it returns, without a graph behind it: what a later side input
    depends on then shows as `requires_grad`, and only one block's graph is ever alive.
    """

    def __init__(self, model: nn.Module, lists: Lists, phases: Phases) -> None:
        self._phases, self._count = phases, sum(map(len, lists))
        self._inputs: dict[Any, BlockInputs] = {}
        self._first = True
        self.handles: list[Any] = []
        for paths in lists:
            blocks = [model.get_submodule(path) for path in paths]
            for path, block, settings in zip(paths, blocks, own_settings(blocks), strict=True):
                key = (type(block), parameters_of(dict(block.named_parameters())), settings)
                before, after = self._before(path, key), self._after
                self.handles.append(block.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
                self.handles.append(block.register_forward_hook(after, with_kwargs=True))
        self._clear()

    def _clear(self) -> None:
        self._runs: list[Run] = []
        self._passed: Tensor | None = None
        self._given: tuple[Tensor, int] | None = None
        self._sources: dict[int, tuple[Tensor, Source]] = {}
        self._phases.phase, self._phases.block, self._phases.handed = "embed", 0, {}

    def take(self) -> list[Run]:
        """The runs of the blocks in order."""
        runs = self._runs
        if self._first:
            for run in runs:
                run.captured = self._inputs[run.captured]
        self._first = False
        self._clear()
        return runs

    def _before(self, path: str, key: Any) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._phases.phase = "blocks"
            place = _find_hidden(args, kwargs)
            hidden = argument(args, kwargs, place)
            tensors = tensor_arguments(args, kwargs)
            shapes = {key: tuple(x.shape) for key, x in tensors}
            whole = (key, place, tuple((k, s[1:] if k == place else s) for k, s in shapes.items()))
            if self._first and whole not in self._inputs:
                self._inputs[whole] = BlockInputs(args=_detached(args), kwargs=_detached(kwargs))
            self._runs.append(
                Run(
                    path=path,
                    hidden=place,
                    direct=hidden is self._passed,
                    shapes=shapes,
                    learned=tuple(key for key, x in tensors if key != place and x.requires_grad),
                    sources={key: found for key, x in tensors if key != place and (found := self._source(x))},
                    captured=whole,
                    outputs={},
                )
            )
            self._given = (hidden, hidden._version)

        return hook

    def _source(self, value: Tensor) -> Source | None:
        """Where a side input comes from, None for one that every stage computes from its batch."""
        if id(value) not in self._sources and value.requires_grad:
            fresh = id(value) in self._phases.handed
            found = Source(made=len(self._runs), place=0, number=len(self._sources), fresh=fresh)
            self._sources[id(value)] = value, found
        return self._sources[id(value)][1] if id(value) in self._sources else None

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        run, name = self._runs[-1], self._runs[-1].path
        first = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(first, Tensor):
            raise InputError(
                f"{name} does not return the hidden state",
                why=f"it returns {type(first).__name__}",
                fix="return the hidden state, or a tuple that begins with it",
            )
        if self._given is not None and self._given[0]._version != self._given[1]:
            raise InputError(
                f"{name} changes its input in place",
                why="its input is kept for the backward, for recompute and for other ranks",
                fix="write x = x + y instead of x += y",
            )
        run.output_length = len(output) if isinstance(output, tuple) else 0
        run.hidden_shape = tuple(first.shape)
        is_last = len(self._runs) == self._count
        if is_last:
            torch.set_grad_enabled(False)  # the logits of a large vocabulary need no graph
        marked = tree_map(_marked, output)
        if isinstance(output, tuple):
            run.outputs = {i: tuple(x.shape) for i, x in enumerate(output) if i and isinstance(x, Tensor)}
        self._passed = passed = marked[0] if isinstance(output, tuple) else marked
        for i, x in enumerate(marked if isinstance(output, tuple) else ()):
            if i and isinstance(x, Tensor):
                self._sources[id(x)] = x, Source(made=len(self._runs) - 1, place=i)
        self._phases.phase, self._phases.block = "head" if is_last else "between", len(self._runs)
        self._phases.handed = {id(passed): passed}
        return marked


def _marked(value: Any) -> Any:
    """A floating-point tensor cut from its graph, that still shows in what is computed from it."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not torch.is_grad_enabled():
        return value
    return value.detach() + torch.zeros((), dtype=value.dtype, device=value.device, requires_grad=True)


def _detached(value: Any) -> Any:
    return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, value)


def _find_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str:
    for key, value in named_arguments(args, kwargs):
        if isinstance(value, Tensor) and value.is_floating_point():
            return key
    raise InputError(
        "the first block takes no floating-point tensor",
        why="the hidden state must be the first such argument",
        fix="pass the hidden state to the blocks as their first argument",
    )


def forms_of(first: Sequence[Run], second: Sequence[Run]) -> tuple[BlockForm, ...]:
    """The form of each block, from two forwards with batches of another size; InputError when they do not agree."""
    if [run.path for run in first] != [run.path for run in second]:
        raise InputError(
            "the blocks do not run once each in order",
            why="a batch of one sample less ran others",
            fix="let the forward run its blocks one after the other, whatever the batch",
        )
    return tuple(_form(a, b) for a, b in zip(first, second, strict=True))


def _form(large: Run, small: Run) -> BlockForm:
    changed = _changed(large.shapes, small.shapes)
    if (large.hidden, 0) not in changed:
        where = [dim for key, dim in changed if key == large.hidden]
        raise InputError(
            f"{large.path} does not get the samples along the first dimension",
            why=f"its hidden state is {list(large.shapes[large.hidden])}, the batch along {where or 'none'}",
            fix="put the batch first (batch_first=True)",
        )
    return BlockForm(
        hidden=large.hidden,
        output_length=large.output_length,
        batch_inputs=tuple((key, dim) for key, dim in changed if key != large.hidden),
        batch_outputs=tuple(_changed(large.outputs, small.outputs)),
        learned=large.learned,
    )


def _changed(large: dict[K, Shape], small: dict[K, Shape]) -> list[tuple[K, int]]:
    """Where shapes differ, as (key, dimension)."""
    return [
        (key, dim)
        for key, shape in large.items()
        if key in small
        for dim, (a, b) in enumerate(zip(shape, small[key], strict=True))
        if a != b
    ]


def kinds_of(model: nn.Module, lists: Lists, runs: Sequence[Run]) -> tuple[tuple[int, ...], dict[int, BlockInputs]]:
    """The number of each block's kind in order of the run, and the inputs of the first block of each kind.

    Settings are read after the forward: it may adapt them to the size of the input.
    """
    settings: dict[str, Any] = {}
    for paths in lists:
        settings |= dict(zip(paths, own_settings([model.get_submodule(path) for path in paths]), strict=True))
    known: dict[Any, int] = {}
    kinds: list[int] = []
    inputs: dict[int, BlockInputs] = {}
    for run in runs:
        block = model.get_submodule(run.path)
        parameters = parameters_of(dict(block.named_parameters()))
        shapes = tuple((k, s[1:] if k == run.hidden else s) for k, s in run.shapes.items())
        kind = known.setdefault((type(block), parameters, settings[run.path], run.output_length, shapes), len(known))
        kinds.append(kind)
        inputs.setdefault(kind, run.captured)
    return tuple(kinds), inputs


def sides_of(runs: Sequence[Run]) -> tuple[Side, ...]:
    """What blocks take beside the hidden state that other layers make, in the order in which it is first taken."""
    keys: dict[Source, Key] = {}
    users: dict[Source, list[tuple[int, Key]]] = {}
    for number, run in enumerate(runs):
        for key, source in run.sources.items():
            keys.setdefault(source, key)
            users.setdefault(source, []).append((number, key))
    return tuple(
        Side(made=source.made, place=source.place, key=keys[source], users=tuple(found))
        for source, found in users.items()
    )


def why_no_pipeline(runs: Sequence[Run], lists: Lists, between: Mapping[int, str], taken: str) -> str:
    """Why a chain cannot be cut into stages, "" where it can.

    between: a parameter used right before a block, by its number; taken: where code outside the blocks takes something
    else of the layers before it than the hidden state, if it does. Where one list of blocks ends and the next begins,
    the model may do what it likes with the hidden state: the stage of the next block does it.
    """
    homes = [run.path.rpartition(".")[0] for run in runs]
    seams = {i for i, run in enumerate(runs) if i and not run.direct and homes[i] != homes[i - 1]}
    changed = next((i for i, run in enumerate(runs) if i and not run.direct and i not in seams), None)
    if changed is not None:
        return f"something between {runs[changed - 1].path} and {runs[changed].path} changes the hidden state"
    inside = next((name for number, name in between.items() if number not in seams), None)
    if inside is not None:
        return f"its forward uses {inside} between its blocks"
    for number, run in enumerate(runs):
        keys = [k for k in run.learned if not _handed_on(run.sources[k], seams)]
        if keys:
            named = ", ".join(key if isinstance(key, str) else f"argument {key}" for key in keys[:3])
            return f"{run.path} gets {named}, which other layers compute from their parameters"
        if run.shapes[run.hidden][1:] != run.hidden_shape[1:] or (
            number and number not in seams and run.hidden_shape[1:] != runs[number - 1].hidden_shape[1:]
        ):
            shapes = {run.hidden_shape[1:] for run in runs} | {run.shapes[run.hidden][1:] for run in runs}
            return f"the hidden state changes its shape: {', '.join(str(list(s)) for s in sorted(shapes)[:3])}"
    return taken


def _handed_on(source: Source, seams: Collection[int]) -> bool:
    """Whether stages hand a side input on: a block returns it, or the stage of the first block of a list makes it."""
    return source.place > 0 or (source.made in seams and source.fresh)
