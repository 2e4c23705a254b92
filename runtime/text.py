"""Byte-level batches from real text: a token is a byte, the vocabulary 256."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from autopar.errors import InputError
from autopar.runtime.batches import BatchForm

BYTE_VOCABULARY = 256


def default_text() -> bytes:
    """The help topics of the Python language reference (about 0.7 MB), shipped with every Python."""
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    return "\n".join(topics[name] for name in sorted(topics)).encode()


def read_text(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a file (any encoding: a token is a byte); InputError when it cannot be read or is empty."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise InputError(f"{path} does not exist", why="no such file", fix="check the path of --text") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read", why=str(error), fix="give a readable file as --text") from None
    if not content:
        raise InputError(f"{path} is empty", why="there is nothing to train on", fix="give a file with text")
    return content


@dataclass(frozen=True, kw_only=True)
class ByteBatches:
    """Batches of random windows of a text, without end; the same seed gives the same batches in every process.

    sequence: tokens a sample; global_batch: samples a batch; form: how the model takes them.
    Raises InputError when the text is shorter than one sample and ValueError for numbers below one.
    """

    text: bytes
    sequence: int
    global_batch: int
    seed: int = 0
    form: BatchForm = field(default_factory=BatchForm)
    _tokens: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.sequence < 1 or self.global_batch < 1:
            raise ValueError(
                f"ByteBatches needs sequence and global_batch >= 1, not {self.sequence}, {self.global_batch}"
            )
        if len(self.text) <= self.sequence:
            raise InputError(
                f"the text has {len(self.text)} bytes",
                why=f"one sample takes {self.sequence + 1} (the sequence and the next byte)",
                fix="give a longer text or a shorter sequence",
            )
        object.__setattr__(self, "_tokens", torch.frombuffer(bytearray(self.text), dtype=torch.uint8))

    def batch(self, step: int) -> dict[str, Tensor]:
        """The batch of this step: ids and labels, each int64 [global_batch, sequence]."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(len(self.text) - self.sequence, (self.global_batch, 1), generator=generator)
        windows = self._tokens[starts + torch.arange(self.sequence + 1)].long()
        return self.form.batch(windows)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        step = 0
        while True:
            yield self.batch(step)
            step += 1


def check_vocabulary(size: int | None) -> None:
    """Raise InputError when a model of this vocabulary cannot read bytes."""
    if size is None or size < BYTE_VOCABULARY:
        raise InputError(
            f"a vocabulary of {size} is too small for text",
            why=f"text is read byte by byte and needs {BYTE_VOCABULARY} tokens",
            fix=f"set vocab_size={BYTE_VOCABULARY} or more",
        )
