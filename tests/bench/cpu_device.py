"""The CPU device class of profiles/, measured on this machine: one core as one rank.

    python tests/bench/cpu_device.py [--save]

Compute is measured on one thread in CPU seconds, which other processes slow little; links between two processes as the
least of many wall times. --save writes the `cpu` entries of profiles/devices.json and profiles/efficiencies.json; what
is not measured here is listed there under `assumed`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch.nn import functional

from autopar.runtime.launch import launch
from autopar.runtime.machine import cpu_name
from autopar.units import GIB, KIB, MIB

ROOT = Path(__file__).resolve().parents[2]
SIDE, ROWS, NARROW = 1024, 32, 64
"""Large, few rows, few columns: what the edge terms of a product are found from."""

ASSUMED = {
    "fp8_share": 0.7,
    "fp8_edge": 500.0,
    "old_attention": 0.75,
    "scores_passes": 14.0,
    "misaligned": 0.0,
    "misaligned_heads": 0.0,
    "network_share": 1.0,
    "network_alpha_s": 5e-4,
    "shard_hop_s": 0.0,
    "dp_exposed": 1.0,
    "tp_exposed": 1.0,
    "contention": 0.0,
    "optimizer_passes": 1.5,
    "accumulation_passes": 2.0,
    "fixed_s": 0.0,
    "node_jitter": 0.0,
}


def cpu_s(run: Callable[[], Any], *, repeats: int = 7) -> float:
    """The least CPU seconds of one call, torch on one thread."""
    run()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        run()
        times.append(time.process_time() - began)
    return min(times)


def product_s(m: int, k: int, n: int) -> float:
    a, b = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16()
    count = max(1, (1 << 28) // (m * k * n))
    return cpu_s(lambda: [a @ b for _ in range(count)]) / count


def measured() -> tuple[float, float, dict[str, float]]:
    """FLOPs a second of a large product, bytes a second of memory, and the coefficients of autopar.roofline."""
    torch.set_num_threads(1)
    rate = 2 * SIDE**3 / product_s(SIDE, SIDE, SIDE)
    small = {
        "row_edge": max(0.0, rate * product_s(ROWS, SIDE, SIDE) / (2 * ROWS * SIDE**2) - 1) * ROWS,
        "product_edge": max(0.0, rate * product_s(SIDE, SIDE, NARROW) / (2 * NARROW * SIDE**2) - 1) * NARROW,
    }
    source, target = torch.zeros(128 * MIB // 4), torch.zeros(128 * MIB // 4)
    memory_bytes_per_s = 2 * 128 * MIB / cpu_s(lambda: target.copy_(source))
    q, k, v = (torch.randn(1, 8, SIDE, 64).bfloat16() for _ in range(3))
    attention_s = cpu_s(lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    a, b = (torch.randn(512, 512).bfloat16().requires_grad_() for _ in range(2))
    forward_s = cpu_s(lambda: a @ b)
    both_s = cpu_s(lambda: (a @ b).sum().backward())
    hidden = torch.randn(1 << 20).bfloat16()
    streamed_s = cpu_s(lambda: hidden * 1.5)
    logits, labels = torch.randn(512, 8192).bfloat16(), torch.zeros(512, dtype=torch.long)
    loss_s = cpu_s(lambda: functional.cross_entropy(logits.float(), labels))
    tiny = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    one = torch.randn(1, 2, 16)
    found = {
        "product_share": 1.0,
        **small,
        "attention_share": 0.5 * 4 * 8 * SIDE**2 * 64 / attention_s / rate,
        "backward_ratio": max(1.0, both_s / forward_s - 1),
        "streamed": max(0.1, streamed_s * memory_bytes_per_s / (2 * 2 * hidden.numel())),
        "loss_passes": loss_s * memory_bytes_per_s / (8 * logits.numel()),
        "launch_s": cpu_s(lambda: tiny(one), repeats=50),
    }
    return rate, memory_bytes_per_s, found


def link_rank(payload: dict[str, Any], report: Any) -> list[float]:
    """The least wall seconds of all-gathers of a few bytes and of many, between two ranks."""
    import torch.distributed as dist

    found = []
    for size in payload["sizes"]:
        part, times = torch.zeros(size // 8), []
        whole = torch.zeros(size // 4)
        for _ in range(payload["repeats"]):
            dist.barrier()
            began = time.perf_counter()
            dist.all_gather_into_tensor(whole, part)
            times.append(time.perf_counter() - began)
        found.append(min(times))
    report({"done": 1, "total": 1})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true")
    save = parser.parse_args().save
    rate, memory_bytes_per_s, found = measured()
    sizes = [KIB, 8 * MIB]
    target = f"{Path(__file__).resolve()}:link_rank"
    least = launch(target, {"sizes": sizes, "repeats": 60}, nproc=2, device="cpu", timeout_s=300)
    small_s, large_s = (max(rank[place] for rank in least) for place in (0, 1))
    cores = os.cpu_count() or 1
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / cores
    command = "python tests/bench/cpu_device.py --save"
    when = f"measured {datetime.now(UTC):%Y-%m-%d}: {command}"
    note = f"one core of {cores} of an {cpu_name()}"

    def figure(value: float, text: str = "") -> dict[str, Any]:
        return {"value": float(f"{value:.4g}"), "source": when, "note": f"{note}{text}"}

    device = {
        "name": "cpu",
        "kind": "cpu",
        "fitted_as": "CPU",
        "tensor_flops_per_s": figure(rate, ", bfloat16 product of 1024^3"),
        "fp8_flops_per_s": None,
        "memory_bytes": figure(memory_bytes, ", its share of the memory"),
        "memory_bytes_per_s": figure(memory_bytes_per_s, ", copy of 128 MiB"),
        "link_bytes_per_s": figure(sizes[1] / 2 / (large_s - small_s), ", gloo between two processes"),
        "ranks_per_node": figure(cores),
        "node_network_bytes_per_s": None,
    }
    coefficients = {**found, "node_share": 1.0, "node_alpha_s": small_s, **ASSUMED}
    fitted = {
        "gpu": "CPU",
        "runs": 0,
        "sources": [when],
        "median_error_percent": 0.0,
        "command": command,
        "coefficients": {name: float(f"{value:.4g}") for name, value in coefficients.items()},
        "assumed": sorted(ASSUMED),
    }
    print(json.dumps([device, fitted], indent=1))
    if save:
        for file, key, name, entry in (
            ("devices", "devices", "name", device),
            ("efficiencies", "efficiencies", "gpu", fitted),
        ):
            path = ROOT / "profiles" / f"{file}.json"
            content = json.loads(path.read_text())
            content[key] = [one for one in content[key] if one[name] != entry[name]] + [entry]
            path.write_text(json.dumps(content, indent=1) + "\n")
    print(f"memory {memory_bytes / GIB:.1f} GiB a rank; load {os.getloadavg()[0]:.1f}", file=sys.stderr)


if __name__ == "__main__":
    main()
