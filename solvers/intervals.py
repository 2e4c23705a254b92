"""What the intervals of a chain are made of: intervals of equal layers have equal bounds, so each is computed once."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from autopar.price import Int


@lru_cache(maxsize=16)
def compositions(pattern: tuple[int, ...]) -> tuple[Int, Int]:
    """The distinct contents of intervals: counts[V, K], layers of each kind; where[U + 1, U + 1], the row of a..b-1.

    pattern: the kind of each layer, numbered by first appearance; where is V for empty intervals. A chain of equal
    layers between two ends has about 4 U contents in U^2 / 2 intervals. With so many kinds that contents do not fit
    into one integer, every interval is its own.
    """
    units, kinds = len(pattern), max(pattern) + 1
    total = np.zeros((units + 1, kinds), dtype=np.int64)
    np.add.at(total, (np.arange(1, units + 1), np.array(pattern)), 1)
    total = total.cumsum(axis=0)
    first, end = np.triu_indices(units + 1, 1)
    if (units + 1) ** kinds < 1 << 62:
        code = total @ (units + 1) ** np.arange(kinds)
        _, sample, row = np.unique(code[end] - code[first], return_index=True, return_inverse=True)
    else:
        sample = row = np.arange(len(first))
    where = np.full((units + 1, units + 1), len(sample), dtype=np.int64)
    where[first, end] = row
    counts = total[end[sample]] - total[first[sample]]
    counts.flags.writeable = where.flags.writeable = False
    return counts, where
