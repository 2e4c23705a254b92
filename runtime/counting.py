"""`autopar verify --fake`: the peak memory of each rank of a plan, counted in one process through the real runtime.

The ranks run one after the other on fake tensors, among ranks that do not exist: the same wrapping, schedule, sharding
and optimizer as in a real run, without numbers and without memory for them. The ranks of a stage hold equally much but
for what does not divide evenly, of which the first has the most: it stands for the others.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

from autopar.errors import InputError
from autopar.plan import Plan
from autopar.runtime.batches import example_batch
from autopar.runtime.fakes import DEPENDS_ON_NUMBERS, absent_ranks, fake_mode
from autopar.runtime.hugging_face import is_hugging_face, unpacked
from autopar.runtime.launch import Progress
from autopar.runtime.losses import summed_loss
from autopar.runtime.models import build_model
from autopar.runtime.parallel import parallelize
from autopar.runtime.peak_parts import PartsAtPeak
from autopar.runtime.pipelining import without_neighbours
from autopar.runtime.train import make_optimizer, one_step


@dataclass(frozen=True, kw_only=True)
class CountedPeak:
    """The peak of the ranks of one pipeline rank over a step, the optimizer's states there; rank: the first of them.

    parts_bytes: `parameters` (masters too), `gradients`, `optimizer`, `unsharded` (whole parameters of ZeRO-2 and 3),
    `communication` (buffers of their gathers and scatters, and those that a stage receives into) and `activations`:
    all else, temporaries included. host_bytes: the peak in host memory, of which nothing is in those.
    """

    rank: int
    peak_bytes: int
    parts_bytes: dict[str, int]
    host_bytes: int = 0


def count_peaks(plan: Plan, *, progress: Progress | None = None) -> tuple[CountedPeak, ...]:
    """The peak of the first rank of each pipeline rank, in their order.

    On the CPU as in `autopar run`: attention, optimizer and temporaries are those of CPU tensors, whatever the plan's
    device. Raises InputError for a model whose course depends on numbers, and what `parallelize` does.
    Cost: two steps of a rank at about 0.1 ms an operator, whatever its sizes; a few GB at most.
    """
    plan = replace(plan, cluster=replace(plan.cluster, device="cpu"))
    width = plan.mesh.ranks_per_stage
    found = []
    for place in range(plan.pp):
        if progress is not None:
            progress({"done": place, "total": plan.pp, "what": f"rank {place * width} of {plan.cluster.world_size}"})
        try:
            found.append(_count(plan, place * width))
        except DEPENDS_ON_NUMBERS as error:
            raise InputError(
                f"{plan.model.source} cannot be counted without running it",
                why=f"its course depends on the numbers in its tensors ({error})",
                fix="leave --fake out, or run the plan: its peaks are measured then",
            ) from error
    return tuple(found)


def _count(plan: Plan, rank: int) -> CountedPeak:
    gc.collect()  # what lies in cycles is alive until something collects them
    with absent_ranks(rank, plan.cluster.world_size), unpacked(), without_neighbours(), fake_mode() as mode:
        with mode:
            model = build_model(plan.model.source, dtype=plan.request.dtype, stored=False)
        loss = summed_loss(type(model).__name__, shifted=is_hugging_face(model))
        # Outside the mode: meshes and what ranks agree on have numbers.
        parallel = parallelize(model, plan, loss=loss)
        with mode:
            batch = example_batch(model, samples=parallel.local_batch, sequence=plan.request.sequence)
            optimizer = make_optimizer(parallel)
            one_step(parallel, optimizer, batch)
            optimizer.zero_grad()
            gc.collect()
            with PartsAtPeak(parallel, parallel.held, parallel.receive_buffers, optimizer, batch) as live:
                one_step(parallel, optimizer, batch)
        return CountedPeak(
            rank=rank, peak_bytes=live.peak_bytes, parts_bytes=live.parts_bytes, host_bytes=live.host.peak_bytes
        )
