"""What the optimizer steps in place of parameters, and how the parameters follow it.

Under ZeRO a rank steps its own rows of a parameter only, as a plain tensor; the rows are a view of it, so that nothing
is held twice, and torch's optimizers do not unwrap and wrap a DTensor in every operation. Under mixed precision it
steps float32 masters, of which the parameter is a rounded copy. After `optimizer.step()` the other ranks' rows are
gathered and the copies rounded. Where the plan offloads the optimizer, it steps copies in host memory, to which
gradients go and from which parameters come. torch calls a function of ours around the step of every optimizer, so that
the user's loop needs no call for it.
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.errors import InputError
from autopar.runtime.activity import activity
from autopar.runtime.buckets import Grouped, gather_rows_in_buckets
from autopar.runtime.fakes import has_numbers
from autopar.runtime.gradients import HeldParameter, local_piece
from autopar.runtime.offload import bring_up, in_host_memory
from autopar.runtime.rows import own_rows

if TYPE_CHECKING:
    from autopar.runtime.step_check import StepCheck

Owner = TypeVar("Owner")


def stand_in(
    parameter: nn.Parameter, rows: dist.ProcessGroup | None, master: Tensor | None, *, away: bool = False
) -> nn.Parameter:
    """What the optimizer steps for a parameter: itself, its rows, its master, or the rows of that.

    rows: the ranks over which ZeRO-1 cuts it; master: its float32 value under mixed precision (fully_shard holds it);
    away: a copy of that in host memory.
    """
    if not parameter.requires_grad:
        return parameter
    if master is not None:
        parameter.grad_dtype = master.dtype
    value = local_piece(parameter.detach()) if master is None else master
    mine = value if rows is None else own_rows(value, rows)
    if away:
        return nn.Parameter(in_host_memory(mine))
    if master is not None:
        return nn.Parameter(mine if rows is None else mine.clone())
    return parameter if rows is None and not isinstance(parameter, DTensor) else nn.Parameter(mine)


def follow_steps(
    owner: Owner, held: Sequence[HeldParameter], check: StepCheck, *, after: Callable[[Owner], None]
) -> None:
    """Check every optimizer that steps these parameters, and bring them up to date after its steps.

    For as long as `owner` lives, which must hold `held`; `after` is then called with it. check: times the steps.
    """
    ours = {id(entry.stepped) for entry in held}
    alive, entries = weakref.ref(owner), [weakref.ref(entry) for entry in held if entry.stands_in]
    known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
    stepping = ExitStack()

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in known or not any(id(p) in ours for p in _stepped(optimizer)):
            return
        refuse_whole_tensors(optimizer)
        known.add(optimizer)

    def begin(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        before(optimizer, args, kwargs)
        if optimizer in known:
            stepping.close()  # a step that failed did not end
            stepping.enter_context(check.optimizer_step(optimizer))

    def follow(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in known:
            chosen = {id(p) for p in _stepped(optimizer)}
            there = [entry for ref in entries if (entry := ref()) is not None]
            part = "optimizer" if any(entry.in_host_memory for entry in there) else "gradient_sync"
            stepping.close()
            with activity.during("optimizer.step"), check.timed(part):
                refresh([entry for entry in there if id(entry.stepped) in chosen])
            check.step_ended()
            model = alive()
            if model is not None:
                after(model)

    handles = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(follow)
    for handle in handles:
        weakref.finalize(owner, handle.remove)


def _stepped(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@torch.no_grad()
def refresh(held: Sequence[HeldParameter]) -> None:
    """Bring parameters up to date with what the optimizer stepped in their place; a collective of their ranks."""
    cut: list[Grouped] = []
    away: list[tuple[Tensor, Tensor]] = []
    for entry in held:
        whole = local_piece(entry.parameter).detach()
        mine = whole if entry.rows is None else own_rows(whole, entry.rows)
        if entry.in_host_memory:
            away.append((mine, entry.stepped.detach()))
        elif mine.data_ptr() != entry.stepped.data_ptr():
            mine.copy_(entry.stepped)
            if mine.dtype == entry.stepped.dtype:
                entry.stepped.data = mine  # somebody moved the model: rows are a view of it again
        if entry.rows is not None:
            cut.append((whole, entry.rows))
    bring_up(away)
    gather_rows_in_buckets(cut)


def refuse_whole_tensors(optimizer: Optimizer) -> None:
    """Raise InputError for an optimizer whose step of an element depends on others: ranks step parts of tensors.

    Found by stepping a small tensor whole and in parts with a twin of the optimizer, so that it holds for any class.
    """
    name = type(optimizer).__name__
    fix = "use an elementwise optimizer, such as AdamW, SGD or RMSprop"
    first = _stepped(optimizer)[0]
    if not has_numbers(local_piece(first)):
        return
    generator = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(6, 4, generator=generator) for _ in range(4))
    whole = [start.to(first.device)]
    parts = [part.clone() for part in whole[0].chunk(3)]
    try:
        for tensors, cut in ((whole, 1), (parts, 3)):
            twin = _twin(optimizer, [nn.Parameter(t) for t in tensors])
            for grad in grads:
                for parameter, piece in zip(_stepped(twin), grad.to(first.device).chunk(cut), strict=True):
                    parameter.grad = piece.clone()
                twin.step()
    except (AttributeError, TypeError, RuntimeError, ValueError) as error:
        why = f"it cannot step by itself, parameter by parameter: {error}"
        raise InputError(f"{name} does not run on a part of each parameter", why=why, fix=fix) from error
    if not torch.allclose(whole[0], torch.cat(parts), rtol=1e-5, atol=1e-7):
        why = "its step of an element depends on other elements of the tensor, of which a rank holds a part"
        raise InputError(f"{name} is not elementwise", why=why, fix=fix)


def _twin(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Optimizer:
    """An optimizer of the same class and settings, without state and hooks, for other parameters."""
    twin = copy.copy(optimizer)
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    if isinstance(settings.get("lr"), float | Tensor):
        settings["lr"] = 0.01  # a warm-up may begin at 0, where every optimizer looks elementwise
    twin.state = defaultdict(dict)
    twin.param_groups = [{**settings, "params": parameters}]
    return twin
