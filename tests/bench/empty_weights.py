"""What a rank holds while a model is built and wrapped: without storage (`autopar.empty_weights`) and plainly.

    python -m tests.bench.empty_weights [--nproc 4] [--blocks 18] [--json]

For ZeRO-3 over all ranks and for two stages: the bytes of the whole model, of a rank's own share, the peak of live
tensors and the growth of the peak of resident memory while building and wrapping, the largest over the ranks, and the
seconds of both.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from torch import nn

from autopar.plan import Plan, PlanCluster, PlanModel
from autopar.request import Request
from autopar.runtime.launch import Progress, launch
from autopar.runtime.models import build_empty, build_model, import_model
from autopar.runtime.parallel import ParallelModel, parallelize
from autopar.runtime.structure import fingerprint
from autopar.runtime.tracker import LiveBytes, storage_bytes
from autopar.strategy import Strategy
from autopar.units import format_bytes

PLANS = {"ZeRO-3": (1, "dp{0}-z3"), "two stages": (2, "dp{1}")}
"""Stages and the strategy of every layer, by the ranks and the ranks of half of them."""


def source_of(blocks: int, width: int = 1024) -> str:
    """The MODEL string: 4 bytes x (12.8 million x blocks + 16.8 million) parameters at width 1024."""
    return (
        f"LlamaConfig(hidden_size={width}, intermediate_size={width * 11 // 4}, num_hidden_layers={blocks}, "
        f"num_attention_heads=16, num_key_value_heads=16, vocab_size={8 * width}, max_position_embeddings=64)"
    )


def plan_of(name: str, source: str, blocks: int, world: int) -> Plan:
    """The plan of a name: one strategy for all layers."""
    stages, short = PLANS[name]
    half = blocks // 2 + 1
    return Plan(
        model=PlanModel(name="llama", source=source, fingerprint=fingerprint(build_model(source, device="meta"))),
        cluster=PlanCluster(name="here", device="cpu", world_size=world, ranks_per_node=world, memory_bytes=1 << 34),
        request=Request(global_batch=2 * world, sequence=32),
        pp=stages,
        schedule="1f1b",
        num_micro_batches=2 if stages > 1 else 1,
        layers_per_stage=(half, blocks + 2 - half) if stages > 1 else (blocks + 2,),
        strategies=(Strategy.parse(short.format(world, world // 2)),) * (blocks + 2),
        versions={},
    )


def prepare(payload: dict[str, Any]) -> None:
    """Load, once for all ranks, what building the model imports; `launch` calls it."""
    import_model(payload["source"])


def wrap_rank(payload: dict[str, Any], report: Progress) -> dict[str, Any]:
    """One rank's bytes and seconds as plain data; the target of `launch`."""
    build = build_empty if payload["empty"] else build_model
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before_bytes, began = resident_peak_bytes(), time.perf_counter()
    with LiveBytes() as live:
        model = build(payload["source"])
        built_s = time.perf_counter() - began
        largest, whole = layer_and_model_bytes(model)
        wrapped = parallelize(model, Plan.loads(payload["plan"]))
    return {
        "whole_bytes": whole,
        "largest_layer_bytes": largest,
        "share_bytes": share_bytes(wrapped),
        "peak_bytes": live.peak_bytes,
        "resident_bytes": resident_peak_bytes() - before_bytes,
        "built_s": built_s,
        "wrapped_s": time.perf_counter() - began - built_s,
    }


def layer_and_model_bytes(model: nn.Module) -> tuple[int, int]:
    """The bytes of the parameters of the largest layer, block or other, and of all, each once."""
    own = [sum(p.nbytes for p in block.parameters()) for block in model.model.layers]
    own += [model.model.embed_tokens.weight.nbytes, model.lm_head.weight.nbytes]
    return max(own), sum(p.nbytes for p in model.parameters())


def share_bytes(wrapped: ParallelModel) -> int:
    """The bytes of what a rank holds for good: its parameters, and what the optimizer steps for them."""
    return storage_bytes([entry.parameter.detach() for entry in wrapped.held], [e.stepped for e in wrapped.held])


def resident_peak_bytes() -> int:
    """The highest resident memory of this process since its start, or since the peak was reset."""
    line = next(x for x in Path("/proc/self/status").read_text(encoding="ascii").splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """Print the bytes and seconds of both ways under both plans."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=18)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    source, rows = source_of(options.blocks), []
    for name in PLANS:
        plan = plan_of(name, source, options.blocks, options.nproc).dumps()
        for empty in (True, False):
            found = launch(
                f"{Path(__file__).resolve()}:wrap_rank",
                {"plan": plan, "source": source, "empty": empty},
                nproc=options.nproc,
                timeout_s=1200,
            )
            worst = {key: max(rank[key] for rank in found) for key in found[0]}
            rows.append({"plan": name, "built": "without storage" if empty else "plainly", **worst})
    if options.json:
        print(json.dumps(rows))
        return
    print("{:11} {:16} {:>10} {:>10} {:>10} {:>10} {:>10} {:>8} {:>8}".format(
        "plan", "built", "model", "layer", "own share", "peak", "resident", "build", "wrap"
    ))  # fmt: skip
    for row in rows:
        sizes = [row[k] for k in ("whole_bytes", "largest_layer_bytes", "share_bytes", "peak_bytes", "resident_bytes")]
        shown = " ".join(f"{format_bytes(size):>10}" for size in sizes)
        print(f"{row['plan']:11} {row['built']:16} {shown} {row['built_s']:6.1f} s {row['wrapped_s']:6.1f} s")


if __name__ == "__main__":
    main()
