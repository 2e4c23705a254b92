"""What crosses the boundaries between stages, as shapes: the hidden state, and the sides that blocks after it take."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.runtime.arguments import argument
from autopar.runtime.fakes import DEPENDS_ON_NUMBERS, FakeTensor, fake_mode
from autopar.runtime.hugging_face import masks_kept
from autopar.runtime.stage import empty_like_parameters
from autopar.runtime.structure import Structure

T = TypeVar("T")


class Boundaries:
    """The whole model once more, without storage, to see the shapes of what crosses stages for a batch.

    layers: the first layer of each stage but the first. Made before the model is taken apart.
    """

    def __init__(self, model: nn.Module, structure: Structure, layers: Sequence[int], device: torch.device) -> None:
        self._structure, self._layers = structure, tuple(layers)
        self._model = copy.deepcopy(model, empty_like_parameters(model, device))
        self._calls: dict[int, tuple[tuple[Any, ...], dict[str, Any], Any]] = {}
        self._known: dict[Any, tuple[tuple[Tensor, ...], ...]] = {}
        for number in range(structure.num_blocks):
            structure.block(self._model, number).register_forward_hook(self._seen(number), with_kwargs=True)

    def _seen(self, number: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self._calls[number] = args, kwargs, output

        return hook

    def of(self, batch: Mapping[str, Tensor], *, masks: bool) -> tuple[tuple[Tensor, ...], ...]:
        """Tensors on the meta device for what crosses each boundary with a micro-batch, gradients where they go back.

        masks: the model keeps its masks where nothing is padded. One forward without numbers for each new shape of a
        batch. Raises InputError when numbers decide the shapes.
        """
        key = masks, *((name, tuple(x.shape), x.dtype) for name, x in sorted(batch.items()))
        if key not in self._known:
            found = self._after_forward(batch, masks, lambda: tuple(self._crossing(layer) for layer in self._layers))
            self._known[key] = found
        return self._known[key]

    def sides(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Likewise all sides of the chain."""
        every = range(len(self._structure.sides))
        return self._after_forward(batch, False, lambda: tuple(_meta(self._side(number)) for number in every))

    def _after_forward(self, batch: Mapping[str, Tensor], masks: bool, look: Callable[[], T]) -> T:
        fake = any(isinstance(x, FakeTensor) for x in batch.values())
        with fake_mode() as mode, nullcontext() if fake else mode, torch.enable_grad():
            try:
                with masks_kept(self._model) if masks else nullcontext():
                    self._model(**batch)
                return look()
            except DEPENDS_ON_NUMBERS as error:
                raise InputError(
                    f"{type(self._model).__name__} does not run on several stages",
                    why=f"its course depends on the numbers in its tensors ({error})",
                    fix="pp 1",
                ) from error
            finally:
                self._calls.clear()

    def _crossing(self, layer: int) -> tuple[Tensor, ...]:
        structure, block = self._structure, layer - 1
        if block in (structure.num_blocks, *(seam.block for seam in structure.seams)):
            hidden = structure.forms[block - 1].hidden_in(self._calls[block - 1][2])
        else:
            hidden = argument(*self._calls[block][:2], structure.forms[block].hidden)
        return _meta(hidden), *(_meta(self._side(number)) for number in structure.crossing(layer))

    def _side(self, number: int) -> Tensor:
        user, key = self._structure.sides[number].users[0]
        found: Tensor = argument(*self._calls[user][:2], key)
        return found


def _meta(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
