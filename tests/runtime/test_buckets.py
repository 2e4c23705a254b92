from __future__ import annotations

from collections.abc import Callable
from typing import Any

Ranks = Callable[..., list[Any]]


def test_buckets_sum_what_single_all_reduces_sum(ranks: Ranks) -> None:
    """Buckets of 400 bytes: 100 float32 or 50 float64; a larger tensor travels alone."""
    for found in ranks("bucket_jobs:sums", 4, sizes=[30, 20, 500, 40, 60, 1], bucket_bytes=400):
        assert found["error"] < 1e-5
        assert found["calls"] == [50, 500, 100, 1] * 2 + [50, 500, 40, 60, 1] * 2
