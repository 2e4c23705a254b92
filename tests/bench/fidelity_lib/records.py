"""Published runs as values: one Case a record that can be mapped, or the reason why not.

What a source leaves out is filled by the rules below and listed in `Case.assumed`; the design's evidence names the
pitfalls (tile sizes need real heads, hardware TFLOPs include recompute, a global batch need not divide).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from autopar.architectures import Architecture
from tests.bench.fidelity_lib.cases import COMPOSED, Case, model_flops

PEAK_TFLOPS = {"V100": 125.0, "A100": 312.0, "H100": 989.4}

# Dimensions of models that records only name, with the page that states them.
# (layers, hidden, heads, kv heads, ffn, gated, vocabulary, tied)
NAMED = {
    "GPT3-5B": (24, 4096, 32, 32, 16384, False, 51200, True),
    "GPT-5B": (24, 4096, 32, 32, 16384, False, 51200, True),
    "GPT3-20B": (44, 6144, 48, 48, 24576, False, 51200, True),
    "GPT3-175B": (96, 12288, 96, 96, 49152, False, 51200, True),
    "GPT-175B": (96, 12288, 96, 96, 49152, False, 51200, True),
    "Nemotron-8B": (32, 4096, 32, 32, 16384, False, 256000, False),
    "Nemotron-22B": (40, 6144, 48, 48, 24576, False, 256000, False),
    "Nemotron-340B": (96, 18432, 96, 8, 73728, False, 256000, False),
    "Nemotron4-340B": (96, 18432, 96, 8, 73728, False, 256000, False),
    "Nemotron4-15B": (32, 6144, 48, 8, 24576, False, 256000, False),
    "InternLM-7B": (32, 4096, 32, 32, 11008, True, 103168, False),
}
NOT_DENSE = re.compile(
    r"MoE|Qwen3|DeepSeek|Mixtral|OSS|Kimi|Nemotron_3|Nemotron-H|Llama-4|LLAMA4|Grok|ResNet|Maverick|Scout"
)
NVIDIA = (
    "nemo-perf",
    "nemo-longseq",
    "dgxc-benchmarking",
    "megatron-bridge",
    "megatron-readme-h100",
    "megatron-llama-fp8",
)

# Bytes a second that leave one node, all cards together: stated by the source, or the class's usual network. Jean
# Zay's are measured, not nominal: bus bandwidth of 4 GB all-reduces over 4 nodes in the source's own repository
# (bigscience, experiments/bandwidth/all_reduce_bench-a100-n4.txt, all_reduce_bench-32gb-n4.txt).
NODE_BYTES_PER_S = {
    ("llm-foundry", "A100"): 200e9,
    ("llm-foundry", "H100"): 400e9,
    ("vtrain-multi", "A100"): 100e9,
    ("vtrain-single", "A100"): 100e9,
    ("bigscience-tr11", "A100"): 5.06e9,
    ("bigscience-1b3-v100", "V100"): 10.59e9,
    ("internevo", "A100"): 50e9,
    ("dlperf-gpt", "V100"): 12.5e9,
    ("alpa-intra", "V100"): 3.1e9,
    ("fms-fsdp", "A100"): 50e9,
    ("fms-fsdp", "H100"): 100e9,
    ("megatron-2020-weak", "V100"): 100e9,
}
USUAL_NODE_BYTES_PER_S = {"A100": 200e9, "H100": 400e9, "V100": 12.5e9}


class Skip(Exception):
    """A record that cannot be mapped; its text is the reason."""


def load(path: str | Path) -> tuple[list[Case], dict[tuple[str, str], Counter[str]]]:
    """The cases of a JSONL file, and per (source, GPU) the reasons of the skipped records with their counts."""
    with open(path, encoding="utf-8") as lines:
        return map_all(json.loads(line) for line in lines if line.strip())


def map_all(records: Iterable[dict[str, Any]]) -> tuple[list[Case], dict[tuple[str, str], Counter[str]]]:
    """The cases of these records, and the reasons of the others."""
    cases: list[Case] = []
    reasons: dict[tuple[str, str], Counter[str]] = {}
    records = list(records)
    heads = _heads_by_width(records)
    for record in records:
        key = (record["source_id"], str(record.get("gpu_class") or record.get("gpu") or "unnamed GPU"))
        counter = reasons.setdefault(key, Counter())
        try:
            cases.append(map_record(record, heads))
        except Skip as why:
            counter[str(why)] += 1
    return cases, reasons


def _heads_by_width(records: Sequence[dict[str, Any]]) -> dict[tuple[str, int], int]:
    """The number of heads that a source states most often for a hidden width, for its records that leave it out."""
    stated: dict[tuple[str, int], Counter[int]] = {}
    for record in records:
        m = record["model"]
        if m.get("heads") and m.get("hidden"):
            stated.setdefault((record["source_id"], m["hidden"]), Counter())[m["heads"]] += 1
    return {key: counter.most_common(1)[0][0] for key, counter in stated.items()}


def map_record(r: dict[str, Any], heads: Mapping[tuple[str, int], int] = MappingProxyType({})) -> Case:
    """The case of one record; Skip with the reason when there is none.

    heads: what the same source states elsewhere for (source, hidden width).
    """
    source, extra = r["source_id"], r.get("extra") or {}
    name = r["model"].get("name") or ""
    gpu = r.get("gpu_class")
    _refuse(r, name, gpu)
    assumed: list[str] = []
    arch = _architecture(r, name, heads, assumed)
    tp, pp, cp = r.get("tp"), r.get("pp"), r.get("cp") or 1
    if source in ("megatron-sc21", "megatron-jan21") and (tp is None or pp is None):
        size = extra.get("model_parallel_size") or 1
        tp, pp = min(8, size), size // min(8, size)
        assumed.append("tp and pp from the model-parallel size")
    ranks = r.get("n_gpus")
    if ranks is None:
        raise Skip("GPU count missing")
    if tp is None or pp is None:
        raise Skip("plan (tp, pp) not stated")
    if ranks % (tp * pp * cp):
        raise Skip("mesh product does not match the GPUs")
    dp = ranks // (tp * pp * cp)
    sequence = r.get("seq_len")
    if not sequence:
        raise Skip("sequence missing")
    global_batch, micro_batch, count = _batch(r, tp, pp, dp, assumed)
    step_s = _seconds(r, arch, sequence, global_batch, ranks, assumed)
    nvidia = source in NVIDIA
    recompute = r.get("activation_checkpointing")
    if recompute is None:
        assumed.append("recompute none")
        recompute = "none"
    attention = r.get("attention")
    if attention is None:
        assumed.append("attention kernel")
        attention = "flash" if nvidia or source == "nanotron" else "non-flash"
    kernel = "plain" if not attention.startswith("flash") else ("flash1" if source == "llm-foundry" else "flash")
    norms = r.get("sp")
    if norms is None and tp > 1:
        assumed.append("sequence-parallel norms")
        norms = nvidia or source == "nanotron"
    chunks = r.get("interleave") or 1
    if pp == 1:
        chunks = 1
    elif source == "megatron-sc21":
        own = arch.layers // pp
        chunks = next((v for v in range(2, own + 1) if own % v == 0), 1)
        assumed.append("interleaved, the fewest chunks that divide")
    zero, shard = _zero(r, nvidia, assumed)
    per_node = r.get("gpus_per_node") or 8
    if r.get("gpus_per_node") is None:
        assumed.append("8 GPUs a node")
    if not r.get("interconnect") and ranks > per_node:
        assumed.append("interconnect")
    precision = str(r.get("precision") or "").lower()
    gradient_bytes = 4 if "fp32 grad" in precision or (source == "llm-foundry" and "default" in precision) else 2
    overlapping = ("llm-foundry", "fms-fsdp", "internevo", "alpa-intra", "nanotron")
    return Case(
        source=source,
        gpu=gpu,
        arch=arch,
        sequence=sequence,
        fp8="fp8" in precision or "nvfp4" in precision,
        micro_batch=micro_batch,
        num_micro_batches=count,
        global_batch=int(global_batch),
        tp=tp,
        sequence_norms=bool(norms),
        pp=pp,
        cp=cp,
        dp=dp,
        chunks=chunks,
        recompute=recompute,
        kernel=kernel,
        zero=zero,
        shard=shard or r.get("fsdp_group"),
        gradient_bytes=gradient_bytes,
        ranks_per_node=per_node,
        node_bytes_per_s=NODE_BYTES_PER_S.get((source, gpu), USUAL_NODE_BYTES_PER_S[gpu]),
        stops_early=source in ("llm-foundry", "fms-fsdp", "alpa-intra"),
        fused_accumulation=nvidia or source == "selective-recompute-T5",
        overlap_dp=nvidia or source in overlapping or str(r.get("framework")).startswith("OneFlow"),
        overlap_tp=nvidia,
        compiled=bool(r.get("compile")),
        step_s=step_s,
        memory_gib=r.get("memory_gib"),
        assumed=tuple(assumed),
        framework=str(r.get("framework") or ""),
        balanced=str(r.get("framework")).startswith("nanotron"),
    )


def _refuse(r: dict[str, Any], name: str, gpu: object) -> None:
    source, extra = r["source_id"], r.get("extra") or {}
    if r.get("oom"):
        raise Skip("the run did not fit")
    if not r.get("measured"):
        raise Skip("no time")
    if r["model"].get("experts") or NOT_DENSE.search(name):
        raise Skip("MoE, hybrid or convolution")
    if "T5" in name or "BERT" in name:
        raise Skip("encoder model")
    task = str(extra.get("task") or "").lower() + str(r.get("source_note") or "").lower()
    if "lora" in task or "peft" in str(extra.get("task") or "").lower():
        raise Skip("LoRA")
    if gpu not in PEAK_TFLOPS:
        raise Skip("GPU class without calibration")
    if r.get("split_suggestion") == "reference-only" and source not in COMPOSED:
        raise Skip("reference only")
    if "JAX" in str(r.get("framework")):
        raise Skip("JAX/XLA FSDP")


def _architecture(
    r: dict[str, Any], name: str, elsewhere: Mapping[tuple[str, int], int], assumed: list[str]
) -> Architecture:
    m, source = r["model"], r["source_id"]
    known = next((v for k, v in NAMED.items() if k.lower() == name.replace("_", "-").lower()), None)
    gated = bool(re.search("llama|internlm|mistral", name.lower()))
    tied = not gated
    layers, hidden, heads, kv = m.get("layers"), m.get("hidden"), m.get("heads"), m.get("kv_heads")
    ffn, vocab = m.get("ffn"), m.get("vocab")
    if known:
        if not layers:
            assumed.append("dimensions by name")
        gated, tied = known[5], known[7]
        values = zip((layers, hidden, heads, kv, ffn, vocab), (*known[:5], known[6]), strict=True)
        layers, hidden, heads, kv, ffn, vocab = (v or k for v, k in values)
    if not hidden:
        raise Skip("dimensions unknown")
    if source == "bigscience-tr11":
        vocab = 250880
    if not vocab:
        vocab = 50304 if source == "bigscience-1b3-v100" else 51200
        assumed.append("vocabulary")
    if not ffn:
        ffn = 4 * hidden
        assumed.append("ffn 4h")
    if not layers:
        if not r.get("params_b"):
            raise Skip("layers unknown")
        layers = round((r["params_b"] * 1e9 - vocab * hidden) / (12 * hidden * hidden))
        assumed.append("layers from the parameters")
    if not heads:
        heads = elsewhere.get((source, hidden)) or max(1, hidden // 128)
        assumed.append("heads as elsewhere in the source, or h/128")
    found = Architecture(
        name=name or "model",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv or heads,
        ffn=ffn,
        vocab=vocab,
        gated=gated,
        tied=tied,
    )
    other, stated = replace(found, tied=not tied), 1e9 * (r.get("params_b") or 0)
    if not known and _off(other, stated) < 0.005 and _off(found, stated) > 0.02:
        return other
    return found


def _off(arch: Architecture, parameters: float) -> float:
    return abs(arch.parameter_count / parameters - 1) if parameters else 1.0


def _batch(r: dict[str, Any], tp: int, pp: int, dp: int, assumed: list[str]) -> tuple[float, float, int]:
    """Global batch, samples of a micro-batch on a rank, and the number of micro-batches."""
    source, batch, micro, count = r["source_id"], r.get("global_batch"), r.get("micro_batch"), r.get("n_microbatches")
    if batch is None and micro and count:
        batch = micro * count * dp
    if batch is None:
        raise Skip("global batch missing")
    local = batch / dp
    if micro is None:
        if count:
            micro = local / count
        elif pp == 1 and source in ("megatron-2020-weak", "alpa-intra"):
            micro = local
        elif source in ("megatron-sc21", "megatron-jan21"):
            micro = min(
                local, 8 if tp * pp <= 8 and tp * pp in (1, 2, 4) else (4 if pp == 1 else (2 if pp <= 4 else 1))
            )
            assumed.append("micro-batch")
        else:
            micro = min(1.0, local)
            assumed.append("micro-batch")
    steps = math.ceil(local / micro - 1e-6)
    if local / micro < 0.99:
        raise Skip("global batch below dp micro-batches")
    return batch, local / steps, steps


def _seconds(
    r: dict[str, Any], arch: Architecture, sequence: int, batch: float, ranks: int, assumed: list[str]
) -> float:
    me = r["measured"]
    if me.get("step_time_s"):
        return float(me["step_time_s"])
    if me.get("tokens_per_s_per_gpu"):
        return batch * sequence / (me["tokens_per_s_per_gpu"] * ranks)
    if me.get("samples_per_s"):
        return batch / float(me["samples_per_s"])
    flops = model_flops(arch, sequence, batch)
    tflops, kind = me.get("tflops_per_gpu"), str(me.get("tflops_kind") or "")
    assumed.append("seconds from FLOPs")
    if tflops and "model" in kind:
        return flops / (ranks * tflops * 1e12)
    if tflops and "hardware" in kind:
        # SC21, equation 3: 96 B s L h^2 (1 + s / 6h + V / 16 L h), recompute included.
        h, n = arch.hidden, arch.layers
        work = 96 * batch * sequence * n * h * h * (1 + sequence / (6 * h) + arch.vocab / (16 * n * h))
        return work / (ranks * tflops * 1e12)
    if me.get("mfu"):
        fp8 = "fp8" in str(r.get("precision"))
        peak = PEAK_TFLOPS[r["gpu_class"]] * 1e12 * (2 if fp8 else 1)
        return flops / (ranks * peak * me["mfu"] / 100)
    raise Skip("time not derivable")


def _zero(r: dict[str, Any], nvidia: bool, assumed: list[str]) -> tuple[int, int | None]:
    """The ZeRO stage and the ranks of a shard group where it is not all of dp."""
    kind, source = str(r.get("dp_kind") or ""), r["source_id"]
    if kind.startswith(("zero3", "fsdp")):
        return 3, None
    if kind.startswith("hsdp"):
        return 3, r.get("gpus_per_node") or 8
    if "zero2" in kind:
        return 2, None
    if "zero1" in kind:
        return 1, None
    if kind.startswith("ddp"):
        return (1 if source == "megatron-bridge" else 0), None
    assumed.append("optimizer sharding")
    return (1 if nvidia else 0), None
