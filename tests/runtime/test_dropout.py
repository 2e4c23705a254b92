"""Dropout: equal masks where ranks hold the same samples, others where they do not, the same ones in recompute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autopar.runtime.randomness import BlockStream

Ranks = Callable[..., list[Any]]

OTHERS = ("dp2-z3-tp2", "dp2-tp2s", "dp2-sp2", "dp2-cp2")


@pytest.mark.parametrize("strategy", ["dp2-tp2", *(pytest.param(s, marks=pytest.mark.slow) for s in OTHERS)])
def test_residual_masks_follow_the_samples(strategy: str, ranks: Ranks) -> None:
    plain = ranks("dropout", 4, strategy=strategy)
    hidden = plain[0]["hidden"]
    if strategy.endswith(("s", "sp2", "cp2")):
        assert hidden[0] != hidden[1]  # each holds other positions of the same samples
    else:
        assert hidden[0] == hidden[1]
        assert hidden[2] == hidden[3]
    assert hidden[0] != hidden[2]
    again = ranks("dropout", 4, strategy=strategy)
    assert again[0]["loss"] == plain[0]["loss"]
    assert again[0]["gradient"] == plain[0]["gradient"]


@pytest.mark.parametrize(
    "strategy",
    ["dp2-tp2s", *(pytest.param(s, marks=pytest.mark.slow) for s in ("dp4", "dp2-tp2", "dp2-sp2", "dp2-cp2"))],
)
def test_recompute_draws_the_same_masks(strategy: str, ranks: Ranks) -> None:
    plain = ranks("dropout", 4, strategy=strategy)[0]
    for again in ("-r", "-rs"):
        recomputed = ranks("dropout", 4, strategy=strategy + again)[0]
        assert recomputed["loss"] == plain["loss"]
        assert recomputed["gradient"] == pytest.approx(plain["gradient"], rel=1e-4, abs=1e-7)


def test_a_block_draws_from_its_stream_without_seeding_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    block = nn.Dropout(0.5)
    BlockStream(block, seed=1, number=0, place=0)
    again = nn.Dropout(0.5)
    BlockStream(again, seed=1, number=0, place=0)
    # Seeding every device costs milliseconds a block where there is no GPU, and memory that is never freed.
    monkeypatch.setattr(torch, "manual_seed", None)
    before, x = torch.get_rng_state(), torch.ones(64)
    first, second = block(x), block(x)
    assert not torch.equal(first, second)
    assert torch.equal(first, again(x))
    assert torch.equal(torch.get_rng_state(), before)
