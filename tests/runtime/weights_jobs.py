"""Jobs on real ranks about plain files of weights."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.runtime.exporting import weight_files
from autopar.runtime.gradients import whole_parameter
from autopar.runtime.models import build_model
from autopar.runtime.parallel import parallelize
from tests.runtime.rank_jobs import make_plan


def export_and_import(source: str, folder: str, writer: Any, reader: Any) -> dict[str, Any]:
    """The largest error of a parameter that one plan exported and another took; the names in the files; a refusal."""
    world = dist.get_world_size()
    plans = [make_plan(source, strategies, world=world, **shape) for strategies, shape in (writer, reader)]
    parallelize(build_model(source), plans[0]).export(folder)
    named = dict(build_model(source).named_parameters(remove_duplicate=False))
    wrapped = parallelize(build_model(source, seed=3), plans[1])
    wrapped.import_weights(folder)
    errors = [float((whole_parameter(e) - named[e.name]).abs().max()) for e in wrapped.held]
    dist.barrier()
    try:
        wrapped.import_weights(f"{folder}-nowhere")
        said = "not refused"
    except AutoparError as error:
        said = str(error)
    return {"error": max(errors), "names": sorted(weight_files(folder)), "said": said}
