"""autopar: finds, proves and runs the best layer-wise hybrid-parallel plan for any PyTorch model.

The heavy names (`parallelize`, `search`, `profile`) load on first use, so that importing a value never loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Plan": "autopar.plan",
    "ModelSpec": "autopar.model",
    "ClusterSpec": "autopar.cluster",
    "Strategy": "autopar.strategy",
    "Request": "autopar.request",
    "AutoparError": "autopar.errors",
    "search": "autopar.planning",
    "profile": "autopar.profiler.models",
    "parallelize": "autopar.runtime.parallel",
    "empty_weights": "autopar.runtime.recording",
}
__all__ = [
    "AutoparError",
    "ClusterSpec",
    "ModelSpec",
    "Plan",
    "Request",
    "Strategy",
    "empty_weights",
    "parallelize",
    "profile",
    "search",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'autopar' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
