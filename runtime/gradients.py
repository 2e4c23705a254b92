"""Gradients of a mixed plan: summed over the ranks that hold other samples, normed and clipped over everything.

The convention of the whole runtime: the loss is a sum, every reduction is a sum, and the result is divided once by
the global number of tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.runtime.buckets import Grouped, sum_in_buckets, sum_rows_in_buckets
from autopar.runtime.fakes import has_numbers, number
from autopar.runtime.finite import refuse_gradients
from autopar.runtime.offload import in_host_memory, send_down
from autopar.runtime.rows import gather_rows, own_rows, rows_of, start_sum_rows

_NORM_PIECE, _MANY_PIECES = 1024, 16

if TYPE_CHECKING:
    from autopar.runtime.copies import Copies
    from autopar.runtime.tensor_parallel import BlockPlan
    from autopar.runtime.vocabulary import WordPlan


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorParallelCut:
    """How a parameter was cut: the plan of its block or vocabulary, its name there, and the group of all pieces."""

    plan: BlockPlan | WordPlan
    name: str
    group: dist.ProcessGroup

    def piece(self, full: Tensor) -> Tensor:
        """What this rank holds of a whole tensor."""
        return self.plan.shard(self.name, full, self.plan.coordinates[dist.get_rank(self.group)])


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldParameter:
    """One parameter as this rank holds it.

    name: its name in the model; layer: its place in the chain; parameter: what the forward uses; stepped: what the
    optimizer steps, a plain tensor: the parameter itself or what stands for it, its own rows under ZeRO-1, its shard
    under ZeRO-2 and 3 (both views of it), its float32 master under mixed precision; rows: the ranks over which ZeRO-1
    cuts `stepped`, None where it does not; group: the data-parallel ranks over which the gradient must still be summed
    besides (None where fully_shard does it or there are none); share: what one element counts in a sum over all ranks
    of the stage, 1 / (ranks that hold the same element of `stepped`), a number or a tensor that broadcasts; copies:
    the stages that hold it, where there are several; counted: whether this is the first of them; aliases:
    its other names in the model;
    tensor_parallel: how tensor parallelism cut it, None where it did not; in_host_memory: whether `stepped`, a copy,
    lies there with its gradient, while the parameter does not.
    """

    name: str
    layer: int
    parameter: nn.Parameter
    stepped: nn.Parameter
    rows: dist.ProcessGroup | None = None
    group: dist.ProcessGroup | None
    share: float | Tensor
    copies: Copies | None = None
    counted: bool = True
    aliases: tuple[str, ...] = ()
    tensor_parallel: TensorParallelCut | None = None
    in_host_memory: bool = False

    @property
    def local_grad(self) -> Tensor | None:
        """This rank's piece of the gradient, as the optimizer gets it."""
        grad = self.stepped.grad
        return None if grad is None else local_piece(grad)

    @property
    def stands_in(self) -> bool:
        """Whether the optimizer steps something else than the parameter."""
        return self.stepped is not self.parameter


def local_piece(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharded or not; a view of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(entry: HeldParameter, tensor: Tensor) -> Tensor:
    """The full tensor of which `tensor` is this rank's piece: `entry.stepped`, its gradient or an optimizer state.

    A collective of the ranks that share the parameter.
    """
    local = tensor.detach().to(entry.parameter.device)
    if entry.rows is not None:
        local = gather_rows(local, entry.parameter.shape[0], entry.rows)
    if isinstance(entry.parameter, DTensor) and not isinstance(local, DTensor):
        like = entry.parameter
        local = DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
    return _uncut(entry, local.full_tensor() if isinstance(local, DTensor) else local)


def whole_parameter(entry: HeldParameter) -> Tensor:
    """The full tensor of the parameter as the forward uses it; a collective of the ranks that share it."""
    parameter = entry.parameter
    return _uncut(entry, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)


def _uncut(entry: HeldParameter, local: Tensor) -> Tensor:
    """The full tensor, from the piece that tensor parallelism left of it."""
    cut, local = entry.tensor_parallel, local.detach()
    if cut is None:
        return local
    local = local.contiguous()
    pieces = [torch.empty_like(local) for _ in range(dist.get_world_size(cut.group))]
    dist.all_gather(pieces, local, group=cut.group)
    return cut.plan.unshard(cut.name, pieces)


def tensor_piece(entry: HeldParameter, full: Tensor) -> Tensor:
    """What tensor parallelism leaves this rank of a whole tensor; all of it where it does not cut the parameter."""
    return full if entry.tensor_parallel is None else entry.tensor_parallel.piece(full)


def piece(entry: HeldParameter, full: Tensor) -> Tensor:
    """This rank's piece of a whole tensor, as `entry.stepped` holds it: its tensor-parallel part, then its rows."""
    part = tensor_piece(entry, full)
    if entry.rows is not None:
        return own_rows(part, entry.rows)
    return shard_of(entry.parameter, part) if isinstance(entry.parameter, DTensor) else part


@torch.no_grad()
def set_parameter(entry: HeldParameter, full: Tensor) -> None:
    """Make a whole tensor the value of the parameter as the forward uses it, rounded to its dtype."""
    parameter = entry.parameter
    mine = piece(entry, full) if isinstance(parameter, DTensor) else tensor_piece(entry, full)
    local_piece(parameter).copy_(mine)


def shard_of(parameter: DTensor, full: Tensor) -> Tensor:
    """The rows of a tensor that this rank holds of a sharded parameter with as many rows.

    Of a (replicate, shard) mesh the last dimension cuts.
    """
    mesh = parameter.device_mesh
    return rows_of(full, mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1))


def reduce_gradients(held: Sequence[HeldParameter]) -> None:
    """Sum the gradients of replicated layers over their data-parallel ranks and hand them to what the optimizer steps.

    In buckets, in one fixed order on all ranks: ZeRO-1 reduce-scatters, then replicas all-reduce, with HSDP the rows
    too. A trained parameter without a gradient on this rank takes part with zeros, so that no rank waits for another.
    """
    found: dict[HeldParameter, Tensor] = {}
    for entry in held:
        if isinstance(entry.parameter, DTensor) and entry.parameter.grad is not None:
            found[entry], entry.parameter.grad = local_piece(entry.parameter.grad), None
    ours = [entry for entry in held if _ours(entry)]
    cut = [entry for entry in ours if entry.rows is not None]
    whole_grads: list[Grouped] = []
    for entry in cut:
        assert entry.rows is not None
        whole_grads.append((_gradient(entry), entry.rows))
        entry.parameter.grad = None

    def take(place: int, rows: Tensor) -> None:
        found[cut[place]] = rows

    sum_rows_in_buckets(whole_grads, take)
    for entry in ours:
        if entry.rows is None:
            found[entry] = _gradient(entry)
            if entry.stands_in:
                entry.parameter.grad = None
    sum_in_buckets([(found[entry], entry.group) for entry in ours if entry.group is not None])
    away = [entry for entry in found if entry.in_host_memory]
    send_down([found.pop(entry) for entry in away], lambda place, grad: _give(away[place], grad))
    for entry, grad in found.items():
        if entry.stands_in:
            _give(entry, grad)


def _give(entry: HeldParameter, grad: Tensor) -> None:
    entry.stepped.grad = grad


def reduce_added(entry: HeldParameter) -> None:
    """Sum one parameter's gradient over its ranks, add it to that of its stand-in, and take it away."""
    grad, entry.parameter.grad = local_piece(_gradient(entry)), None
    if entry.rows is not None:
        work, grad = start_sum_rows(grad, entry.rows)
        work.wait()
    if entry.group is not None:
        dist.all_reduce(grad, group=entry.group)
    if entry.in_host_memory:
        grad = in_host_memory(grad)
    entry.stepped.grad = grad if entry.stepped.grad is None else entry.stepped.grad + grad


def _ours(entry: HeldParameter) -> bool:
    """Whether the gradient is summed here or handed on, rather than summed by fully_shard."""
    summed = isinstance(entry.parameter, DTensor)
    return entry.parameter.requires_grad and not summed and (entry.stands_in or entry.group is not None)


def _gradient(entry: HeldParameter) -> Tensor:
    """The gradient of this rank's samples, zeros where there is none."""
    if entry.parameter.grad is None:
        entry.parameter.grad = torch.zeros_like(entry.parameter, dtype=entry.stepped.dtype)
    return entry.parameter.grad


def scale_gradients(held: Sequence[HeldParameter], factor: float) -> None:
    """Multiply every local gradient by `factor`."""
    grads = [grad for entry in held if (grad := entry.local_grad) is not None]
    if grads:
        torch._foreach_mul_(grads, factor)


def gradient_norm(held: Sequence[HeldParameter]) -> Tensor:
    """The 2-norm of the gradient of the whole model, each element counted once; one all-reduce over the world."""
    total = torch.zeros((), dtype=torch.float64)
    alike: defaultdict[float, list[Tensor]] = defaultdict(list)
    for entry in held:
        grad = entry.local_grad
        if grad is None or not entry.counted:
            continue
        if isinstance(entry.share, Tensor):
            total += (grad.double().square() * entry.share.to(grad.device)).sum().cpu()
        else:
            alike[entry.share].append(grad)
    for share, grads in alike.items():
        total += share * _squared_norm(grads).cpu()
    dist.all_reduce(total)
    return total.sqrt()


def _squared_norm(grads: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements in float64, right to 1e-7; not copied whole.

    Torch's float32 norm of a large tensor loses digits on a CPU (3e-3 measured at 10 million elements), of short
    pieces it does not: their norms are added up in float64.
    """
    pieces: list[Tensor] = []
    norms: list[Tensor] = []
    for grad in grads:
        flat = grad.detach().reshape(-1)
        rest = flat.numel() % _NORM_PIECE
        if flat.numel() > _MANY_PIECES * _NORM_PIECE:
            norms.append(torch.linalg.vector_norm(flat[: flat.numel() - rest].view(-1, _NORM_PIECE), dim=1))
            flat = flat[flat.numel() - rest :]
        pieces += flat.split(_NORM_PIECE)
    norms.append(torch.stack(torch._foreach_norm(pieces)))
    return torch.stack([norm.double().square().sum() for norm in norms]).sum()


def clip_gradients(held: Sequence[HeldParameter], max_norm: float, *, step: int = 1) -> Tensor:
    """The 2-norm of the whole gradient, after scaling it down to `max_norm` where it is larger.

    Raises RunError, on every rank, where it is not finite in this step.
    """
    norm = gradient_norm(held)
    refuse_gradients(number(norm), held, step=step)
    factor = min(1.0, max_norm / (number(norm) + 1e-6))
    if factor < 1.0:
        scale_gradients(held, factor)
    return norm


def check_gradients_present(held: Sequence[HeldParameter], group: dist.ProcessGroup) -> None:
    """Raise RunError on every rank of the stage when some trained parameter got no gradient on any of them."""
    trained = [entry for entry in held if entry.parameter.requires_grad]
    if not trained:
        return
    present = torch.tensor([entry.parameter.grad is not None for entry in trained], dtype=torch.int32)
    if not has_numbers(present):
        return
    dist.all_reduce(present, op=dist.ReduceOp.MAX, group=group)
    missing = [entry.name for entry, there in zip(trained, present.tolist(), strict=True) if not there]
    if missing:
        raise RunError(
            f"{len(missing)} trained parameters got no gradient in the first step: {', '.join(missing[:8])}",
            why="the forward does not use them, or a sharded layer lost its gradients",
            fix="freeze unused parameters with requires_grad_(False) before autopar.parallelize",
        )
