"""Several global batches: each is searched as if alone, the most samples a second count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.batch_choice import search_batches, with_micro_batches
from autopar.errors import InputError
from autopar.finalists import step_s
from autopar.planning import search
from autopar.searching import search_files
from tests.pricing import cluster_file, model_file, request

MODEL, CLUSTER = model_file(), cluster_file()
ASKED = request(8, pp=(1,))


def test_the_best_batch_by_samples_a_second_is_planned() -> None:
    plan, tried = search_batches(MODEL, CLUSTER, ASKED, (8, 16, 7, 8))
    alone = {batch: search_files(MODEL, CLUSTER, replace(ASKED, global_batch=batch)).plan for batch in (8, 16)}
    best = max(alone, key=lambda batch: batch / step_s(alone[batch]))
    assert plan == alone[best]
    assert plan.request.global_batch == best
    assert [one.global_batch for one in tried] == [8, 16, 7]
    assert [one.plan for one in tried] == [alone[8], alone[16], None]
    assert "no plan (no plan is legal" in str(tried[2])
    assert search(MODEL, cluster=CLUSTER, global_batch=(8, 16), pp=(1,)) == plan


def test_no_legal_batch_is_the_error_of_the_first() -> None:
    with pytest.raises(InputError, match="no plan is legal"):
        search_batches(MODEL, CLUSTER, ASKED, (7, 9))


def test_sizes_of_micro_batches_are_numbers_of_them() -> None:
    assert with_micro_batches(ASKED, ()) == ASKED
    assert with_micro_batches(ASKED, (4, 3, 8)).num_micro_batches == (1, 2)
    assert with_micro_batches(replace(ASKED, num_micro_batches=(2, 4)), (4, 8)).num_micro_batches == (2,)
    plan, _ = search_batches(MODEL, CLUSTER, ASKED, (8, 16), micro_batch_sizes=(4,))
    assert plan.micro_batch == 4
    for sizes, asked in (((3,), ASKED), ((8,), replace(ASKED, num_micro_batches=(2,)))):
        with pytest.raises(InputError, match="has the size asked for"):
            with_micro_batches(asked, sizes)


def test_numbers_below_one_are_no_batches() -> None:
    for batches in ((), (8, 0)):
        with pytest.raises(InputError, match="not acceptable"):
            search(MODEL, cluster=CLUSTER, global_batch=batches)
