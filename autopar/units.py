"""Bytes and seconds inside; GiB and ms only where people read. No other file holds a factor 1024 or 1e6."""

from __future__ import annotations

import re
from types import MappingProxyType

from autopar.errors import InputError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
NS_PER_S = 1_000_000_000

DTYPE_BYTES = MappingProxyType(
    {
        "float64": 8,
        "float32": 4,
        "bfloat16": 2,
        "float16": 2,
        "int64": 8,
        "int32": 4,
        "int16": 2,
        "int8": 1,
        "uint8": 1,
        "bool": 1,
    }
)
"""Bytes of one element, by torch's own dtype names without the prefix."""


_DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}

_BINARY = {"K": KIB, "M": MIB, "G": GIB, "T": TIB}
_DECIMAL = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(iB|B)?|B)?", re.ASCII)


def parse_bytes(text: str) -> int:
    """Bytes of a size such as `24GiB`, `24G` (= GiB), `24GB` (= 10^9) or `1024`.

    Raises InputError for any other form and for sizes below one byte.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InputError(
            f"{text!r} is not a memory size",
            why="accepted: 24GiB, 24G (= GiB), 24GB (10^9 bytes), or plain bytes; K, M, G or T",
            fix="write for example 24GiB",
        )
    number, prefix, suffix = match.groups()
    factor = 1 if prefix is None else (_DECIMAL if suffix == "B" else _BINARY)[prefix]
    size = float(number) * factor
    if not 1 <= size < 1 << 60:
        raise InputError(
            f"{text!r} is not a sensible memory size",
            why="sizes go from 1 byte to 2^60 bytes",
            fix="write for example 24GiB",
        )
    return round(size)


def format_bytes(size_bytes: float) -> str:
    """The size for people: `1.50 GiB`, `20.3 MiB`, `512 B`."""
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size_bytes) >= factor:
            value = size_bytes / factor
            return f"{value:.2f} {unit}" if abs(value) < 10 else f"{value:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """The duration for people: `1.50 s`, `20.3 ms`, `5.0 us`, `2 min 05 s`."""
    if abs(seconds) >= 60:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        value = seconds * factor
        if abs(value) >= 1 or unit == "us":
            return f"{value:.2f} {unit}" if abs(value) < 10 else f"{value:.1f} {unit}"
    raise AssertionError("unreachable")


def dtype_name(text: str) -> str:
    """Torch's dtype name for `bf16`, `bfloat16`, `torch.bfloat16` and the like; InputError for an unknown one."""
    name = text.removeprefix("torch.")
    name = _DTYPE_ALIASES.get(name, name)
    if name not in DTYPE_BYTES:
        known = ", ".join(sorted({*DTYPE_BYTES, *_DTYPE_ALIASES}))
        raise InputError(f"{text!r} is not a dtype", why=f"known: {known}", fix="write for example float32")
    return name


def widening(dtype: str) -> int:
    """How many bytes of gradients and masters a byte of a parameter has: mixed precision holds them in float32."""
    return 2 if dtype == "bfloat16" else 1
