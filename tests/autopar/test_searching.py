"""The whole search against every plan there is, and its answers when nothing is legal or nothing fits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest

from autopar.cuts import Cut, legal_cuts
from autopar.errors import InfeasibleError, InputError, RunError
from autopar.finalists import objective_ns
from autopar.measured import ClusterFile, ModelFile
from autopar.plan import Plan
from autopar.predict import predict, rank_memory
from autopar.price import INFEASIBLE, CostTables, score
from autopar.request import Forbid, Pin, Request
from autopar.searching import SearchResult, search_files
from autopar.tables import tables
from autopar.units import parse_bytes
from tests.bench.whole_search import CASES
from tests.bench.whole_search import cluster_file as cluster_of
from tests.bench.whole_search import model_file as profile_of
from tests.pricing import cluster_file, model_file, request

# Without vocabulary and sequence parallelism there are few enough plans to look at each.
MODEL, CLUSTER = model_file(words_tp=(), attention=None), cluster_file()


def _search(memory_bytes: int | None = None, **changes: Any) -> SearchResult:
    return search_files(MODEL, CLUSTER, request(memory_bytes=memory_bytes, **changes))


def _peak(plan: Plan) -> int:
    assert plan.predicted is not None
    return max(rank.peak_bytes for rank in plan.predicted.memory)


def _all_choices(made: CostTables) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    units = len(made.time_ns)
    rows = [[s for s in range(len(made.strategies)) if made.feasible[u, s]] for u in range(units)]
    for ends in combinations(range(1, units), made.stages - 1):
        layers = tuple(b - a for a, b in zip((0, *ends), (*ends, units), strict=True))
        for chosen in product(*rows):
            yield layers, chosen


FEWER = ("*: z1", "*: rs", "embed: tp2", "embed: tp4", "head: tp2", "head: tp4")
"""What leaves some thousand plans to enumerate."""
WORDS = model_file(words_tp=(2,), attention=None)
ONLY_Z1 = ("*: r", "*: z2", "*: z3", "*: tp4")
"""What leaves some thousand with ZeRO-1 and words that are cut."""


class _Everything:
    """Every plan of a small model: its objective, and its peak by the walk."""

    def __init__(self, model: ModelFile = MODEL, bans: Sequence[str] = FEWER, **changes: Any) -> None:
        self.model, self.asked = model, request(forbids=tuple(map(Forbid.parse, bans)), **changes)
        found = []
        some = search_files(model, CLUSTER, self.asked).plan
        for cut in legal_cuts(model, CLUSTER, self.asked)[0]:
            made = tables(
                model.model,
                model.layers,
                CLUSTER.cluster,
                CLUSTER.links,
                self.asked,
                pp=cut.pp,
                num_micro_batches=cut.num_micro_batches,
                schedule=cut.schedule,
            )
            stages: dict[Any, int] = {}
            for layers, chosen in _all_choices(made):
                if made.tied and chosen[0] != chosen[-1]:
                    continue
                plan = replace(
                    some,
                    pp=cut.pp,
                    schedule=cut.schedule,
                    num_micro_batches=cut.num_micro_batches,
                    layers_per_stage=layers,
                    strategies=tuple(made.strategies[s] for s in chosen),
                    predicted=None,
                )
                peak = 0
                for stage in range(cut.pp):
                    span = plan.stage_layers(stage)
                    key = stage, span, chosen[span.start : span.stop]
                    if key not in stages:
                        stages[key] = rank_memory(plan, stage, model.model, model.layers).peak_bytes
                    peak = max(peak, stages[key])
                found.append((score(made, layers, chosen).objective_ns, peak))
        self.plans = sorted(found)

    def best_ns(self, memory_bytes: int) -> int | None:
        return next((objective for objective, peak in self.plans if peak <= memory_bytes), None)


@pytest.fixture(scope="module")
def everything() -> _Everything:
    return _Everything(num_micro_batches=(2,), schedules=("1f1b",), global_batch=8)


def _exact_budgets(everything: _Everything, count: int) -> tuple[int, int]:
    """At so many budgets the bound holds and the plan fits by the walk; how often no plan that fits is better, proven.

    So few plans are settled one by one: the bound is then that of the walk.
    """
    peaks = sorted({peak for _, peak in everything.plans})
    exact = 0
    budgets = [peaks[0], *peaks[:: len(peaks) // count], peaks[-1]]
    for memory_bytes in budgets:
        result = search_files(everything.model, CLUSTER, replace(everything.asked, memory_bytes=memory_bytes))
        best_ns = everything.best_ns(memory_bytes)
        assert best_ns is not None
        assert all(_peak(f.plan) <= memory_bytes for f in result.finalists if f.fits)
        found = [f.plan.certificate for f in result.finalists if f.fits]
        assert all(c is not None and c.lower_bound_ns <= best_ns <= c.objective_ns for c in found)
        least_ns = min(c.objective_ns for c in found if c is not None)
        assert least_ns == best_ns
        exact += any(c.status == "optimal" for c in found if c is not None)
    return exact, len(budgets)


def test_the_search_equals_the_enumeration_of_all_plans(everything: _Everything) -> None:
    exact, count = _exact_budgets(everything, 5)
    assert exact == count


def test_the_search_equals_the_enumeration_with_zero_1_and_cut_words() -> None:
    everything = _Everything(WORDS, ONLY_Z1, num_micro_batches=(2,), schedules=("1f1b",), global_batch=8)
    exact, count = _exact_budgets(everything, 5)
    print(f"{len(everything.plans)} plans, {exact} of {count} budgets exact")
    assert exact == count


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_the_search_equals_the_enumeration_of_more_plans_with_zero_1_and_cut_words(tied: bool) -> None:
    model = model_file(words_tp=(2, 4), attention=None, tied=tied)
    everything = _Everything(
        model, ("*: tp4", "*: z2", "*: rs"), num_micro_batches=(2, 4), schedules=("1f1b",), global_batch=8
    )
    exact, count = _exact_budgets(everything, 30)
    print(f"{len(everything.plans)} plans, {exact} of {count} budgets exact")
    assert exact == count


@pytest.mark.slow
def test_the_search_equals_the_enumeration_of_more_plans() -> None:
    exact, count = _exact_budgets(
        _Everything(num_micro_batches=(1, 2, 4), schedules=("1f1b", "gpipe"), global_batch=16), 30
    )
    print(f"{exact} of {count} budgets exact")
    assert exact == count


@pytest.mark.slow
def test_with_selective_recompute_the_search_equals_the_enumeration() -> None:
    bans = tuple(ban for ban in FEWER if ban != "*: rs")
    everything = _Everything(MODEL, bans, num_micro_batches=(1, 2, 4), schedules=("1f1b", "gpipe"), global_batch=16)
    exact, count = _exact_budgets(everything, 30)
    print(f"{exact} of {count} budgets exact")
    assert exact == count


RESTRICTIONS: tuple[dict[str, Any], ...] = (
    {"max_strategies": 1},
    {"max_strategies": 2},
    {"pp": (1,)},
    {"num_micro_batches": (2,)},
    {"schedules": ("1f1b",)},
    {"forbids": (Forbid.parse("*: rs"),)},
    {"pins": (Pin.parse("head: dp4-z1"),), "pp": (1,)},
)


def _least_ns(model: ModelFile, cluster: ClusterFile, asked: Request) -> int:
    try:
        found = search_files(model, cluster, asked).finalists
    except InfeasibleError:
        return INFEASIBLE
    return min(objective_ns(one.plan) for one in found if one.fits)


def _never_beaten(model: ModelFile, asked: Request) -> None:
    free_ns = _least_ns(model, CLUSTER, asked)
    restricted = [_least_ns(model, CLUSTER, replace(asked, **one)) for one in RESTRICTIONS]
    assert free_ns <= min(restricted)
    assert free_ns < max(restricted)


def test_a_restricted_search_never_beats_the_unlimited() -> None:
    _never_beaten(MODEL, request(8, memory_bytes=1_500_000))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_a_restricted_search_never_beats_the_unlimited_with_words_that_are_cut(tied: bool) -> None:
    for memory_bytes in (1_000_000, 1_200_000, 1_500_000, 2_000_000, 2_500_000):
        _never_beaten(model_file(attention=None, tied=tied), request(8, memory_bytes=memory_bytes))


@pytest.mark.slow
def test_a_restricted_search_never_beats_the_unlimited_on_a_7b_model() -> None:
    """At 24 GiB two strategies were found to take 11.310 s where any number took 11.456 s (2026-11-30)."""
    case = next(case for case in CASES if case.name.startswith("7B"))
    model, cluster = profile_of(case), cluster_of(case.devices)
    asked = Request(global_batch=case.global_batch, sequence=case.sequence, dtype="bfloat16")
    for gib in (17, 20, 22, 24, 26, 28):
        free, two = (
            _least_ns(model, cluster, replace(asked, memory_bytes=gib << 30, max_strategies=most))
            for most in (None, 2)
        )
        print(f"{gib} GiB: {free / 1e9:.3f} s, with two strategies {two / 1e9:.3f} s")
        assert free <= two


def test_one_byte_less_than_the_leanest_plan_does_not_fit(everything: _Everything) -> None:
    least = min(peak for _, peak in everything.plans)
    with pytest.raises(InfeasibleError) as caught:
        search_files(MODEL, CLUSTER, replace(everything.asked, memory_bytes=least - 1))
    words = str(caught.value)
    assert "No plan fits" in words
    assert "are missing" in words
    assert "rank" in words
    leanest = caught.value.leanest
    assert isinstance(leanest, Plan)
    assert _peak(leanest) > least - 1


def test_the_fix_of_an_infeasible_request_works() -> None:
    with pytest.raises(InfeasibleError) as caught:
        _search(1 << 19)
    size = parse_bytes(caught.value.fix.split()[1])
    assert _peak(_search(size).plan) <= size


def test_a_table_optimum_with_room_is_proven() -> None:
    plan = _search().plan
    assert plan.certificate is not None
    assert (plan.certificate.status, plan.certificate.gap) == ("optimal", 0.0)
    plan.check(MODEL.model)


def test_more_memory_never_hurts() -> None:
    steps = []
    for memory_bytes in (3 << 19, 1 << 21, 1 << 22):
        predicted = _search(memory_bytes).plan.predicted
        assert predicted is not None
        steps.append(predicted.step_s)
    assert steps == sorted(steps, reverse=True)


def test_the_prediction_is_that_of_the_plan() -> None:
    plan = _search(pp=(2,)).plan
    again = predict(plan, MODEL.model, MODEL.layers, CLUSTER.cluster, CLUSTER.links)
    assert plan.predicted == again
    assert plan.pp == 2


def test_the_same_input_gives_the_same_bytes() -> None:
    assert _search(3 << 20).plan.dumps() == _search(3 << 20).plan.dumps()


def test_a_plan_survives_its_file(tmp_path: Any) -> None:
    plan = _search(3 << 20, pins=(Pin.parse("0: dp2-z3-tp2s-r"),)).plan
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert plan.strategies[1].short == "dp2-z3-tp2s-r"


def test_tied_layers_agree() -> None:
    tied = model_file(tied=True)
    for memory_bytes in (None, 1 << 21):
        result = search_files(tied, CLUSTER, request(memory_bytes=memory_bytes))
        for finalist in result.finalists:
            assert finalist.plan.strategies[0] == finalist.plan.strategies[-1]


def test_a_slow_network_makes_stages() -> None:
    """Where collectives cost a second and sends little, a pipeline wins."""
    slow = cluster_file(alpha_s=0.05, bytes_per_s=1e7)
    curves = [c if c.collective != "p2p" else replace(c, seconds=(1e-6,) * len(c.seconds)) for c in slow.links.curves]
    cheap = replace(slow, links=replace(slow.links, curves=tuple(curves)))
    plan = search_files(MODEL, cheap, request()).plan
    assert plan.pp == 4


def test_cuts_are_legal_and_the_rest_has_reasons() -> None:
    legal, skipped = legal_cuts(MODEL, CLUSTER, request(global_batch=4))
    assert Cut(pp=4, num_micro_batches=4, schedule="1f1b") in legal
    assert Cut(pp=4, num_micro_batches=2, schedule="1f1b") not in legal
    assert Cut(pp=4, num_micro_batches=2, schedule="gpipe") in legal
    assert any("at least as many micro-batches as stages" in reason for reason in skipped)
    assert [c.pp for c in legal_cuts(model_file(1), CLUSTER, request(pp=(4,)))[0]] == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"global_batch": 10, "pp": (1,)}, "legal global batches near it: [8, 12]"),
        ({"pp": (3,)}, "pp 3 does not divide the 4 ranks"),
        ({"pp": (1,), "num_micro_batches": (3,)}, "not divisible by 3 micro-batches"),
        (
            {"pp": (1,), "pins": (Pin.parse("0: tp4s"), Pin.parse("head: tp4s"))},
            "head runs data parallel, or vocabulary-parallel with tp",
        ),
        ({"pins": (Pin.parse("0: dp8"),)}, "occupies 8 ranks"),
        ({"global_batch": 1 << 40}, "absurd"),
    ],
)
def test_nothing_legal_is_the_users_error(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        _search(**changes)
    assert words in str(caught.value)


def test_a_pin_beyond_the_heads_names_heads_and_degrees() -> None:
    with pytest.raises(InputError) as caught:
        search_files(model_file(tp_degrees=(2,)), CLUSTER, request(pins=(Pin.parse("*: tp4"),)))
    assert "heads 2" in str(caught.value)
    assert "legal degrees: 1, 2" in str(caught.value)


@pytest.mark.parametrize(("field", "value"), [("sequence", 64), ("dtype", "bfloat16")])
def test_a_profile_for_something_else_is_refused(field: str, value: object) -> None:
    with pytest.raises(InputError, match=f"another {field}"):
        search_files(MODEL, CLUSTER, replace(request(), **{field: value}))  # type: ignore[arg-type]


def test_one_rank_needs_no_links() -> None:
    alone = replace(CLUSTER, cluster=replace(CLUSTER.cluster, world_size=1), links=replace(CLUSTER.links, curves=()))
    assert search_files(MODEL, alone, request()).plan.strategies[0].short == "dp1"


def test_a_stopped_search_says_so() -> None:
    with pytest.raises(RunError, match="stopped"):
        search_files(MODEL, CLUSTER, request(), stop=lambda: True)


def test_progress_is_told() -> None:
    heard: list[tuple[str, int, int]] = []
    search_files(MODEL, CLUSTER, request(), progress=lambda *step: heard.append(step))
    assert {phase for phase, _, _ in heard} == {"tables", "solve"}
    assert all(0 <= done <= total for _, done, total in heard)


def test_searching_loads_nothing_heavy() -> None:
    code = (
        "import sys, autopar.searching; print([m for m in ('torch', 'pandas', 'ortools', 'pulp') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_a_batch_beyond_the_exact_range_is_refused_in_words() -> None:
    with pytest.raises(InputError, match="a global batch of 2147483648 is too large to plan for"):
        _search(global_batch=1 << 31, memory_bytes=1 << 55)
