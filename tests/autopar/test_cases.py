"""Inputs that broke other planners (C01, C02, C04, C06, C08, C11, C12): the right plan, or a reason with numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.axes import RankMesh
from autopar.errors import InfeasibleError, InputError
from autopar.measured import ClusterFile, ModelFile
from autopar.plan import Plan
from autopar.relaxing import Relaxation, search_or_explain
from autopar.request import Forbid, Pin
from autopar.searching import search_files
from autopar.space import StrategySpace
from autopar.units import parse_bytes
from tests.bench import whole_search
from tests.pricing import cluster_file, model_file, request

ROOT = Path(__file__).parent.parent.parent


def _heads(blocks: int, degrees: tuple[int, ...], reason: str, **changes: float) -> ModelFile:
    """A profile whose blocks allow these tp degrees for this reason."""
    found = model_file(blocks, tp_degrees=degrees, **changes)  # type: ignore[arg-type]
    kinds = tuple(replace(kind, tp_reason=reason) if kind.role == "block" else kind for kind in found.model.kinds)
    return replace(found, model=replace(found.model, kinds=kinds))


def _peak(plan: Plan) -> int:
    assert plan.predicted is not None
    return max(rank.peak_bytes for rank in plan.predicted.memory)


def test_c01_tp_stays_among_the_divisors_of_heads_and_kv_heads() -> None:
    model, cluster = _heads(4, (2,), "heads 14, kv heads 2, width 448"), cluster_file(8)
    for memory in (None, 2 << 20):
        plan = search_files(model, cluster, request(memory_bytes=memory)).plan
        assert {strategy.tp for strategy in plan.strategies} <= {1, 2}
    with pytest.raises(InputError) as caught:
        search_files(model, cluster, request(pins=(Pin.parse("*: tp8"),)))
    words = str(caught.value)
    assert "heads 14, kv heads 2" in words
    assert "legal degrees: 1, 2" in words


def test_c02_tp_beyond_the_kv_heads_is_refused_before_anything_runs() -> None:
    model = _heads(2, (2,), "heads 8, kv heads 2, width 448")
    with pytest.raises(InputError, match="tp 4 does not divide Block"):
        search_files(model, cluster_file(4), request(pins=(Pin.parse("*: tp4"),)))


def test_c04_one_rank_recomputes_when_it_must() -> None:
    model, alone = _heads(6, (2, 3, 4, 6, 12), "heads 12"), cluster_file(1)
    free = search_files(model, alone, request(8)).plan
    leaner = request(8, memory_bytes=int(_peak(free) * 0.8), num_micro_batches=(free.num_micro_batches,))
    plan = search_files(model, alone, leaner).plan
    assert any(strategy.recompute != "none" for strategy in plan.strategies)
    assert {strategy.ranks for strategy in plan.strategies} == {1}


def test_c04_six_ranks_are_all_used_and_may_take_three() -> None:
    model, cluster = _heads(6, (2, 3, 6), "heads 12"), cluster_file(6)
    asked = request(12)
    space = StrategySpace.of(model.model, model.layers, RankMesh.of(world_size=6), asked, 12)
    assert {strategy.tp for strategy in space.strategies} == {1, 2, 3, 6}
    plan = search_files(model, cluster, asked).plan
    assert plan.mesh.world_size == 6
    assert {strategy.ranks for strategy in plan.strategies} == {6 // plan.pp}


@pytest.mark.parametrize(("blocks", "world", "pp"), [(30, 4, 4), (7, 6, 3)])
def test_c06_every_layer_stands_on_one_stage(blocks: int, world: int, pp: int) -> None:
    plan = search_files(model_file(blocks, tp_degrees=()), cluster_file(world), request(24, pp=(pp,))).plan
    places = [layer for stage in range(pp) for layer in plan.stage_layers(stage)]
    assert places == list(range(blocks + 2))


def test_c06_a_stage_with_a_large_head_holds_fewer_blocks() -> None:
    model = model_file(7, tp_degrees=(), head_scale=6.0)
    plan = search_files(model, cluster_file(3), request(24, pp=(3,), schedules=("1f1b",))).plan
    assert plan.layers_per_stage[-1] < max(plan.layers_per_stage)


def test_c08_a_batch_that_the_pins_cannot_share_names_legal_ones() -> None:
    with pytest.raises(InputError) as caught:
        search_files(model_file(), cluster_file(4), request(10, pins=(Pin.parse("*: dp4"),)))
    assert "legal global batches near it: [8, 12]" in str(caught.value)


def test_c08_a_plan_takes_a_divisor_and_never_changes_the_batch() -> None:
    plan = search_files(model_file(), cluster_file(4), request(10)).plan
    assert plan.request.global_batch == 10
    assert plan.micro_batch * plan.num_micro_batches == 10
    assert all(plan.micro_batch % strategy.dp == 0 for strategy in plan.strategies)
    with pytest.raises(InputError, match="16 is not divisible by 3 micro-batches"):
        search_files(model_file(), cluster_file(4), request(16, num_micro_batches=(3,)))


def test_c11_a_sequence_that_does_not_divide_is_kept_whole_or_refused_with_the_next_length() -> None:
    model = model_file()
    odd = replace(model, layers=replace(model.layers, sequence=8193))
    asked = replace(request(), sequence=8193)
    plan = search_files(odd, cluster_file(4), asked).plan
    assert not any(strategy.sequence_norms for strategy in plan.strategies)
    with pytest.raises(InputError) as caught:
        search_files(odd, cluster_file(4), replace(asked, pins=(Pin.parse("*: dp2-tp2s"),)))
    assert "8193" in str(caught.value)
    assert "8194" in str(caught.value)


@pytest.fixture(scope="module")
def one_b() -> tuple[ModelFile, ClusterFile, whole_search.Case]:
    case = next(case for case in whole_search.CASES if case.name.startswith("1B"))
    return whole_search.model_file(case), whole_search.cluster_file(case.devices), case


def _one_b(one_b: tuple[ModelFile, ClusterFile, whole_search.Case], memory: str) -> Plan:
    model, cluster, case = one_b
    asked = request(case.global_batch, dtype="bfloat16", memory_bytes=parse_bytes(memory))
    return search_or_explain(model, cluster, replace(asked, sequence=case.sequence)).plan


def test_c12_a_tiny_budget_names_the_least_and_what_would_do(
    one_b: tuple[ModelFile, ClusterFile, whole_search.Case],
) -> None:
    with pytest.raises(InfeasibleError) as caught:
        _one_b(one_b, "0.1GB")
    error = caught.value
    assert error.exit_code == 4
    assert isinstance(error.leanest, Plan)
    for word in ("rank", "are missing", "95.4 MiB"):
        assert word in error.what
    for word in ("parameters", "gradients", "optimizer", "activations"):
        assert word in error.why
    found = [one for one in error.relaxations if isinstance(one, Relaxation)]
    assert len(found) >= 3
    assert found[0].fits
    assert _peak(found[0].plan) <= parse_bytes(found[0].change.split()[1])
    assert any("ranks of the same memory" in one.change for one in found)
    assert any("--seq" in one.change for one in found)
    assert all(str(one) in error.fix for one in found)


@pytest.mark.parametrize("memory", ["7GB", "12GB", "20GB"])
def test_c12_larger_budgets_work(one_b: tuple[ModelFile, ClusterFile, whole_search.Case], memory: str) -> None:
    assert _peak(_one_b(one_b, memory)) <= parse_bytes(memory)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [f"{n}GB" for n in range(1, 21)])
def test_c12_every_budget_is_a_plan_or_a_reason(
    one_b: tuple[ModelFile, ClusterFile, whole_search.Case], memory: str
) -> None:
    reason, plan = None, None
    try:
        plan = _one_b(one_b, memory)
    except InfeasibleError as error:
        reason = error
    assert plan is None or _peak(plan) <= parse_bytes(memory)
    assert reason is None or ("are missing" in reason.what and len(reason.relaxations) >= 3)


def test_options_in_conflict_are_named_and_dropping_any_one_helps() -> None:
    model, cluster = model_file(), cluster_file()
    free = search_files(model, cluster, request()).plan
    budget = int(_peak(free) * 0.7)
    pins = tuple(Pin.parse(f"{layers}: dp4") for layers in ("embed", "0", "1", "head"))
    asked = request(memory_bytes=budget, pins=pins, pp=(1,), num_micro_batches=(1,))
    with pytest.raises(InfeasibleError) as caught:
        search_or_explain(model, cluster, asked)
    named = caught.value.why.split("something fits: ")[1]
    assert named
    for option, without in (
        ("--micro-batches 1", replace(asked, num_micro_batches=())),
        ("--pp 1", replace(asked, pp=())),
        *((f'--pin "{pin.short}"', replace(asked, pins=tuple(p for p in pins if p != pin))) for pin in pins),
    ):
        if option in named:
            others = [pin for pin in without.pins if f'"{pin.short}"' in named]
            kept = replace(
                without,
                pins=tuple(others),
                pp=without.pp if "--pp" in named else (),
                num_micro_batches=without.num_micro_batches if "--micro" in named else (),
            )
            assert _peak(search_files(model, cluster, kept).plan) <= budget


def test_what_is_forbidden_is_not_chosen() -> None:
    model, cluster = model_file(4), cluster_file()
    tight = int(_peak(search_files(model, cluster, request()).plan) * 0.6)
    for text in ("*: z3", "*: tp2", "1-2: r", "*: dp4-z3"):
        ban = Forbid.parse(text)
        plan = search_files(model, cluster, request(memory_bytes=tight, forbids=(ban,))).plan
        assert not any(ban.meets(plan.strategies[layer]) for layer in ban.indices(6))
        assert Plan.loads(plan.dumps()) == plan
    with pytest.raises(InputError, match="pinned to what is forbidden"):
        search_files(model, cluster, request(pins=(Pin.parse("0: dp4"),), forbids=(Forbid.parse("*: dp4"),)))
    with pytest.raises(InputError, match="is not a strategy"):
        Forbid.parse("*: fast")


@pytest.mark.parametrize("most", [1, 2])
def test_at_most_so_many_strategies(most: int) -> None:
    model, cluster = model_file(4), cluster_file()
    free = search_files(model, cluster, request()).plan
    for part in (1.0, 0.75, 0.6):
        asked = request(memory_bytes=int(_peak(free) * part), max_strategies=most)
        result = search_files(model, cluster, asked)
        assert all(len(set(one.plan.strategies[1:-1])) <= most for one in result.finalists if one.fits)
        assert len(set(result.plan.strategies[1:-1])) <= most


def test_tensor_parallelism_stays_in_its_node_unless_allowed() -> None:
    model, one_node = model_file(), cluster_file(8)
    cluster = replace(one_node, cluster=replace(one_node.cluster, ranks_per_node=2))
    pins = (Pin.parse("*: dp2-tp4"),)
    with pytest.raises(InputError, match="--tp-across-nodes"):
        search_files(model, cluster, request(pins=pins, pp=(1,)))
    assert search_files(model, cluster, request(pins=pins, pp=(1,), tp_across_nodes=True)).plan.strategies[1].tp == 4


def test_verification_names_who_agrees() -> None:
    result = search_files(model_file(), cluster_file(), request(memory_bytes=3 << 20), verify=True)
    certificate = result.plan.certificate
    assert certificate is not None
    assert certificate.verified_by == ("OR-Tools CP-SAT", "HiGHS")


def test_the_plan_does_not_depend_on_the_hash_seed() -> None:
    program = (
        "from tests.pricing import *\n"
        "from autopar.request import Pin\n"
        "from autopar.searching import search_files\n"
        "asked = request(memory_bytes=7 << 18, pins=(Pin.parse('head: dp4'),), pp=(1, 2))\n"
        "print(search_files(model_file(5), cluster_file(), asked).plan.dumps())"
    )
    found = set()
    for seed, threads in (("0", "1"), ("1", "2"), ("77", "1")):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": threads}
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1
