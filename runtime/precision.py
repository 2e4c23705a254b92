"""What the dtype of a plan means: float32 is float32 throughout, bfloat16 is mixed precision, the same in every layer.

Under bfloat16 the forward and backward of every layer run on bfloat16 parameters, and so do the collectives between
layers and inside tensor parallelism. Each micro-batch's gradient is turned into float32; gradients are added up over
micro-batches and summed over ranks in float32. The optimizer steps float32 masters, from which the bfloat16 parameters
are rounded after each step. ZeRO-2 and ZeRO-3 hold the masters alone, cut, and gather them rounded. Buffers keep their
dtype. Frozen parameters have no master.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from autopar.errors import InputError

MASTER_DTYPE = torch.float32
"""What gradients are summed in and optimizers step under mixed precision."""


def mixed_dtype(dtype: str) -> torch.dtype | None:
    """The dtype of the forward under mixed precision, None where a plan of this dtype has one dtype throughout.

    Raises InputError for float16.
    """
    if dtype == "float16":
        raise InputError(
            "float16 does not train",
            why="its small gradients vanish without a scaled loss, which autopar does not have",
            fix="use bfloat16 (mixed precision) or float32",
        )
    return torch.bfloat16 if dtype == "bfloat16" else None


class Masters:
    """The float32 values of parameters that a model now has in a lower dtype; none where `dtype` is None."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        """Cast the parameters of the model to `dtype`; those that were float32 keep their exact values here."""
        self.dtype = dtype
        self._exact: dict[str, Tensor] = {}
        if dtype is None:
            return
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter.dtype == MASTER_DTYPE:
                self._exact[name] = parameter.data
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)

    def of(self, name: str, parameter: nn.Parameter, cut: Callable[[Tensor], Tensor] | None) -> Tensor | None:
        """The float32 value of a parameter, a tensor of its own; None where it is what it is.

        cut: what tensor parallelism leaves of a whole tensor, None where it leaves all.
        """
        if self.dtype is None or parameter.dtype != self.dtype:
            return None
        exact = self._exact.get(name)
        if exact is None:
            return parameter.data.to(MASTER_DTYPE)
        mine = exact if cut is None else cut(exact)
        # Built without storage: the values come later.
        return torch.empty_like(mine, device=parameter.device) if mine.is_meta else mine.clone()
