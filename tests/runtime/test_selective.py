"""Selective recompute: gradients of one process under every strategy, the operators that run again, and refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.legality import why_sharding_illegal
from autopar.profiler.layers import LayerBench
from autopar.profiler.rank import layer_bytes
from autopar.runtime.models import build_model
from autopar.runtime.recompute import recomputed
from autopar.schedules import SPLIT_BACKWARD
from autopar.strategy import Strategy
from tests.runtime.test_equality import GPT2, LLAMA4, PLAIN, TIED, check

Ranks = Callable[..., list[Any]]

STAGES = {"pp": 2, "layers_per_stage": [3, 3], "micro_batches": 4}
PLANS: dict[str, tuple[str, list[str], int, dict[str, Any]]] = {
    "every ZeRO and tensor parallel": (
        LLAMA4,
        ["dp4-z3", "dp2-z3-tp2-rs", "tp4s-rs", "dp4-z2-rs", "dp4-z1-rs", "dp4"],
        4,
        {"micro_batches": 2},
    ),
    "stages of different degrees": (LLAMA4, ["dp2", "dp2-z3-rs", "tp2-rs", "tp2s-rs", "dp2-rs", "dp2-z3"], 4, STAGES),
    "fused weights": (GPT2, ["dp4-z3", "dp4-z3-rs", "tp4-rs", "dp2-tp2s-rs", "dp4-rs", "dp4-z3"], 4, {}),
    "a cut sequence": (LLAMA4, ["dp4", "dp2-sp2-rs", "dp2-cp2-rs", "dp2-z3-sp2-rs", "sp2-cp2-rs", "dp4"], 4, {}),
    "tied, a filled pipeline": (
        TIED, ["dp2-z3", "dp2-rs", "dp2-z2-rs", "tp2-rs", "dp2-z3-rs", "dp2-z3"], 4, {**STAGES, "schedule": "gpipe"}
    ),
    "a plain module": (PLAIN, ["dp2-z3", "tp2-rs", "dp2-z3-rs", "tp2s", "dp2-z2-rs", "dp2"], 4, STAGES),
    "two stages a rank": (
        LLAMA4, ["dp2", "dp2-rs", "tp2-rs", "dp2-z2-rs", "dp2-rs", "dp2"], 4,
        {"pp": 2, "layers_per_stage": [2, 1, 1, 2], "micro_batches": 4, "schedule": "interleaved-1f1b"},
    ),
}  # fmt: skip
IN_CI = ("every ZeRO and tensor parallel", "stages of different degrees")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in IN_CI)) for n in PLANS])
def test_plans_with_selective_recompute_equal_one_process(name: str, ranks: Ranks) -> None:
    source, strategies, size, shape = PLANS[name]
    check(ranks("compare_with_one_process", size, source=source, strategies=strategies, **shape))


class _Operators(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class _Block(nn.Module):
    """Two linear layers around an attention and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        inner = nn.functional.dropout(self.first(x).tanh(), 0.5)[:, None]
        return x + self.second(nn.functional.scaled_dot_product_attention(inner, inner, inner)[:, 0])


def _runs(which: Any) -> tuple[Counter[str], Counter[str], list[Tensor]]:
    """Operators of the second forward and of its backward, and the gradients."""
    torch.manual_seed(0)
    block, x = _Block(), torch.randn(2, 4, 8, requires_grad=True)
    forward = recomputed(block.forward, which)
    forward(x)
    torch.manual_seed(1)
    with _Operators() as ahead:
        output = forward(x)
    torch.rand(3)
    with _Operators() as back:
        output.square().sum().backward()
    assert x.grad is not None
    return ahead.found, back.found, [x.grad, *(p.grad for p in block.parameters() if p.grad is not None)]


def test_products_with_weights_do_not_run_again_and_all_else_does() -> None:
    ahead, plain, grads = _runs("none")
    assert ahead["addmm"] == 2
    attention = next(name for name in ahead if name.startswith("_scaled_dot_product"))
    for which, products in (("full", 1), ("selective", 0)):  # the last product is needed by nobody
        found, back, others = _runs(which)
        assert found[attention] == ahead[attention] == 1
        assert back["addmm"] - plain["addmm"] == products
        assert back[attention] - plain[attention] == 1
        assert back["tanh"] - plain["tanh"] == 1
        assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True)), which  # the same dropout too


@pytest.mark.parametrize(("source", "kept"), [(LLAMA4, 1 + 1 + 2 * 0.5 + 1 + 2 * 1.5), (GPT2, 1 + 3 + 1 + 4)])
def test_what_is_kept_is_the_input_and_the_products_but_the_last(source: str, kept: float) -> None:
    """Counted by hand in units of the hidden state: input, q, k, v, o, gate, up; or fused qkv, o, the wider MLP."""
    bench = LayerBench(build_model(source), sequence=8, source=source)
    found = layer_bytes(bench, next(key for key in bench.keys([]) if key.kind.startswith("block")), (1, 2))
    assert found.selective is not None
    hidden = found.input_bytes.per_sample
    assert found.selective.saved_bytes.per_sample == pytest.approx(kept * hidden, rel=1e-3)
    assert found.selective.saved_bytes.per_sample < found.saved_bytes.per_sample


def test_backwards_in_two_parts_are_refused_by_torch_and_by_us() -> None:
    block, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(2, 4, requires_grad=True)
    loss = recomputed(block.forward, "selective")(x).sum()
    torch.autograd.grad(loss, x, retain_graph=True)
    with pytest.raises(RuntimeError, match="backward an extra time"):
        torch.autograd.grad(loss, list(block.parameters()))
    for schedule in SPLIT_BACKWARD:
        reason = why_sharding_illegal(Strategy.parse("dp2-rs"), schedule)
        assert reason is not None
        assert "full recompute runs" in reason
    assert why_sharding_illegal(Strategy.parse("dp2-rs"), "interleaved-1f1b") is None


def test_a_product_that_is_changed_in_place_is_seen() -> None:
    linear = nn.Linear(4, 4)

    def forward(x: Tensor) -> Tensor:
        return linear(torch.tanh(linear(x).add_(1.0))).sum()

    with pytest.raises(RuntimeError, match="mutated"):
        recomputed(forward, "selective")(torch.randn(2, 4, requires_grad=True)).backward()
