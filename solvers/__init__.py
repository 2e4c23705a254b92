"""Optimisers over plain numpy tables. They choose; `autopar.price.score` adds up.

The names load on first use: a search needs few of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.solvers.certificate import certify
    from autopar.solvers.chain import ChainChoice, score_chain, solve_chain
    from autopar.solvers.conflict import irreducible
    from autopar.solvers.lean import excess_bytes, leanest, leanest_of
    from autopar.solvers.limited import solve_limited
    from autopar.solvers.pipeline import TableChoice, solve_pipeline, solve_table

_HOMES = {
    "ChainChoice": "chain",
    "TableChoice": "pipeline",
    "certify": "certificate",
    "excess_bytes": "lean",
    "irreducible": "conflict",
    "leanest": "lean",
    "leanest_of": "lean",
    "score_chain": "chain",
    "solve_chain": "chain",
    "solve_limited": "limited",
    "solve_pipeline": "pipeline",
    "solve_table": "pipeline",
}
__all__ = [
    "ChainChoice",
    "TableChoice",
    "certify",
    "excess_bytes",
    "irreducible",
    "leanest",
    "leanest_of",
    "score_chain",
    "solve_chain",
    "solve_limited",
    "solve_pipeline",
    "solve_table",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"autopar.solvers.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'autopar.solvers' has no attribute {name!r}")
