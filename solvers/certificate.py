"""Who else says that a choice is best: CP-SAT and HiGHS; they share only the layout classes with the solver."""

from __future__ import annotations

from autopar.errors import RunError
from autopar.price import INFEASIBLE, Choice, CostTables, score
from autopar.solvers.counted import nothing_at_or_below
from autopar.solvers.ilp import Answer, cp_sat, highs

CP_SAT = "OR-Tools CP-SAT"
HIGHS = "HiGHS"


def certify(tables: CostTables, choice: Choice, *, limit_s: float = 10.0) -> tuple[str, ...]:
    """The names of the provers that agree with a choice; each program has limit_s.

    CP-SAT agrees when it proves that nothing is below the choice's lower bound (or that nothing fits), in the count
    form first, then layer by layer; HiGHS when the best choice it finds adds up to the objective within 1e-6 (or it
    finds none). A prover that runs out of time is not named; it is no objection.
    Raises RunError when one finds a choice that fits and is below the bound, ValueError for a choice of which nothing
    was proven.
    """
    bound = choice.lower_bound_ns
    if choice.layers_per_stage is None or choice.strategies is None:
        if bound != INFEASIBLE:
            raise ValueError("nothing is proven of this choice but that it is above a limit")
        refuted = _check(tables, CP_SAT, cp_sat(tables, limit_s=limit_s), bound).status == "INFEASIBLE"
        agrees = _check(tables, HIGHS, highs(tables, limit_s=limit_s), bound).status == "INFEASIBLE"
    else:
        objective = score(tables, choice.layers_per_stage, choice.strategies).objective_ns
        refuted = bound <= 0 or nothing_at_or_below(tables, bound - 1, limit_s=limit_s)
        if not refuted:
            answer = cp_sat(tables, at_most_ns=bound - 1, limit_s=limit_s)
            refuted = _check(tables, CP_SAT, answer, bound).status == "INFEASIBLE"
        found = _check(tables, HIGHS, highs(tables, limit_s=limit_s), bound).objective_ns(tables)
        agrees = found is not None and abs(found - objective) <= 1e-6 * objective
    return (*([CP_SAT] if refuted else []), *([HIGHS] if agrees else []))


def _check(tables: CostTables, name: str, answer: Answer, bound: int) -> Answer:
    found = answer.objective_ns(tables)
    if found is not None and found < bound:
        raise RunError(
            f"{name} contradicts the solver: it finds a choice below its lower bound of {bound} ns",
            why=f"layers per stage {answer.layers_per_stage}, strategies {answer.strategies} fit in {found} ns",
            fix="this is a bug of the solver: report it with the inputs of the search",
        )
    return answer
