"""On what, when and with which versions something was measured."""

from __future__ import annotations

import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from autopar.measured import Provenance

_PACKAGES = ("torch", "transformers")


def provenance(command: str, machine: str) -> Provenance:
    """The provenance of a measurement made now on this `machine` (the device's name)."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Provenance(machine=machine, date=now, command=command or " ".join(sys.argv), versions=versions)
