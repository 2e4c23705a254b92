"""What `autopar verify` does: one plan, or random legal plans of a model, each against one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autopar.errors import RunError
from autopar.folding import fold_plan
from autopar.formats import dumps
from autopar.plan import Plan
from autopar.random_plans import plan_words
from autopar.report import comparison_words, random_plans_words


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The answer as JSON and in words, and the error of what did not agree."""

    json: str
    words: str
    error: RunError | None

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            raise self.error


def verify_command(
    plan: Path | None, model: str | None, *, nproc: int, count: int, seed: int, progress: Callable[[Any], None]
) -> Verified:
    """The comparison of `plan`, or of `count` random plans of `model` on `nproc` ranks; raises what they raise."""
    return _one(Plan.load(plan), progress) if plan else _random(str(model), nproc, count, seed, progress)


def _one(plan: Plan, progress: Callable[[Any], None]) -> Verified:
    plan.check_runnable()
    from autopar.runtime.launch import inside_torchrun
    from autopar.runtime.verify import verify_plan

    found = verify_plan(plan, progress=progress)
    words = comparison_words(found)
    folded = fold_plan(plan)
    if folded is not plan and not inside_torchrun():
        words += f"\nfolded from {plan.cluster.world_size} ranks to {plan_words(folded)}"
    error = RunError(
        "the plan does not compute what one process computes",
        why=words,
        fix="report this plan as a bug; until then pin that layer to another strategy",
    )
    body = {"verified": found.agrees, **asdict(found)}
    return Verified(json=dumps("autopar.verify", 1, body), words=words, error=None if found.agrees else error)


def _random(model: str, nproc: int, count: int, seed: int, progress: Callable[[Any], None]) -> Verified:
    from autopar.runtime.source import canonical_source
    from autopar.runtime.verify_random import verify_random

    found = verify_random(canonical_source(model, {}), nproc=nproc, count=count, seed=seed, progress=progress)
    wrong = [one for one in found if not one.comparison.agrees]
    error = None
    if wrong:
        first = wrong[0]
        error = RunError(
            f"plan {first.number} of seed {seed} does not compute what one process computes: {first.plan}",
            why=comparison_words(first.comparison),
            fix="report this plan as a bug",
        )
    body = {
        "verified": not wrong,
        "seed": seed,
        "nproc": nproc,
        "plans": [{"number": one.number, "plan": one.plan, **asdict(one.comparison)} for one in found],
    }
    words = random_plans_words(found, nproc=nproc, seed=seed)
    return Verified(json=dumps("autopar.verify_random", 1, body), words=words, error=error)
