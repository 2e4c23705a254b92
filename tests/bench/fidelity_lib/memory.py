"""Predicted beside stated memory: states, activations in flight, recompute, logits, by the schedule's own counts.

The published runs are mixed precision with an fp32 master copy (2 + gradient + 12 bytes a parameter), which the
library's walk of pure-dtype training does not hold; the parts and the counts in flight are the same. What a framework
allocates beside that is written down per framework with the source file that shows it (`FRAMEWORKS`), never per row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.orders import actions
from autopar.request import Schedule
from autopar.units import GIB
from tests.bench.fidelity_lib.cases import Case

CONTEXT_BYTES = 0.5 * GIB
"""Assumed: CUDA context and libraries, where the figure is nvidia-smi's."""

NCCL_BYTES = 1.0 * GIB
"""Assumed: what NCCL holds beside them as soon as there is a second rank."""

ALLOCATOR = 1.06
"""Assumed: reserved over allocated, where the figure is not the sum of live tensors (design: cost model, 5)."""


@dataclass(frozen=True, kw_only=True)
class Framework:
    """What a framework allocates, and what its figure of memory counts.

    gradient_bytes: of a parameter, None for what the record's precision says; copied_gradients: further bytes of
    gradients that no degree shards, under DDP and under ZeRO-1; logit_bytes: of logits and loss at their peak;
    dropout: blocks keep masks; margin: reserved over allocated; context: nvidia-smi's figure, with what no allocator
    knows; first_stage: the figure is rank 0's; buffered: a pipeline keeps room for 2 * pp micro-batches in every
    stage but the last, and forwards share no memory with backwards.
    """

    gradient_bytes: int | None = None
    copied_gradients: tuple[int, int] = (0, 0)
    logit_bytes: int = 12
    dropout: bool = True
    margin: float = ALLOCATOR
    context: bool = True
    first_stage: bool = False
    buffered: bool = False


MEGATRON = Framework()
"""16-bit logits, their fp32 copy and the gradient (design: cost model, 5)."""

FRAMEWORKS = {
    # An fp32 copy of all gradients beside the 16-bit ones: deepspeed/runtime/bf16_optimizer.py.
    "Megatron-DeepSpeed": Framework(copied_gradients=(0, 4)),
    # XLA's figure is that of its own plan of buffers.
    "Alpa": Framework(margin=1.0, context=False),
    # src/nanotron: rank 0 writes torch's max_memory_reserved (helpers.py, log_throughput); gradients in 16 bits beside
    # the fp32 sums until a backward ends (optim/gradient_accumulator.py), and the buckets of DDP, which is left out
    # under ZeRO-1 with fp32 sums (trainer.py, _init_model); no dropout (models/llama.py).
    "nanotron": Framework(copied_gradients=(4, 2), dropout=False, context=False, first_stage=True),
    # oneflow/core: a static plan of memory; the loss stays in 16 bits (job_rewriter/auto_mixed_precision_lists.cpp),
    # with logits, probabilities and gradient; gradients are clipped in fp32; buffers of 2 * stages between forward
    # and backward (job_rewriter/pipeline_buffer_pass.cpp).
    "OneFlow": Framework(gradient_bytes=4, logit_bytes=6, margin=1.0, buffered=True),
}


def framework_of(case: Case) -> Framework:
    """The framework of the record, by how its name begins."""
    return next((found for name, found in FRAMEWORKS.items() if case.framework.startswith(name)), MEGATRON)


def stage_bytes(case: Case) -> dict[str, float]:
    """The parts of the stage that the figure is of, allocated bytes: the worst, or the first."""
    stages = range(1 if framework_of(case).first_stage else case.pp)
    return max((_stage(case, stage) for stage in stages), key=lambda parts: sum(parts.values()))


def _stage(case: Case, stage: int) -> dict[str, float]:
    a, f, tokens = case.arch, framework_of(case), case.micro_batch * case.sequence / case.cp
    chunks = [case.chunk_blocks[i] for i in range(stage, case.pp * case.chunks, case.pp)]
    last = stage == case.pp - 1
    tables = 1 if case.pp == 1 and a.tied else (stage == 0) + last
    parameters = (sum(chunks) * (a.block_products + 13 * a.hidden) + tables * a.vocab * a.hidden) / case.tp
    group = case.shard or case.dp
    shards = {level: group if case.zero >= level else 1 for level in (1, 2, 3)}
    gradients = (f.gradient_bytes or case.gradient_bytes) / shards[2]
    if case.zero < 2 and case.dp > 1:
        gradients += f.copied_gradients[case.zero]
    saved = _saved(case, tokens, recomputed=False)
    kept = saved if case.recompute == "none" else _saved(case, tokens, recomputed=True)
    if case.recompute == "full":
        kept = 2 * tokens * a.hidden / (case.tp if case.sequence_norms else 1)
    # A backward through unfused attention holds two gradients of its scores in 16 bits.
    work = saved - kept + (4 * _scores(case) if case.kernel == "plain" and case.recompute == "full" else 0.0)
    # The logits come when the last forward has ended: not together with a recompute.
    logits = f.logit_bytes * tokens * a.vocab / case.tp if last else 0.0
    buffered = f.buffered and case.pp > 1
    alive = sum(chunks) * (1 if last else 2 * case.pp) if buffered else _most_blocks(case, stage)
    return {
        "states": parameters * (2 / shards[3] + gradients + 12 / shards[1]),
        "activations": kept * alive,
        "recompute": max(work + (saved if buffered else 0.0), logits),
        "unsharded": 2 * 2 * a.block_products / case.tp if case.zero == 3 else 0.0,
    }


def _scores(case: Case) -> float:
    """Elements of the score matrices of one block on one rank."""
    return case.micro_batch * case.arch.heads * case.sequence**2 / case.tp / case.cp


def _saved(case: Case, tokens: float, *, recomputed: bool) -> float:
    """Bytes that one block keeps: s b h (10 + 24/t + 5 a s / h t), or 34/t with sequence-parallel norms.

    Korthikanti et al. 2022 (arXiv 2205.05198), equations 2 and 4; without the last term where the scores are fused or
    recomputed; 8 instead of 10 without dropout; a gated MLP keeps 8 bytes of its width instead of 8 of 4 h times two.
    """
    a, t = case.arch, case.tp
    mlp = (8 if a.gated else 4) * a.ffn / a.hidden
    inside = 8.0 * (1 + a.kv_heads / a.heads) / 2 + mlp
    outside = (10.0 if framework_of(case).dropout else 8.0) / (t if case.sequence_norms else 1)
    scores = 0.0 if case.kernel != "plain" or recomputed else 5 * _scores(case)
    return tokens * a.hidden * (outside + inside / t) + scores


def _most_blocks(case: Case, stage: int) -> int:
    """The most block inputs alive at once, by the order of the rank's own operations."""
    alive = most = 0
    schedule: Schedule = "1f1b" if case.chunks == 1 else "interleaved-1f1b"
    count = min(case.num_micro_batches, 4 * case.pp)
    for kind, virtual, _ in actions(schedule, case.pp, stage, count, case.chunks):
        alive += case.chunk_blocks[virtual] if kind == "F" else -case.chunk_blocks[virtual]
        most = max(most, alive)
    return most


def reported_bytes(case: Case) -> float:
    """What the source's own figure would be: live tensors, reserved memory, or that and what no allocator knows."""
    f = framework_of(case)
    context = (CONTEXT_BYTES + NCCL_BYTES * (case.ranks > 1)) if f.context else 0.0
    return sum(stage_bytes(case).values()) * f.margin + context


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
