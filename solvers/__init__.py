"""Optimisers over plain numpy tables. They choose; `autopar.price.score` adds up."""

from autopar.solvers.certificate import certify
from autopar.solvers.chain import ChainChoice, score_chain, solve_chain
from autopar.solvers.conflict import irreducible
from autopar.solvers.lean import excess_bytes, leanest, leanest_of
from autopar.solvers.limited import solve_limited
from autopar.solvers.pipeline import TableChoice, solve_pipeline, solve_table

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
