"""A block without weights, from which its graph can be exported again for any input signature."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# The only place that imports these two semi-private names of torch 2.13.
from torch._subclasses.fake_tensor import FakeTensorMode
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from autopar.errors import InputError
from autopar.runtime.tensor_parallel.graph import BlockGraph, trace

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)

Key = tuple[Any, ...]


def signature(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Key, list[Any]]:
    """What a traced graph depends on (shapes, types, structure, constants), and the flat inputs.

    Raises InputError for an input that is neither tensor, constant, tuple, list nor dict.
    """
    flat: list[Any] = []
    return (_shape_of(args, flat), *((name, _shape_of(value, flat)) for name, value in kwargs.items())), flat


def _shape_of(value: Any, flat: list[Any]) -> Any:
    if isinstance(value, Tensor):
        flat.append(value)
        return (value.shape, value.dtype, value.device)
    if isinstance(value, tuple | list):
        return (type(value), *[_shape_of(x, flat) for x in value])
    if isinstance(value, dict):
        return (dict, *[(name, _shape_of(x, flat)) for name, x in value.items()])
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        flat.append(value)
        return (type(value), value)
    raise InputError(
        f"a tensor-parallel block got an input of type {type(value).__name__}",
        why="only tensors, constants, tuples, lists and dicts can be traced",
        fix="pass None instead (no key-value cache in training)",
    )


@contextmanager
def real_tensors() -> Iterator[None]:
    """Suspend fake-tensor and other modes."""
    with _disable_current_modes():
        yield


class Skeleton:
    """A copy of a block on the meta device, without hooks; the block itself is not touched."""

    def __init__(self, block: nn.Module) -> None:
        with real_tensors():
            memo: dict[int, Any] = {id(p): _empty(p, "meta") for p in block.parameters()}
            for module in block.modules():
                memo.update({id(getattr(module, name)): OrderedDict() for name in _HOOKS if hasattr(module, name)})
            self.block: nn.Module = copy.deepcopy(block, memo)
        self.dtypes = {name: p.dtype for name, p in block.named_parameters()}

    def trace(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        training: bool,
        dtypes: dict[str, torch.dtype] | None = None,
    ) -> BlockGraph:
        """The graph for inputs like these (their values are not read), with parameters of these dtypes.

        Fake tensors of the inputs' device are traced, not meta ones: code that asks for the device takes its true path.
        """
        _, flat = signature(args, kwargs)
        places = {x.device for x in flat if isinstance(x, Tensor) and x.device.type != "meta"}
        device = next(iter(places)) if places else torch.device("cpu")
        dtypes = self.dtypes | (dtypes or {})
        with real_tensors():
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            with mode:
                memo: dict[int, Any] = {
                    id(p): _empty(p, device, dtypes[name]) for name, p in self.block.named_parameters()
                }
                memo.update({id(b): _empty_buffer(b, device) for b in self.block.buffers() if b.device.type == "meta"})
                inputs, named = _fake((args, kwargs), device)
            block = copy.deepcopy(self.block, memo).train(training)
            return trace(block, inputs, named)


def _empty(p: nn.Parameter, device: Any, dtype: torch.dtype | None = None) -> nn.Parameter:
    floating = p.is_floating_point()
    return nn.Parameter(
        torch.empty(p.shape, dtype=dtype or p.dtype, device=device), requires_grad=p.requires_grad and floating
    )


def _empty_buffer(buffer: Tensor, device: Any) -> Tensor:
    return torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


def _fake(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device=device)
    if isinstance(value, tuple | list):
        return type(value)(_fake(x, device) for x in value)
    if isinstance(value, dict):
        return {name: _fake(x, device) for name, x in value.items()}
    return value
