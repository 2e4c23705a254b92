"""Ranks that built the same model without storage begin with the same numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import InputError
from autopar.runtime.replaying import View, Write, writes_of
from autopar.runtime.trees import tree_leaves, tree_map


def agree(views: Iterable[View]) -> None:
    """Let recorded parameters begin on every rank as they do on rank 0; a collective of the world.

    Raises InputError, on every rank, when not the same was done to them.
    """
    writes = writes_of(views)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, _digests(writes))
    if any(structure != told[0][0] for structure, _ in told):
        raise InputError(
            "the ranks built different models",
            why="other operations initialised the parameters on some rank than on rank 0",
            fix="build the same model, with the same settings, on every rank",
        )
    if any(numbers != told[0][1] for _, numbers in told):
        numbers: list[Any] = [[w.random for w in writes], [_bytes(c) for c in _constants(writes)]]
        dist.broadcast_object_list(numbers, src=0)
        for write, random in zip(writes, numbers[0], strict=True):
            write.random = random
        for constant, value in zip(_constants(writes), numbers[1], strict=True):
            constant[0] = value.untyped_storage()


def _constants(writes: Sequence[Write]) -> list[list[torch.UntypedStorage]]:
    """The constants that these writes took, each once, in order."""
    leaves = [leaf for write in writes for leaf in tree_leaves((write.args, write.kwargs)) if isinstance(leaf, View)]
    return list({id(v.state.constant): v.state.constant for v in leaves if v.state.constant is not None}.values())


def _bytes(constant: list[torch.UntypedStorage]) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(constant[0])


def _digests(writes: Sequence[Write]) -> tuple[str, str]:
    """Hashes of what was done, and of the numbers that went into it."""
    tokens: dict[object, int] = {}

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, View):
            number = tokens.setdefault(leaf.state.token, len(tokens))
            return f"{number} {leaf.dtype} {leaf.shape} {leaf.stride} {leaf.offset}"
        return "generator" if isinstance(leaf, torch.Generator) else leaf

    structure, numbers = hashlib.sha256(), hashlib.sha256()
    for write in writes:
        structure.update(f"{write.function.name()} {tree_map(plain, (write.args, write.kwargs))}\n".encode())
        for token, _ in write.made.values():
            tokens.setdefault(token, len(tokens))
        if write.random is not None:
            numbers.update(write.random.numpy().tobytes())
    for constant in _constants(writes):
        numbers.update(_bytes(constant).numpy().tobytes())
    return structure.hexdigest(), numbers.hexdigest()
