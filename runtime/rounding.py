"""How far rounding alone moves a gradient: what tells one that is zero in exact arithmetic from one that is wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_FACTOR, _MARGIN = 3.0, 10.0


def rounding_of(output: Tensor, direction: Tensor, tensors: Sequence[Tensor]) -> list[float]:
    """Ten times the 2-norm of what rounding leaves of the gradient of each tensor, 0 where it has none.

    That is how much a third of the gradient along three times the direction differs from it: in exact arithmetic not
    at all, but each term of a sum is rounded anew, so that terms that cancel (of a bias of keys, to which a softmax is
    blind) leave as much as in any other order of summing. output, direction: of one shape. The graph stays. Cost: two
    backwards.
    """
    needed = [tensor for tensor in tensors if tensor.requires_grad]
    along, thrice = (
        torch.autograd.grad(output, needed, scale * direction, retain_graph=True, allow_unused=True)
        for scale in (1.0, _FACTOR)
    )
    moved = {
        id(tensor): _MARGIN * float((b / _FACTOR - a).norm())
        for tensor, a, b in zip(needed, along, thrice, strict=True)
        if a is not None and b is not None
    }
    return [moved.get(id(tensor), 0.0) for tensor in tensors]
