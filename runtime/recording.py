"""Models built without storage that still know their initial weights: `with autopar.empty_weights(): model = build()`.

While inside, every parameter goes to the meta device as soon as a module registers it. What the model's own code does
to it, before and after, is recorded operation by operation with the state of the random generator; a random operation
draws into scratch memory what it would draw, so that the generator moves as in a plain build. A parameter can then be
made alone, by doing again what its value came from, and is bit by bit what `build()` gives from the same seed.
Everything else (buffers, sizes, tables) is real, as in a plain build.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from autopar.runtime.dispatch import TorchDispatchMode
from autopar.runtime.replaying import CPU, State, View, Write, made, strided, tensors_in, writes_of
from autopar.runtime.tracker import storage_key
from autopar.runtime.trees import tree_leaves, tree_map

_META = torch.device("meta")
_OVERWRITES = ("aten::normal_", "aten::uniform_", "aten::zero_", "aten::fill_", "aten::copy_")
"""Operations in place after which nothing is left of what was there."""


class _Storage:
    """A storage as it is now; version: that of the parameter in it when its recording ended."""

    def __init__(self, size_bytes: int, *, lost: bool = False) -> None:
        self.token = object()
        self.version: int | None = None
        self.latest = State(token=self.token, size_bytes=size_bytes, lost=lost)


_storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], _Storage]] = {}
_numbers = itertools.count()


def _find(tensor: Tensor) -> _Storage | None:
    found = _storages.get(storage_key(tensor.untyped_storage()))
    return None if found is None else found[1]


def _remember(tensor: Tensor, storage: _Storage) -> _Storage:
    memory = tensor.untyped_storage()
    key = storage_key(memory)

    def forget(reference: weakref.ref[torch.UntypedStorage]) -> None:
        if key in _storages and _storages[key][0] is reference:
            del _storages[key]

    _storages[key] = (weakref.ref(memory, forget), storage)
    return storage


def _storage_of(tensor: Tensor) -> _Storage:
    """The storage of any tensor; the bytes of one that is met for the first time are kept as they are."""
    found = _find(tensor)
    if found is None:
        memory = tensor.untyped_storage()
        found = _remember(tensor, _Storage(memory.nbytes(), lost=tensor.is_meta))
        if not tensor.is_meta:
            found.latest = State(token=found.token, size_bytes=memory.nbytes(), constant=[memory.clone()])
    return found


def _is_ours(tensor: Tensor) -> bool:
    """Whether a tensor on the meta device has numbers that can be made."""
    storage = _find(tensor)
    return storage is not None and not storage.latest.lost


def _view(tensor: Tensor, state: State) -> View:
    return View(
        state=state,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=tensor.storage_offset(),
    )


def _on_meta(tensor: Tensor) -> Tensor:
    """A tensor like this one on the meta device, with as large a storage."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = torch.empty(size, dtype=tensor.dtype, device=_META)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _written(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes in place."""
    named = {key: value for key, value in kwargs.items() if key.startswith("out")}
    in_place = name.partition(".")[0].endswith("_") and not name.partition(".")[0].endswith("__")
    return [*(tensors_in(args[:1]) if in_place else []), *tensors_in(named)]


class _Recorder(TorchDispatchMode):
    """Records what is done to tensors; keeps those that come from parameters on the meta device."""

    running = False

    def __init__(self) -> None:
        super().__init__()
        self.parameters: list[weakref.ref[nn.Parameter]] = []
        self.is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While inside, operations are ours and not the model's: nothing is recorded."""
        self.is_paused, before = True, self.is_paused
        try:
            yield
        finally:
            self.is_paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        with self.paused():
            return self._recorded(func, args, kwargs)

    def _recorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = tensors_in((args, kwargs))
        deferred = any(x.is_meta and _is_ours(x) for x in given)
        asked = not deferred and (kwargs.get("device") == _META or any(x.is_meta for x in given))
        if asked or any(x.layout is not torch.strided for x in given):
            return func(*args, **kwargs)  # on the meta device by the model's own will
        written = _written(func.name(), args, kwargs)
        if deferred and any(not x.is_meta for x in written):
            args, kwargs = realised((args, kwargs))
            deferred = False
        before = {storage_key(x.untyped_storage()): _storage_of(x) for x in given}
        write = self._begin(func, args, kwargs, written)
        result = self._deferred(func, args, kwargs, write) if deferred else func(*args, **kwargs)
        self._end(write, result, before, written)
        return result

    def _begin(self, func: Any, args: Any, kwargs: Any, written: list[Tensor]) -> Write:
        random, own = None, False
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = kwargs.get("generator")
            own = generator is not None
            random = (generator or torch.default_generator).get_state()
        fresh = str(func.name()).partition(".")[0] in _OVERWRITES and _fills(written[0])
        target = storage_key(written[0].untyped_storage()) if fresh else None

        def seen(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            state = _storage_of(leaf).latest
            if target == storage_key(leaf.untyped_storage()):
                state = State(token=state.token, size_bytes=state.size_bytes)
            return _view(leaf, state)

        seen_args, seen_kwargs = tree_map(seen, (args, kwargs))
        return Write(
            number=next(_numbers),
            function=func,
            args=seen_args,
            kwargs=seen_kwargs,
            random=random,
            own_generator=own,
            default=torch.get_default_dtype(),
            made={},
        )

    def _deferred(self, func: Any, args: Any, kwargs: Any, write: Write) -> Any:
        """What the operation returns on the meta device; real where its course needs the numbers."""
        if write.random is not None:
            # Into scratch memory: the generator must move as it would.
            scratch = (strided(args[0].shape, args[0].stride(), args[0].dtype), *args[1:])
            func(*realised(scratch), **realised(kwargs))
        there = tree_map(lambda x: _on_meta(x) if isinstance(x, Tensor) and not x.is_meta else x, (args, kwargs))
        on_meta = {**there[1], "device": _META} if there[1].get("device") is not None else there[1]
        try:
            return func(*there[0], **on_meta)
        except (NotImplementedError, RuntimeError):
            if _written(func.name(), args, kwargs):
                raise
            found = realised((args, kwargs))
            return func(*found[0], **found[1])

    def _end(self, write: Write, result: Any, before: dict[int, _Storage], written: list[Tensor]) -> None:
        for place, leaf in enumerate(tensors_in(result)):
            if storage_key(leaf.untyped_storage()) in before:
                continue
            storage = _remember(leaf, _Storage(leaf.untyped_storage().nbytes()))
            storage.latest = State(token=storage.token, size_bytes=storage.latest.size_bytes, write=write)
            write.made[place] = (storage.token, leaf.stride())
        for tensor in written:
            storage = before[storage_key(tensor.untyped_storage())]
            storage.latest = State(token=storage.token, size_bytes=storage.latest.size_bytes, write=write)

    def parameter(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        """Send a parameter that is being registered to the meta device, whoever else holds it."""
        with self.paused():
            if nn.parameter.is_lazy(parameter) or parameter.layout is not torch.strided:
                return
            if not parameter.is_meta:
                stand = nn.Parameter(_on_meta(parameter), parameter.requires_grad)
                _remember(stand, _storage_of(parameter))
                vars(stand).update(vars(parameter))
                torch.utils.swap_tensors(parameter, stand)
            self.parameters.append(weakref.ref(parameter))

    def buffer(self, module: nn.Module, name: str, buffer: Tensor | None) -> Tensor | None:
        """Make a buffer real that was computed from parameters."""
        with self.paused():
            if buffer is None or not buffer.is_meta or not _is_ours(buffer):
                return None
            real: Tensor = realised(buffer)
            return real

    def assigned(self, parameter: Tensor, value: Tensor) -> Tensor:
        """What `parameter.data = value` must assign for a parameter on the meta device."""
        if not parameter.is_meta or value.is_meta:
            return value
        stand = _on_meta(value)
        _remember(stand, _storage_of(value))
        return stand


class _Disguise(TorchFunctionMode):
    """Shows our tensors as what they stand for: on the CPU. Initialisers of torch skip what is on the meta device."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._recorder.is_paused or func not in (_SET_DATA, *_READ, *_SHOWN):
            return func(*args, **kwargs)
        with self._recorder.paused():
            if func == _SET_DATA:
                return func(args[0], self._recorder.assigned(*args))
            if not args[0].is_meta or not _is_ours(args[0]):
                return func(*args, **kwargs)
            return func(realised(args[0]), *args[1:], **kwargs) if func in _READ else _SHOWN[func]


_SET_DATA = Tensor.data.__set__
_READ = (Tensor.numpy, Tensor.tolist)
_SHOWN: dict[Any, Any] = {
    Tensor.is_meta.__get__: False,
    Tensor.is_cpu.__get__: True,
    Tensor.device.__get__: CPU,
}


@contextmanager
def empty_weights() -> Iterator[None]:
    """While inside, models are built without storage for their parameters, which know their initial values.

    `autopar.parallelize` makes them on the ranks that hold them. Whatever sets weights must run inside. Cost: the time
    of a plain build, and memory for one parameter at a time.
    """
    if _Recorder.running:
        yield  # inside another one
        return
    recorder = _Recorder()
    with ExitStack() as stack:
        _Recorder.running = True
        stack.callback(setattr, _Recorder, "running", False)
        for handle in (
            register_module_parameter_registration_hook(recorder.parameter),
            register_module_buffer_registration_hook(recorder.buffer),
        ):
            stack.callback(handle.remove)
        stack.enter_context(_Disguise(recorder))
        stack.enter_context(recorder)
        yield
    for reference in recorder.parameters:
        parameter = reference()
        if parameter is not None and (storage := _find(parameter)) is not None:
            storage.version = _writes_so_far(parameter)


def _fills(tensor: Tensor) -> bool:
    """Whether a tensor is all of its storage."""
    return bool(tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes())


def recorded(parameter: Tensor) -> View | None:
    """How the value of a parameter that `empty_weights` left on the meta device comes about; None for any other."""
    storage = _find(parameter) if parameter.is_meta else None
    if storage is None or written_since(parameter):
        return None
    view = _view(parameter, storage.latest)
    taken = (leaf for write in writes_of([view]) for leaf in tree_leaves((write.args, write.kwargs)))
    lost = view.state.lost or any(leaf.state.lost for leaf in taken if isinstance(leaf, View))
    return None if lost else view


def written_since(parameter: Tensor) -> bool:
    """Whether a recorded parameter was written, without any effect, after its recording had ended."""
    storage = _find(parameter) if parameter.is_meta else None
    return storage is not None and storage.version is not None and storage.version != _writes_so_far(parameter)


def realised(value: Any) -> Any:
    """The value with every tensor of it that is on the meta device made real."""

    def real(leaf: Any) -> Any:
        return made(_view(leaf, _storage_of(leaf).latest)) if isinstance(leaf, Tensor) and leaf.is_meta else leaf

    return tree_map(real, value)


def _writes_so_far(tensor: Tensor) -> int:
    return int(tensor._version)
