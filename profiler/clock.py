"""What every timing on several ranks needs: waiting for the device, its name, and what ranks found."""

from __future__ import annotations

import torch
import torch.distributed as dist

from autopar.runtime.machine import cpu_name


def wait_for(device: torch.device) -> None:
    """Return when the device has done all that was asked of it; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slowest(seconds: list[float], device: torch.device) -> list[float]:
    """For each entry the largest over all ranks of the process group; without one, as given."""
    if not dist.is_initialized():
        return seconds
    values = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return [float(value) for value in values.tolist()]


def mean(seconds: list[float], device: torch.device) -> list[float]:
    """For each entry the mean over all ranks of the process group; without one, as given."""
    if not dist.is_initialized():
        return seconds
    values = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(values)
    return [float(value) / dist.get_world_size() for value in values.tolist()]


def device_name(device: torch.device) -> str:
    """The maker's name of the processor or GPU."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else cpu_name()
