"""What the user asks for: batch, sequence, precision, optimizer, memory budget, and pinned layers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from autopar.errors import InputError
from autopar.formats import omitted
from autopar.strategy import Strategy

Schedule = Literal["1f1b", "gpipe", "looped-bfs", "interleaved-1f1b", "interleaved-zero-bubble", "zbv", "dualpipev"]
Optimizer = Literal["adamw", "sgd", "sgd-momentum", "adamw-offloaded", "sgd-momentum-offloaded"]
OFFLOADED: dict[Optimizer, Optimizer] = {"adamw": "adamw-offloaded", "sgd-momentum": "sgd-momentum-offloaded"}
"""The same with its states (and float32 masters) in host memory, where it steps."""
OPTIMIZER_COPIES = {"adamw": 2, "sgd": 0, "sgd-momentum": 1, "adamw-offloaded": 0, "sgd-momentum-offloaded": 0}
"""States of the optimizer on the device in copies of the trained parameters (AdamW: both moments)."""
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "gpipe")
"""What a search tries unless it is told otherwise."""

_PIN = re.compile(r"\s*(embed|head|\*|\d+(?:-\d+)?)\s*:\s*(\S+)\s*", re.ASCII)

_PART = re.compile(r"z[123]|rs?|h\d+|(?:dp|sp|cp|ep)\d+|tp\d+s?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Pin:
    """Layers that must take a strategy: `embed`, `head`, `*` (all blocks), `3` or `0-3`; written `0-3: dp4-z3`."""

    layers: str
    strategy: Strategy

    @classmethod
    def parse(cls, text: str) -> Pin:
        """The pin that `text` writes; InputError when it is none."""
        match = _PIN.fullmatch(text)
        if match is None:
            raise InputError(
                f"{text!r} is not a pin",
                why="the form is LAYERS: STRATEGY, LAYERS being embed, head, * (all blocks), 3 or 0-3",
                fix='write for example --pin "0-3: dp4-z3"',
            )
        return cls(layers=match[1], strategy=Strategy.parse(match[2]))

    @property
    def short(self) -> str:
        """The pin as `Pin.parse` reads it."""
        return f"{self.layers}: {self.strategy}"

    def indices(self, num_layers: int) -> range:
        """The places of the chain that it pins (embed is 0); InputError for layers that the model does not have."""
        return _indices(self.layers, num_layers, f"the pin {self.short!r}")


@dataclass(frozen=True, kw_only=True)
class Forbid:
    """Layers that must not take a strategy, or any that has one part: `0-3: dp4-z3`, `*: tp4`, `*: z3` or `*: r`."""

    layers: str
    what: str

    @classmethod
    def parse(cls, text: str) -> Forbid:
        """The ban that `text` writes; InputError when it is none."""
        match = _PIN.fullmatch(text)
        if match is None:
            raise InputError(
                f"{text!r} forbids nothing",
                why="the form is LAYERS: STRATEGY, LAYERS being embed, head, * (all blocks), 3 or 0-3",
                fix='write for example --forbid "*: r" or --forbid "0-3: dp4-z3"',
            )
        if _PART.fullmatch(match[2]) is None:
            Strategy.parse(match[2])
        return cls(layers=match[1], what=match[2])

    @property
    def short(self) -> str:
        """The ban as `Forbid.parse` reads it."""
        return f"{self.layers}: {self.what}"

    def indices(self, num_layers: int) -> range:
        """As for Pin."""
        return _indices(self.layers, num_layers, f"the ban {self.short!r}")

    def meets(self, strategy: Strategy) -> bool:
        """Whether it forbids this strategy: by its whole short form, or by one part (`tp4` is also in `tp4s`)."""
        if _PART.fullmatch(self.what) is None:
            return strategy == Strategy.parse(self.what)
        parts = strategy.short.split("-")
        return self.what in parts or f"{self.what}s" in parts


def _indices(layers: str, num_layers: int, who: str) -> range:
    if layers == "embed":
        return range(1)
    if layers == "head":
        return range(num_layers - 1, num_layers)
    if layers == "*":
        return range(1, num_layers - 1)
    first, _, last = layers.partition("-")
    start, stop = int(first), int(last or first)
    if not start <= stop < num_layers - 2:
        raise InputError(
            f"{who} names layers that the model does not have",
            why=f"its blocks are 0-{num_layers - 3}",
            fix="name layers of the model",
        )
    return range(start + 1, stop + 2)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the plan is for.

    global_batch: samples of one optimizer step over all ranks (a plan never changes it); sequence: tokens a sample;
    memory_bytes: the budget of one rank for live tensors, None for what the cluster can hold; pp: the allowed numbers
    of stages, empty for all; num_micro_batches: likewise; pins and forbids: what layers must and must not take;
    max_strategies: at most so many different ones over the blocks; tp_across_nodes: whether tp may leave a node;
    allow_unrunnable: whether the plan may have parts that the runtime of this version cannot run.
    Raises ValueError for numbers below one and values of another type.
    """

    global_batch: int
    sequence: int
    dtype: str = "float32"
    optimizer: Optimizer = "adamw"
    memory_bytes: int | None = None
    pp: tuple[int, ...] = ()
    num_micro_batches: tuple[int, ...] = ()
    schedules: tuple[Schedule, ...] = SCHEDULES
    pins: tuple[Pin, ...] = ()
    forbids: tuple[Forbid, ...] = ()
    max_strategies: int | None = None
    tp_across_nodes: bool = False
    allow_unrunnable: bool = omitted(False)

    def __post_init__(self) -> None:
        for field in ("global_batch", "sequence", "memory_bytes", "max_strategies"):
            value = getattr(self, field)
            if value is not None and not (type(value) is int and 1 <= value < 1 << 60):
                raise ValueError(f"Request.{field} must be a whole number >= 1, not {value!r}")
        for field in ("pp", "num_micro_batches"):
            if any(type(value) is not int or value < 1 for value in getattr(self, field)):
                raise ValueError(f"Request.{field} must be whole numbers >= 1, not {getattr(self, field)}")
        for field in ("tp_across_nodes", "allow_unrunnable"):
            if type(getattr(self, field)) is not bool:
                raise ValueError(f"Request.{field} must be True or False, not {getattr(self, field)!r}")
        if self.optimizer not in get_args(Optimizer):
            raise ValueError(
                f"Request.optimizer must be one of {', '.join(get_args(Optimizer))}, not {self.optimizer!r}"
            )
        if not self.schedules or not set(self.schedules) <= set(get_args(Schedule)):
            raise ValueError(f"Request.schedules must name some of {', '.join(get_args(Schedule))}")
