"""ZeRO-2 and ZeRO-3 layer by layer, on stock fully_shard; each layer over its own data-parallel ranks.

Every reduction is a plain sum: fully_shard's own average divides by each layer's own number of ranks, which is
silently wrong where layers differ in it. On gloo the sum must be forced before the factor is set.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from autopar.runtime.precision import MASTER_DTYPE


def owners(model: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """The modules that hold these parameters directly, also under other names, each once, in order."""
    named = dict(model.named_parameters(remove_duplicate=False))
    wanted = {id(named[name]) for name in names}
    return [m for m in model.modules() if any(id(p) in wanted for p in m.parameters(recurse=False))]


def shard_modules(
    modules: list[nn.Module], mesh: DeviceMesh, *, keep_unsharded: bool, gathered: torch.dtype | None
) -> None:
    """Shard the parameters of these modules together over `mesh`; ZeRO-2 keeps them whole from forward to backward.

    gathered: the dtype in which the forward uses them, None for their own.
    """
    fully_shard(
        modules if len(modules) > 1 else modules[0],
        mesh=mesh,
        reshard_after_forward=not keep_unsharded,
        mp_policy=_policy(gathered),
    )


def shard_root(root: nn.Module, mesh: DeviceMesh, ignored: set[nn.Parameter], *, gathered: torch.dtype | None) -> None:
    """Make a module the root of its sharded layers, so that they share streams and prefetch; then force plain sums.

    root: the body of a stage; where backwards run in two parts, all that the pipeline schedule sees of the stage. The
    schedule then keeps its parameters whole and reduces its gradients once, after the last part of the last backward:
    between the two parts the layers' own hooks would reduce gradients that are not there yet.
    ignored: the parameters that no ZeRO layer holds; gathered: as in `shard_modules`.
    """
    fully_shard(root, mesh=mesh, ignored_params=ignored, mp_policy=_policy(gathered))
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def _policy(gathered: torch.dtype | None) -> MixedPrecisionPolicy:
    """Inputs are not cast: a sharded layer must get what a replicated one gets."""
    reduced = None if gathered is None else MASTER_DTYPE
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=reduced, cast_forward_inputs=False)
