"""Numbers for parameters on the meta device while something must run: a forward that shows how a model is built.

Any numbers do. Parameters of one shape share them, so that a model of many equal blocks costs one block.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime.replaying import strided

_TILE = 65_521
"""How many numbers are drawn; a prime, so that the columns of a matrix differ."""


class _Numbers:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._of_shape: dict[tuple[tuple[int, ...], torch.dtype], Tensor] = {}
        self._of_parameter: dict[int, nn.Parameter] = {}

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The stand-in of a parameter, the same each time; equal on every rank."""
        key = tuple(parameter.shape), parameter.dtype
        if id(parameter) not in self._of_parameter:
            if key not in self._of_shape:
                self._of_shape[key] = _drawn(parameter).to(self._device)
            numbers = self._of_shape[key].detach()
            self._of_parameter[id(parameter)] = nn.Parameter(numbers, parameter.requires_grad)
        return self._of_parameter[id(parameter)]


def _drawn(parameter: Tensor) -> Tensor:
    """Numbers of about the size that a layer begins with: 1 for vectors, 1 / sqrt(inputs) for matrices."""
    if not parameter.is_floating_point():
        return torch.zeros(parameter.shape, dtype=parameter.dtype)
    numbers = strided((parameter.numel(),), (1,), parameter.dtype)
    tile = torch.randn(_TILE, generator=torch.Generator().manual_seed(11))
    tile = 1.0 + 0.1 * tile if parameter.dim() < 2 else tile / max(1, parameter.shape[-1]) ** 0.5
    for part in numbers.split(_TILE):
        part.copy_(tile[: len(part)])
    return numbers.view(parameter.shape)


@contextmanager
def with_numbers(module: nn.Module, device: torch.device) -> Iterator[None]:
    """While inside, the parameters of the module that are on the meta device are others, with numbers on `device`."""
    places = [
        (owner, leaf, parameter)
        for owner in module.modules()
        for leaf, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
        if parameter.is_meta
    ]
    numbers = _Numbers(device)
    try:
        for owner, leaf, parameter in places:
            setattr(owner, leaf, numbers.of(parameter))
        yield
    finally:
        for owner, leaf, parameter in places:
            setattr(owner, leaf, parameter)


def copy_with_numbers(module: nn.Module, device: torch.device, instead: Mapping[Any, Any]) -> nn.Module:
    """A copy of a module with numbers on `device` where it has none, and other objects in the place of some.

    Buffers and real parameters are shared with the module.
    """
    numbers = _Numbers(device)
    kept = {id(old): new for old, new in instead.items()}
    gone = {id(p) for old in instead if isinstance(old, nn.Module) for p in old.parameters()}
    kept |= {id(b): b for b in module.buffers()}
    kept |= {id(p): numbers.of(p) if p.is_meta else p for p in module.parameters() if id(p) not in gone}
    return copy.deepcopy(module, kept)
