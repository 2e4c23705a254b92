"""Logits whose vocabulary lies on the ranks of a group, and the cross-entropy that never puts them together.

The head of a vocabulary-parallel model returns such a tensor in the place of its logits, so that the model's own code
(casts, soft caps, shifts, its loss) runs on it unchanged. Operators that treat all words alike run on the own part,
`cross_entropy` exchanges three numbers a token, everything else is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from autopar.errors import InputError
from autopar.runtime.fakes import has_numbers
from autopar.runtime.relayout import gather


@dataclass(frozen=True, eq=False)
class WordRange:
    """The words of one rank of `group`: `count` of all `words`, from `start`; `rank` is its place in the group."""

    group: dist.ProcessGroup
    ranks: int
    rank: int
    words: int
    start: int
    count: int


class ShardedLogits(Tensor):
    """This rank's logits: shape, dtype and device are theirs, whole; held is something else.

    local: [ranks, *shape] with the own words only where the shape has all of them: the samples of every rank of the
    group, since each of them knows some words of all. words_dim: where the vocabulary is in the shape.
    """

    local: Tensor
    held: WordRange
    words_dim: int

    @staticmethod
    def of(local: Tensor, held: WordRange, words_dim: int) -> ShardedLogits:
        """Logits with this content."""
        shape = list(local.shape[1:])
        shape[words_dim] = held.words
        out: ShardedLogits = torch.Tensor._make_wrapper_subclass(
            ShardedLogits, shape, dtype=local.dtype, device=local.device
        )
        out.local, out.held, out.words_dim = local, held, words_dim
        return out

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"ShardedLogits({tuple(self.shape)}, words {self.held.start} + {self.held.count} of {self.held.words})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):
            name = f"{func.__self__.__name__}{'=' if name == '__set__' else ''}"
        if name in _FACTS:
            return super().__torch_function__(func, types, args, kwargs)
        first = args[0] if args else None
        if isinstance(first, ShardedLogits) and name in _OF_GRADIENT:
            value = getattr(first.local, name)
            return value(*args[1:], **kwargs) if callable(value) and name == "register_hook" else value
        if name == "cross_entropy":
            return _cross_entropy(*args, **kwargs)
        if name in _ASSIGNED:
            func = _ASSIGNED[name]
            name = func.__name__
        if name in _ALIKE and _only_numbers(args, kwargs):
            logits = next(x for x in args if isinstance(x, ShardedLogits))
            local = func(*[x.local if isinstance(x, ShardedLogits) else x for x in args], **kwargs)
            return ShardedLogits.of(local, logits.held, logits.words_dim)
        if name in _SHAPES and isinstance(first, ShardedLogits):
            moved = _SHAPES[name](func, first, args[1:], kwargs)
            if moved is not None:
                return moved
        raise InputError(
            f"{name.strip('_')} does not run on logits that are cut along the vocabulary",
            why="only casts, scaling, soft caps, shapes and cross_entropy are known to treat all words alike",
            fix="give head and embedding a strategy without tp, or compute the loss with torch's cross_entropy",
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} on logits that are cut along the vocabulary")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FACTS = _names(
    "shape dtype device layout ndim size dim numel nelement __len__ is_floating_point is_complex element_size "
    "itemsize is_cuda is_cpu is_meta is_sparse is_quantized is_nested is_mkldnn __hash__ __repr__ ndimension _base"
)
_OF_GRADIENT = _names("requires_grad grad_fn is_leaf register_hook grad")
_ALIKE = _names(
    "float to type double half bfloat16 type_as contiguous clone detach mul __mul__ __rmul__ multiply div truediv "
    "__truediv__ __div__ true_divide add __add__ __radd__ sub __sub__ subtract neg __neg__ tanh sigmoid clamp clip "
    "pow __pow__ square abs exp cuda cpu nan_to_num"
)
"""Operators of every element by itself."""


_ASSIGNED = {"__imul__": Tensor.mul, "__itruediv__": Tensor.div, "__iadd__": Tensor.add, "__isub__": Tensor.sub}
"""Augmented assignments, which need not work in place: a hook on the logits would be lost."""


def _only_numbers(args: Any, kwargs: Any) -> bool:
    """Whether an operator has one logits argument, and otherwise nothing whose parts other ranks would need."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    others = [x for x in tensors if not isinstance(x, ShardedLogits)]
    return len(tensors) - len(others) == 1 and all(not x.dim() and not x.requires_grad for x in others)


def _reshaped(func: Any, x: ShardedLogits, args: Any, kwargs: Any) -> ShardedLogits | None:
    """Views that keep the vocabulary, which must be the last dimension, whole."""
    shape = func(torch.empty(x.shape, device="meta"), *args, **kwargs).shape
    if x.words_dim != x.ndim - 1 or not shape or shape[-1] != x.held.words:
        return None
    local = x.local.reshape(x.held.ranks, *shape[:-1], x.held.count)
    return ShardedLogits.of(local, x.held, len(shape) - 1)


def _permuted(func: Any, x: ShardedLogits, args: Any, kwargs: Any) -> ShardedLogits | None:
    """Transpositions: dimensions in another order, found on a tensor whose sizes are their places."""
    marked = func(torch.empty([i + 2 for i in range(x.ndim)], device="meta"), *args, **kwargs)
    order = [size - 2 for size in marked.shape]
    return ShardedLogits.of(x.local.permute(0, *[i + 1 for i in order]), x.held, order.index(x.words_dim))


def _indexed(func: Any, x: ShardedLogits, args: Any, kwargs: Any) -> ShardedLogits | None:
    """Slices and places of dimensions other than the vocabulary's."""
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    if not all(i is Ellipsis or isinstance(i, int | slice) for i in index):
        return None
    if Ellipsis not in index:
        index = (*index, Ellipsis)
    at = index.index(Ellipsis)
    missing = x.ndim - (len(index) - 1)
    index = (*index[:at], *[slice(None)] * missing, *index[at + 1 :])
    of_words = index[x.words_dim]
    if not isinstance(of_words, slice) or of_words.indices(x.held.words) != (0, x.held.words, 1):
        return None
    index = (*index[: x.words_dim], slice(None), *index[x.words_dim + 1 :])
    dim = x.words_dim - sum(isinstance(i, int) for i in index[: x.words_dim])
    return ShardedLogits.of(x.local[(slice(None), *index)], x.held, dim)


_SHAPES: dict[str, Callable[[Any, ShardedLogits, Any, Any], ShardedLogits | None]] = {
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten"), _reshaped),
    **dict.fromkeys(("transpose", "permute", "movedim", "swapaxes", "moveaxis", "swapdims"), _permuted),
    "__getitem__": _indexed,
}


def _cross_entropy(*args: Any, **kwargs: Any) -> Tensor:
    """torch's cross_entropy of this rank's samples."""
    given = _SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    settings = given.arguments
    logits, target, reduction = settings["input"], settings["target"], settings["reduction"]
    odd = {
        "class weights": settings["weight"] is not None,
        "label smoothing": settings["label_smoothing"] != 0.0,
        "the old size_average and reduce": settings["size_average"] is not None or settings["reduce"] is not None,
        "targets that are probabilities": target.is_floating_point(),
    }
    for name, used in odd.items():
        if used:
            raise InputError(
                f"{name} in cross_entropy: not with logits that are cut along the vocabulary",
                why="the parallel cross-entropy takes one word a token, all with the same weight",
                fix="give head and embedding a strategy without tp",
            )
    # The classes are the second dimension, or the only one.
    local = logits.local.movedim(logits.words_dim + 1, -1)
    if logits.words_dim != (1 if logits.ndim > 1 else 0) or local.shape[1:-1] != target.shape:
        raise InputError(
            f"cross_entropy of {tuple(logits.shape)} against targets {tuple(target.shape)}",
            why="the vocabulary must be the second dimension, and the others those of the targets",
            fix="view the logits as [tokens, vocabulary]",
        )
    ignored = settings["ignore_index"]
    rows = local.reshape(logits.held.ranks, target.numel(), logits.held.count)
    losses: Tensor = _CrossEntropy.apply(rows, target.reshape(-1), ignored, logits.held)
    if reduction == "none":
        return losses.view(target.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / (target != ignored).sum()


_SIGNATURE = inspect.signature(functional.cross_entropy)


class _CrossEntropy(torch.autograd.Function):
    """The loss of each own token: [ranks, tokens, words] and [tokens] to [tokens], in float32 at least.

    All ranks of the group compute the losses of the tokens of all: the largest logit, the sum of exponentials and the
    logit of the target are reduced over them. Each returns its own tokens' only, and the backward gets the gradients
    of the others' by an all-gather of one number a token.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, target: Tensor, ignored: int, held: WordRange) -> Tensor:
        target = gather(target[None], 0, held.group)
        counted = target != ignored
        outside = counted & ((target < 0) | (target >= held.words))
        if has_numbers(target) and not target.is_cuda and bool(outside.any()):
            raise IndexError(f"a target is out of bounds: the vocabulary has {held.words} words")
        x = local.float() if local.dtype in (torch.bfloat16, torch.float16) else local
        largest = x.amax(-1) if held.count else x.new_full(x.shape[:-1], float("-inf"))
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=held.group)
        place = target - held.start
        mine = counted & (place >= 0) & (place < held.count)
        place = torch.where(mine, place, 0)
        sums = torch.stack([(x - largest[..., None]).exp_().sum(-1), torch.zeros_like(largest)])
        if held.count:
            sums[1] = torch.where(mine, x.gather(-1, place[..., None])[..., 0], 0.0)
        dist.all_reduce(sums, group=held.group)
        log_sum = largest + sums[0].log()
        ctx.save_for_backward(local, log_sum, place, mine, counted)
        ctx.held = held
        return torch.where(counted, log_sum - sums[1], 0.0)[held.rank]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        local, log_sum, place, mine, counted = ctx.saved_tensors
        # A mean over no token at all has an infinite gradient.
        grad = torch.where(counted, gather(grads[0][None], 0, ctx.held.group), 0.0)
        out = (local - log_sum[..., None]).exp_().mul_(grad[..., None])
        if ctx.held.count:
            out.scatter_add_(-1, place[..., None], torch.where(mine, -grad, 0.0)[..., None])
        return out.to(local.dtype), None, None, None
