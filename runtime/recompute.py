"""What a block computes again in its backward: all of it, or all but its products with weights.

Selective recompute keeps the block's input and the outputs of KEPT operators but the last, which nothing in the
backward needs; attention, softmax, norms, dropout, element-wise operators, products of activations with one another
and collectives run again. A model that changes such an output in place is refused by torch when it happens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autopar.strategy import Recompute

KEPT = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.convolution.default)
"""The operators whose outputs selective recompute keeps: what linear layers and convolutions come down to."""


def recomputed(forward: Callable[..., Any], which: Recompute) -> Callable[..., Any]:
    """The forward of a block with what it computes again; itself for `none`."""
    if which == "none":
        return forward
    if which == "full":
        return partial(checkpoint, forward, use_reentrant=False)
    return partial(checkpoint, forward, use_reentrant=False, context_fn=_KeptProducts().contexts)


class _KeptProducts:
    """Which outputs of one block are kept: of its first forward all of KEPT, later all but the last."""

    def __init__(self) -> None:
        self._last = -1

    def contexts(self) -> Any:
        """The contexts of one forward and of its recompute."""
        seen = 0

        def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            nonlocal seen
            if operator not in KEPT:
                return CheckpointPolicy.PREFER_RECOMPUTE
            seen += 1
            if seen == self._last:
                return CheckpointPolicy.PREFER_RECOMPUTE
            self._last = max(self._last, seen)
            return CheckpointPolicy.MUST_SAVE

        return create_selective_checkpoint_contexts(policy)
