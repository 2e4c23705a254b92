"""What makes the search quick against the plain way: repeated rounds, single changes, GPipe through 1F1B."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from autopar import memory
from autopar.layer_memory import Unit
from autopar.memory import walk
from autopar.orders import actions
from autopar.pipeline import Ending, StageTimes, simulate, step
from autopar.polish import _better_singles, moved_cuts
from autopar.predict import rank_memory
from autopar.price import score
from autopar.searching import search_files
from autopar.tables import Prices
from tests.pricing import cluster_file, model_file, request


def _unit(rng: random.Random) -> Unit:
    zero, size = rng.choice([0, 0, 2, 3]), rng.randint(1, 200)
    return Unit(
        zero=zero,
        shards=rng.choice([2, 4]) if zero else 1,
        recompute=rng.random() < 0.4,
        parameter_bytes=size,
        trainable_bytes=rng.choice([size, 0, size // 2]),
        largest_parameter_bytes=rng.randint(0, size),
        input_bytes=rng.randint(0, 60),
        output_bytes=rng.randint(0, 60),
        saved_bytes=rng.randint(0, 300),
        forward_peak_bytes=rng.randint(0, 400),
        backward_peak_bytes=rng.randint(0, 500),
        relayout=rng.random() < 0.3,
    )


def test_rounds_that_are_not_walked_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def plainly(state: memory._State, pattern: str, times: int, held_bytes: int) -> None:
        for kind in pattern * times:
            if kind == "F":
                state.forward()
                state.ledger.add("activations", held_bytes)
                state.ledger.look(0)
            else:
                state.backward()
                state.ledger.add("activations", -held_bytes)

    rng, cases = random.Random(3), []
    for _ in range(600):
        pp = rng.choice([1, 2, 4, 8])
        order = actions(rng.choice(["1f1b", "gpipe"]), pp, rng.randrange(pp), rng.randint(pp, 20))
        cases.append(([_unit(rng) for _ in range(rng.randint(1, 5))], order, rng.randint(-60, 60)))
    quick = [walk(units, order, optimizer="adamw", held_bytes=held) for units, order, held in cases]
    monkeypatch.setattr(memory, "_repeat", plainly)
    assert quick == [walk(units, order, optimizer="adamw", held_bytes=held) for units, order, held in cases]


def test_a_step_without_operations_is_that_of_the_simulation() -> None:
    rng = random.Random(5)
    for _ in range(200):
        stages = [StageTimes(forward_s=rng.random(), backward_s=rng.random()) for _ in range(4)]
        ending = Ending(
            sync_s=tuple(rng.random() for _ in stages),
            tied_s=rng.choice((0.0, rng.random())),
            clip_s=rng.random(),
            optimizer_s=tuple(rng.random() for _ in stages),
        )
        asked = {"schedule": rng.choice(["1f1b", "gpipe"]), "micro_batches": rng.randint(4, 9), "send_s": rng.random()}
        line = simulate(stages, ending=ending, **asked)  # type: ignore[arg-type]
        short = step(stages, ending=ending, **asked)  # type: ignore[arg-type]
        assert (short.step_s, short.last_rank) == (line.step_s, line.last_rank)
        assert max(op.end_s for op in line.operations) == pytest.approx(line.step_s)
        acting = sum(op.end_s - op.start_s for op in line.operations if op.rank == line.last_rank and op.stage >= 0)
        assert short.busy_s == pytest.approx(acting)


def _prices(pp: int, count: int) -> Prices:
    model, cluster = model_file(5), cluster_file()
    asked = request(16)
    return Prices.of(model.model, model.layers, cluster.cluster, cluster.links, asked, pp=pp, num_micro_batches=count)


@pytest.mark.parametrize(("pp", "count"), [(2, 2), (2, 4), (2, 8), (4, 4), (4, 16)])
def test_the_lower_table_of_1f1b_bounds_gpipe(pp: int, count: int) -> None:
    model, cluster, asked = model_file(5), cluster_file(), request(16)
    made, other = (_prices(pp, count).tables(schedule, "lower") for schedule in ("1f1b", "gpipe"))  # type: ignore[arg-type]
    assert (made.time_ns == other.time_ns).all()
    some = search_files(model, cluster, asked).plan
    rng, units = np.random.default_rng(pp), len(made.time_ns)
    for _ in range(40):
        ends = sorted(rng.choice(np.arange(1, units), pp - 1, replace=False).tolist())
        layers = tuple(b - a for a, b in pairwise((0, *ends, units)))
        chosen = tuple(int(rng.choice(np.flatnonzero(row))) for row in made.feasible)
        plan = replace(
            some,
            pp=pp,
            schedule="gpipe",
            num_micro_batches=count,
            layers_per_stage=layers,
            strategies=tuple(made.strategies[s] for s in chosen),
            predicted=None,
        )
        for stage, size in enumerate(score(made, layers, chosen).stage_bytes):
            at_ends = cluster.cluster.memory_bytes - made.budget_bytes[stage]
            assert rank_memory(plan, stage, model.model, model.layers).peak_bytes >= size + at_ends


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_single_changes_are_scored_as_one_by_one(pp: int) -> None:
    made = _prices(pp, 4).tables("1f1b", "lower")
    rng, units = np.random.default_rng(pp), len(made.time_ns)
    layers = tuple(len(part) for part in np.array_split(np.arange(units), pp))
    for _ in range(5):
        chosen = tuple(int(rng.choice(np.flatnonzero(row))) for row in made.feasible)
        best_ns = score(made, layers, chosen).objective_ns
        found = {choice: ns for ns, choice in _better_singles(made, layers, chosen, best_ns, made.time_ns.size)}
        expected = {}
        for unit in range(units):
            for s in np.flatnonzero(made.feasible[unit]):
                other = (*chosen[:unit], int(s), *chosen[unit + 1 :])
                summed = score(made, layers, other)
                stage = int(np.searchsorted(np.cumsum(layers), unit, side="right"))
                if summed.objective_ns < best_ns and summed.stage_bytes[stage] <= made.budget_bytes[stage]:
                    expected[layers, other] = summed.objective_ns
        assert found == expected


@pytest.mark.parametrize(("pp", "count"), [(2, 4), (4, 4), (4, 16)])
def test_moved_cuts_are_those_that_add_up_to_less(pp: int, count: int) -> None:
    made = _prices(pp, count).tables("1f1b", "lower")
    rng, units = np.random.default_rng(pp), len(made.time_ns)
    for _ in range(40):
        ends = sorted(rng.choice(np.arange(1, units), pp - 1, replace=False).tolist())
        layers = tuple(b - a for a, b in pairwise((0, *ends, units)))
        chosen = tuple(int(rng.choice(np.flatnonzero(row))) for row in made.feasible)
        best_ns = int(score(made, layers, chosen).objective_ns * rng.uniform(0.9, 1.1))
        wanted = set()
        for stage in range(pp - 1):
            for moved in (-1, 1):
                cuts = list(layers)
                cuts[stage] += moved
                cuts[stage + 1] -= moved
                if min(cuts) > 0 and score(made, tuple(cuts), chosen).objective_ns < best_ns:
                    wanted.add((tuple(cuts), chosen))
        assert set(moved_cuts(made, layers, chosen, best_ns)) == wanted
