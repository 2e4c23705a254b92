"""What the tests of vocabulary parallelism run on real ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from autopar.errors import AutoparError
from autopar.runtime import sharded_logits
from autopar.runtime.models import build_model
from autopar.runtime.parallel import parallelize
from autopar.runtime.sharded_logits import ShardedLogits
from autopar.runtime.vocabulary import WordPlan, cut_vocabulary
from tests.runtime.rank_jobs import distance, make_plan


def cross_entropies(words: int) -> dict[str, Any]:
    """Losses on logits cut along the vocabulary, as models write them, against the whole: largest error of each.

    Errors are of the loss, the gradient of the hidden states, and that of the weight.
    """
    group, rank = dist.group.WORLD, dist.get_rank()
    plan = WordPlan(tp=dist.get_world_size(), words=words)

    def draw(*shape: int, seed: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    weight, hidden = draw(words, 5, seed=1), draw(2, 6, 5, seed=2 + rank)
    targets = torch.randint(words, (2, 6), generator=torch.Generator().manual_seed(rank))
    targets[:, rank:4] = -100

    def run(linear: torch.nn.Linear, loss: Any) -> list[torch.Tensor]:
        x = hidden.clone().requires_grad_()
        value = loss(linear(x))
        (value * draw(*value.shape, seed=rank)).sum().backward()
        return [value.detach(), x.grad, linear.weight.grad]

    worst = {}
    for name, loss in _LOSSES.items():
        whole, cut = (torch.nn.Linear(5, words, bias=False, dtype=torch.float64) for _ in range(2))
        for linear in (whole, cut):
            linear.weight.data.copy_(weight)
        cut_vocabulary(cut, cut, plan, group, {})
        expected, found = (run(linear, lambda x, loss=loss: loss(x, targets)) for linear in (whole, cut))
        dist.all_reduce(expected[2])
        expected[2] = plan.shard("", expected[2], (rank,))
        worst[name] = [distance(a, b) for a, b in zip(found, expected, strict=True)]
    return worst


_LOSSES: dict[str, Any] = {
    "flat": lambda x, y: functional.cross_entropy(x.view(-1, x.size(-1)), y.view(-1)),
    "soft cap, shifted, a sum": lambda x, y: functional.cross_entropy(
        (torch.tanh(x / 3.0) * 3.0)[..., :-1, :].flatten(0, 1), y[:, 1:].flatten(), reduction="sum"
    ),
    "classes second": lambda x, y: torch.nn.CrossEntropyLoss()(x.float().double().transpose(1, 2), y),
    "one a token": lambda x, y: functional.cross_entropy(x.permute(0, 2, 1), y, reduction="none"),
    "the last place": lambda x, y: functional.cross_entropy(x[:, -1], y[:, -1]),
    "an ignored word": lambda x, y: functional.cross_entropy(
        x[:, 4:].flatten(0, 1), y[:, 4:].flatten(), ignore_index=2
    ),
}


def refused_on_sharded_logits() -> list[str]:
    """The words with which operators that need all words are refused."""
    plan = WordPlan(tp=dist.get_world_size(), words=7)
    held = plan.held(dist.group.WORLD)
    logits = ShardedLogits.of(torch.zeros(4, 2, 3, held.count), held, 2)
    targets = torch.zeros(6, dtype=torch.long)
    tries = [
        lambda: logits.softmax(-1),
        lambda: logits + torch.zeros(7),
        lambda: logits[..., :4],
        lambda: logits.flatten(),
        lambda: functional.cross_entropy(logits.flatten(0, 1), targets, label_smoothing=0.1),
        lambda: functional.cross_entropy(logits, targets),
    ]
    found = []
    for attempt in tries:
        try:
            attempt()
            found.append("not refused")
        except AutoparError as error:
            found.append(str(error))
    return found


def local_maximum(source: str, strategies: list[str]) -> str:
    """What parallelize says when each rank takes the largest of its own logits for the largest of all."""
    real = sharded_logits.dist

    class Planted:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def all_reduce(self, tensor: torch.Tensor, op: Any = real.ReduceOp.SUM, group: Any = None) -> Any:
            return None if op == real.ReduceOp.MAX else real.all_reduce(tensor, op=op, group=group)

    sharded_logits.dist = Planted()
    try:
        parallelize(build_model(source), make_plan(source, strategies, world=dist.get_world_size()))
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        sharded_logits.dist = real
    return "not caught"
