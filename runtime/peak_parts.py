"""What was alive at the peak of a step, by category."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime.gradients import HeldParameter, local_piece
from autopar.runtime.offload import told_when_made
from autopar.runtime.tracker import LiveBytes, storage_bytes, storage_key
from autopar.runtime.trees import tree_leaves

_CLOSE = 1.001
"""What is alive is looked at whenever it has grown by so much: the parts are those of a moment as near the peak."""


class PartsAtPeak(LiveBytes):
    """LiveBytes of a step that also knows what was alive at the peak, by category."""

    def __init__(
        self,
        model: nn.Module,
        held: Sequence[HeldParameter],
        receive_buffers: Iterable[Tensor],
        optimizer: torch.optim.Optimizer,
        batch: Any,
    ) -> None:
        super().__init__()
        self.parts_bytes: dict[str, int] = {}
        """As in CountedPeak (autopar.runtime.counting); of the whole peak, though looked at slightly below it."""
        self.host = LiveBytes()
        """What lies in host memory, where the plan puts the optimizer's states; on a CPU it only would elsewhere."""
        self._goes_to_host = False
        self._held = held
        away = [entry.stepped for entry in held if entry.in_host_memory]
        self.host.adopt(away, [optimizer.state.get(p, {}) for p in away])
        self._fixed = {
            "parameters": storage_bytes(model, [e.stepped.detach() for e in held if not e.in_host_memory]),
            "optimizer": storage_bytes([state for p, state in optimizer.state.items() if not _is_in(p, away)]),
        }
        self._of: dict[str, set[int]] = {"unsharded": set(), "communication": set()}
        self._looked_bytes = 0.0
        self.adopt(model, optimizer, batch)
        for buffer in receive_buffers:
            self.adopt(buffer)
            self._of["communication"].add(storage_key(buffer.untyped_storage()))

    def __enter__(self) -> PartsAtPeak:
        self._hearing = told_when_made(self._next_goes_to_host)
        self._hearing.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hearing.__exit__(*error)

    def _next_goes_to_host(self, begins: bool) -> None:
        self._goes_to_host = begins

    def _count(self, storage: torch.UntypedStorage) -> None:
        if self._goes_to_host or self.host.size_bytes(storage_key(storage)):
            self.host._count(storage)
        else:
            super()._count(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = self._goes_to_host
        if not asked and self.host.current_bytes:  # what the host computes of its own it keeps
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim()]
            self._goes_to_host = bool(given) and all(self.host.size_bytes(_key(t)) for t in given)
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._goes_to_host = asked
        if func.namespace == "fsdp":  # what fully_shard copies together to gather, and to scatter
            for tensor in (result[1] if result else None, (kwargs or {}).get("out")):
                if isinstance(tensor, Tensor):
                    self._of["communication"].add(storage_key(tensor.untyped_storage()))
        return result

    def _resized(self, storage: torch.UntypedStorage) -> None:
        self._of["unsharded"].add(storage_key(storage))
        super()._resized(storage)

    def _freed(self, key: int, reference: Any) -> None:
        super()._freed(key, reference)
        for keys in self._of.values():
            keys.discard(key)

    def _grow(self, size_bytes: int) -> None:
        super()._grow(size_bytes)
        if self.current_bytes > self._looked_bytes * _CLOSE:
            self._looked_bytes = self.current_bytes
            self.parts_bytes = self._look()
        elif self.current_bytes == self.peak_bytes:
            self.parts_bytes["activations"] += self.peak_bytes - sum(self.parts_bytes.values())

    def _look(self) -> dict[str, int]:
        kept = {id(p): p.grad for entry in self._held for p in (entry.parameter, entry.stepped) if p.is_leaf}
        found = {
            **self._fixed,
            "gradients": sum(
                local_piece(grad).nbytes
                for grad in kept.values()
                if grad is not None and not self.host.size_bytes(_key(local_piece(grad)))
            ),
            **{name: sum(self.size_bytes(key) for key in keys) for name, keys in self._of.items()},
        }
        return {**found, "activations": self.current_bytes - sum(found.values())}


def _key(tensor: Tensor) -> int:
    local = local_piece(tensor)
    return storage_key(local.untyped_storage())


def _is_in(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    return any(tensor is other for other in others)
