"""Random inputs of the shapes that a Hugging Face model takes, by its main input and its task."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import InputError

_BY_SAMPLE = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")


def takes_words(model: nn.Module) -> bool:
    """Whether the input of a Hugging Face model is token ids."""
    return main_input(model) == "input_ids"


def main_input(model: nn.Module) -> str:
    """The name of its main input."""
    return str(getattr(model, "main_input_name", "input_ids"))


def labels_by_sample(model: nn.Module) -> bool:
    """Whether it takes one label a sample, not one a token."""
    return type(model).__name__.endswith(_BY_SAMPLE)


def labels_by_class(model: nn.Module) -> bool:
    """Whether its labels are classes, not words."""
    return labels_by_sample(model) or type(model).__name__.endswith("ForTokenClassification")


def made_up_inputs(model: Any, *, samples: int, generator: torch.Generator) -> dict[str, Tensor]:
    """The main input of a model that takes no token ids; InputError where its config does not give the shape."""
    name, config = main_input(model), model.config
    shape: Sequence[int] | None = None
    if name == "pixel_values" and hasattr(config, "num_channels") and hasattr(config, "image_size"):
        size = config.image_size
        shape = (config.num_channels, *(size if isinstance(size, list | tuple) else (size, size)))
    elif name == "input_features" and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        shape = (config.num_mel_bins, 2 * config.max_source_positions)
    if shape is None:
        raise InputError(
            f"no {name} can be made up for {type(model).__name__}",
            why="only token ids, images (num_channels, image_size) and mel spectra are known from a config",
            fix="pass a batch as example=",
        )
    kind = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return {name: torch.randn((samples, *shape), generator=generator).to(kind)}


def made_up_labels(model: Any, *, samples: int, sequence: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Labels of its task: classes (one a sample or one a token), or words; none where its forward takes none."""
    if "labels" not in inspect.signature(model.forward).parameters:
        return {}
    config = model.config
    classes = int(config.num_labels)
    if labels_by_sample(model):
        if classes == 1:
            return {"labels": torch.randn(samples, generator=generator)}
        return {"labels": torch.randint(classes, (samples,), generator=generator)}
    kinds = classes if labels_by_class(model) else int(config.vocab_size)
    return {"labels": torch.randint(kinds, (samples, sequence), generator=generator)}
