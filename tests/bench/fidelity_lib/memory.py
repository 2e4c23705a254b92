"""Predicted beside stated memory: states, activations in flight, recompute, logits, by the schedule's own counts.

The published runs are mixed precision with an fp32 master copy (2 + gradient + 12 bytes a parameter), which the
library's walk of pure-dtype training does not hold; the parts and the counts in flight are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from autopar.units import GIB
from tests.bench.fidelity_lib.cases import Case
from tests.bench.fidelity_lib.schedules import order

CONTEXT_BYTES = 1.5 * GIB
"""Assumed: CUDA context, libraries and NCCL's buffers, where the figure is nvidia-smi's."""

ALLOCATOR = 1.06
"""Assumed: reserved over allocated, where the figure is not the sum of live tensors (design: cost model, 5)."""

LOGIT_BYTES = 12
"""16-bit logits, their fp32 copy and the gradient (design: cost model, 5)."""

DEEPSPEED_GRADIENT_BYTES = 4
"""An fp32 copy of all gradients beside the 16-bit ones, not sharded: what DeepSpeed's mixed-precision optimizer of
stage 1 allocates (deepspeed/runtime/bf16_optimizer.py); both DeepSpeed sources are short by just this without it."""


def stage_bytes(case: Case) -> dict[str, float]:
    """The parts of the worst stage of a rank, allocated bytes."""
    return max((_stage(case, stage) for stage in range(case.pp)), key=lambda parts: sum(parts.values()))


def _stage(case: Case, stage: int) -> dict[str, float]:
    a, tokens = case.arch, case.micro_batch * case.sequence / case.cp
    chunks = [case.chunk_blocks[i] for i in range(stage, case.pp * case.chunks, case.pp)]
    ends = (stage == 0) + (stage == case.pp - 1)
    tables = 1 if case.pp == 1 and a.tied else ends
    parameters = (sum(chunks) * (a.block_products + 13 * a.hidden) + tables * a.vocab * a.hidden) / case.tp
    group = case.shard or case.dp
    shards = {level: group if case.zero >= level else 1 for level in (1, 2, 3)}
    cut = case.tp if case.sequence_norms else 1
    entry = 2 * tokens * a.hidden / cut
    saved = _saved(case, tokens, recomputed=False)
    kept = entry if case.recompute == "full" else _saved(case, tokens, recomputed=case.recompute == "selective")
    gradients = case.gradient_bytes / shards[2]
    if case.framework == "Megatron-DeepSpeed" and case.zero == 1:
        gradients += DEEPSPEED_GRADIENT_BYTES
    parts = {
        "states": parameters * (2 / shards[3] + gradients + 12 / shards[1]),
        "activations": kept * _most_blocks(case, stage),
        "recompute": saved if case.recompute == "full" else saved - kept,
        "unsharded": 2 * 2 * a.block_products / case.tp if case.zero == 3 else 0.0,
    }
    if stage == case.pp - 1:
        # The logits come when the last forward has ended: not together with a recompute.
        logits = LOGIT_BYTES * tokens * a.vocab / case.tp
        parts["recompute"] = max(parts["recompute"], logits)
    return parts


def _saved(case: Case, tokens: float, *, recomputed: bool) -> float:
    """Bytes that one block keeps: s b h (10 + 24/t + 5 a s / h t), or 34/t with sequence-parallel norms.

    Korthikanti et al. 2022 (arXiv 2205.05198), equations 2 and 4; without the last term where the scores are fused or
    recomputed; a gated MLP keeps 8 bytes of its width instead of 8 of 4 h times two.
    """
    a, t = case.arch, case.tp
    mlp = (8 if a.gated else 4) * a.ffn / a.hidden
    inside = 8.0 * (1 + a.kv_heads / a.heads) / 2 + mlp
    outside = 10.0 / (t if case.sequence_norms else 1)
    scores = 0.0 if case.kernel != "plain" or recomputed else 5 * a.heads * case.sequence / a.hidden
    return tokens * a.hidden * (outside + (inside + scores) / t)


def _most_blocks(case: Case, stage: int) -> int:
    """The most block inputs alive at once, by the order of the rank's own operations."""
    alive = most = 0
    for forward, virtual, _ in order(case.pp, stage, min(case.num_micro_batches, 4 * case.pp), case.chunks):
        alive += case.chunk_blocks[virtual] if forward else -case.chunk_blocks[virtual]
        most = max(most, alive)
    return most


def reported_bytes(case: Case) -> float:
    """What the source's own figure would be: live tensors for XLA, reserved and context for nvidia-smi."""
    total = sum(stage_bytes(case).values())
    if case.source == "alpa-intra":
        return total
    return total * ALLOCATOR + CONTEXT_BYTES


def print_memory(cases: Sequence[Case]) -> None:
    """A line a source: records, median error, bias, 90th percentile, in percent."""
    groups: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for case in cases:
        if case.memory_gib:
            groups[case.source, case.gpu].append((reported_bytes(case), case.memory_gib * GIB))
    print("\nmemory: records, median error, bias (median), 90th percentile")
    for (source, gpu), pairs in sorted(groups.items()):
        ratio = np.array([predicted / stated for predicted, stated in pairs])
        errors = 100 * np.abs(ratio - 1)
        bias = 100 * (np.median(ratio) - 1)
        far = np.quantile(errors, 0.9)
        print(f"  {source:24s} {gpu:5s} {len(pairs):4d} {np.median(errors):6.1f} {bias:+6.1f} {far:6.1f}")
