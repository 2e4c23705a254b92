"""Rules of operators that compute: contractions, attention, reductions, normalisations, convolutions."""

from __future__ import annotations

from autopar.runtime.tensor_parallel.factors import Dims, Factor
from autopar.runtime.tensor_parallel.graph import Shape, is_tensor, names
from autopar.runtime.tensor_parallel.rules import Op, rule


@rule("linear")
def _linear(op: Op) -> Shape:
    x, weight = op.dims(0), op.dims(1)
    op.space.unify(x[-1], weight[1])
    op.contract([weight[1]])
    bias = op.arg(2, "bias")
    if is_tensor(bias):
        op.space.unify(op.of(bias)[0], weight[0])
    return [*x[:-1], weight[0]]


@rule("mm", "bmm", "matmul", "addmm", "baddbmm")
def _matmul(op: Op) -> Shape:
    first = 1 if op.name in ("addmm", "baddbmm") else 0
    x, y = op.dims(first), op.dims(first + 1)
    sizes = op.sizes
    op.space.unify(x[-1], y[-2] if len(y) > 1 else y[0])
    op.contract([x[-1]])
    ends = (len(x) > 1) + (len(y) > 1)
    out = op.broadcast([x[:-2], y[:-2]], sizes[: len(sizes) - ends])
    out += [x[-2]] if len(x) > 1 else []
    out += [y[-1]] if len(y) > 1 else []
    if first:
        op.broadcast([op.dims(0), out], sizes)
    return out


@rule("einsum")
def _einsum(op: Op) -> Shape:
    left, right = op.args[0].replace(" ", "").split("->")
    if "." in left:
        raise ValueError("ellipsis")
    named: dict[str, Factor] = {}
    for term, x in zip(left.split(","), op.args[1], strict=True):
        for letter, factor in zip(term, op.of(x), strict=True):
            if letter in named:
                op.space.unify(named[letter], factor)
            named.setdefault(letter, factor)
    op.contract([factor for letter, factor in named.items() if letter not in right])
    return [named[letter] for letter in right]


@rule("_grouped_mm", "grouped_mm", "grouped_mm_fallback")
def _grouped_mm(op: Op) -> Shape:
    x, weight = op.dims(0), op.dims(1)
    if len(x) != 2 or len(weight) != 3:
        raise ValueError("only rows against stacked matrices")
    op.space.unify(x[-1], weight[1])
    op.block([x[0], weight[0]])
    op.contract([weight[1]])
    return [x[0], weight[2]]


@rule("scaled_dot_product_attention")
def _attention(op: Op) -> Shape:
    q, k, v = op.dims(0), op.dims(1), op.dims(2)
    unify = op.space.unify
    if len(q) > 2:
        heads, kv_heads = q[-3].size, k[-3].size
        if heads != kv_heads and kv_heads > 1:
            grouped = op.space.view([q[-3]], [kv_heads, heads // kv_heads])
            if grouped is None:
                raise ValueError("query heads do not group")
            unify(grouped[0], k[-3])
        else:
            op.broadcast([[q[-3]], [k[-3]]], [heads])
        unify(k[-3], v[-3])
    for i in range(len(q) - 3):
        op.broadcast([[q[i]], [k[i]], [v[i]]], [q[i].size])
    unify(q[-1], k[-1])
    unify(k[-2], v[-2])
    mask = op.arg(3, "attn_mask")
    if is_tensor(mask):
        op.broadcast([op.of(mask), [*q[:-1], k[-2]]], [f.size for f in [*q[:-1], k[-2]]])
    op.block([q[-1], k[-2]])
    if op.arg(5, "is_causal", False):
        op.block(q[-2])  # a causal mask depends on the place of a row in the whole sequence
    return [*q[:-1], v[-1]]


@rule("softmax", "_softmax", "log_softmax", "cumsum", "sort", "argsort", "flip", "roll")
def _along(op: Op) -> Shape:
    dims = op.dims()
    along = op.args[2] if op.name == "roll" else op.arg(1, "dim", -1)
    for dim in [along] if isinstance(along, int) else along:
        op.block(dims[dim])
    return (dims, list(dims)) if isinstance(op.value, tuple | list) else dims


@rule(*names("mean sum amax amin max min var std any all argmax norm linalg_vector_norm prod logsumexp"))
def _reduce(op: Op) -> Shape:
    dims = op.dims()
    if op.name in ("max", "min") and len(op.args) > 1 and is_tensor(op.args[1]):
        return op.broadcast([dims, op.dims(1)], op.sizes)
    over = op.arg(2, "dim") if op.name in ("norm", "linalg_vector_norm") else op.arg(1, "dim")
    keep = any(x is True for x in op.args[1:]) or bool(op.node.kwargs.get("keepdim", False))
    if over is None or over == []:
        over = range(len(dims))
    reduced = {dim % len(dims) for dim in ([over] if isinstance(over, int) else over)} if dims else set()
    for dim in sorted(reduced):
        if op.name in ("sum", "mean"):
            op.contract([dims[dim]])
        else:
            op.block(dims[dim])
    out: Dims = [Factor(1) if i in reduced else f for i, f in enumerate(dims) if keep or i not in reduced]
    return tuple(list(out) for _ in op.value) if isinstance(op.value, tuple | list) else out


@rule("topk")
def _topk(op: Op) -> Shape:
    dims = op.dims()
    dim = op.arg(2, "dim", -1)
    op.block(dims[dim])
    dims[dim] = op.barrier(op.value[0].shape[dim])
    return dims, list(dims)


@rule("layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm")
def _norm(op: Op) -> Shape:
    dims = op.dims()
    count = len(op.args[1])
    op.block(dims[-count:])
    for affine in (op.arg(2, "weight"), op.arg(3, "bias")):
        if is_tensor(affine):
            for x, y in zip(op.of(affine), dims[-count:], strict=True):
                op.space.unify(x, y)
    if not isinstance(op.value, tuple | list):
        return dims
    rest = [*dims[:-count], *[Factor(1)] * count]
    return tuple(dims if i == 0 else list(rest) for i in range(len(op.value)))


@rule("conv1d", "conv2d", "conv3d")
def _conv(op: Op) -> Shape:
    x, weight = op.dims(0), op.dims(1)
    groups, channels, out = op.arg(6, "groups", 1), x[1].size, weight[0]
    op.block([*x[2:], *weight[2:]])
    if groups == channels == out.size:
        op.space.unify(x[1], out)
    elif groups == 1:
        op.space.unify(x[1], weight[1])
        op.contract([weight[1]])
    else:
        raise ValueError("grouped convolution")
    bias = op.arg(2, "bias")
    if is_tensor(bias):
        op.space.unify(op.of(bias)[0], out)
    return [x[0], out, *(op.barrier(size) for size in op.sizes[2:])]


@rule("view_as_real")
def _as_real(op: Op) -> Shape:
    return [*op.dims(), op.barrier(2)]


@rule("view_as_complex")
def _as_complex(op: Op) -> Shape:
    op.block(op.dims()[-1])
    return op.dims()[:-1]
