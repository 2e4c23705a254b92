"""A block without weights, from which its graph can be exported again for any input signature."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.runtime.fakes import FakeTensor, FakeTensorMode
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


def in_order(names: Sequence[str], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments in the order of a forward's parameters, so that its activation comes first."""
    known = [name for name in names if name in kwargs]
    return kwargs if len(kwargs) < 2 else {name: kwargs[name] for name in dict.fromkeys([*known, *kwargs])}


def parameter_names(block: nn.Module) -> tuple[str, ...]:
    """The names of the parameters of a block's forward."""
    return tuple(inspect.signature(block.forward).parameters)


T = TypeVar("T")


def alone(function: Callable[[], T]) -> T:
    """The result of a function that runs in a thread of its own, without the caller's modes and hooks.

    Autograd state is per thread: activation checkpointing counts what a forward saves, no-grad and autocast change
    which operators are traced, dispatch modes see every one of them. None of it may reach a trace.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(function).result()


class Skeleton:
    """A copy of a block on the meta device, without hooks; the block itself is not touched."""

    def __init__(self, block: nn.Module) -> None:
        self.block: nn.Module = alone(lambda: _without_weights(block))
        self.dtypes = {name: p.dtype for name, p in block.named_parameters()}

    def with_random_weights(self, device: torch.device) -> nn.Module:
        """A block of this kind with weights from a fixed seed, of ordinary size."""
        generator, memo = torch.Generator().manual_seed(11), dict[int, Any]()
        for p in self.block.parameters():
            scale = p.shape[-1] ** -0.5 if p.dim() > 1 else 1.0
            values = scale * torch.randn(p.shape, generator=generator)
            memo[id(p)] = nn.Parameter(values.to(device, p.dtype), requires_grad=p.requires_grad)
        return copy.deepcopy(self.block, memo)

    def trace(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        training: bool,
        dtypes: dict[str, torch.dtype] | None = None,
        sequence_parts: int = 1,
    ) -> BlockGraph:
        """The graph for inputs like these (their values are not read), with parameters of these dtypes.

        sequence_parts: the activation input is one of so many parts of the sequence; the whole is traced. Fake tensors
        of the inputs' device are traced, not meta ones: code that asks for the device then takes its true path.
        """
        return alone(lambda: self._trace(args, kwargs, training, self.dtypes | (dtypes or {}), sequence_parts))

    def _trace(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        training: bool,
        dtypes: dict[str, torch.dtype],
        sequence_parts: int,
    ) -> BlockGraph:
        _, flat = signature(args, kwargs)
        tensors = [x for x in flat if isinstance(x, Tensor)]
        places = [x.device for x in tensors if x.device.type != "meta"]
        device = places[0] if places else torch.device("cpu")
        activation = next((x for x in tensors if x.is_floating_point()), None)

        def fake(value: Any) -> Any:
            if isinstance(value, Tensor):
                shape = list(value.shape)
                if value is activation and sequence_parts > 1:
                    shape[1] *= sequence_parts
                return torch.empty(shape, dtype=value.dtype, device=device)
            if isinstance(value, tuple | list):
                return type(value)(fake(x) for x in value)
            return {name: fake(x) for name, x in value.items()} if isinstance(value, dict) else value

        with FakeTensorMode(allow_non_fake_inputs=True):
            memo: dict[int, Any] = {id(p): _empty(p, device, dtypes[n]) for n, p in self.block.named_parameters()}
            for b in self.block.buffers():
                if b.device.type == "meta" or isinstance(b, FakeTensor):
                    memo[id(b)] = torch.empty(b.shape, dtype=b.dtype, device=device)
            inputs, named = fake(args), fake(kwargs)
        return trace(copy.deepcopy(self.block, memo).train(training), inputs, named)


def _without_weights(block: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {id(p): _empty(p, "meta") for p in block.parameters()}
    for module in block.modules():
        memo.update({id(getattr(module, name)): OrderedDict() for name in _HOOKS if hasattr(module, name)})
    return copy.deepcopy(block, memo)


def _empty(p: nn.Parameter, device: Any, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.empty(p.shape, dtype=dtype or p.dtype, device=device), requires_grad=p.requires_grad)
