"""What this machine is: the names of its processors and its memory. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path


def cpu_name() -> str:
    """The maker's name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def machine_memory_bytes() -> int:
    """The memory of this machine, or of the container where that is limited to less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
            total = min(total, int(Path(limit).read_text(encoding="ascii")))
    return total
