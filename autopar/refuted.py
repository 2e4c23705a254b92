"""A table after the memory walk has refuted a choice of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from autopar.polish import Columns, Cuts
from autopar.price import CostTables, score
from autopar.solvers.stages import equal_rows


@dataclass(frozen=True, kw_only=True)
class Refutation:
    """A stage that needs over_bytes too much by the walk; layer: of the chain, the one that works at that moment."""

    stage: int
    over_bytes: int
    layer: int | None


def without(
    tables: CostTables, layers_per_stage: Cuts, strategies: Columns, refutations: Sequence[Refutation]
) -> CostTables:
    """The table in which a choice does not fit any more: layers need as much on top as the walk says that they do.

    What a layer needs beside the sets that are saved is its strategy's fault, so that layers of the same costs need it
    under the same strategy, too; others do not. Where no layer works at the peak every stage gets less memory. No
    bound: elsewhere in the chain the same strategy may need less.
    """
    result, ids = score(tables, layers_per_stage, strategies), equal_rows(tables)
    ends = (0, *accumulate(layers_per_stage))
    transient = tables.transient_bytes.copy()
    for one in refutations:
        if one.layer is None:
            tables = tables.with_less(one.over_bytes)
            continue
        span = range(ends[one.stage], ends[one.stage + 1])
        largest = max(int(tables.transient_bytes[layer, strategies[layer]]) for layer in span)
        kept = result.stage_bytes[one.stage] - largest
        needed = tables.budget_bytes[one.stage] - kept + one.over_bytes
        rows = [row for row, kind in enumerate(ids) if kind == ids[one.layer]]
        column = strategies[one.layer]
        transient[rows, column] = transient[rows, column].clip(min=needed)
    return replace(tables, transient_bytes=transient)


def lean_first(tables: CostTables, layers_per_stage: Cuts, strategies: Columns) -> Columns:
    """The choice with equal neighbours of a stage in order of what they save, the least first.

    Layers that recompute then work backwards when the sets of those behind them are gone. It costs nothing where they
    share a layout.
    """
    ids, first, found = equal_rows(tables), 0, list(strategies)
    for count in layers_per_stage:
        for _, same in groupby(range(first, first + count), lambda layer: ids[layer]):
            span = list(same)
            if tables.tied:
                span = [layer for layer in span if 0 < layer < len(ids) - 1]
            saved = {strategies[layer]: int(tables.saved_bytes[layer, strategies[layer]]) for layer in span}
            ordered = sorted((saved[strategies[layer]], strategies[layer]) for layer in span)
            for layer, (_, column) in zip(span, ordered, strict=True):
                found[layer] = column
        first += count
    return tuple(found)
