"""The factor algebra against real tensors: which elements a shard of an output needs of the input."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.runtime.tensor_parallel.factors import Factor, FactorSpace, find, leaves, product
from autopar.runtime.tensor_parallel.layout import BlockPlan, DimLayout, dim_layout


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def programs(draw):
    """A vector's size and a list of views, transposes and slices on it."""
    size = draw(st.sampled_from([12, 24, 36, 48]))
    shape, steps = [size], []
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["view", "transpose", "slice"]))
        if kind == "view":
            total, new = math.prod(shape), []
            while total > 1 and len(new) < 3:
                new.append(draw(st.sampled_from(divisors(total))))
                total //= new[-1]
            shape = [*new, total]
            steps.append(("view", list(shape)))
        elif kind == "transpose" and len(shape) > 1:
            i = draw(st.integers(0, len(shape) - 2))
            shape[i], shape[i + 1] = shape[i + 1], shape[i]
            steps.append(("transpose", i))
        elif kind == "slice":
            dim = draw(st.integers(0, len(shape) - 1))
            start = draw(st.integers(0, shape[dim] - 1))
            stop = draw(st.integers(start + 1, shape[dim]))
            shape[dim] = stop - start
            steps.append(("slice", (dim, start, stop)))
    return size, steps


@settings(deadline=None)
@given(programs(), st.data())
def test_a_shard_of_the_output_comes_from_the_shard_of_the_input(program, data):
    size, steps = program
    space, tensor = FactorSpace(), torch.arange(size)
    source = Factor(size)
    for _ in range(data.draw(st.integers(0, 2))):  # another user of the source cuts it elsewhere
        start = data.draw(st.integers(0, size - 1))
        space.cut(source, start, data.draw(st.integers(start + 1, size)))
    dims = [source]
    for kind, value in steps:
        if kind == "view":
            tensor = tensor.reshape(value)
            dims = space.view(dims, value)
            if dims is None:
                return
        elif kind == "transpose":
            tensor = tensor.transpose(value, value + 1)
            dims[value], dims[value + 1] = dims[value + 1], dims[value]
        else:
            dim, start, stop = value
            tensor = tensor.narrow(dim, start, stop - start)
            dims[dim] = space.cut(dims[dim], start, stop)
    assert [find(d).size for d in dims] == list(tensor.shape)
    free = [leaf for d in dims for leaf in leaves(d) if not leaf.blocked and leaf.size % 2 == 0]
    if not free:
        return
    axes = [frozenset([data.draw(st.sampled_from(free))])]
    for coordinate in ((0,), (1,)):
        held = set(dim_layout(source, axes).index((2,), coordinate).tolist())
        part = tensor
        for dim, factor in enumerate(dims):
            part = part.index_select(dim, torch.from_numpy(dim_layout(factor, axes).index((2,), coordinate)))
        assert set(part.flatten().tolist()) <= held
        if all(kind != "slice" for kind, _ in steps):
            assert set(part.flatten().tolist()) == held


def test_three_segments_of_a_fused_weight_share_their_heads():
    space, fused = FactorSpace(), Factor(3 * 8)
    parts = [space.cut(fused, 8 * i, 8 * i + 8) for i in range(3)]
    heads = [space.view([part], [4, 2]) for part in parts]
    for other in heads[1:]:
        space.unify(heads[0][0], other[0])
    layout = dim_layout(fused, [frozenset(leaves(heads[0][0]))])
    assert layout.index((2,), (1,)).tolist() == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]
    assert not layout.is_mixed


def test_sizes_that_do_not_divide_are_blocked():
    space, a, b = FactorSpace(), Factor(6), Factor(4)
    assert space.view([product([a, b])], [4, 6]) is None or all(leaf.blocked for leaf in leaves(a))
    space.unify(Factor(3), a)
    assert find(a).blocked


@st.composite
def layouts(draw, depth=2):
    """A dimension of 2 axes of 2 and 3 ranks, each used at most once on the way down."""

    def build(axes, depth):
        kind = draw(st.sampled_from(["leaf", "product", "cat"] if depth else ["leaf"]))
        if kind == "leaf":
            used = tuple(i for i in axes if draw(st.booleans()))
            return DimLayout(math.prod((2, 3)[i] for i in used) * draw(st.integers(1, 3)), axes=used)
        if kind == "product":
            first = build(axes, depth - 1)
            second = build((), depth - 1)
            return DimLayout(first.size * second.size, "product", parts=(first, second))
        parts = tuple(build(axes, depth - 1) for _ in range(2))
        return DimLayout(sum(p.size for p in parts), "cat", parts=parts)

    return build((0, 1), depth)


@settings(deadline=None)
@given(layouts(), layouts())
def test_unshard_inverts_shard(first, second):
    plan = BlockPlan(axis_sizes=(2, 3), sequence_norms=False, layouts={"w": (first, second)}, calls=())
    whole = torch.randn(first.size, second.size)
    if first.is_cut and second.is_cut:
        plan = BlockPlan(
            axis_sizes=(2, 3), sequence_norms=False, layouts={"w": (first, DimLayout(second.size))}, calls=()
        )
    parts = [plan.shard("w", whole, coordinate) for coordinate in plan.coordinates]
    assert all(tuple(part.shape) == plan.local_shapes["w"] for part in parts)
    assert torch.equal(plan.unshard("w", parts), whole)
