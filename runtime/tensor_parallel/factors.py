"""The dimensions of tensors as trees of factors, made equal by union-find.

A dimension is a leaf, a product of factors (outer to inner, row major) or a concatenation of segments. Operators
equate factors: [heads * head_dim] viewed as [heads, head_dim] splits one leaf into a product, and every tensor whose
dimension was that leaf follows. A blocked factor cannot be sharded; blocking is always safe, it only loses
parallelism. Sizes are compared where a view or a broadcast needs it, never to guess that two dimensions are one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import prod
from typing import Literal

Dims = list["Factor"]


class Factor:
    """A node of the forest: `parent` when united with another, `parts` when it is a product or a concatenation."""

    __slots__ = ("blocked", "kind", "parent", "parts", "size")

    def __init__(
        self,
        size: int,
        *,
        blocked: str = "",
        kind: Literal["leaf", "product", "cat"] = "leaf",
        parts: Dims | None = None,
    ) -> None:
        self.size, self.blocked, self.kind, self.parts = size, blocked, kind, parts or []
        self.parent: Factor | None = None

    def __repr__(self) -> str:
        root = find(self)
        if root.kind == "leaf":
            return f"{'!' if root.blocked else ''}{root.size}"
        inside = ("*" if root.kind == "product" else "|").join(map(repr, root.parts))
        return f"({inside})"


def find(factor: Factor) -> Factor:
    """The representative of a factor."""
    while factor.parent is not None:
        factor = factor.parent
    return factor


def leaves(factor: Factor) -> Dims:
    """The leaves below a factor, larger than 1, in order; a leaf that occurs twice is listed twice."""
    root = find(factor)
    if root.kind == "leaf":
        return [root] if root.size > 1 else []
    return [leaf for part in root.parts for leaf in leaves(part)]


def flat(factor: Factor) -> Dims:
    """The factor as a row-major list of leaves and concatenations; size 1 gives nothing."""
    root = find(factor)
    if root.size == 1:
        return []
    return [f for part in root.parts for f in flat(part)] if root.kind == "product" else [root]


def segments(factor: Factor) -> Dims:
    """The segments of a concatenation, nested ones resolved; anything else is its own single segment."""
    root = find(factor)
    return [s for part in root.parts for s in segments(part)] if root.kind == "cat" else [root]


def product(factors: Iterable[Factor]) -> Factor:
    """One factor that is the row-major product of these."""
    parts = [f for factor in factors for f in flat(factor)]
    if not parts:
        return Factor(1)
    return parts[0] if len(parts) == 1 else Factor(prod(f.size for f in parts), kind="product", parts=parts)


class FactorSpace:
    """The operations that change the forest; `blocked_now` collects what was blocked since it was last emptied."""

    def __init__(self) -> None:
        self.blocked_now: Dims = []

    def block(self, factors: Factor | Iterable[Factor], why: str) -> None:
        """Forbid to shard these factors and all below them."""
        for factor in [factors] if isinstance(factors, Factor) else list(factors):
            root = find(factor)
            self.blocked_now.append(root)
            root.blocked = root.blocked or why
            if root.parts:
                self.block(root.parts, why)

    def unify(self, x: Factor, y: Factor) -> None:
        """Make two factors equal, splitting leaves as needed; block both where their structures do not match."""
        x, y = find(x), find(y)
        if x is y:
            return
        if x.size != y.size:
            self.block([x, y], f"{x.size} against {y.size}")
            return
        self._align(flat(x), flat(y))

    def _align(self, xs: Dims, ys: Dims) -> None:
        xs, ys = list(xs), list(ys)
        while xs and ys:
            xs, ys = flat(xs[0]) + xs[1:], flat(ys[0]) + ys[1:]
            x, y = xs[0], ys[0]
            if x is y or x.size == y.size:
                self._merge(x, y)
                xs.pop(0)
                ys.pop(0)
                continue
            if x.size < y.size:
                xs, ys, x, y = ys, xs, y, x
            if x.kind == "leaf":
                if x.size % y.size:
                    self.block([*xs, *ys], f"{x.size} viewed as {y.size}")
                    return
                self._split(x, [y.size, x.size // y.size])
            elif not self._align_cat(xs, ys):
                return

    def _align_cat(self, xs: Dims, ys: Dims) -> bool:
        """Align the concatenation at the head of xs with a product at the head of ys; False when blocked."""
        cat, items, size = xs.pop(0), [], 1
        while ys and size < cat.size:
            items.append(ys[0])
            size *= ys.pop(0).size
        if size != cat.size:
            self.block([cat, *items, *xs, *ys], "concatenation against product")
            return False
        inner = size // items[0].size
        if any(segment.size % inner for segment in segments(cat)):
            self.block([cat, *items], "concatenation against product")
            return False
        start = 0
        for segment in segments(cat):
            stop = start + segment.size // inner
            self.unify(segment, product([self.cut(items[0], start, stop), *items[1:]]))
            start = stop
        return True

    def _merge(self, x: Factor, y: Factor) -> None:
        x, y = find(x), find(y)
        if x is y or x.size == 1:
            return
        if x.kind == "leaf" and y.kind == "leaf":
            x.parent = y
            if x.blocked:
                self.block(y, x.blocked)
        elif x.kind == "leaf":
            if x in leaves(y):
                return
            x.parent = y
            if x.blocked:
                self.block(y, x.blocked)
        elif y.kind == "leaf":
            self._merge(y, x)
        elif x.kind == "cat" and y.kind == "cat":
            self._merge_cats(segments(x), segments(y))
        else:
            self.unify(x, y)

    def _merge_cats(self, xs: Dims, ys: Dims) -> None:
        xs, ys = [x for x in xs if x.size], [y for y in ys if y.size]
        while xs and ys:
            x, y = xs.pop(0), ys.pop(0)
            if x.size > y.size:
                xs.insert(0, self.cut(x, y.size, x.size))
                x = self.cut(x, 0, y.size)
            elif x.size < y.size:
                ys.insert(0, self.cut(y, x.size, y.size))
                y = self.cut(y, 0, x.size)
            self.unify(x, y)

    def _split(self, leaf: Factor, sizes: Sequence[int], kind: Literal["product", "cat"] = "product") -> None:
        leaf.kind, leaf.parts = kind, [Factor(size, blocked=leaf.blocked) for size in sizes]

    def cut(self, factor: Factor, start: int, stop: int) -> Factor:
        """The factor of the slice start:stop of a dimension; a cut inside an inner factor blocks it."""
        root = find(factor)
        if start == 0 and stop == root.size:
            return root
        if stop <= start:
            return Factor(0)
        parts = flat(root)
        if not parts:
            return Factor(1)
        outer, rest = parts[0], parts[1:]
        inner = prod(f.size for f in rest)
        if start % inner or stop % inner:
            self.block(root, "cut inside a factor")
            return Factor(stop - start, blocked="cut")
        start, stop = start // inner, stop // inner
        if outer.kind == "leaf":
            edges = sorted({0, start, stop, outer.size})
            self._split(outer, [b - a for a, b in pairwise(edges)], "cat")
        offset, kept = 0, []
        for segment in segments(outer):
            low, high = max(start, offset), min(stop, offset + segment.size)
            if low < high:
                kept.append(self.cut(segment, low - offset, high - offset))
            offset += segment.size
        piece = kept[0] if len(kept) == 1 else Factor(stop - start, kind="cat", parts=kept)
        return product([piece, *rest])

    def view(self, factors: Iterable[Factor], sizes: Sequence[int]) -> Dims | None:
        """The dimensions of these sizes that a row-major list of factors is viewed as; None when blocked."""
        todo = [f for factor in factors for f in flat(factor)]
        out: Dims = []
        for size in sizes:
            taken: Dims = []
            done = 1
            while done < size:
                if not todo:
                    return None
                todo = flat(todo[0]) + todo[1:]
                head = todo[0]
                need = size // done if size % done == 0 else 0
                if need and head.size <= need and need % head.size == 0:
                    taken.append(todo.pop(0))
                    done *= head.size
                elif need and head.size % need == 0 and head.kind == "leaf":
                    self._split(head, [need, head.size // need])
                elif not (need and head.size % need == 0 and self._split_cat(todo, need)):
                    self.block([*todo, *taken], f"{head.size} viewed as {size}")
                    return None
            out.append(product(taken))
        return out

    def _split_cat(self, todo: Dims, need: int) -> bool:
        """Split the concatenation at the head into one of `need` and an inner factor common to all segments."""
        cat = todo[0]
        inner = Factor(cat.size // need)
        if any(segment.size % inner.size for segment in segments(cat)):
            return False
        outer: Dims = []
        for segment in segments(cat):
            parts = self.view([segment], [segment.size // inner.size, inner.size])
            if parts is None:
                return False
            outer.append(parts[0])
            self.unify(parts[1], inner)
        todo[0:1] = [Factor(need, kind="cat", parts=outer), find(inner)]
        return True
