"""What the intervals of a chain hold: intervals of the same layers have equal costs, so each is computed once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.price import Int


@dataclass(frozen=True, kw_only=True, eq=False)
class Contents:
    """The V distinct sequences of layers that intervals of a chain hold.

    counts[V, K]: layers of each kind; size[V]; first[V]: where an interval with this content begins; where[U + 1,
    U + 1]: the content of layers a..b-1 at [b, a], V when there are none; placed[V, 2, 2]: whether such an interval
    begins behind the first layer and ends before the last one.
    """

    counts: Int
    size: Int
    first: Int
    where: NDArray[np.int32]
    placed: NDArray[np.bool_]


@lru_cache(maxsize=16)
def contents(pattern: tuple[int, ...]) -> Contents:
    """The contents of a chain whose layers are of these kinds, numbered by first appearance.

    A chain of equal layers between two ends has about 4 U contents in U^2 / 2 intervals. O(U^2 log U).
    """
    units, kinds = len(pattern), np.array(pattern, dtype=np.int64)
    where = np.full((units + 1, units + 1), -1, dtype=np.int32)
    shorter, made = np.zeros(units, dtype=np.int64), 0
    firsts, sizes = [], []
    for size in range(1, units + 1):
        begins = np.arange(units - size + 1)
        # Intervals are equal when they are without their last layer, and in that.
        key = shorter[: len(begins)] * units + kinds[size - 1 :]
        _, sample, shorter = np.unique(key, return_index=True, return_inverse=True)
        where[begins + size, begins] = made + shorter
        firsts.append(sample)
        sizes.append(np.full(len(sample), size))
        made += len(sample)
    where[where < 0] = made
    first, length = np.concatenate(firsts), np.concatenate(sizes)
    total = np.zeros((units + 1, max(pattern) + 1), dtype=np.int64)
    np.add.at(total, (np.arange(1, units + 1), kinds), 1)
    total = total.cumsum(axis=0)
    placed = np.zeros((made + 1, 2, 2), dtype=bool)
    for enters, from_ in enumerate((slice(0, 1), slice(1, None))):
        for leaves, to in enumerate((slice(-1, None), slice(None, -1))):
            placed[where[to, from_], enters, leaves] = True
    found = Contents(
        counts=total[first + length] - total[first], size=length, first=first, where=where, placed=placed[:-1]
    )
    for array in (found.counts, found.size, found.first, found.where, found.placed):
        array.flags.writeable = False
    return found
