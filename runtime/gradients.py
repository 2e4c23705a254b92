"""Gradients of a mixed plan: summed over the ranks that hold other samples, normed and clipped over everything.

The convention of the whole runtime: the loss is a sum, every reduction is a sum, and the result is divided once by
the global number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import RunError

if TYPE_CHECKING:
    from autopar.runtime.tensor_parallel import BlockPlan


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorParallelCut:
    """How a parameter was cut: the plan of its block, its name there, and the group that holds all pieces."""

    plan: BlockPlan
    name: str
    group: dist.ProcessGroup


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldParameter:
    """One parameter as this rank holds it.

    name: its name in the model; layer: its place in the chain; group: the data-parallel ranks over which its gradient
    must still be summed (None where fully_shard does it or there are none); share: what one element counts in a sum
    over all ranks of the stage, 1 / (ranks that hold the same element), a number or a tensor that broadcasts;
    tied: it has a second copy on another stage; counted: False for that copy; aliases: its other names in the model;
    tensor_parallel: how tensor parallelism cut it, None where it did not.
    """

    name: str
    layer: int
    parameter: nn.Parameter
    group: dist.ProcessGroup | None
    share: float | Tensor
    tied: bool = False
    counted: bool = True
    aliases: tuple[str, ...] = ()
    tensor_parallel: TensorParallelCut | None = None

    @property
    def local_grad(self) -> Tensor | None:
        """This rank's piece of the gradient."""
        grad = self.parameter.grad
        return None if grad is None else local_piece(grad)


def local_piece(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharded or not; a view of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(entry: HeldParameter, tensor: Tensor) -> Tensor:
    """The full tensor of which `tensor` (the parameter or its gradient) is this rank's piece.

    A collective of the ranks that share the parameter.
    """
    local = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    cut = entry.tensor_parallel
    if cut is None:
        return local.detach()
    local = local.detach().contiguous()
    pieces = [torch.empty_like(local) for _ in range(dist.get_world_size(cut.group))]
    dist.all_gather(pieces, local, group=cut.group)
    return cut.plan.unshard(cut.name, pieces)


def shard_of(parameter: DTensor, full: Tensor) -> Tensor:
    """The rows of a tensor that this rank holds of a sharded parameter with as many rows.

    fully_shard cuts the first dimension in equal chunks, the last ones shorter or empty; of a (replicate, shard) mesh
    the last dimension cuts.
    """
    mesh = parameter.device_mesh
    chunks = full.chunk(mesh.size(mesh.ndim - 1), 0)
    rank = mesh.get_local_rank(mesh.ndim - 1)
    return chunks[rank] if rank < len(chunks) else full[:0]


def reduce_gradients(held: Sequence[HeldParameter]) -> None:
    """Sum the gradients of replicated layers over their data-parallel ranks, in one fixed order on all of them.

    A trained parameter without a gradient on this rank takes part with zeros, so that no rank waits for another.
    """
    pending = []
    for entry in held:
        if entry.group is None or not entry.parameter.requires_grad:
            continue
        if entry.parameter.grad is None:
            entry.parameter.grad = torch.zeros_like(entry.parameter)
        grad = entry.local_grad
        assert grad is not None
        pending.append(dist.all_reduce(grad, group=entry.group, async_op=True))
    for work in pending:
        work.wait()


def scale_gradients(held: Sequence[HeldParameter], factor: float) -> None:
    """Multiply every local gradient by `factor`."""
    grads = [grad for entry in held if (grad := entry.local_grad) is not None]
    if grads:
        torch._foreach_mul_(grads, factor)


def gradient_norm(held: Sequence[HeldParameter]) -> Tensor:
    """The 2-norm of the gradient of the whole model, each element counted once; one all-reduce over the world."""
    total = torch.zeros((), dtype=torch.float64)
    for entry in held:
        grad = entry.local_grad
        if grad is not None and entry.counted:
            total += (grad.detach().double().square() * entry.share).sum().cpu()
    dist.all_reduce(total)
    return total.sqrt()


def clip_gradients(held: Sequence[HeldParameter], max_norm: float) -> Tensor:
    """The 2-norm of the whole gradient, after scaling it down to `max_norm` where it is larger."""
    norm = gradient_norm(held)
    factor = min(1.0, max_norm / (float(norm) + 1e-6))
    if factor < 1.0:
        scale_gradients(held, factor)
    return norm


def check_gradients_present(held: Sequence[HeldParameter], group: dist.ProcessGroup) -> None:
    """Raise RunError on every rank of the stage when some trained parameter got no gradient on any of them."""
    trained = [entry for entry in held if entry.parameter.requires_grad]
    if not trained:
        return
    present = torch.tensor([entry.parameter.grad is not None for entry in trained], dtype=torch.int32)
    dist.all_reduce(present, op=dist.ReduceOp.MAX, group=group)
    missing = [entry.name for entry, there in zip(trained, present.tolist(), strict=True) if not there]
    if missing:
        raise RunError(
            f"{len(missing)} trained parameters got no gradient in the first step: {', '.join(missing[:8])}",
            why="the forward does not use them, or a sharded layer lost its gradients",
            fix="freeze unused parameters with requires_grad_(False) before autopar.parallelize",
        )
