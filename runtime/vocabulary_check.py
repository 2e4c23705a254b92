"""A numerical check of cut embeddings and heads on their real ranks: values and every gradient against the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import RunError
from autopar.runtime.arguments import argument
from autopar.runtime.ends import Vocabulary
from autopar.runtime.fakes import has_numbers
from autopar.runtime.stage import LossFunction, StageBody, StageModule
from autopar.runtime.vocabulary import WordPlan

TOLERANCE, HALF_TOLERANCE = 1e-3, 3e-2


@dataclass(frozen=True, kw_only=True, eq=False)
class EndValues:
    """What an end made of a batch: its output (hidden state, or sum of the losses) and the gradients that flow back.

    gradients: of the parameters of the vocabulary, by name; inward: of the head's input, None for the embedding;
    dtype: in which the end computes.
    """

    dtype: torch.dtype
    output: Tensor
    inward: Tensor | None
    gradients: dict[str, Tensor]


def measure_ends(
    stage: StageModule, ends: Mapping[int, Vocabulary], batch: Mapping[str, Tensor], rank: int
) -> dict[int, EndValues]:
    """The values of these ends as they are now, for a batch that differs from rank to rank; without dropout."""
    body = stage.body
    batch = {
        name: torch.roll(value, rank, 1) if value.dim() == 2 and not value.is_floating_point() else value
        for name, value in batch.items()
    }
    was_training = body.model.training
    body.model.eval()
    found = {}
    for layer, end in ends.items():
        named = dict(body.model.get_submodule(end.path).named_parameters(recurse=False))
        named = {name: p for name, p in named.items() if p.requires_grad}
        measure = _embedding if layer == 0 else _head
        found[layer] = measure(body, batch, named, stage.loss)
    body.model.train(was_training)
    return found


def check_end(layer: int, before: EndValues, after: EndValues, words: WordPlan, group: dist.ProcessGroup) -> float:
    """The largest relative error of a cut end against the whole one; RunError, on all ranks alike, when it is large.

    Gradients of the parameters are compared with the sum over the ranks of the group, which had other samples.
    """
    if not has_numbers(before.output):
        return 0.0
    rank, end = dist.get_rank(group), "the embedding" if layer == 0 else "the head"
    errors = {f"the output of {end}": _error(after.output, before.output)}
    if before.inward is not None and after.inward is not None:
        errors[f"the gradient into {end}"] = _error(after.inward, before.inward)
    for name, grad in before.gradients.items():
        total = grad.clone()
        dist.all_reduce(total, group=group)
        part = words.shard(name, total, (rank,))
        # A rank that holds no word of the batch has a gradient of zero.
        errors[f"the {name} of {end}"] = _error(after.gradients[name], part, float(total.norm()))
    worst = torch.tensor(list(errors.values()), dtype=torch.float64, device=before.output.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    tolerance = HALF_TOLERANCE if before.dtype in (torch.bfloat16, torch.float16) else TOLERANCE
    for name, error in zip(errors, worst.tolist(), strict=True):
        if not error <= tolerance:
            raise RunError(
                f"vocabulary parallelism is wrong at {name}",
                why=f"it differs by {error:.1e} (relative) from the uncut model; allowed is {tolerance:.0e}",
                fix="give embedding and head a strategy without tp",
            )
    return float(worst.max())


class _Left(Exception):  # noqa: N818  (no error: the way out of a forward)
    pass


def _embedding(
    body: StageBody, batch: Mapping[str, Tensor], named: Mapping[str, nn.Parameter], loss: LossFunction
) -> EndValues:
    seen: list[Tensor] = []

    def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(argument(args, kwargs, body.structure.forms[0].hidden))
        raise _Left

    first = body.structure.block(body.model, 0)
    _run(lambda: body.model(**batch), [first.register_forward_pre_hook(leave, with_kwargs=True)])
    (hidden,) = seen
    grads = _gradients((hidden * _noise(hidden)).sum(), list(named.values()))
    return EndValues(
        dtype=hidden.dtype, output=hidden.detach(), inward=None, gradients=dict(zip(named, grads, strict=True))
    )


def _head(
    body: StageBody, batch: Mapping[str, Tensor], named: Mapping[str, nn.Parameter], loss: LossFunction
) -> EndValues:
    entered: list[Tensor] = []

    def enter(module: nn.Module, args: Any, output: Any) -> Any:
        hidden = body.structure.forms[-1].hidden_in(output)
        entered.append(_noise(hidden).requires_grad_())
        return (entered[0], *output[1:]) if body.structure.forms[-1].output_length else entered[0]

    last = body.structure.block(body.model, -1)
    output = _run(lambda: body.model(**batch), [last.register_forward_hook(enter)])
    total, _ = loss(output, batch)
    inward, *grads = _gradients(total, [entered[0], *named.values()])
    gradients = dict(zip(named, grads, strict=True))
    return EndValues(dtype=entered[0].dtype, output=total.detach(), inward=inward, gradients=gradients)


def _noise(like: Tensor) -> Tensor:
    """Random numbers, the same each time; fake where `like` is, which a mere `to` would leave real."""
    numbers = torch.randn(like.shape, generator=torch.Generator().manual_seed(7))
    return torch.empty_like(like, requires_grad=False).copy_(numbers)


def _run(forward: Callable[[], Any], handles: Sequence[Any]) -> Any:
    try:
        with torch.enable_grad():
            return forward()
    except _Left as left:
        left.__traceback__ = None
        return None
    finally:
        for handle in handles:
            handle.remove()


def _gradients(total: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    if not total.requires_grad:
        return [torch.zeros_like(x) for x in tensors]
    grads = torch.autograd.grad(total, tensors, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(tensors, grads, strict=True)]


def _error(found: Tensor, expected: Tensor, scale: float = 0.0) -> float:
    """Relative L2 distance; infinite when the shapes differ."""
    if found.shape != expected.shape:
        return float("inf")
    return float((found - expected).norm()) / max(float(expected.norm()), scale, 1e-30)
