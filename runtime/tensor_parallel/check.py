"""A numerical check of a derived plan on its real ranks: every gradient against the unsharded block."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import RunError
from autopar.runtime.fakes import has_numbers
from autopar.runtime.tensor_parallel.execute import LocalGraphs, apply
from autopar.runtime.tensor_parallel.layout import BlockPlan
from autopar.runtime.tensor_parallel.sequence import SequenceTeams
from autopar.runtime.tensor_parallel.skeleton import alone, in_order, parameter_names
from autopar.runtime.trees import tree_leaves, tree_map

NOISE = 0.05
# Gradients that are zero in exact arithmetic (biases of key projections) are compared with this part of the largest.
ABSOLUTE_FLOOR = 1e-6


def check_plan(
    block: nn.Module,
    plan: BlockPlan,
    groups: Sequence[Any],
    coordinate: tuple[int, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tolerance: float = 1e-3,
    sharing: SequenceTeams | None = None,
) -> float:
    """The largest relative error of output, input gradients and parameter gradients against the unsharded block.

    block: whole, the same weights on every rank, and not changed; its copies get noise, because zero biases and unit
    norms hide errors, and run in float32 at least, because rounding in half precision is larger than many errors of a
    plan. What differs in float32 is looked at again in float64: there a gradient whose terms cancel is off by 1e-16 of
    them, and what is wrong is wrong again. args, kwargs: whole inputs, the same on every rank. Raises RunError, on all
    ranks alike, with the first wrong tensor. Gradients and not only the output: without a gradient all-reduce the
    output is exact. sharing: as in `apply`; the gradients of parameters are then first added up over these ranks.
    """
    if not all(map(has_numbers, block.parameters())):
        return 0.0
    measured = partial(_errors, block, plan, groups, coordinate, args, kwargs, sharing)
    errors = measured(torch.float32)
    if not max(errors.values()) <= tolerance:
        # Not every operator has float64 (grouped matrix products of experts); the whole block says so on all ranks.
        with suppress(RuntimeError):
            errors = measured(torch.float64)
    for name, error in errors.items():
        if not error <= tolerance:
            what = "sequence-parallel" if plan.sp * plan.cp > 1 else "tensor-parallel"
            raise RunError(
                f"the {what} plan of {type(block).__name__} is wrong at {name}",
                why=f"it differs by {error:.1e} (relative) from the unsharded block; allowed is {tolerance:.0e}",
                fix="run this layer data parallel and report the block",
            )
    return max(errors.values())


def _errors(
    block: nn.Module,
    plan: BlockPlan,
    groups: Sequence[Any],
    coordinate: tuple[int, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sharing: SequenceTeams | None,
    dtype: torch.dtype,
) -> dict[str, float]:
    """The relative errors of `check_plan` in this dtype at least, by name, the largest of all ranks."""
    whole, kwargs = _noisy(block, dtype), in_order(parameter_names(block), kwargs)
    local = copy.deepcopy(whole)
    apply(local, plan, groups, coordinate, sharing=sharing)
    rank = plan.coordinates.index(tuple(coordinate)) if sharing is None else sharing.whole.rank

    def part(x: Tensor) -> Tensor:
        if sharing is not None:
            return sharing.part(x)
        return x.chunk(plan.sequence_parts, 1)[rank] if plan.sequence_parts > 1 else x

    whole_inputs, local_inputs = _leaves((args, kwargs), dtype, None), _leaves((args, kwargs), dtype, part)
    weight = torch.Generator().manual_seed(7)
    expected = _main_output(whole, whole_inputs)
    direction = torch.randn(expected.shape, generator=weight, dtype=torch.float32).to(expected)
    (expected * direction).sum().backward()
    found = _main_output(local, local_inputs)
    (found * part(direction)).sum().backward()

    errors = {"the output": _error(found, part(expected), 0.0)}
    floor = ABSOLUTE_FLOOR * max((float(p.grad.norm()) for p in whole.parameters() if p.grad is not None), default=0.0)
    first = True
    pairs = zip(tree_leaves(whole_inputs), tree_leaves(local_inputs), strict=True)
    for i, (want, got) in enumerate(pairs):
        if isinstance(want, Tensor) and want.requires_grad:
            gradient = _gradient(want)
            gradient = part(gradient) if first else gradient
            errors[f"the gradient of input {i}"] = _error(_gradient(got), gradient, floor)
            first = False
    for (name, want), got in zip(whole.named_parameters(), local.parameters(), strict=True):
        if sharing is not None:
            got.grad = _gradient(got).contiguous()
            dist.all_reduce(got.grad, group=sharing.whole.group)
        errors[name] = _error(_gradient(got), plan.shard(name, _gradient(want), coordinate), floor)
    worst = torch.tensor(list(errors.values()), dtype=torch.float64, device=found.device)
    for group in (*groups[-1:], *(() if sharing is None else (sharing.whole.group,))):
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    return dict(zip(errors, worst.tolist(), strict=True))


def check_again(graphs: LocalGraphs, groups: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """`check_plan` of blocks that are cut already, for other inputs of them, with weights made up for the purpose."""
    return alone(
        lambda: check_plan(
            graphs.skeleton.with_random_weights(
                next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)).device
            ),
            graphs.plan,
            groups,
            graphs.coordinate,
            args,
            kwargs,
            sharing=graphs.sharing,
        )
    )


def _noisy(block: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a block in this dtype at least, without dropout, with noise on every parameter, equal on all ranks."""
    noisy = copy.deepcopy(block).eval()
    if any(_widened(p, dtype) is not p for p in noisy.parameters()):
        noisy = noisy.to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in noisy.parameters():
            p.add_(torch.randn(p.shape, generator=generator).to(p) * NOISE)
            p.grad = None
    return noisy


def _widened(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A floating-point tensor in this dtype if its own has fewer bytes, otherwise itself."""
    return x.to(dtype) if x.is_floating_point() and x.dtype.itemsize < dtype.itemsize else x


def _leaves(inputs: Any, dtype: torch.dtype, part: Callable[[Tensor], Tensor] | None) -> Any:
    """The inputs with fresh leaves for the floating-point tensors of 3 or more dimensions, the activation first."""
    first = True

    def visit(x: Any) -> Any:
        nonlocal first
        if not isinstance(x, Tensor):
            return x
        x = _widened(x.detach(), dtype)
        if not x.is_floating_point() or x.dim() < 3:
            return x
        if first and part is not None:
            x = part(x)
        first = False
        return x.clone().requires_grad_()

    return tree_map(visit, inputs)


def _main_output(block: nn.Module, inputs: Any) -> Tensor:
    """The first floating-point tensor that a block returns."""
    args, kwargs = inputs
    out = block(*args, **kwargs)
    return next(x for x in tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point())


def _gradient(x: Tensor) -> Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad


def _error(found: Tensor, expected: Tensor, floor: float) -> float:
    """Relative L2 distance; infinite when the shapes differ."""
    if found.shape != expected.shape:
        return float("inf")
    found, expected = found.detach(), expected.detach()
    return float((found - expected).norm()) / max(float(expected.norm()), floor, 1e-30)
