"""Bytes of all live tensor storages of this process, seen operation by operation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch.distributed.tensor import DTensor

from autopar.runtime.dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

_resize: Callable[[torch.UntypedStorage, int], Any] = torch.UntypedStorage.resize_
_active: list[LiveBytes] = []


class LiveBytes(TorchDispatchMode):
    """A context in which the storages of tensors are counted from their first operation until they are freed.

    Every storage counts once, however many views it has; a storage that FSDP empties or refills by
    `UntypedStorage.resize_` counts at its size of the moment. Works through backward, recompute, DTensor, FSDP2,
    collectives and pipeline schedules. What lived before must be given to `adopt`, or counts from the first
    operation that returns a view of it. Workspaces inside a single operation stay unseen; tensors on the meta device
    weigh nothing. Cost: about 10 us an operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current_bytes = 0
        """Bytes alive now."""
        self.peak_bytes = 0
        """Highest bytes alive since the start or the last `reset_peak`."""
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._fake_mode: Any = None

    def adopt(self, *things: Any) -> LiveBytes:
        """Count what exists already: tensors, modules (with gradients), optimizers, or containers of them."""
        for tensor in tensors_of(things):
            self._see(tensor)
        return self

    def size_bytes(self, key: int) -> int:
        """The bytes of the storage of this key (see `storage_key`), 0 where none is known."""
        known = self._storages.get(key)
        return 0 if known is None else known[1]

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak_bytes = self.current_bytes

    def __enter__(self) -> LiveBytes:
        self._fake_mode = active_fake_mode()
        if not _active:
            torch.UntypedStorage.resize_ = _seen_resize
        _active.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _active.remove(self)
        if not _active:
            torch.UntypedStorage.resize_ = _resize

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first becomes local operations; those come back here.
        result = func(*args, **(kwargs or {}))
        # DTensor finds shapes under a fake mode of its own; those tensors hold no memory.
        if active_fake_mode() is self._fake_mode:
            self._see_all(result)
        return result

    def _see_all(self, result: Any) -> None:
        if isinstance(result, Tensor):
            self._see(result)
        elif isinstance(result, list | tuple):
            for item in result:
                self._see_all(item)

    def _see(self, tensor: Tensor) -> None:
        if is_traceable_wrapper_subclass(tensor):
            for name in tensor.__tensor_flatten__()[0]:
                self._see_all(getattr(tensor, name))  # a DTensor names its mesh too, which is no tensor
        elif tensor.layout is torch.strided and tensor.device.type != "meta":
            self._count(tensor.untyped_storage())

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size_bytes = storage_key(storage), storage.nbytes()
        known = self._storages.get(key)
        if known is None:
            reference = weakref.ref(storage, partial(self._freed, key))
            self._storages[key] = (reference, size_bytes)
            self._grow(size_bytes)
        elif known[1] != size_bytes:
            self._storages[key] = (known[0], size_bytes)
            self._grow(size_bytes - known[1])

    def _resized(self, storage: torch.UntypedStorage) -> None:
        self._count(storage)

    def _grow(self, size_bytes: int) -> None:
        self.current_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    def _freed(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        known = self._storages.get(key)
        if known is not None and known[0] is reference:
            del self._storages[key]
            self.current_bytes -= known[1]


@wraps(_resize)
def _seen_resize(storage: torch.UntypedStorage, size: int) -> Any:
    result = _resize(storage, size)
    for tracker in _active:
        # The storage of a fake tensor says that it is on the meta device.
        if storage.device.type != "meta" or tracker._fake_mode is not None:
            tracker._resized(storage)
    return result


def storage_key(storage: torch.UntypedStorage) -> int:
    """What all tensors of one storage have in common while it lives: its address inside torch."""
    return int(storage._cdata)


def tensors_of(thing: Any) -> Iterator[Tensor]:
    """All tensors of a thing: itself, those of a module (gradients too), an optimizer, or any container of these."""
    if isinstance(thing, Tensor):
        yield thing
        if thing.is_leaf and thing.grad is not None:
            yield thing.grad
    elif isinstance(thing, nn.Module):
        yield from tensors_of(list(thing.parameters()))
        yield from thing.buffers()
    elif isinstance(thing, torch.optim.Optimizer):
        yield from tensors_of([group["params"] for group in thing.param_groups])
        yield from tensors_of(list(thing.state.values()))
    elif isinstance(thing, Mapping):
        yield from tensors_of(list(thing.values()))
    elif isinstance(thing, Iterable) and not isinstance(thing, str | bytes):
        for item in thing:
            yield from tensors_of(item)


def storage_bytes(*things: Any) -> int:
    """Bytes of all storages that the things hold, each once (local ones of DTensors)."""
    return LiveBytes().adopt(*things).current_bytes
