"""How a model takes its batch, and batches of random tokens for models whose input can be made up."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.runtime.hugging_face import is_hugging_face
from autopar.runtime.made_up import labels_by_class, labels_by_sample, made_up_inputs, made_up_labels, takes_words
from autopar.runtime.stand_ins import with_numbers

_IDS_NAMES = ("input_ids", "ids", "idx", "tokens", "x", "input", "inputs")
_LABEL_NAMES = ("labels", "targets", "target", "y")


@dataclass(frozen=True, kw_only=True)
class BatchForm:
    """How a language model takes its batch.

    ids, labels: the names of forward's parameters (labels None: the model computes no loss itself); shifted: whether
    the labels must already be the next tokens (Hugging Face models shift them themselves); masked: whether it is to
    guess hidden tokens (id 0): every seventh, which are the only labels.
    """

    ids: str = "input_ids"
    labels: str | None = "labels"
    shifted: bool = False
    masked: bool = False

    def batch(self, tokens: Tensor) -> dict[str, Tensor]:
        """The ids and labels of samples of one token more than the sequence: [samples, sequence + 1]."""
        batch = {self.ids: tokens[:, :-1].contiguous()}
        if self.masked and self.labels is not None:
            hidden = torch.arange(tokens.shape[1] - 1, device=tokens.device) % 7 == 0
            batch[self.labels] = torch.where(hidden, tokens[:, :-1], -100)
            batch[self.ids] = torch.where(hidden, 0, tokens[:, :-1])
        elif self.labels is not None:
            batch[self.labels] = (tokens[:, 1:] if self.shifted else tokens[:, :-1]).clone()
        return batch


def batch_form(model: nn.Module) -> BatchForm:
    """How the model takes ids and labels: Hugging Face's way, or by the names of forward's parameters."""
    if is_hugging_face(model):
        return BatchForm(masked=type(model).__name__.endswith("ForMaskedLM"))
    names = list(inspect.signature(model.forward).parameters)
    ids = next((name for name in _IDS_NAMES if name in names), names[0] if names else None)
    if ids is None:
        why = "its forward has no parameter"
        raise InputError(f"{type(model).__name__} takes no batch", why=why, fix="let forward take the token ids")
    return BatchForm(ids=ids, labels=next((n for n in _LABEL_NAMES if n in names and n != ids), None), shifted=True)


def labels_of(batch: Mapping[str, Tensor]) -> str:
    """The name under which a batch holds its labels; InputError when it has none."""
    for name in _LABEL_NAMES:
        if name in batch:
            return name
    raise InputError(
        "the loss of this model cannot be averaged over ranks",
        why=f"its batch ({', '.join(batch)}) has no `labels` or `targets`, so their number is not known",
        fix="give autopar.parallelize(model, plan, loss=...) a function (output, batch) -> (sum, count)",
    )


def takes_text(model: nn.Module) -> bool:
    """Whether a text alone makes batches for the model: it takes words, and its labels are words too."""
    if callable(getattr(model, "example_batch", None)):
        return False
    if is_hugging_face(model):
        return takes_words(model) and not labels_by_class(model)
    return vocab_size(model) is not None


def vocab_size(model: nn.Module) -> int | None:
    """The number of token ids: of the config where there is one, else rows of the nn.Embedding that looks them up.

    None where there is neither. With several embeddings (positions, types) one small forward tells which it is.
    """
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(size, int):
        return size
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if not tables:
        return None
    table = tables[0] if len(tables) == 1 else _looked_up(model, tables)
    return int(table.num_embeddings)


def _looked_up(model: nn.Module, tables: list[nn.Embedding]) -> nn.Embedding:
    """The first table that gets the ids themselves; the first of all when the model does not run on its own."""
    form = batch_form(model)
    found: list[nn.Embedding] = []

    def see(module: nn.Module, args: tuple[Any, ...]) -> None:
        # The ids are all 0: positions would begin 0, 1.
        if isinstance(module, nn.Embedding) and args and args[0].shape == (1, 2) and not bool(args[0].any()):
            found.append(module)

    handles = [table.register_forward_pre_hook(see) for table in tables]
    was_training = model.training
    device = tables[0].weight.device
    ids = torch.zeros(1, 2, dtype=torch.long, device="cpu" if device.type == "meta" else device)
    batch = {name: ids for name in (form.ids, form.labels) if name is not None}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), with_numbers(model, ids.device):
            model.eval()(**batch)
    except Exception:  # it may need more inputs than these; what ran before that still counts
        pass
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return (found or tables)[0]


def max_sequence(model: nn.Module) -> int | None:
    """The longest sequence that a Hugging Face config allows; None where no config says so."""
    for name in ("max_position_embeddings", "max_target_positions"):
        length = getattr(getattr(model, "config", None), name, None)
        if isinstance(length, int):
            return length
    return None


def example_batch(model: nn.Module, *, samples: int, sequence: int, seed: int = 0) -> dict[str, Tensor]:
    """A random batch that the model takes: ids [samples, sequence], or images or spectra of its config, and labels.

    A model with a method `example_batch(samples, sequence)` is asked for it. Images and the like have the dtype of the
    model. The same arguments give the same batch.
    Raises InputError when nothing can be made up (then only the user knows its input) or the sequence is longer than
    its config allows.
    """
    own = getattr(model, "example_batch", None)
    kind = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if callable(own):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return {
                name: value.to(kind) if value.is_floating_point() else value
                for name, value in own(samples, sequence).items()
            }
    generator = torch.Generator().manual_seed(seed)
    images = is_hugging_face(model) and not takes_words(model)
    given = made_up_inputs(model, samples=samples, generator=generator) if images else {}
    if images and labels_by_sample(model):
        return given | made_up_labels(model, samples=samples, sequence=sequence, generator=generator)
    size, longest = vocab_size(model), max_sequence(model)
    if size is None:
        raise InputError(
            f"{type(model).__name__} has no vocabulary",
            why="it has neither config.vocab_size nor an nn.Embedding, so no batch can be made up for it",
            fix="pass a batch as example=, or give the model a method example_batch(samples, sequence)",
        )
    if longest is not None and sequence > longest:
        raise InputError(
            f"sequence {sequence} is too long for {type(model).__name__}",
            why=f"its max_position_embeddings is {longest}",
            fix=f"take a sequence of at most {longest}, or set max_position_embeddings={sequence}",
        )
    if given:
        return given | made_up_labels(model, samples=samples, sequence=sequence, generator=generator)
    batch = batch_form(model).batch(torch.randint(size, (samples, sequence + 1), generator=generator))
    if is_hugging_face(model) and labels_by_class(model):
        batch |= made_up_labels(model, samples=samples, sequence=sequence, generator=generator)
    return batch


def sequence_length(batch: Mapping[str, Tensor]) -> int | None:
    """The sequence length of a batch: the second dimension of its first integer matrix; None without."""
    for value in batch.values():
        if value.dim() == 2 and not value.is_floating_point():
            return int(value.shape[1])
    return None
