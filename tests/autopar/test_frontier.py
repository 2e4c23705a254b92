"""The frontier against every plan of the small model, and what-ifs against the changed inputs."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from autopar.charts import COLUMNS, frontier_csv, frontier_svg, frontier_table, what_if_table
from autopar.errors import InfeasibleError, InputError
from autopar.finalists import peak_bytes, step_s
from autopar.frontier import Frontier, changed_conditions, frontier, what_if
from autopar.predict import predict
from autopar.report import render
from autopar.request import Forbid
from autopar.searching import search_files
from tests.pricing import cluster_file, model_file, request

MODEL, CLUSTER = model_file(3), cluster_file()
FEWER = tuple(map(Forbid.parse, ("embed: tp2", "embed: tp4", "head: tp2", "head: tp4")))
ASKED = request(8, num_micro_batches=(1, 2), schedules=("1f1b",), forbids=FEWER)


@pytest.fixture(scope="module")
def found() -> Frontier:
    return frontier(MODEL, CLUSTER, ASKED)


def test_a_frontier_goes_down_to_the_leanest_plan(found: Frontier) -> None:
    assert found.complete
    assert len(found.plans) > 5
    peaks, steps = [peak_bytes(plan) for plan in found.plans], [step_s(plan) for plan in found.plans]
    assert peaks == sorted(set(peaks), reverse=True)
    assert steps == sorted(set(steps))
    with pytest.raises(InfeasibleError):
        search_files(MODEL, CLUSTER, replace(ASKED, memory_bytes=peaks[-1] - 1))


def test_a_search_at_any_budget_is_not_better_than_the_frontier(found: Frontier) -> None:
    """Beyond the 2 % by which two searches near the leanest plan may differ, where none is proven optimal."""
    peaks = [peak_bytes(plan) for plan in found.plans]
    for budget in range(peaks[-1], peaks[0], max(1, (peaks[0] - peaks[-1]) // 12)):
        plan = search_files(MODEL, CLUSTER, replace(ASKED, memory_bytes=budget)).plan
        best = next(one for one in found.plans if peak_bytes(one) <= budget)
        assert step_s(best) <= step_s(plan) * 1.02


def test_a_stopped_frontier_says_so() -> None:
    calls = {"count": 0}

    def stop() -> bool:
        calls["count"] += 1
        return calls["count"] > 400

    stopped = frontier(MODEL, CLUSTER, ASKED, stop=stop)
    assert not stopped.complete
    assert stopped.plans
    assert "stopped" in render(frontier_table(stopped))


def test_a_frontier_as_csv_and_plot(found: Frontier) -> None:
    rows = list(csv.DictReader(io.StringIO(frontier_csv(found))))
    assert tuple(rows[0]) == COLUMNS
    assert [int(row["memory_bytes"]) for row in rows] == [peak_bytes(plan) for plan in found.plans]
    assert [float(row["step_s"]) for row in rows] == [step_s(plan) for plan in found.plans]
    plot = ElementTree.fromstring(frontier_svg(found, title="a < b"))
    circles = [one for one in plot.iter() if one.tag.endswith("circle")]
    assert len(circles) == len(found.plans)
    assert f"of {len(found.plans)} breakpoints" in render(frontier_table(found)) or len(found.plans) <= 24


def test_slower_links_and_compute_price_the_same_plan_again() -> None:
    result = what_if(MODEL, CLUSTER, ASKED, "links*0.5, compute*0.5")
    assert result.fits
    assert result.best is not None
    assert step_s(result.now) < step_s(result.best) <= step_s(result.then)
    # All measured times twice as long; only the assumed optimizer keeps its own.
    twice = 2 * step_s(result.now)
    assert 0.9 * twice <= step_s(result.then) <= twice
    model, cluster, _ = changed_conditions(MODEL, CLUSTER, ASKED, "links*0.5,compute*0.5")
    again = predict(result.now, model.model, model.layers, cluster.cluster, cluster.links)
    assert again.step_s == step_s(result.then)
    assert "today's plan then" in render(what_if_table(result))


def test_less_memory_may_leave_nothing() -> None:
    now = search_files(MODEL, CLUSTER, ASKED).plan
    size = peak_bytes(now)
    asked = replace(ASKED, memory_bytes=size)
    result = what_if(MODEL, CLUSTER, asked, "memory*0.9", now=now)
    assert not result.fits
    assert result.best is not None
    assert peak_bytes(result.best) <= size * 0.9 + 1
    nothing = what_if(MODEL, CLUSTER, asked, f"memory-{size - 10}B", now=now)
    assert nothing.best is None
    assert "nothing fits" in render(what_if_table(nothing))
    assert changed_conditions(MODEL, CLUSTER, asked, "memory+2KiB")[2].memory_bytes == size + 2048


@pytest.mark.parametrize(
    "change", ["links", "links*0", "links*-1", "gpus*2", "memory-", "memory*x", "", "links*1.2.3"]
)
def test_a_change_that_is_none_is_refused(change: str) -> None:
    with pytest.raises(InputError, match="is not a change"):
        changed_conditions(MODEL, CLUSTER, ASKED, change)


def test_a_change_that_leaves_no_memory_is_refused() -> None:
    with pytest.raises(InputError, match="leaves no memory"):
        changed_conditions(MODEL, CLUSTER, ASKED, "memory-2TiB")
