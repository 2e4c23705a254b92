"""The engines that the tests of the solver run on."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from autopar.solvers.segment import Engine


@pytest.fixture(
    params=[
        "numpy",
        pytest.param("numba", marks=pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")),
    ]
)
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each way to run the inner loops."""
    return request.param  # type: ignore[no-any-return]
