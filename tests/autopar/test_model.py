from __future__ import annotations

from typing import Any

import pytest

from autopar.cluster import ClusterSpec
from autopar.measured import GroupShape, LayerCost, Line, LinkCurve
from autopar.model import ModelSpec, Parameter, layer_names
from tests.values import golden, kind, model


def test_bytes_and_counts_by_hand() -> None:
    block = kind()
    assert block.parameter_count == 8 * 8 + 8
    assert block.parameter_bytes == 4 * 72
    assert Parameter(name="w", shape=(), dtype="bfloat16").size_bytes == 2


def test_the_chain() -> None:
    spec = model(3)
    assert spec.layer_names == ("embed", "0", "1", "2", "head") == layer_names(5)
    assert spec.num_blocks == 3
    assert [spec.kind(i).role for i in range(5)] == ["embed", "block", "block", "block", "head"]


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": ("embed", "head")},
        {"layers": ("embed", "block", "other", "head")},
        {"layers": ("block", "block", "head")},
        {"kinds": (kind("embed"), kind(), kind(), kind("head"))},
        {"hidden_size": 0},
    ],
)
def test_a_chain_that_does_not_hold_together_is_refused(changes: dict[str, object]) -> None:
    spec = model()
    fields = {name: getattr(spec, name) for name in ("name", "source", "fingerprint", "layers", "kinds")}
    with pytest.raises(ValueError, match=r"ModelSpec\."):
        ModelSpec(**({**fields, "hidden_size": 8} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {"world_size": 0},
        {"world_size": -4},
        {"memory_bytes": 0},
        {"world_size": 1 << 21},
        {"ranks_per_node": 3},
        {"compute_speedup": (1.0,)},
        {"compute_speedup": (2.0, 1.0, 0.0, 1.0)},
    ],
)
def test_sizes_that_make_no_machine_are_refused(changes: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"world_size": 4, "ranks_per_node": 4, "memory_bytes": 1 << 30} | changes
    with pytest.raises(ValueError, match=r"ClusterSpec\."):
        ClusterSpec(name="c", device="cpu", device_name="cpu", **sizes)


def test_group_shapes_by_hand() -> None:
    assert GroupShape.of(((0, 2), (1, 3)), 4) == GroupShape(ranks=2, nodes=1, contiguous=False, concurrent=2)
    assert GroupShape.of(((0, 1), (2, 3)), 2) == GroupShape(ranks=2, nodes=1, contiguous=True, concurrent=2)
    assert GroupShape.of(((0, 1, 2, 3),), 2) == GroupShape(ranks=4, nodes=2, contiguous=True, concurrent=1)


@pytest.mark.parametrize(
    ("size_bytes", "seconds"), [((), ()), ((1, 2), (1.0,)), ((2, 1), (1.0, 1.0)), ((0,), (1.0,)), ((1,), (-1.0,))]
)
def test_a_curve_is_positive_and_ascending(size_bytes: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="LinkCurve"):
        LinkCurve(collective="p2p", shape=GroupShape(ranks=2), size_bytes=size_bytes, seconds=seconds)


def test_a_layer_cost_is_found_by_kind_and_degree() -> None:
    layers = golden()["model.json"].layers  # type: ignore[union-attr]
    cost = layers.find("block", tp=2, sequence_norms=True)
    assert isinstance(cost, LayerCost)
    assert layers.find("block") is None
    assert Line(fixed=1.0, per_sample=2.0).at(3) == 7.0
