"""What the launch tests run on the ranks; given to `launch` by file name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

from autopar.errors import InputError


def add_up(payload: dict[str, Any], report: Any) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    total = torch.tensor([float(dist.get_rank() + payload["first"])])
    dist.all_reduce(total)
    report({"pid": os.getpid()})
    return {
        "rank": dist.get_rank(),
        "total": total.item(),
        "cwd": os.getcwd(),
        "threads": torch.get_num_threads(),
        "transformers": "transformers" in sys.modules,
    }


def refuse(payload: dict[str, Any], report: Any) -> None:
    """One rank raises an error of ours; the others wait in a collective for it."""
    import torch
    import torch.distributed as dist

    if dist.get_rank() == payload["rank"]:
        raise InputError("the text is empty", why="0 bytes", fix="give another --text")
    dist.all_reduce(torch.zeros(1))


def bug(payload: dict[str, Any], report: Any) -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == payload["rank"]:
        raise KeyError("no such layer")
    dist.all_reduce(torch.zeros(1))


def killed(payload: dict[str, Any], report: Any) -> None:
    import torch
    import torch.distributed as dist

    dist.barrier()
    if dist.get_rank() == payload["rank"]:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def leaves(payload: dict[str, Any], report: Any) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os._exit(0)


def asleep(payload: dict[str, Any], report: Any) -> int:
    """Rank 0 starts a child, ignores SIGTERM and sleeps; the others are done at once."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "600"])
        report({"pids": [os.getpid(), os.getppid(), child.pid]})
        time.sleep(600)
    return dist.get_rank()


def not_json(payload: dict[str, Any], report: Any) -> object:
    return {"value": object()}
