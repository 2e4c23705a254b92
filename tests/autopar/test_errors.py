from __future__ import annotations

import pickle

import pytest

from autopar.errors import AutoparError, InfeasibleError, InputError, RunError, UsageError


@pytest.mark.parametrize(
    ("kind", "exit_code"), [(UsageError, 2), (InputError, 3), (InfeasibleError, 4), (RunError, 5)]
)
def test_an_error_says_what_why_fix_and_crosses_processes(kind: type[AutoparError], exit_code: int) -> None:
    error = kind("no plan fits", why="21.4 GiB > 16.0 GiB", fix="--memory 22GiB")
    assert str(error) == "no plan fits\n  why: 21.4 GiB > 16.0 GiB\n  fix: --memory 22GiB"
    assert error.exit_code == exit_code
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (copy.what, copy.why, copy.fix) == (error.what, error.why, error.fix)


def test_empty_parts_take_no_line() -> None:
    assert str(InputError("x")) == "x"
    assert str(InputError("x", fix="y")) == "x\n  fix: y"
