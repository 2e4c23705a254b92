"""What the blocks of a stage take beside the hidden state, made once a step where no number of the batch matters.

A stage in the middle of a chain has nothing of its own outside its blocks: of the model's forward it needs the masks,
positions and rotary tables. Where these follow from the shapes of the batch alone, all micro-batches of a step share
them, and the forward around the blocks runs once. That they do is seen operation by operation, once for each shape of
batch: nothing that a block is given may depend on a number of the batch, no such number may leave torch (a branch of
the program could depend on it), and nothing random may be drawn. Otherwise every micro-batch runs the whole forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.runtime.arguments import argument, replace_argument
from autopar.runtime.dispatch import TorchDispatchMode
from autopar.runtime.structure import BlockForm, Structure
from autopar.runtime.tracker import storage_key
from autopar.runtime.trees import tree_leaves

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a block, its hidden state left out."""

_SHAPES_ONLY = ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full")
_WAYS_OUT = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.untyped_storage, Tensor.data_ptr)
"""By which numbers leave a tensor without an operation."""


class StandingInputs:
    """The calls of a stage's blocks, kept until `forget`.

    blocks: numbers of the own blocks, in order. Only for a chain in one part, without embedding and head.
    """

    def __init__(self, model: nn.Module, structure: Structure, blocks: tuple[int, ...]) -> None:
        self._model, self._structure, self._blocks = model, structure, blocks
        self._stands: dict[object, bool] = {}
        self._calls: dict[object, dict[int, Call]] = {}

    def forget(self) -> None:
        """Make them again when next asked."""
        self._calls.clear()

    def calls(self, batch: Mapping[str, Tensor]) -> dict[int, Call] | None:
        """The arguments of each own block under this batch; None where the model's forward must make them."""
        shapes = tuple((name, tuple(x.shape), x.dtype, x.device) for name, x in sorted(batch.items()))
        key = (shapes, self._model.training, torch.is_grad_enabled())
        if not self._stands.get(key, True):
            return None
        if key not in self._calls:
            seen = None if key in self._stands else _Numbers(batch.values())
            calls = self._make(batch, seen)
            self._stands[key] = calls is not None
            if calls is None:
                return None
            self._calls[key] = calls
        return self._calls[key]

    def _make(self, batch: Mapping[str, Tensor], seen: _Numbers | None) -> dict[int, Call] | None:
        structure, model = self._structure, self._model
        own = {number: structure.block(model, number) for number in self._blocks}
        stand_ins = {n: _Recorder(structure.forms[n], block, n == self._blocks[-1]) for n, block in own.items()}
        try:
            for number, stand_in in stand_ins.items():
                model.set_submodule(structure.paths[number], stand_in)
            if seen is None:
                model(**batch)
            else:
                with seen, _WaysOut(seen):
                    model(**batch)
        except _Done:
            pass
        finally:
            for number, block in own.items():
                model.set_submodule(structure.paths[number], block)
        calls = {number: stand_in.call for number, stand_in in stand_ins.items()}
        if any(call is None for call in calls.values()):
            return None
        found = {number: call for number, call in calls.items() if call is not None}
        if seen is not None and not (_handed_on(list(stand_ins.values())) and seen.none_in(found)):
            return None
        return found


class _Done(Exception):  # noqa: N818  (the way out of a forward)
    pass


class _Recorder(nn.Module):
    """Stands for an own block: keeps what it is called with, and returns the hidden state as it came."""

    def __init__(self, form: BlockForm, block: nn.Module, last: bool) -> None:
        super().__init__()
        self._form, self._last = form, last
        self.call: Call | None = None
        self.hidden: Tensor | None = None
        object.__setattr__(self, "_block", block)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.hidden = argument(args, kwargs, self._form.hidden)
        self.call = replace_argument(args, kwargs, self._form.hidden, None)
        if self._last:
            raise _Done
        length = self._form.output_length
        return (self.hidden, *(None,) * (length - 1)) if length else self.hidden


def _handed_on(blocks: list[_Recorder]) -> bool:
    """Whether each block got the very tensor that the one before returned."""
    return all(block.hidden is blocks[0].hidden for block in blocks)


class _Numbers(TorchDispatchMode):
    """Sees which tensors depend on the numbers in `sources`, and whether such a number left torch or any was drawn."""

    def __init__(self, sources: Iterable[Tensor]) -> None:
        super().__init__()
        self.left = False
        # Kept alive: the address of a storage that was freed may be another's.
        self._dependent = {storage_key(x.untyped_storage()): x for x in sources}

    def depends(self, value: Any) -> bool:
        """Whether it is a tensor that depends on them."""
        return isinstance(value, Tensor) and storage_key(value.untyped_storage()) in self._dependent

    def none_in(self, calls: Mapping[int, Call]) -> bool:
        """Whether these arguments are plain values and tensors that depend on none of the numbers."""
        values = tree_leaves(list(calls.values()))
        plain = all(
            not (self.depends(value) or value.requires_grad)
            if isinstance(value, Tensor)
            else value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device)
            for value in values
        )
        return plain and not self.left

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.left |= torch.Tag.nondeterministic_seeded in func.tags
        given = [value for value in tree_leaves([args, kwargs]) if isinstance(value, Tensor)]
        if any(map(self.depends, given)) and func.overloadpacket.__name__ not in _SHAPES_ONLY:
            made = [value for value in tree_leaves(out) if value is not None]
            self.left |= not all(isinstance(value, Tensor) for value in made)
            for value in made or given:
                if isinstance(value, Tensor):
                    self._dependent[storage_key(value.untyped_storage())] = value
        return out


class _WaysOut(TorchFunctionMode):
    """Sees the ways in which numbers leave a tensor without an operation."""

    def __init__(self, numbers: _Numbers) -> None:
        super().__init__()
        self._numbers = numbers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WAYS_OUT:
            self._numbers.left |= self._numbers.depends(args[0])
        return func(*args, **(kwargs or {}))
