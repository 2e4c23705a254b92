"""What was done to tensors, as values, and doing it again: a tensor made from the operations that led to it."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.trees import tree_leaves, tree_map

CPU = torch.device("cpu")
_OWN_PAGES_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class State:
    """What a storage holds at some point: what `write` left in it, or the bytes of `constant`; anything where neither.

    token: the same for all states of one storage; lost: its numbers cannot be made.
    """

    token: object
    size_bytes: int
    write: Write | None = None
    constant: list[torch.UntypedStorage] | None = None
    lost: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class View:
    """A strided tensor in a storage of some state."""

    state: State
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(kw_only=True, eq=False)
class Write:
    """One recorded operation with the views that it took; number: its place among all.

    made: token, dtype, shape and stride of each storage that it made, by the place in what it returned; random: the
    state of the generator before it, None where it draws nothing; own_generator: whether that was an argument;
    default: torch's default dtype then, in which the product of a whole number and a fraction is.
    """

    number: int
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: Tensor | None
    own_generator: bool
    default: torch.dtype
    made: dict[int, tuple[object, tuple[int, ...]]]


def writes_of(views: Iterable[View]) -> list[Write]:
    """All that must be done again, in order, to make these tensors."""
    found: dict[int, Write] = {}
    waiting = [view.state for view in views]
    while waiting:
        write = waiting.pop().write
        if write is not None and write.number not in found:
            found[write.number] = write
            waiting += [leaf.state for leaf in tree_leaves((write.args, write.kwargs)) if isinstance(leaf, View)]
    return [found[number] for number in sorted(found)]


@torch.no_grad()
def made(view: View) -> Tensor:
    """The tensor with its numbers, alone in a storage of its own; torch's generators stay as they are."""
    memory: dict[object, torch.UntypedStorage] = {}

    def real(leaf: Any) -> Any:
        if not isinstance(leaf, View):
            return leaf
        state = leaf.state
        if state.token not in memory:
            if state.lost:
                raise RuntimeError("its value came from a tensor on the meta device that was never recorded")
            kept = state.constant
            memory[state.token] = kept[0].clone() if kept else storage_of(state.size_bytes)
        return torch.empty(0, dtype=leaf.dtype, device=CPU).set_(
            memory[state.token], leaf.offset, leaf.shape, leaf.stride
        )

    with torch.random.fork_rng(devices=[]), _default_dtype_kept():
        for write in writes_of([view]):
            args, kwargs = tree_map(real, (write.args, write.kwargs))
            if kwargs.get("device") is not None:
                kwargs["device"] = CPU
            torch.set_default_dtype(write.default)
            if write.own_generator:
                kwargs["generator"] = torch.Generator()
                kwargs["generator"].set_state(write.random)
            elif write.random is not None:
                torch.set_rng_state(write.random)
            results = tensors_in(write.function(*args, **kwargs))
            for place, (token, stride) in write.made.items():
                result = results[place]
                if "empty" in write.function.name():
                    result.zero_()  # it held anything, and must be the same on all ranks
                if result.stride() != stride:
                    result = strided(result.shape, stride, result.dtype).copy_(result)
                memory[token] = result.untyped_storage()
        out: Tensor = real(view)
    return out


@contextmanager
def _default_dtype_kept() -> Iterator[None]:
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def storage_of(size_bytes: int) -> torch.UntypedStorage:
    """A storage of this size with any bytes, which the system gets back as soon as it is freed.

    An allocator keeps freed blocks of some MiB: after many parameters, one at a time, a process holds them all.
    """
    if size_bytes < _OWN_PAGES_BYTES:
        return torch.UntypedStorage(size_bytes, device="cpu")
    return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8).untyped_storage()


def strided(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A real tensor of this form, with any numbers."""
    size = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
    memory = storage_of(size * dtype.itemsize)
    return torch.empty(0, dtype=dtype, device=CPU).set_(memory, 0, tuple(shape), tuple(stride))


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a value, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
