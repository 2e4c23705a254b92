"""Where a model looks its tokens up and where it makes its logits: what vocabulary parallelism cuts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime.fakes import FakeTensor


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """One end of the vocabulary: the path of its module and its words; path "" and `reason` where there is none."""

    path: str = ""
    words: int = 0
    reason: str = ""

    def degrees(self, limit: int) -> tuple[int, ...]:
        """The vocabulary-parallel degrees from 2 to `limit`: any, since a part may be padded."""
        return tuple(range(2, min(limit, self.words) + 1)) if self.path else ()


class SeenEnds:
    """Hooks on the modules outside the blocks, for one forward: which nn.Embedding gets ids of the batch in `phase`
    "embed", and which nn.Linear runs last in `phase` "head"."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[str], batch: Mapping[str, Tensor], phase: Callable[[], str]
    ) -> None:
        self._model, self._phase = model, phase
        self._ids = [value for value in batch.values() if not value.is_floating_point()]
        self._lookup: str | None = None
        self._projection: str | None = None
        inside = tuple(f"{path}." for path in blocks)
        self.handles = [
            module.register_forward_pre_hook(self._see(path))
            for path, module in model.named_modules()
            if isinstance(module, nn.Embedding | nn.Linear) and not path.startswith(inside)
        ]

    def _see(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if isinstance(module, nn.Linear):
                if self._phase() == "head":
                    self._projection = path
            elif self._lookup is None and self._phase() == "embed" and args and self._is_ids(args[0]):
                self._lookup = path

        return hook

    def _is_ids(self, value: Any) -> bool:
        if isinstance(value, FakeTensor):  # it has no numbers to compare
            return any(x.shape == value.shape and x.dtype == value.dtype for x in self._ids)
        return isinstance(value, Tensor) and any(x.shape == value.shape and torch.equal(x, value) for x in self._ids)

    def lookup(self, *, shared: bool = False) -> Vocabulary:
        """The embedding of the token ids; shared: others may look up in the same table."""
        if self._lookup is None:
            return Vocabulary(reason="no nn.Embedding looks the token ids of the batch up")
        if shared:
            return Vocabulary(reason="words enter the model in more than one place")
        table = self._model.get_submodule(self._lookup)
        assert isinstance(table, nn.Embedding)
        if table.max_norm is not None or table.sparse or table.scale_grad_by_freq:
            return Vocabulary(reason=f"{self._lookup} uses max_norm, sparse or scale_grad_by_freq")
        return Vocabulary(path=self._lookup, words=table.num_embeddings)

    def projection(self, *, shared: bool = False) -> Vocabulary:
        """The linear layer that makes the logits; shared: its weights are those of a lookup that is not cut."""
        if self._projection is None:
            return Vocabulary(reason="its logits are not made by an nn.Linear")
        if shared:
            return Vocabulary(reason=f"{self._projection} shares its weights with lookups that are not cut")
        linear = self._model.get_submodule(self._projection)
        assert isinstance(linear, nn.Linear)
        if type(linear).forward is not nn.Linear.forward:
            return Vocabulary(reason=f"{self._projection} is a {type(linear).__name__} with a forward of its own")
        return Vocabulary(path=self._projection, words=linear.out_features)
