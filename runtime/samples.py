"""Which samples of a global batch are a rank's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from autopar.errors import InputError
from autopar.plan import Plan


def own_samples(batch: Mapping[str, Tensor], plan: Plan, place: int) -> dict[str, Tensor]:
    """The samples, micro-batch by micro-batch, of the rank at `place` among those of its stage.

    batch: the global one, every tensor's first dimension is `global_batch`. Raises InputError for one that does not
    fit the plan.
    """
    samples, ranks = plan.request.global_batch, plan.mesh.ranks_per_stage
    for name, value in batch.items():
        if value.shape[0] != samples:
            raise InputError(
                f"the batch does not fit the plan: {name} has {value.shape[0]} samples",
                why=f"the plan was made for a global batch of {samples}",
                fix="give the whole global batch, or search again for this batch",
            )
    return {
        name: torch.cat([part.chunk(ranks)[place] for part in value.chunk(plan.num_micro_batches)])
        for name, value in batch.items()
    }
