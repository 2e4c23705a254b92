"""What the blocks of a middle stage share over the micro-batches of a step: only what no number of the batch moves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.runtime.batches import example_batch
from autopar.runtime.models import build_model
from autopar.runtime.probing import probe
from autopar.runtime.stage import StageBody

LLAMA = (
    "LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, "
    "num_key_value_heads=2)"
)
TOKENS, WIDTH = 8, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, side: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x) + side)


class Model(nn.Module):
    """side: what its blocks are given beside the hidden state, from the ids."""

    def __init__(self, side: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, 50)
        self.register_buffer("scale", torch.ones(()))
        self.side, self.sides_made = side, 0

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(ids)
        side = self.side(ids) * self.scale
        self.sides_made += 1
        for block in self.blocks:
            x = block(x, side)
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def places(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1], dtype=torch.float32)[:, None] / 10


def written_into(ids: Tensor) -> Tensor:
    side = places(ids)
    side[: ids.shape[0]].view(-1)[0] = ids[0, 0]
    return side


def added_in_lists(ids: Tensor) -> Tensor:
    side = places(ids)
    torch._foreach_add_([side], [ids[0].float()[:, None]])
    return side


FROM_NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "an operation": lambda ids: places(ids) + ids.float().mean() / 50,
    "a value": lambda ids: places(ids) * (float(ids[0, 0]) + 1),
    "a branch": lambda ids: places(ids) if (ids > 25).any() else -places(ids),
    "a list": lambda ids: places(ids) + ids.tolist()[0][0],
    "numpy": lambda ids: places(ids) + float(ids.numpy().sum()),
    "memory": written_into,
    "memory in a list": added_in_lists,
    "choice of rows": lambda ids: places(ids)[ids[0] % TOKENS],
    "chance": lambda ids: places(ids) + torch.rand(()),
}


def batch(seed: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 50, (2, TOKENS), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids, "targets": ids}


def middle(model: nn.Module, example: dict[str, Tensor]) -> StageBody:
    """The stage of the second and third block."""
    body = StageBody(model, probe(model, example).structure, range(2, 4))
    body.attach_ends()
    return body


def by_hand(blocks: list[Block], hidden: Tensor, side: Tensor) -> Tensor:
    for block in blocks:
        hidden = block(hidden, side)
    return hidden


def copied(model: Model) -> list[Block]:
    """The two blocks of the stage before anything is done to them."""
    return [copy.deepcopy(model.blocks[number]) for number in (1, 2)]


def test_what_follows_from_shapes_is_made_once_a_step() -> None:
    model = Model(places)
    blocks, body = copied(model), middle(model, batch(0))
    made = model.sides_made
    for _ in range(2):
        body.begin_step()
        for seed in range(3):
            hidden = torch.randn(2, TOKENS, WIDTH)
            assert torch.equal(body(hidden, **batch(seed)), by_hand(blocks, hidden, places(hidden)))
        made += 1
        assert model.sides_made == made
    body.begin_step()
    model.scale.fill_(3.0)
    assert torch.equal(body(hidden, **batch(0)), by_hand(blocks, hidden, 3 * places(hidden)))
    # Another length is another batch, also within a step.
    short = {name: value[:, :4] for name, value in batch(0).items()}
    assert torch.equal(body(hidden[:, :4], **short), by_hand(blocks, hidden[:, :4], 3 * places(hidden[:, :4])))


@pytest.mark.parametrize("name", FROM_NUMBERS)
def test_what_depends_on_numbers_is_made_for_every_micro_batch(name: str) -> None:
    model = Model(FROM_NUMBERS[name])
    blocks, body = copied(model), middle(model, batch(0))
    for seed in range(3):
        hidden, made = torch.randn(2, TOKENS, WIDTH), model.sides_made
        torch.manual_seed(seed)
        found = body(hidden, **batch(seed))
        assert model.sides_made > made
        if seed:  # in the first, chance is drawn twice
            torch.manual_seed(seed)
            assert torch.equal(found, by_hand(blocks, hidden, FROM_NUMBERS[name](batch(seed)["ids"])))


def test_blocks_that_do_not_follow_each_other_directly() -> None:
    model = Model(places)
    blocks, body = copied(model), middle(model, batch(0))

    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    model.between = Doubled()

    def run(ids: Tensor, targets: Tensor) -> Any:
        x, side = model.embedding(ids), places(ids)
        for number, block in enumerate(model.blocks):
            x = block(model.between(x) if number == 2 else x, side)
        return x

    model.forward = run
    hidden = torch.randn(2, TOKENS, WIDTH)
    expected = blocks[1](2 * blocks[0](hidden, places(hidden)), places(hidden))
    assert torch.equal(body(hidden, **batch(0)), expected)


@pytest.mark.parametrize("padded", [False, True])
def test_rotary_tables_stand_and_masks_of_padding_do_not(padded: bool) -> None:
    model, whole = build_model(LLAMA), build_model(LLAMA)
    whole.load_state_dict(model.state_dict())
    example = example_batch(model, samples=2, sequence=TOKENS)
    body = middle(model, example)
    ran: list[int] = []
    model.get_submodule("model.rotary_emb").register_forward_hook(lambda *_: ran.append(1))
    seen: dict[int, Tensor] = {}
    for number in (1, 3):
        whole.get_submodule(f"model.layers.{number}").register_forward_pre_hook(
            lambda block, args, number=number: seen.update({number: args[0]})
        )
    for pad in (1, 3):
        mask = (torch.arange(TOKENS) < TOKENS - pad).long().repeat(2, 1)
        given = {**example, "attention_mask": mask} if padded else example
        whole(**given)
        assert torch.equal(body(seen[1], **given), seen[3])
    assert len(ran) == (3 if padded else 1)  # of those with a mask the first is looked at and then run
