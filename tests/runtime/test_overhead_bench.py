"""The benchmark of the runtime's overhead: its interval, and that its plans are those of its scripts."""

from __future__ import annotations

import pytest

from tests.bench.runtime_overhead import PLANS, SIZES, interval, plan_of


def test_the_interval_is_that_of_the_tables_of_order_statistics() -> None:
    values = [float(n) for n in range(1, 16)]
    assert interval(values) == (4.0, 12.0)  # n = 15: 0.965 between the 4th and the 12th, 0.882 between 5th and 11th
    assert interval(values[:2]) == (1.0, 2.0)


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_is_uniform_and_takes_its_batch(name: str) -> None:
    for size in SIZES:
        plan = plan_of(name, size, 4)
        assert len(set(plan.strategies[1:-1])) == 1
        assert plan.request.global_batch % (plan.num_micro_batches * plan.mesh.ranks_per_stage) == 0
