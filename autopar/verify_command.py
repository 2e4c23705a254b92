"""What `autopar verify` does: a plan, or random legal plans of a model, against one process; or a plan's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from autopar.errors import RunError, UsageError
from autopar.folding import fold_plan
from autopar.formats import dumps
from autopar.plan import Plan
from autopar.random_plans import plan_words
from autopar.report import comparison_words, counted_tables, random_plans_words, render

COUNTED_TOLERANCE = 0.10
"""How far a predicted peak may be from the counted one."""

COUNTED_HOW = "counted on fake CPU tensors: the first rank of each pipeline rank, which holds the most of its stage"


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


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The arguments of the command: a plan, or a model with its settings; UsageError when they do not go together."""

    plan: Path | None = None
    model: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    nproc: int = 4
    count: int = 20
    seed: int = 0
    fake: bool = False

    def __post_init__(self) -> None:
        if (self.plan is None) == (self.model is None):
            why = "it got neither, or both"
            raise UsageError("verify takes PLAN or --model", why=why, fix="autopar verify plan.json")
        if self.plan is None and self.fake:
            raise UsageError("--fake takes a PLAN", why="it counts its memory", fix="autopar verify plan.json --fake")
        if self.plan is not None and self.settings:
            raise UsageError("--set goes with --model", why="a plan is of one model", fix="leave --set out")


def verify_command(wanted: Wanted, *, progress: Callable[[Any], None]) -> Verified:
    """The comparison of a plan, its counted memory, or the comparison of random plans; raises what they raise."""
    if wanted.plan is None:
        return _random(wanted, progress)
    plan = Plan.load(wanted.plan)
    plan.check_runnable()
    return _counted(plan, progress) if wanted.fake else _one(plan, progress)


def _one(plan: Plan, progress: Callable[[Any], None]) -> Verified:
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


def _counted(plan: Plan, progress: Callable[[Any], None]) -> Verified:
    from autopar.runtime.counting import count_peaks

    found = count_peaks(plan, progress=progress)
    predicted = None if plan.predicted is None else [plan.predicted.memory[one.rank] for one in found]
    off = max(
        (abs(p.peak_bytes / one.peak_bytes - 1) for one, p in zip(found, predicted or (), strict=False)), default=0
    )
    words = render(*counted_tables(plan, found), COUNTED_HOW)
    error = RunError(
        f"the predicted memory is off by {off:.0%}, more than {COUNTED_TOLERANCE:.0%}",
        why=COUNTED_HOW,
        fix="profile the model again with the sequence and dtype of the plan, and search again; or report it as a bug",
    )
    body = {
        "within": off <= COUNTED_TOLERANCE if predicted else None,
        "tolerance": COUNTED_TOLERANCE,
        "ranks": [asdict(one) for one in found],
        "predicted": None if predicted is None else [asdict(one) for one in predicted],
    }
    return Verified(
        json=dumps("autopar.counted", 2, body), words=words, error=error if off > COUNTED_TOLERANCE else None
    )


def _random(wanted: Wanted, progress: Callable[[Any], None]) -> Verified:
    from autopar.runtime.source import canonical_source
    from autopar.runtime.verify_random import verify_random

    nproc, seed, source = wanted.nproc, wanted.seed, canonical_source(str(wanted.model), wanted.settings)
    found = verify_random(source, nproc=nproc, count=wanted.count, seed=seed, progress=progress)
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
