"""The chain of a model as values: embed, blocks, head. `autopar.runtime.probing` finds it.

The blocks may stand in several lists of the model (encoder and decoder, the stages of a hierarchical model): the chain
is the order in which they run. What runs before or between them is the embedding, what runs after is the head.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from autopar.model import Parameter
from autopar.runtime.arguments import Key
from autopar.runtime.ends import Vocabulary


@dataclass(frozen=True, kw_only=True)
class BlockForm:
    """How a block takes and returns tensors.

    hidden: position (or keyword) at which it takes the hidden state; output_length: 0 when it returns the hidden state
    itself, otherwise the length of the tuple that it leads; batch_inputs: its side inputs that carry the batch, as
    (key, dimension); batch_outputs: likewise what it returns beside the hidden state, by place;
    learned: the side inputs that other layers compute from their parameters.
    """

    hidden: int | str
    output_length: int
    batch_inputs: tuple[tuple[Key, int], ...] = ()
    batch_outputs: tuple[tuple[int, int], ...] = ()
    learned: tuple[Key, ...] = ()

    def hidden_in(self, output: Any) -> Any:
        """The hidden state in what the block returned."""
        return output[0] if self.output_length else output


@dataclass(frozen=True, kw_only=True)
class Side:
    """A tensor beside the hidden state that other layers make and blocks take; stages hand it on.

    made: the block that returns it at `place` of its tuple; with place 0 it is made outside the blocks, right before
    block `made`, which takes it as `key`; users: the blocks that take it, with their keys.
    """

    made: int
    place: int
    key: Key
    users: tuple[tuple[int, Key], ...]


@dataclass(frozen=True, kw_only=True)
class Seam:
    """Where one list of blocks ends and the next begins: the first block of that, the parameters used right before."""

    block: int
    parameters: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Structure:
    """Where the chain of a model is.

    paths, forms: the dotted path and the form of each block, in the order in which they run; starts: the blocks that
    get something else than what the block before them returned, always the first; hidden_size: elements of the hidden
    state's last dimension; embed_parameters, head_parameters: full names; tied: whether some parameter is in both;
    kinds: for each block the number of its kind (class, parameter shapes and dtypes, settings, shapes of its inputs);
    pipeline_reason: why the chain cannot be cut into stages, "" where it can; front_parameters: those of the embedding
    that are used before the first block; seams: where the chain may change its hidden state, with the others; sides:
    what layers hand to blocks beside the hidden state. A parameter may be used in several places.
    """

    paths: tuple[str, ...]
    forms: tuple[BlockForm, ...]
    starts: tuple[int, ...]
    hidden_size: int
    embed_parameters: tuple[str, ...]
    head_parameters: tuple[str, ...]
    tied: bool
    kinds: tuple[int, ...]
    pipeline_reason: str = ""
    front_parameters: tuple[str, ...] = ()
    seams: tuple[Seam, ...] = ()
    sides: tuple[Side, ...] = ()

    def crossing(self, layer: int) -> tuple[int, ...]:
        """The numbers of the sides that cross the boundary before a layer of the chain."""
        block = layer - 1
        return tuple(
            number
            for number, side in enumerate(self.sides)
            if side.made < block and any(user >= block for user, _ in side.users)
        )

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return len(self.paths)

    def outside_names(self, layers: range) -> set[str]:
        """The parameters outside the blocks that a stage of these layers uses: a seam goes with the block after it."""
        if len(layers) == self.num_blocks + 2:
            return {*self.embed_parameters, *self.head_parameters}
        found = {*(self.front_parameters if 0 in layers else ())}
        found |= {name for seam in self.seams if seam.block + 1 in layers for name in seam.parameters}
        return found | {*(self.head_parameters if self.num_blocks + 1 in layers else ())}

    def is_outside(self, name: str) -> bool:
        """Whether a parameter lies outside the blocks."""
        return not name.startswith(tuple(f"{path}." for path in self.paths))

    def block(self, model: nn.Module, number: int) -> nn.Module:
        """A block of the model, or what stands in its place; negative numbers count from the end."""
        return model.get_submodule(self.paths[number])

    def layer_parameters(self, model: nn.Module, layer: int) -> dict[str, nn.Parameter]:
        """The parameters of a layer of the chain by full name, shared ones under every name that the layer uses."""
        named = dict(model.named_parameters(remove_duplicate=False))
        if layer == 0:
            return {name: named[name] for name in self.embed_parameters}
        if layer == self.num_blocks + 1:
            return {name: named[name] for name in self.head_parameters}
        prefix = self.paths[layer - 1] + "."
        return {name: parameter for name, parameter in named.items() if name.startswith(prefix)}


@dataclass(frozen=True, kw_only=True)
class BlockInputs:
    """The arguments with which a block was called: detached tensors and plain values."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Probe:
    """The structure of a model, the inputs of the first block of each kind.

    hidden_shape: of one sample after the last block; tokens: of one sample of the batch (None where it has none);
    used: the names of the parameters that the forward used; lookup, projection: where its words go in and out.
    """

    structure: Structure
    used: tuple[str, ...]
    lookup: Vocabulary
    projection: Vocabulary
    hidden_shape: tuple[int, ...]
    tokens: int | None
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
