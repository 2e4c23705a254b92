"""Link profiles: every shape that the mesh can use, real collectives on real ranks, and Ctrl-C keeps what is done."""

from __future__ import annotations

import os
import sys
from itertools import combinations, product
from math import nan, prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.axes import RankMesh, divisors
from autopar.comm import boundary_shape, shape_of
from autopar.errors import InputError, RunError
from autopar.measured import COLLECTIVES, ClusterFile, GroupShape
from autopar.profiler.cluster import Interrupted, dimensions, profile_cluster, tasks
from autopar.runtime.launch import launch
from autopar.strategy import Strategy

TARGETS = Path(__file__).with_name("link_targets.py")


def shape(ranks: int, contiguous: bool, concurrent: int, nodes: int = 1) -> GroupShape:
    return GroupShape(ranks=ranks, contiguous=contiguous, concurrent=concurrent, nodes=nodes)


def test_shapes_of_four_ranks_counted_by_hand() -> None:
    found = dimensions(4, 4)
    assert {d.shape for d in found if not d.p2p} == {shape(2, False, 2), shape(2, True, 2), shape(4, True, 1)}
    assert {d.shape: d.groups for d in found if d.p2p} == {
        shape(2, False, 2): ((0, 2), (1, 3)),
        shape(2, True, 1): ((0, 1),),
    }
    assert len(tasks(4, 4)) == 4 * 3 + 2


def test_shapes_of_two_nodes_counted_by_hand() -> None:
    found = {d.shape for d in dimensions(4, 2) if not d.p2p}
    assert found == {shape(2, False, 2, nodes=2), shape(2, True, 2), shape(4, True, 1, nodes=2)}
    pairs = {d.shape: d.groups for d in dimensions(4, 2) if d.p2p}
    assert pairs[shape(2, True, 1)] == ((0, 1),)
    assert pairs[shape(2, True, 1, nodes=2)] == ((1, 2),)


def test_one_rank_has_no_links() -> None:
    assert dimensions(1, 1) == ()


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(2, 2), (4, 4), (6, 6), (6, 3), (8, 4), (12, 12)])
def test_every_strategy_finds_its_groups_measured(world_size: int, ranks_per_node: int) -> None:
    measured = {d.shape for d in dimensions(world_size, ranks_per_node) if not d.p2p}
    for pp in divisors(world_size):
        mesh = RankMesh.of(world_size=world_size, pp=pp, ranks_per_node=ranks_per_node)
        for dp, tp, sp, shards in product(divisors(mesh.ranks_per_stage), repeat=4):
            if dp * tp * sp != mesh.ranks_per_stage or shards > dp or dp % shards:
                continue
            strategy = Strategy(
                dp=dp, tp=tp, sp=sp, zero=3 if shards > 1 else 0, shard=shards if 1 < shards < dp else None
            )
            placed = mesh.place(strategy)
            for names in (placed.tp, placed.sp, placed.dp, placed.dp_shard, placed.dp_replicate):
                groups = tuple(g for stage in range(pp) for g in mesh.groups(names, stage))
                assert not names or GroupShape.of(groups, ranks_per_node) in measured, (strategy, names)


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(4, 4), (6, 6), (8, 8), (8, 4), (12, 6)])
def test_what_the_cost_model_looks_up_is_measured(world_size: int, ranks_per_node: int) -> None:
    found = {(d.p2p, d.shape) for d in dimensions(world_size, ranks_per_node)}
    for pp in divisors(world_size):
        mesh = RankMesh.of(world_size=world_size, pp=pp, ranks_per_node=ranks_per_node)
        for count in range(1, len(mesh.names) + 1):
            for names in combinations(mesh.names, count):
                assert (False, shape_of(mesh, names, ranks_per_node)) in found
        assert pp == 1 or (True, boundary_shape(mesh, ranks_per_node)) in found


@given(world_size=st.integers(1, 24), nodes=st.integers(1, 4))
def test_dimensions_are_sound(world_size: int, nodes: int) -> None:
    ranks_per_node = max(1, world_size // nodes)
    found = dimensions(world_size, ranks_per_node)
    assert len({(d.p2p, d.shape) for d in found}) == len(found)
    for dimension in found:
        members = [rank for group in dimension.groups for rank in group]
        assert len(set(members)) == len(members) <= world_size
        assert dimension.p2p or len(members) == world_size
        assert dimension.shape == GroupShape.of(dimension.groups, ranks_per_node)
        assert prod((dimension.shape.ranks, dimension.shape.concurrent)) == len(members)


def summary_s(repeats: list[float]) -> float:
    from autopar.profiler.links import summary_s

    return summary_s(repeats, "all_reduce")


def test_times_are_medians_without_outliers() -> None:
    assert summary_s([3.0, 1.0, 2.0]) == 2.0
    assert summary_s([1.0, 2.0, 3.0, 4.0, 900.0]) == 2.5


@pytest.mark.parametrize("bad", [[1.0, nan], [1.0, float("inf")], [-1.0], [0.0, 1.0], []])
def test_times_that_no_clock_gives_are_refused(bad: list[float]) -> None:
    with pytest.raises(RunError, match="measured"):
        summary_s(bad)


@given(st.lists(st.floats(1e-9, 1e3), min_size=1))
def test_a_summary_lies_among_its_repeats(repeats: list[float]) -> None:
    assert min(repeats) <= summary_s(repeats) <= max(repeats)


def test_each_collective_moves_its_data_in_its_groups() -> None:
    found = launch(f"{TARGETS}:check_collectives", {"ranks_per_node": 4, "size_bytes": 1000}, nproc=4, timeout_s=90)
    assert [rank["wrong"] for rank in found] == [[]] * 4
    assert found[0]["count"] == 14
    assert found[0]["seconds"] == found[3]["seconds"]
    assert min(found[0]["seconds"]) >= 0.02


@pytest.mark.parametrize(
    "nproc", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_a_profile_of_this_machine(nproc: int, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    file = profile_cluster(
        nproc=nproc, device="cpu", sizes=(65536, 1000), progress=events.append, command="the command", timeout_s=90
    )
    expected = [(c, d.shape) for c, d in tasks(nproc, nproc)]
    assert [(c.collective, c.shape) for c in file.links.curves] == expected
    assert {c for c, _ in expected} == set(COLLECTIVES)
    for curve in file.links.curves:
        small, large = curve.size_bytes
        assert 1000 <= small < 1000 + 4 * nproc
        assert 65536 <= large < 65536 + 4 * nproc
        assert small % (4 * curve.shape.ranks) == large % (4 * curve.shape.ranks) == 0
        assert all(1e-7 < s < 10 for s in curve.seconds)
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < file.cluster.memory_bytes <= machine_bytes // nproc
    assert (file.cluster.world_size, file.cluster.ranks_per_node, file.cluster.device) == (nproc, nproc, "cpu")
    assert len(file.cluster.compute_speedup) == nproc
    assert file.cluster.compute_speedup[-1] == 1.0
    assert all(0.2 < speed < 10 * nproc for speed in file.cluster.compute_speedup)
    assert [(u.optimizer, u.sharded) for u in file.cluster.updates] == [("adamw", False), ("adamw", True)]
    assert all(0 < u.tensor_s < 0.1 and 0 < u.byte_s < 1e-6 for u in file.cluster.updates)
    assert file.cluster.zero is not None
    assert file.cluster.zero.at(1 << 20) < 1
    assert 0 < file.cluster.pipeline_call_s < 1
    assert file.links.overlap_origin == "measured"
    assert 1 <= file.links.overlap_slowdown <= 2
    assert file.provenance.command == "the command"
    assert "torch" in file.provenance.versions
    events = [e for e in events if "note" not in e]
    assert [e["done"] for e in events] == sorted(e["done"] for e in events)
    assert events[-1]["done"] == events[-1]["total"]
    file.save(tmp_path / "cluster.json")
    assert ClusterFile.load(tmp_path / "cluster.json") == file


def test_an_interrupt_keeps_the_finished_curves(tmp_path: Path) -> None:
    def interrupt(event: dict[str, Any]) -> None:
        if "all_gather" in event.get("what", ""):
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        profile_cluster(nproc=2, device="cpu", sizes=(1024, 2048), progress=interrupt, timeout_s=90)
    assert caught.value.partial is not None
    assert [c.collective for c in caught.value.partial.links.curves][:1] == ["all_reduce"]
    caught.value.partial.save(tmp_path / "cluster.json")
    assert ClusterFile.load(tmp_path / "cluster.json") == caught.value.partial


def test_an_interrupt_before_anything_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autopar.profiler.cluster.launch", interrupted)
    with pytest.raises(Interrupted) as caught:
        profile_cluster(nproc=2, device="cpu")
    assert caught.value.partial is None


@pytest.mark.parametrize("sizes", [(), (0,), (-4, 8), (1 << 41,)])
def test_sizes_that_are_none_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="message sizes"):
        profile_cluster(nproc=2, device="cpu", sizes=sizes)


def test_a_profile_that_takes_too_long_is_ended() -> None:
    with pytest.raises(RunError, match=r"not done after 0\.5 s"):
        profile_cluster(nproc=2, device="cpu", timeout_s=0.5)


@pytest.mark.slow
def test_planning_a_profile_does_not_import_torch() -> None:
    import subprocess

    code = "import sys, autopar.profiler.cluster; sys.exit('torch' in sys.modules)"
    root = str(Path(__file__).resolve().parents[2])
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
