"""Models that cannot be cut exactly are refused by name, before anything is computed."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.plan import Plan, PlanCluster, PlanModel
from autopar.request import Request
from autopar.runtime.launch import launch
from autopar.runtime.probing import probe
from autopar.runtime.structure import fingerprint
from autopar.strategy import Strategy


class Block(nn.Module):
    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), norm or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2).relu()


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        x += self.linear(x)
        return x


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embedding, self.blocks, self.head = nn.Embedding(16, 8), nn.ModuleList(blocks), nn.Linear(8, 16)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class OnOneRank(Model):
    """Uses a parameter on rank 0 only."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        self.extra = nn.Linear(8, 8)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        loss = super().forward(ids, targets)
        return loss + self.extra(self.embedding(ids)).sum() if os.environ.get("RANK", "0") == "0" else loss


class Outside(Model):
    """Its blocks use a parameter that is not theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)
        kept = [self.shared]

        class Borrower(Block):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) + kept[0](x)

        self.blocks.extend([Borrower(), Borrower()])


def one_rank_model() -> nn.Module:
    return OnOneRank(Block(), Block())


def frozen_model() -> nn.Module:
    return Model(Block(), Block()).requires_grad_(False)


def shared_by_blocks() -> nn.Module:
    model = Model(Block(), Block())
    model.blocks[1].linear.weight = model.blocks[0].linear.weight
    return model


def shared_with_head() -> nn.Module:
    model = Model(Block(), Block())
    model.head = nn.Linear(8, 8)
    model.head.weight = model.blocks[1].linear.weight
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (shared_by_blocks(), "blocks.0.linear.weight and blocks.1.linear.weight are one parameter"),
        (shared_with_head(), "blocks.1.linear.weight and head.weight are one parameter"),
        (Outside(), "a block uses shared.weight, which is not its own"),
        (Model(Block(nn.BatchNorm1d(8)), Block(nn.BatchNorm1d(8))), "blocks.0.norm is a BatchNorm1d"),
        (Model(InPlace(), InPlace()), "blocks.0 changes its input in place"),
    ],
)
def test_a_model_that_cannot_be_cut_exactly_is_refused(model: nn.Module, words: str) -> None:
    with pytest.raises(InputError) as caught:
        probe(model, {"ids": torch.zeros(3, 4, dtype=torch.long)})
    assert words in caught.value.what
    assert caught.value.why
    assert caught.value.fix


def test_the_plain_model_is_not_refused() -> None:
    found = probe(Model(Block(), Block()), {"ids": torch.zeros(3, 4, dtype=torch.long)})
    assert "head.weight" in found.used


@pytest.mark.parametrize(
    ("function", "strategy", "words"),
    [
        ("one_rank_model", Strategy(dp=2), "used on some ranks only: extra.bias, extra.weight"),
        ("one_rank_model", Strategy(dp=2, zero=3), "used on some ranks only: extra.bias, extra.weight"),
        ("frozen_model", Strategy(dp=2), "no parameter to train"),
    ],
)
def test_ranks_that_differ_end_in_an_error_by_name(function: str, strategy: Strategy, words: str) -> None:
    source = f"{__file__}:{function}"
    plan = Plan(
        model=PlanModel(name="m", source=source, fingerprint=fingerprint(globals()[function]())),
        cluster=PlanCluster(name="c", device="cpu", world_size=2, ranks_per_node=2, memory_bytes=1 << 30),
        request=Request(global_batch=4, sequence=4),
        pp=1,
        schedule="1f1b",
        num_micro_batches=1,
        layers_per_stage=(4,),
        strategies=(strategy,) * 4,
        versions={},
    )
    with pytest.raises(InputError) as caught:
        launch("autopar.runtime.verify:verify_rank", {"plan": plan.dumps()}, nproc=2, timeout_s=90)
    assert words in caught.value.what
