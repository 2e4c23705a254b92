"""Flash attention with the logarithm of its sums of exponentials, and its backward: torch's kernels, here only.

That of the CPU takes fewer heads of keys than of queries as they are. That of CUDA is unverified.
"""

from __future__ import annotations

import torch
from torch import Tensor

aten = torch.ops.aten
FLASH_FOR_CPU = aten._scaled_dot_product_flash_attention_for_cpu


def takes(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> bool:
    """Whether these can be attended to in parts; the same on all ranks, which hold equal shapes."""
    if q.dim() != 4 or not q.shape[-1] == k.shape[-1] == v.shape[-1] or q.shape[-2] != k.shape[-2]:
        return False
    if q.device.type == "cpu":
        return True
    flash = torch.backends.cuda
    return bool(
        flash.can_use_flash_attention(flash.SDPAParams(q, k, v, None, 0.0, is_causal, q.shape[1] != k.shape[1]))
    )


def flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """The output and the logarithm of the sums of exponentials, [samples, heads, places]."""
    if q.device.type == "cpu":
        out, lse = FLASH_FOR_CPU(q, k, v, 0.0, is_causal, scale=scale)
        return out, lse
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)
    return out, lse


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values of a part, from the merged output and logarithm."""
    if q.device.type == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        of_q, of_k, of_v = backward(grad, q, k, v, out, lse, 0.0, is_causal, scale=scale)
        return of_q, of_k, of_v
    shared = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    none = torch.empty(0, dtype=torch.int64, device=q.device)  # nothing is drawn without dropout
    of_q, *others = aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, is_causal, none, none, scale=scale
    )
    of_k, of_v = (x.unflatten(1, (-1, shared)).sum(2) for x in others)
    return of_q, of_k, of_v
