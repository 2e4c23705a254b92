"""What the search does with choices that the memory walk refutes."""

from __future__ import annotations

import random

from autopar.cuts import cut_tables, legal_cuts
from autopar.plan import Plan
from autopar.polish import Columns, Cuts
from autopar.pool import Pool
from autopar.price import CostTables, score
from autopar.refuted import lean_first, without
from tests.pricing import cluster_file, model_file, request

MODEL, CLUSTER = model_file(4), cluster_file()


def _pool(memory_bytes: int) -> Pool:
    asked = request(memory_bytes=memory_bytes)
    made, _ = cut_tables(MODEL, CLUSTER, asked, legal_cuts(MODEL, CLUSTER, asked)[0])
    return Pool(model_file=MODEL, cluster_file=CLUSTER, request=asked, made=made)


def _drawn(rng: random.Random, tables: CostTables) -> tuple[Cuts, Columns]:
    ends = sorted(rng.sample(range(1, len(tables.time_ns)), tables.stages - 1))
    cuts = tuple(b - a for a, b in zip([0, *ends], [*ends, len(tables.time_ns)], strict=True))
    return cuts, tuple(rng.choice(row.nonzero()[0].tolist()) for row in tables.feasible)


def test_a_refuted_choice_does_not_fit_its_table_any_more() -> None:
    pool, rng, blamed, kept = _pool(3 << 20), random.Random(1), 0, 0
    for _ in range(200):
        place = rng.randrange(len(pool.made.cuts))
        tables = pool.made.lower[place]
        choice = _drawn(rng, tables)
        refutations = pool.refutations(pool.plan(place, *choice))
        assert bool(refutations) == (not _fits(pool, pool.plan(place, *choice)))
        if refutations and score(tables, *choice).fits:
            left = without(tables, *choice, refutations)
            assert not score(left, *choice).fits
            assert (left.time_ns == tables.time_ns).all()
            blamed += all(one.layer is not None for one in refutations)
            kept += (left.transient_bytes == tables.transient_bytes).mean() > 0.7
    assert blamed > 10
    assert kept > 10


def _fits(pool: Pool, plan: Plan) -> bool:
    predicted = pool.priced(plan).predicted
    assert predicted is not None
    return all(rank.peak_bytes <= pool.budget_bytes for rank in predicted.memory)


def test_layers_that_save_little_come_first() -> None:
    pool = _pool(1 << 30)
    place = next(i for i, cut in enumerate(pool.made.cuts) if (cut.pp, cut.num_micro_batches) == (1, 2))
    tables = pool.made.lower[place]
    short = [strategy.short for strategy in tables.strategies]
    ends, plain, again = short.index("dp4"), short.index("dp4-z3"), short.index("dp4-z3-r")
    found = lean_first(tables, (6,), (ends, plain, again, plain, again, ends))
    assert found == (ends, again, again, plain, plain, ends)
    assert pool.peak_bytes(place, (6,), found) < pool.peak_bytes(place, (6,), (ends, plain, plain, again, again, ends))
