from __future__ import annotations

from collections.abc import Callable
from typing import Any

Ranks = Callable[..., list[Any]]


def test_every_pair_of_layouts_equals_dtensor_and_cutting_the_whole(ranks: Ranks) -> None:
    """All layouts over two axes, also of sequences dealt out in pairs, values and gradients."""
    plain = ranks("relayout_pairs", 4, sizes=[2, 2], ways=["batch", "sequence"])
    dealt = ranks("relayout_pairs", 6, sizes=[3, 2], ways=["batch", "sequence", "dealt"])
    for pairs, results in ((81, plain), (256, dealt)):
        for result in results:
            assert result["pairs"] == pairs
            assert result["value_error"] == 0.0
            assert result["gradient_error"] == 0.0
            assert result["dtensor_error"] == 0.0


def test_groups_are_made_once_per_set_of_ranks(ranks: Ranks) -> None:
    """2 x 2 ranks: four pairs and the world, however often they are asked for."""
    for result in ranks("count_groups", 4):
        assert result == {"groups": 5, "same": True}
