from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.axes import RankMesh, divisors, prime_factors
from autopar.strategy import Strategy
from tests.draws import strategies_on

meshes = st.integers(1, 48).flatmap(
    lambda world: st.builds(
        lambda pp, per_node: RankMesh.of(world_size=world, pp=pp, ranks_per_node=per_node),
        st.sampled_from(divisors(world)),
        st.sampled_from((*divisors(world), None)),
    )
)


@given(st.integers(1, 5000))
def test_factors_and_divisors(number: int) -> None:
    factors = prime_factors(number)
    assert prod(factors) == number
    assert factors == sorted(factors, reverse=True)
    assert all(len(divisors(p)) == 2 for p in factors)
    assert set(divisors(number)) == {a for a in range(1, number + 1) if number % a == 0}


@given(meshes, st.data())
def test_the_groups_of_any_axes_hold_each_rank_once(mesh: RankMesh, data: st.DataObject) -> None:
    names = tuple(name for name in mesh.names if data.draw(st.booleans()))
    stage = data.draw(st.integers(0, mesh.pp - 1))
    groups = mesh.groups(names, stage)
    first = stage * mesh.ranks_per_stage
    assert sorted(r for group in groups for r in group) == list(range(first, first + mesh.ranks_per_stage))
    assert {len(group) for group in groups} == {mesh.size(names)}
    for group in groups:
        for rank in group:
            assert mesh.group(rank, names) == group
            where = mesh.coordinates(rank)
            assert all(where[n] == mesh.coordinates(group[0])[n] for n in mesh.names if n not in names)


@given(meshes, st.data())
def test_a_placement_uses_each_axis_once_with_the_right_degrees(mesh: RankMesh, data: st.DataObject) -> None:
    strategy = data.draw(strategies_on(mesh.ranks_per_stage))
    placement = mesh.place(strategy)
    used = (placement.tp, placement.sp, placement.cp, placement.ep, placement.dp_shard, placement.dp_replicate)
    assert sorted(name for names in used for name in names) == sorted(mesh.names)
    degrees = [strategy.tp, strategy.sp, strategy.cp, strategy.ep, strategy.state_shards]
    assert [mesh.size(names) for names in used[:5]] == degrees
    assert mesh.size(placement.dp) == strategy.dp
    assert mesh.size(placement.layout.batch) == strategy.dp * strategy.ep
    assert all(names == tuple(n for n in mesh.names if n in names) for names in used)


@given(meshes)
def test_coordinates_count_ranks_in_row_major_order(mesh: RankMesh) -> None:
    seen = [tuple(mesh.coordinates(rank)[n] for n in ("pp", *mesh.names)) for rank in range(mesh.world_size)]
    assert seen == sorted(set(seen))


def test_slow_links_come_first() -> None:
    mesh = RankMesh.of(world_size=12, ranks_per_node=6)
    assert [(a.name, a.size) for a in mesh.axes] == [("n0", 2), ("a0", 3), ("a1", 2)]
    assert mesh.groups(mesh.place(Strategy(dp=6, tp=2)).tp)[0] == (0, 1)
    assert mesh.groups(mesh.place(Strategy(dp=2, tp=6)).tp) == (tuple(range(6)), tuple(range(6, 12)))


def test_what_does_not_factor_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot form"):
        RankMesh.of(world_size=6, pp=4)
    with pytest.raises(ValueError, match="occupies 8 ranks, a stage has 4"):
        RankMesh.of(world_size=4).place(Strategy(dp=8))
