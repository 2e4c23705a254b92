"""How one layer is spread over the ranks of its pipeline stage, and its short form.

The short form is the same in plan files, pins and messages; parts of degree 1 are left out:

    dp<N>[-z1|-z2|-z3][-h<shard>][-tp<N>[s]][-sp<N>][-cp<N>][-ep<N>][-r|-rs]

    dp4-z3-tp2s-r   data parallel 4, ZeRO-3, tensor parallel 2 with sequence-parallel norms, full recompute
    dp8-z3-h4       states sharded over 4 ranks, replicated over 2 (HSDP)
    tp4             tensor parallel only
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from autopar.errors import InputError

Recompute = Literal["none", "full", "selective"]

_SHORT = re.compile(
    r"(?:dp(?P<dp>\d+))?(?:-z(?P<zero>[123]))?(?:-h(?P<shard>\d+))?(?:-?tp(?P<tp>\d+)(?P<s>s)?)?"
    r"(?:-?sp(?P<sp>\d+))?(?:-?cp(?P<cp>\d+))?(?:-?ep(?P<ep>\d+))?(?:-(?P<r>rs?))?",
    re.ASCII,
)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """The parallel degrees of one layer.

    dp: ranks that hold different samples; zero: what they shard (0 nothing, 1 optimizer, 2 and gradients,
    3 and parameters); shard: over how many of the dp ranks (None: all); tp: tensor parallel, with
    `sequence_norms` the parts between the sharded regions run on 1/tp of the sequence; sp: Ulysses;
    cp: context parallel; ep: expert parallel; recompute: what the backward computes again.
    Raises ValueError for degrees below 1 or parts that contradict each other.
    """

    dp: int = 1
    zero: int = 0
    shard: int | None = None
    tp: int = 1
    sequence_norms: bool = False
    sp: int = 1
    cp: int = 1
    ep: int = 1
    recompute: Recompute = "none"

    def __post_init__(self) -> None:
        for field in ("dp", "tp", "sp", "cp", "ep"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"Strategy.{field} must be a whole number >= 1, not {value!r}")
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"Strategy.zero must be 0, 1, 2 or 3, not {self.zero!r}")
        if self.zero and self.dp == 1:
            raise ValueError("Strategy.zero shards over dp ranks and needs dp > 1")
        if self.shard is not None and (not self.zero or self.dp % self.shard or not 1 < self.shard < self.dp):
            raise ValueError(f"Strategy.shard must be a proper divisor of dp {self.dp} and needs ZeRO")
        if self.sequence_norms and self.tp == 1:
            raise ValueError("Strategy.sequence_norms needs tp > 1")
        if self.recompute not in ("none", "full", "selective"):
            raise ValueError(f"Strategy.recompute is unknown: {self.recompute!r}")

    @property
    def ranks(self) -> int:
        """The number of ranks of a stage that this layer occupies."""
        return self.dp * self.tp * self.sp * self.cp * self.ep

    @property
    def state_shards(self) -> int:
        """Over how many ranks ZeRO cuts this layer's states (1 without ZeRO)."""
        return 1 if not self.zero else (self.shard or self.dp)

    @property
    def sequence_pieces(self) -> int:
        """Into how many equal pieces the sequence falls: evenly for norms and sp, in pairs for cp."""
        return self.sp * (self.tp if self.sequence_norms else 1) * (2 * self.cp if self.cp > 1 else 1)

    @property
    def short(self) -> str:
        """The short form; `Strategy.parse` reads it back."""
        parts = [f"dp{self.dp}"] if self.dp > 1 else []
        if self.zero:
            parts.append(f"z{self.zero}")
        if self.shard:
            parts.append(f"h{self.shard}")
        if self.tp > 1:
            parts.append(f"tp{self.tp}{'s' if self.sequence_norms else ''}")
        parts += [f"{axis}{getattr(self, axis)}" for axis in ("sp", "cp", "ep") if getattr(self, axis) > 1]
        if not parts:
            parts = ["dp1"]
        if self.recompute != "none":
            parts.append("r" if self.recompute == "full" else "rs")
        return "-".join(parts)

    def __str__(self) -> str:
        return self.short

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """The strategy that a short form names; InputError when it names none."""
        is_text = isinstance(text, str) and text and not text.startswith("-")
        match = _SHORT.fullmatch(text) if is_text else None
        fix = "write for example dp4-z3-tp2s-r, tp4 or dp1"
        if match is None:
            grammar = "dp<N>[-z1|-z2|-z3][-h<shard>][-tp<N>[s]][-sp<N>][-cp<N>][-ep<N>][-r|-rs]"
            raise InputError(f"{text!r:.60} is not a strategy", why=f"the form is {grammar}", fix=fix)
        part = match.groupdict()
        try:
            return cls(
                dp=int(part["dp"] or 1),
                zero=int(part["zero"] or 0),
                shard=int(part["shard"]) if part["shard"] else None,
                tp=int(part["tp"] or 1),
                sequence_norms=part["s"] is not None,
                sp=int(part["sp"] or 1),
                cp=int(part["cp"] or 1),
                ep=int(part["ep"] or 1),
                recompute={None: "none", "r": "full", "rs": "selective"}[part["r"]],  # type: ignore[arg-type]
            )
        except ValueError as error:
            raise InputError(f"{text[:60]!r} is not a strategy", why=str(error)[:200], fix=fix) from None
