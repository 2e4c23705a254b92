"""What a model's own loss sums over: (sum, count) of a batch, so that means over uneven shards come out right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.runtime.batches import labels_of
from autopar.runtime.stage import LossFunction

IGNORED_LABEL = -100
"""The label that torch's cross-entropy and the losses of Hugging Face leave out."""


def loss_of(output: Any) -> Tensor | None:
    """The scalar loss in what a model returned: `.loss`, `["loss"]`, or the scalar of a tuple; None without one."""
    candidates = [getattr(output, "loss", None)]
    if isinstance(output, Mapping):
        candidates.append(output.get("loss"))
    if isinstance(output, tuple | list):
        candidates += list(output)
    candidates.append(output)
    for value in candidates:
        if isinstance(value, Tensor) and value.dim() == 0 and value.is_floating_point():
            return value
    return None


def with_loss(output: Any, mean: Tensor, loss: Tensor) -> Any:
    """What the model returned, with `loss` in the place of its `mean`."""
    if output is mean:
        return loss
    if isinstance(output, tuple | list) and not hasattr(output, "_fields"):
        return type(output)(loss if item is mean else item for item in output)
    if isinstance(output, Mapping) and "loss" in output:
        output["loss"] = loss  # type: ignore[index]
    else:
        output.loss = loss
    return output


def first_label_counts(model: nn.Module, batch: Mapping[str, Tensor]) -> bool:
    """Whether the model's mean loss counts the first label of each sequence; found by leaving it out once.

    A model that shifts the labels inside (as Hugging Face causal language models do) never looks at it.
    """
    labels = batch[labels_of(batch)]
    if labels.dim() < 2 or labels.is_floating_point():
        return True
    masked = labels.clone()
    masked[:, 0] = IGNORED_LABEL
    with torch.no_grad():
        before = loss_of(model(**batch))
        after = loss_of(model(**{**batch, labels_of(batch): masked}))
    return before is None or after is None or not torch.allclose(before, after, rtol=1e-6, atol=0.0)


def own_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> LossFunction:
    """The model's own mean loss times the number of its labels, as (sum, count).

    batch: a small one with labels, from which the way the model counts them is found. Raises InputError for a batch
    without labels or a model that returns no loss.
    """
    was_training = model.training
    model.eval()
    shifted = not first_label_counts(model, batch)
    model.train(was_training)
    return summed_loss(type(model).__name__, shifted=shifted)


def summed_loss(name: str, *, shifted: bool) -> LossFunction:
    """The mean loss that a model of this name returns times the number of its labels.

    shifted: whether the first label of a sequence counts for nothing.
    """

    def loss(output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        mean = loss_of(output)
        if mean is None:
            raise InputError(
                f"{name} returns no loss",
                why="its output has no scalar `.loss`, `['loss']` or tuple element",
                fix="put the labels into the batch, or give parallelize(..., loss=...) a function",
            )
        mean = mean.to(torch.promote_types(mean.dtype, torch.float32))  # a sum over many tokens needs the digits
        labels = batch[labels_of(batch)]
        if labels.is_floating_point():
            count = torch.tensor(labels.shape[0], device=labels.device)
        else:
            count = ((labels[..., 1:] if shifted else labels) != IGNORED_LABEL).sum()
        # A shard may hold no label at all; its mean is then nan, its sum is 0 with zero gradients.
        return torch.where(count > 0, mean, torch.zeros_like(mean)) * count, count

    return loss
