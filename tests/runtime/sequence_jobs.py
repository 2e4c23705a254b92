"""What the tests of sequence parallelism run on real ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from autopar.errors import AutoparError
from autopar.runtime import layers
from autopar.runtime.models import build_model
from autopar.runtime.parallel import parallelize
from autopar.runtime.relayout import dealt_order
from autopar.runtime.tensor_parallel import ring, sequence
from tests.runtime.rank_jobs import compare_with_one_process, make_plan


def faulty(source: str, strategies: list[str], fault: str) -> str:
    """What parallelize says when the attention exchanges nothing or mixes up parts or places."""
    exchange = sequence._exchange
    faults: dict[str, tuple[Any, str, Any]] = {
        "own part only": (sequence, "_exchange", lambda x, team, cut, joined: x),
        "wrong order": (sequence, "_exchange", lambda *rest: exchange(*rest).flip(rest[-1])),
        "later parts as own": (ring, "_met", _later_as_own(ring._met)),
        "places in one piece": (sequence, "dealt_order", lambda length, axes: np.arange(length)),
    }
    home, name, wrong = faults[fault]
    real = getattr(home, name)
    setattr(home, name, wrong)
    try:
        parallelize(build_model(source), make_plan(source, strategies, world=dist.get_world_size()))
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        setattr(home, name, real)
    return "not caught"


def _later_as_own(met: Any) -> Any:
    """Parts of later ranks are met as if they were the rank's own."""
    return lambda place, source, *rest: met(place, min(source, place), *rest)


def around_equals_one_process(source: str, strategies: list[str], **shape: Any) -> dict[str, Any]:
    """`compare_with_one_process` with every context-parallel layer around the ring, whatever the rule says."""
    real = layers.goes_around
    layers.goes_around = lambda attention, strategy: strategy.cp > 1
    try:
        return compare_with_one_process(source, strategies, **shape)
    finally:
        layers.goes_around = real


def exchanged(heads: int, length: int) -> dict[str, float]:
    """There and back again: the error of an exchange against cutting the whole, and of the way back."""
    size, rank = dist.get_world_size(), dist.get_rank()
    team = sequence.Team(size, rank, dist.group.WORLD)
    whole = torch.randn(2, heads, length, 3, generator=torch.Generator().manual_seed(0))
    part = whole.chunk(size, 2)[rank].clone().requires_grad_()
    moved = sequence._Exchange.apply(part, team, -3, -2)
    back = sequence._Exchange.apply(moved, team, -2, -3)
    moved.sum().backward(retain_graph=True)
    assert part.grad is not None
    return {
        "there": float((moved - whole.chunk(size, 1)[rank]).abs().max()),
        "back": float((back - part).abs().max()),
        "gradient": float((part.grad - 1).abs().max()),
    }


def attended(heads: int, kv_heads: int, piece: int, fault: str = "") -> dict[str, Any]:
    """Attention in parts, gathered and around the ring, causal or not, against torch's own on the whole sequence.

    The largest errors of output and gradients by form, and the scores that the kernel was asked for by it.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    team = sequence.Team(size, rank, dist.group.WORLD)
    generator, length = torch.Generator().manual_seed(0), 2 * size * piece
    inputs = [
        torch.randn(2, n, length, 8, generator=generator, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)
    ]
    weight = torch.randn(2, heads, length, 8, generator=generator, dtype=torch.float64)
    places = torch.from_numpy(dealt_order(length, ((size, True),))).view(size, -1)[rank]
    found: dict[str, Any] = {}
    real, areas = ring.flash, [0.0]

    def counted(q: Any, k: Any, v: Any, is_causal: bool, scale: Any) -> Any:
        areas[0] += q.shape[2] * k.shape[2] / 2 if is_causal else q.shape[2] * k.shape[2]
        return real(q, k, v, is_causal, scale)

    ring.flash = counted
    met = ring._met
    if fault == "later parts as own":
        ring._met = _later_as_own(met)
    try:
        for causal in (False, True):
            whole = [x.clone().requires_grad_() for x in inputs]
            expected = F.scaled_dot_product_attention(*whole, is_causal=causal, scale=0.3, enable_gqa=True)
            (expected * weight).sum().backward()
            for around in (False, True):
                areas[0] = 0.0
                own = [x[..., places, :].clone().requires_grad_() for x in inputs]
                out = ring.attend(*own, team, causal, 0.3, around)
                (out * weight[..., places, :]).sum().backward()
                errors = [(out - expected[..., places, :]).abs().max()]
                errors += [(a.grad - b.grad[..., places, :]).abs().max() for a, b in zip(own, whole, strict=True)]
                found[f"causal {causal}, around {around}"] = (float(max(errors)), areas[0] / piece**2)
    finally:
        ring.flash, ring._met = real, met
    return found
