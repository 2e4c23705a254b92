"""The factored mesh as plain values: which ranks a layer's strategy ties together.

The ranks are `pp` stages, outermost, times the prime factors of the ranks of one stage, slow links first: the
factors of the node count (`n0`, `n1`, ...), then those inside a node (`a0`, `a1`, ...), larger primes first in each.
A strategy takes, per layer, a set of these axes for tp, the next for sp, cp and ep, and the rest for dp, counted from
the innermost. Any two strategies then differ only by who holds which slice along which axis, so that the decision
tree of the search and the process groups of the runtime are the same object.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import gcd, isqrt, prod

from autopar.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One mesh axis: its name and how many ranks it counts."""

    name: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How an activation lies on a stage: the axes that cut its samples, and those that cut its sequence.

    dealt: those of `sequence` (cp) over which it is dealt out in pairs: of 2 n equal pieces, place i of n has the
    pieces i and 2 n - 1 - i, so that each place has as much to do under a causal mask. The other axes of `sequence`
    cut such a pair evenly.
    """

    batch: tuple[str, ...]
    sequence: tuple[str, ...] = ()
    dealt: tuple[str, ...] = ()

    def kept(self, other: Layout) -> tuple[int, int]:
        """How many leading axes of the samples and of the sequence stay when this layout becomes the other."""
        sequence = _common(self.sequence, other.sequence)
        if self.dealt != other.dealt or not {*self.dealt} <= {*self.sequence[:sequence]}:
            sequence = 0
        return _common(self.batch, other.batch), sequence


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The axes that one strategy uses for what, each tuple in root order (outermost first)."""

    tp: tuple[str, ...]
    sp: tuple[str, ...]
    cp: tuple[str, ...]
    ep: tuple[str, ...]
    dp_shard: tuple[str, ...]
    dp_replicate: tuple[str, ...]
    dp: tuple[str, ...]
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class RankMesh:
    """`pp` stages of ranks laid out along `axes`; rank = stage * ranks_per_stage + place in the stage."""

    pp: int
    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, *, world_size: int, pp: int = 1, ranks_per_node: int | None = None) -> RankMesh:
        """The mesh of `world_size` ranks in `pp` stages; ValueError when pp does not divide the world size."""
        if world_size < 1 or pp < 1 or world_size % pp:
            raise ValueError(f"{world_size} ranks cannot form {pp} equal stages")
        per_stage = world_size // pp
        inside = gcd(per_stage, ranks_per_node or per_stage)
        nodes = [Axis(name=f"n{i}", size=p) for i, p in enumerate(prime_factors(per_stage // inside))]
        local = [Axis(name=f"a{i}", size=p) for i, p in enumerate(prime_factors(inside))]
        return cls(pp=pp, axes=(*nodes, *local))

    @property
    def ranks_per_stage(self) -> int:
        """The number of ranks of one pipeline stage."""
        return prod(axis.size for axis in self.axes)

    @property
    def world_size(self) -> int:
        """The number of ranks of the whole mesh."""
        return self.pp * self.ranks_per_stage

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The axis names in root order, without `pp`."""
        return tuple(axis.name for axis in self.axes)

    def size(self, names: tuple[str, ...]) -> int:
        """The number of ranks that the named axes count together."""
        return prod(axis.size for axis in self.axes if axis.name in names)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands: its stage under `pp` and its place along each axis."""
        stage, place = divmod(rank, self.ranks_per_stage)
        where = {"pp": stage}
        for axis in reversed(self.axes):
            place, where[axis.name] = divmod(place, axis.size)
        return where

    def group(self, rank: int, names: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along the named axes, in root order; `rank` is one of them."""
        where = self.coordinates(rank)
        ranges = [range(a.size) if a.name in names else (where[a.name],) for a in self.axes]
        base = where["pp"] * self.ranks_per_stage
        return tuple(base + self._place(place) for place in product(*ranges))

    def groups(self, names: tuple[str, ...], stage: int = 0) -> tuple[tuple[int, ...], ...]:
        """All groups along the named axes on one stage; together they hold each rank of the stage once."""
        first = stage * self.ranks_per_stage
        found = {self.group(rank, names): None for rank in range(first, first + self.ranks_per_stage)}
        return tuple(found)

    def _place(self, coordinates: tuple[int, ...]) -> int:
        place = 0
        for axis, value in zip(self.axes, coordinates, strict=True):
            place = place * axis.size + value
        return place

    def place(self, strategy: Strategy) -> Placement:
        """The axes that `strategy` uses for what; ValueError when its degrees do not factor over this stage."""
        return _placement(self, strategy)

    def _placement(self, strategy: Strategy) -> Placement:
        if strategy.ranks != self.ranks_per_stage:
            raise ValueError(f"{strategy} occupies {strategy.ranks} ranks, a stage has {self.ranks_per_stage}")
        free = list(reversed(self.axes))

        def take(degree: int) -> tuple[str, ...]:
            taken = []
            for axis in list(free):
                if degree % axis.size == 0:
                    degree //= axis.size
                    taken.append(axis.name)
                    free.remove(axis)
            if degree != 1:
                raise ValueError(f"the degrees of {strategy} do not factor over the axes {self.axes}")
            return tuple(name for name in self.names if name in taken)

        tp, sp, cp, ep = take(strategy.tp), take(strategy.sp), take(strategy.cp), take(strategy.ep)
        dp_shard = take(strategy.state_shards)
        dp_replicate = tuple(name for name in self.names if name in {axis.name for axis in free})
        dp = tuple(name for name in self.names if name in {*dp_shard, *dp_replicate})
        batch = tuple(name for name in self.names if name in {*dp, *ep})
        sequence = tuple(name for name in self.names if name in {*sp, *cp})
        if strategy.sequence_norms:
            sequence = tuple(name for name in self.names if name in {*sequence, *tp})
        layout = Layout(batch=batch, sequence=sequence, dealt=cp)
        return Placement(
            tp=tp, sp=sp, cp=cp, ep=ep, dp_shard=dp_shard, dp_replicate=dp_replicate, dp=dp, layout=layout
        )

    @property
    def boundary(self) -> Layout:
        """The one layout in which activations cross stages: the micro-batch cut over all axes of the stage."""
        return Layout(batch=self.names)


def _common(old: tuple[str, ...], new: tuple[str, ...]) -> int:
    """The length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))


@lru_cache(maxsize=1 << 14)
def _placement(mesh: RankMesh, strategy: Strategy) -> Placement:
    return mesh._placement(strategy)


def prime_factors(number: int) -> list[int]:
    """The prime factors of a number >= 1, larger first: 12 gives [3, 2, 2]."""
    factors, prime = [], 2
    while number > 1:
        while number % prime == 0:
            factors.append(prime)
            number //= prime
        prime += 1
    return factors[::-1]


def divisors(number: int) -> tuple[int, ...]:
    """The divisors of a number >= 1, ascending: 6 gives (1, 2, 3, 6); in O(sqrt(number))."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))
