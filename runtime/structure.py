"""The chain of a model (embed, blocks, head), found by its structure and one small forward. No table of names.

The blocks are the outermost `ModuleList` whose children are of one class. What runs before them is the embedding, what
runs after is the head; a parameter belongs to where it is used. One forward with two batch sizes tells how a block
takes and returns the hidden state and which of its side inputs carry the batch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.errors import InputError
from autopar.model import Parameter
from autopar.runtime.arguments import Key, argument, named_arguments, tensor_arguments
from autopar.runtime.ends import SeenEnds, Vocabulary
from autopar.runtime.refusals import refuse_batch_statistics, refuse_shared
from autopar.runtime.trees import tree_leaves, tree_map


@dataclass(frozen=True, kw_only=True)
class Structure:
    """Where the chain of a model is.

    blocks: dotted path of the ModuleList; hidden: position (or keyword) at which a block takes the hidden state;
    output_length: 0 when a block returns the hidden state itself, otherwise the length of the tuple that it leads;
    hidden_size: elements of the hidden state's last dimension;
    batch_inputs: the side inputs of a block that carry the batch, as (key, dimension);
    embed_parameters, head_parameters: full names; tied: whether some parameter is in both;
    kinds: for each block the number of its kind (class, parameter shapes and dtypes).
    """

    blocks: str
    num_blocks: int
    hidden: int | str
    output_length: int
    hidden_size: int
    batch_inputs: tuple[tuple[Key, int], ...]
    embed_parameters: tuple[str, ...]
    head_parameters: tuple[str, ...]
    tied: bool
    kinds: tuple[int, ...]

    def block_path(self, block: int) -> str:
        """The dotted path of a block."""
        return f"{self.blocks}.{block}"

    def block_list(self, model: nn.Module) -> nn.ModuleList:
        """The list that holds the blocks."""
        found = model.get_submodule(self.blocks)
        assert isinstance(found, nn.ModuleList)
        return found

    def hidden_in(self, output: Any) -> Any:
        """The hidden state in what a block returned."""
        return output[0] if self.output_length else output

    def layer_parameters(self, model: nn.Module, layer: int) -> dict[str, nn.Parameter]:
        """The parameters of a layer of the chain by full name, shared ones under every name that the layer uses."""
        named = dict(model.named_parameters(remove_duplicate=False))
        if layer == 0:
            return {name: named[name] for name in self.embed_parameters}
        if layer == self.num_blocks + 1:
            return {name: named[name] for name in self.head_parameters}
        prefix = self.block_path(layer - 1) + "."
        return {name: parameter for name, parameter in named.items() if name.startswith(prefix)}


@dataclass(frozen=True, kw_only=True)
class BlockInputs:
    """The arguments with which a block was called: detached tensors and plain values."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Probe:
    """The structure of a model, the inputs of the first block of each kind, the hidden state's shape of one sample.

    used: the names of the parameters that the forward used; lookup, projection: where its words go in and out.
    """

    structure: Structure
    used: tuple[str, ...]
    lookup: Vocabulary
    projection: Vocabulary
    hidden_shape: tuple[int, ...]
    inputs: dict[int, BlockInputs] = field(repr=False)


def dtype_of(tensor: Tensor) -> str:
    """Torch's name of the dtype, as autopar.units knows it: `float32`."""
    return str(tensor.dtype).removeprefix("torch.")


def parameters_of(named: Mapping[str, nn.Parameter], prefix: str = "") -> tuple[Parameter, ...]:
    """The parameters as plain values, `prefix` taken from their names."""
    return tuple(
        Parameter(name=name.removeprefix(prefix), shape=tuple(p.shape), dtype=dtype_of(p), trainable=p.requires_grad)
        for name, p in named.items()
    )


def fingerprint(model: nn.Module) -> str:
    """A short hash of the names, shapes and dtypes of all parameters."""
    facts = [(name, list(p.shape), dtype_of(p)) for name, p in model.named_parameters(remove_duplicate=False)]
    return hashlib.sha256(json.dumps(sorted(facts)).encode()).hexdigest()[:16]


def find_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The path and list of the model's blocks; InputError when there is none, or more than one chain of them."""
    found: list[tuple[int, str, nn.ModuleList]] = []

    def walk(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            child_path = f"{path}.{name}" if path else name
            if isinstance(child, nn.ModuleList) and len(child) and len({type(block) for block in child}) == 1:
                size = sum(p.numel() for p in child.parameters())
                if size:
                    found.append((size, child_path, child))
                    continue
            walk(child, child_path)

    walk(model, "")
    found.sort(key=lambda entry: -entry[0])
    if not found:
        raise InputError(
            f"{type(model).__name__} has no chain of blocks",
            why="no nn.ModuleList whose children are all of one class and have parameters",
            fix="keep the repeated blocks of the model in one nn.ModuleList",
        )
    if len(found) > 1 and 4 * found[1][0] > found[0][0]:
        raise InputError(
            f"{type(model).__name__} has several chains of blocks",
            why=f"{found[0][1]} and {found[1][1]}; encoder-decoder models are not supported yet",
            fix="give a model with one chain of blocks",
        )
    return found[0][1], found[0][2]


class _UsedParameters(TorchFunctionMode):
    """Notes which parameters torch functions get, by the phase of the forward in which they run."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "embed"
        self.used: dict[str, set[int]] = {"embed": set(), "blocks": set(), "head": set()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, nn.Parameter):
                self.used[self.phase].add(id(leaf))
        return func(*args, **kwargs)


@contextmanager
def _hooked(handles: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _find_hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | str:
    for key, value in named_arguments(args, kwargs):
        if isinstance(value, Tensor) and value.is_floating_point():
            return key
    raise InputError(
        "the first block takes no floating-point tensor",
        why="the hidden state must be the first such argument",
        fix="pass the hidden state to the blocks as their first argument",
    )


def _detached(value: Any) -> Any:
    return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, value)


def probe(model: nn.Module, batch: Mapping[str, Tensor]) -> Probe:
    """The structure of the model, from one forward of `batch` and one of its samples but the last.

    batch: keyword inputs of the model whose first dimension is at least 2 samples. Raises InputError when the blocks
    do not run once each in order, or when something between them changes the hidden state.
    """
    path, blocks = find_blocks(model)
    refuse_batch_statistics(model)
    samples = next(iter(batch.values())).shape[0]
    if samples < 2:
        raise ValueError("probe needs a batch of at least 2 samples")
    kinds = _kinds(blocks)
    seen = _Seen(num_blocks=len(blocks), first_of_kind={kinds.index(k): k for k in set(kinds)})
    usage = _UsedParameters()
    ends = SeenEnds(model, path, batch, lambda: usage.phase)
    handles = list(ends.handles)
    for number, block in enumerate(blocks):
        handles.append(block.register_forward_pre_hook(seen.before(number, usage), with_kwargs=True, prepend=True))
        handles.append(block.register_forward_hook(seen.after(number, usage), with_kwargs=True))
    was_training = model.training
    with _hooked(handles), torch.no_grad():
        model.eval()
        with usage:
            model(**batch)
        first_run = seen.take()
        model(**{name: value[: samples - 1] for name, value in batch.items()})
        model.train(was_training)
    small_run = seen.take()
    named = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    refuse_shared(named, path + ".", usage.used["blocks"])
    outside = {name: i for name, i in named.items() if not name.startswith(path + ".")}
    embed, head, tied = _ends(outside, usage.used["embed"], usage.used["head"])
    structure = Structure(
        blocks=path,
        num_blocks=len(blocks),
        hidden=first_run.hidden,
        output_length=first_run.output_length,
        hidden_size=first_run.hidden_shape[-1],
        batch_inputs=_batch_inputs(first_run.shapes, small_run.shapes, first_run.hidden),
        embed_parameters=embed,
        head_parameters=head,
        tied=tied,
        kinds=tuple(kinds),
    )
    used = set().union(*usage.used.values())
    return Probe(
        structure=structure,
        used=tuple(name for name, i in named.items() if i in used),
        lookup=ends.lookup(),
        projection=ends.projection(),
        inputs=first_run.inputs,
        hidden_shape=first_run.hidden_shape[1:],
    )


def _ends(
    outside: Mapping[str, int], in_embed: set[int], in_head: set[int]
) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """The names of the parameters of embedding and head, and whether some are tied.

    outside: the identity of each parameter outside the blocks by name; in_embed, in_head: the identities of those that
    ran there. A tied parameter goes by its first name in the embedding and by its last in the head; what ran in
    neither is counted to the embedding.
    """
    tied = in_embed & in_head & set(outside.values())
    names = {i: [name for name, j in outside.items() if j == i] for i in tied}
    first, last = {found[0] for found in names.values()}, {found[-1] for found in names.values()}
    embed = [name for name, i in outside.items() if i in in_embed and (i not in tied or name in first)]
    head = [name for name, i in outside.items() if i in in_head and (i not in tied or name in last)]
    unused = [name for name, i in outside.items() if i not in in_embed | in_head]
    return (*embed, *unused), tuple(head), bool(tied)


def _kinds(blocks: nn.ModuleList) -> list[int]:
    known: dict[Any, int] = {}
    return [
        known.setdefault((type(block), parameters_of(dict(block.named_parameters()))), len(known)) for block in blocks
    ]


def _batch_inputs(
    large: Mapping[Key, tuple[int, ...]], small: Mapping[Key, tuple[int, ...]], hidden: int | str
) -> tuple[tuple[Key, int], ...]:
    found = []
    for key, shape in large.items():
        if key != hidden and key in small:
            changed = [d for d, (a, b) in enumerate(zip(shape, small[key], strict=True)) if a != b]
            found += [(key, d) for d in changed]
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class _Run:
    hidden: int | str
    output_length: int
    hidden_shape: tuple[int, ...]
    shapes: dict[Key, tuple[int, ...]]
    inputs: dict[int, BlockInputs]


class _Seen:
    """What the hooks of one forward saw; `take` checks and returns it and begins again."""

    def __init__(self, *, num_blocks: int, first_of_kind: Mapping[int, int]) -> None:
        self.num_blocks, self.first_of_kind = num_blocks, first_of_kind
        self._clear()

    def _clear(self) -> None:
        self.order: list[int] = []
        self.hidden: int | str | None = None
        self.passed: Tensor | None = None
        self.given: tuple[Tensor, int] | None = None
        self.output_length = 0
        self.shapes: dict[Key, tuple[int, ...]] = {}
        self.inputs: dict[int, BlockInputs] = {}

    def before(self, number: int, usage: _UsedParameters) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.hidden is None:
                self.hidden = _find_hidden(args, kwargs)
            hidden = argument(args, kwargs, self.hidden)
            if self.passed is not None and hidden is not self.passed:
                raise InputError(
                    f"something between the blocks {number - 1} and {number} changes the hidden state",
                    why="a block must get what the block before it returned",
                    fix="move what runs between the blocks into them",
                )
            self.given = (hidden, hidden._version) if isinstance(hidden, Tensor) else None
            self.order.append(number)
            usage.phase = "blocks"
            if number == 0:
                self.shapes = {key: tuple(x.shape) for key, x in tensor_arguments(args, kwargs)}
            if number in self.first_of_kind:
                self.inputs[self.first_of_kind[number]] = BlockInputs(args=_detached(args), kwargs=_detached(kwargs))

        return hook

    def after(self, number: int, usage: _UsedParameters) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self.output_length = len(output) if isinstance(output, tuple) else 0
            first = output[0] if isinstance(output, tuple) else output
            if not isinstance(first, Tensor):
                raise InputError(
                    f"block {number} does not return the hidden state",
                    why=f"it returns {type(first).__name__}",
                    fix="return the hidden state, or a tuple that begins with it",
                )
            if self.given is not None and self.given[0]._version != self.given[1]:
                raise InputError(
                    f"block {number} changes its input in place",
                    why="its input is kept for the backward, for recompute and for other ranks",
                    fix="write x = x + y instead of x += y",
                )
            self.passed = first
            if number == self.num_blocks - 1:
                usage.phase = "head"

        return hook

    def take(self) -> _Run:
        if self.order != list(range(self.num_blocks)) or self.hidden is None or self.passed is None:
            raise InputError(
                "the blocks do not run once each in order",
                why=f"one forward ran {self.order} of {self.num_blocks} blocks",
                fix="give a model whose forward runs its blocks one after the other",
            )
        run = _Run(
            hidden=self.hidden,
            output_length=self.output_length,
            hidden_shape=tuple(self.passed.shape),
            shapes=self.shapes,
            inputs=self.inputs,
        )
        self._clear()
        return run
