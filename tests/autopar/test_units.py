from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import InputError
from autopar.units import DTYPE_BYTES, dtype_name, format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("24GiB", 24 * 2**30),
        ("24G", 24 * 2**30),
        ("24GB", 24 * 10**9),
        ("1024", 1024),
        ("1024B", 1024),
        (" 1.5 MiB ", 3 * 2**19),
        ("0.1GB", 10**8),
        ("2K", 2048),
        ("1T", 2**40),
    ],
)
def test_sizes_are_read_as_documented(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["abc", "", "-1GiB", "0", "0GiB", "24 gib", "1e9", "nan", "24GiBB", "٢GiB", "9" * 400]
)
def test_other_sizes_are_refused_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_bytes(text)
    assert "24GiB" in str(caught.value)


@given(st.text(max_size=20))
def test_no_text_breaks_the_size_reader(text: str) -> None:
    with contextlib.suppress(InputError):
        assert parse_bytes(text) >= 1


@given(st.integers(1, 2**59))
def test_a_formatted_size_reads_back_within_one_percent(size_bytes: int) -> None:
    text = format_bytes(size_bytes).replace(" ", "")
    assert parse_bytes(text) == pytest.approx(size_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(125, "2 min 05 s"), (60, "1 min 00 s"), (1.5, "1.50 s"), (0.0203, "20.3 ms"), (5e-6, "5.00 us"), (0, "0.00 us")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_dtype_names() -> None:
    assert dtype_name("bf16") == dtype_name("torch.bfloat16") == "bfloat16"
    assert all(dtype_name(name) == name for name in DTYPE_BYTES)
    with pytest.raises(InputError, match="'float12' is not a dtype"):
        dtype_name("float12")
