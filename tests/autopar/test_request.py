from __future__ import annotations

import pytest
from hypothesis import given

from autopar.errors import InputError
from autopar.formats import from_plain, to_plain
from autopar.request import Pin, Request
from tests.draws import pins, requests


@given(pins)
def test_the_short_form_of_a_pin_parses_back(pin: Pin) -> None:
    assert Pin.parse(pin.short) == pin


@given(requests)
def test_a_request_survives_plain_data(request: Request) -> None:
    assert from_plain(Request, to_plain(request), "request") == request


@pytest.mark.parametrize("text", ["", "dp4", "3 dp4", "a: dp4", "-1: dp4", "0-: dp4", "3: dp4 tp2", "3: pp2", ": dp4"])
def test_other_text_is_no_pin(text: str) -> None:
    with pytest.raises(InputError):
        Pin.parse(text)


@pytest.mark.parametrize(
    ("text", "places"),
    [("embed: dp4", [0]), ("head: dp4", [9]), ("*: dp4", list(range(1, 9))), ("0: dp4", [1]), ("6-7: dp4", [7, 8])],
)
def test_where_a_pin_stands_in_a_chain_of_ten(text: str, places: list[int]) -> None:
    assert list(Pin.parse(text).indices(10)) == places


@pytest.mark.parametrize("text", ["8: dp4", "0-8: dp4", "3-1: dp4"])
def test_a_pin_on_missing_layers_names_the_blocks(text: str) -> None:
    with pytest.raises(InputError) as caught:
        Pin.parse(text).indices(10)
    assert "its blocks are 0-7" in caught.value.why


@pytest.mark.parametrize(
    "changes",
    [
        {"global_batch": 0},
        {"global_batch": -8},
        {"sequence": 0},
        {"memory_bytes": 0},
        {"global_batch": 1 << 60},
        {"pp": (0,)},
        {"num_micro_batches": (4, -1)},
    ],
)
def test_numbers_below_one_and_absurd_ones_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"Request\."):
        Request(**({"global_batch": 8, "sequence": 16} | changes))  # type: ignore[arg-type]
