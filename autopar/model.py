"""A model as numbers: its chain of layers, their kinds and parameters. No tensors.

The chain is `embed` (all that runs before the first block), the blocks `0` .. `L-1`, and `head` (all that runs after
the last block, with the loss). Blocks of one class and the same parameter shapes are one kind and measured once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from autopar.formats import omitted
from autopar.units import DTYPE_BYTES

Role = Literal["embed", "block", "head"]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter: its name within the layer, shape, dtype name and whether it is trained."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"Parameter.dtype is unknown: {self.dtype[:40]!r}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"Parameter.shape of {self.name!r} is negative: {self.shape}")
        if self.size_bytes > 1 << 50:
            raise ValueError(f"Parameter.shape of {self.name!r} is absurd: more than 2^50 bytes")

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole parameter."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The attention of a block.

    heads, kv_heads: of the whole block; head_dim: the width of one; fused: no score matrix in memory.
    Raises ValueError for sizes that make no attention.
    """

    heads: int
    kv_heads: int
    head_dim: int
    fused: bool = True

    def __post_init__(self) -> None:
        sizes = (self.heads, self.kv_heads, self.head_dim)
        if not all(1 <= size <= 1 << 20 for size in sizes) or self.heads % self.kv_heads:
            raise ValueError(f"Attention needs whole numbers, kv heads that divide heads: {sizes}")


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What layers of one kind have in common.

    tp_degrees: the tensor-parallel degrees (> 1) that the block's own graph allows, of embed and head the
    vocabulary-parallel ones; `tp_reason` in words why no others ("heads 14, kv heads 2, width 1792");
    sequence_norms: whether those degrees also run with sequence-parallel norms; attention: of a block, None where it
    is not known to have one of equal heads; sequence_reason: why its sequence cannot be cut around it, if so; tokens:
    those of its hidden state where the model and not the request says how many (patches of an image), otherwise 0.
    """

    name: str
    role: Role
    class_name: str
    parameters: tuple[Parameter, ...]
    tp_degrees: tuple[int, ...] = ()
    tp_reason: str = ""
    sequence_norms: bool = False
    attention: Attention | None = omitted(None)
    sequence_reason: str = omitted("")
    tokens: int = omitted(0)

    @property
    def vocabulary(self) -> Parameter | None:
        """The matrix of an embedding or head with a row for each token of the vocabulary: its largest one."""
        matrices = [p for p in self.parameters if len(p.shape) == 2 and self.role != "block"]
        return max(matrices, key=lambda p: p.shape[0], default=None)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(p.size_bytes for p in self.parameters)

    @property
    def parameter_count(self) -> int:
        """Number of parameter elements."""
        return sum(prod(p.shape) for p in self.parameters)


@dataclass(frozen=True, kw_only=True)
class SeamKind:
    """The first layer after a seam, and the kind of what runs right before it, outside the blocks."""

    layer: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model as a chain of layers.

    source: the MODEL string it can be built from again; layers: the kind name of each layer in chain order (embed
    first, head last); tied: embed and head share parameters (each is then listed in both kinds); fingerprint: a hash
    of all parameter names, shapes and dtypes; pipeline_reason: why the runtime of this version cannot put its layers
    on several stages, if so; seams: where one list of blocks follows another (decoder after encoder), whose stage then
    holds part of the embedding; front: the kind of the part before the first block.
    Raises ValueError when the chain does not hold together.
    """

    name: str
    source: str
    fingerprint: str
    layers: tuple[str, ...]
    kinds: tuple[LayerKind, ...]
    tied: bool = False
    hidden_size: int
    vocab_size: int | None = None
    pipeline_reason: str = omitted("")
    front: str = omitted("")
    seams: tuple[SeamKind, ...] = omitted(())

    def __post_init__(self) -> None:
        known = [kind.name for kind in self.kinds]
        if len(set(known)) != len(known):
            raise ValueError(f"ModelSpec.kinds has a name twice: {known}")
        missing = [name for name in self.layers if name not in known]
        if missing:
            raise ValueError(f"ModelSpec.layers names unknown kinds: {missing}")
        parts = [self.front, *(seam.kind for seam in self.seams)] if self.seams else []
        if any(part not in known for part in parts):
            raise ValueError(f"ModelSpec.front and seams name unknown kinds: {sorted(set(parts) - set(known))}")
        if any(not 1 < seam.layer < len(self.layers) - 1 for seam in self.seams):
            raise ValueError("ModelSpec.seams must be blocks after the first")
        roles = [self.kind(i).role for i in range(len(self.layers))]
        if len(roles) < 3 or roles[0] != "embed" or roles[-1] != "head" or set(roles[1:-1]) != {"block"}:
            raise ValueError("ModelSpec.layers must be embed, one block or more, head")
        if self.hidden_size < 1:
            raise ValueError(f"ModelSpec.hidden_size must be >= 1, not {self.hidden_size}")

    @cached_property
    def _kinds(self) -> dict[str, LayerKind]:
        return {kind.name: kind for kind in self.kinds}

    def kind(self, layer: int) -> LayerKind:
        """The kind of the layer at this place of the chain."""
        return self._kinds[self.layers[layer]]

    def kind_named(self, name: str) -> LayerKind:
        """The kind of this name."""
        return self._kinds[name]

    @property
    def num_blocks(self) -> int:
        """The number of blocks, without embed and head."""
        return len(self.layers) - 2

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The names of the chain: embed, 0, 1, ..., head."""
        return layer_names(len(self.layers))


def layer_names(count: int) -> tuple[str, ...]:
    """The names of a chain of `count` layers: embed, 0, 1, ..., head."""
    return ("embed", *(str(i) for i in range(count - 2)), "head")
