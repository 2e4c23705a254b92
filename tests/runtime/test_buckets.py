from __future__ import annotations

from collections.abc import Callable
from typing import Any

Ranks = Callable[..., list[Any]]


def test_buckets_sum_what_single_all_reduces_sum(ranks: Ranks) -> None:
    """Buckets of 400 bytes: 100 float32 or 50 float64; a larger tensor travels alone."""
    for found in ranks("bucket_jobs:sums", 4, sizes=[30, 20, 500, 40, 60, 1], bucket_bytes=400):
        assert found["error"] < 1e-5
        assert found["calls"] == [50, 500, 100, 1] * 2 + [50, 500, 40, 60, 1] * 2


def test_buckets_of_rows_scatter_and_gather_what_whole_sums_hold(ranks: Ranks) -> None:
    """Buckets of 400 bytes. Over 4 ranks 10 rows of 3 are padded to 12, 5 of 2 to 8, over 2 ranks 5 to 6."""
    shapes = [[10, 3], [20], [125, 4], [10, 4], [5, 2], [8, 20]]
    for found in ranks("bucket_jobs:rows", 4, shapes=shapes, bucket_bytes=400):
        assert found["error"] < 1e-5
        assert found["shapes"]
        assert found["freed"]
        four, two = [36 + 20, 128 * 4, 12 * 4 + 8 * 2, 8 * 20], [10 * 3 + 20, 126 * 4, 10 * 4 + 6 * 2, 8 * 20]
        assert found["calls"] == [*four, *two] * 2
