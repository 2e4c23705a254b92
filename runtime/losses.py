"""What a model's own loss sums over: (sum, count) of a batch, so that means over uneven shards come out right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import InputError
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


def count_labels(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The number of labels that the model's mean loss is taken over.

    Hugging Face causal language models shift the labels by one inside; all others are taken as they are.
    Raises InputError when the batch has no labels.
    """
    labels = batch.get("labels", batch.get("targets"))
    if labels is None:
        raise InputError(
            "the loss of this model cannot be averaged over ranks",
            why="its batch has neither `labels` nor `targets`, so their number is not known",
            fix="give autopar.parallelize(model, plan, loss=...) a function (output, batch) -> (sum, count)",
        )
    if getattr(model, "loss_type", None) == "ForCausalLM" and labels.dim() > 1:
        labels = labels[..., 1:]
    if labels.is_floating_point():
        return torch.tensor(labels.shape[0], device=labels.device)
    return (labels != IGNORED_LABEL).sum()


def own_loss(model: nn.Module) -> LossFunction:
    """The model's own mean loss times the number of its labels, as (sum, count)."""

    def loss(output: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        mean = loss_of(output)
        if mean is None:
            raise InputError(
                f"{type(model).__name__} returns no loss",
                why="its output has no scalar `.loss`, `['loss']` or tuple element",
                fix="put the labels into the batch, or give parallelize(..., loss=...) a function",
            )
        count = count_labels(model, batch)
        # A shard may hold no label at all; its mean is then nan, its sum is 0 with zero gradients.
        return torch.where(count > 0, mean, torch.zeros_like(mean)) * count, count

    return loss
