"""Which of several global batches is best: each is searched, the most samples a second count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopar.errors import AutoparError, InfeasibleError, InputError
from autopar.finalists import step_s
from autopar.measured import ClusterFile, ModelFile
from autopar.plan import Plan
from autopar.relaxing import search_or_explain
from autopar.request import Request
from autopar.searching import Progress


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A global batch with its plan, or with why it has none."""

    global_batch: int
    plan: Plan | None = None
    why: str = ""

    @property
    def samples_per_s(self) -> float:
        """The predicted samples of a second, 0 without a plan."""
        return 0.0 if self.plan is None else self.global_batch / step_s(self.plan)

    def __str__(self) -> str:
        if self.plan is None:
            return f"global batch {self.global_batch}: no plan ({self.why})"
        return f"global batch {self.global_batch}: {self.samples_per_s:.4g} samples a second"


def search_batches(
    model_file: ModelFile,
    cluster_file: ClusterFile,
    request: Request,
    global_batches: Sequence[int],
    *,
    micro_batch_sizes: Sequence[int] = (),
    progress: Progress | None = None,
    deadline: float | None = None,
    stop: Callable[[], bool] | None = None,
    verify: bool = False,
) -> tuple[Plan, tuple[Tried, ...]]:
    """The plan with the most samples a second over these global batches, and what came of each.

    micro_batch_sizes: the samples that one micro-batch may have over the ranks of its stage, empty for any. Of equal
    plans that of the first batch. Raises the error of the first batch when none has a plan.
    """
    tried: list[Tried] = []
    errors: list[AutoparError] = []
    for global_batch in dict.fromkeys(global_batches):
        try:
            asked = with_micro_batches(replace(request, global_batch=global_batch), micro_batch_sizes)
            found = search_or_explain(
                model_file, cluster_file, asked, progress=progress, deadline=deadline, stop=stop, verify=verify
            )
        except (InputError, InfeasibleError) as error:
            errors.append(error)
            tried.append(Tried(global_batch=global_batch, why=error.what))
            continue
        tried.append(Tried(global_batch=global_batch, plan=found.plan))
    best = max(tried, key=lambda one: one.samples_per_s)
    if best.plan is None:
        raise errors[0]
    return best.plan, tuple(tried)


def with_micro_batches(request: Request, sizes: Sequence[int]) -> Request:
    """The request with the numbers of micro-batches that have one of these sizes; InputError for none."""
    if not sizes:
        return request
    counts = sorted({request.global_batch // size for size in sizes if request.global_batch % size == 0})
    if request.num_micro_batches:
        counts = [count for count in counts if count in request.num_micro_batches]
    if not counts:
        also = (
            f"; allowed numbers: {', '.join(map(str, request.num_micro_batches))}" if request.num_micro_batches else ""
        )
        raise InputError(
            f"no micro-batch of a global batch of {request.global_batch} has the size asked for",
            why=f"allowed sizes: {', '.join(map(str, sizes))}{also}",
            fix="give sizes that divide the global batch",
        )
    return replace(request, num_micro_batches=tuple(counts))
