"""A published run as a value: model, machine and plan, the measured seconds, and what had to be assumed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.architectures import Architecture, model_spec
from autopar.cluster import ClusterSpec
from autopar.model import ModelSpec
from autopar.plan import Plan, PlanCluster, PlanModel
from autopar.request import Request
from autopar.strategy import Strategy

MEMORY_GB = {"V100": 32, "A100": 80, "H100": 80}

COMPOSED = ("vtrain-single",)
"""Sources whose times were put together by a formula: reported apart, never fitted."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One published run: model, machine and plan, the measured seconds, and what had to be assumed.

    micro_batch: samples of a rank, a mean where the last one is smaller; chunks: virtual stages of a rank;
    state_shards: over how many ranks the optimizer is cut; node_bytes_per_s: what leaves a node;
    stops_early: a recompute ends with the last input that the backward needs (torch's non-reentrant checkpoint, XLA);
    fused_accumulation: the product of a weight gradient adds to the sum itself; overlap_dp, overlap_tp: collectives
    run beside compute; kernel: "plain", "flash1" or "flash"; balanced: stages are cut by cost, the head counted.
    """

    source: str
    gpu: str
    arch: Architecture
    sequence: int
    fp8: bool
    micro_batch: float
    num_micro_batches: int
    global_batch: int
    tp: int
    sequence_norms: bool
    pp: int
    cp: int
    dp: int
    chunks: int
    recompute: str
    kernel: str
    zero: int
    shard: int | None
    gradient_bytes: int
    ranks_per_node: int
    node_bytes_per_s: float
    stops_early: bool
    fused_accumulation: bool
    overlap_dp: bool
    overlap_tp: bool
    compiled: bool
    step_s: float
    memory_gib: float | None
    assumed: tuple[str, ...]
    framework: str
    balanced: bool = False

    @property
    def ranks(self) -> int:
        """All ranks of the run."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def label(self) -> str:
        """Source and GPU, with the precision where a source has two."""
        return f"{self.source}{' fp8' if self.fp8 else ''}"

    @property
    def configuration(self) -> tuple[object, ...]:
        """What folds are cut by: runs of one configuration never lie on both sides."""
        a = self.arch
        return (
            self.source,
            self.gpu,
            *(
                a.layers,
                a.hidden,
                a.heads,
                a.ffn,
                a.vocab,
                self.sequence,
                self.fp8,
                self.tp,
                self.pp,
                self.cp,
                self.dp,
            ),
            *(self.chunks, self.micro_batch, self.global_batch, self.recompute, self.zero, self.shard, self.compiled),
        )

    @property
    def strategy(self) -> Strategy:
        """The strategy of every layer."""
        dp = self.dp
        shard = self.shard if self.shard and 1 < self.shard < dp and dp % self.shard == 0 else None
        return Strategy(
            dp=dp,
            zero=self.zero if dp > 1 else 0,
            shard=shard if self.zero and dp > 1 else None,
            tp=self.tp,
            sequence_norms=self.sequence_norms and self.tp > 1,
            cp=self.cp,
            recompute=self.recompute,  # type: ignore[arg-type]
        )

    def model(self) -> ModelSpec:
        """The model."""
        return model_spec(self.arch, dtype="bfloat16")

    def cluster(self) -> ClusterSpec:
        """The machine."""
        inside = min(self.ranks, self.ranks_per_node)
        return ClusterSpec(
            name=f"{self.gpu}-{self.ranks}",
            device="cuda",
            device_name=self.gpu,
            world_size=self.ranks,
            ranks_per_node=inside if self.ranks % inside == 0 else math.gcd(self.ranks, inside),
            memory_bytes=MEMORY_GB[self.gpu] * 10**9,
        )

    def plan(self) -> Plan:
        """The run as a plan; the chunks of a rank are one stage in it."""
        cluster, model = self.cluster(), self.model()
        blocks = [sum(self.chunk_blocks[stage :: self.pp]) for stage in range(self.pp)]
        blocks[0] += 1
        blocks[-1] += 1
        return Plan(
            model=PlanModel(name=model.name, source=model.source, fingerprint=model.fingerprint),
            cluster=PlanCluster(
                name=cluster.name,
                device="cuda",
                world_size=cluster.world_size,
                ranks_per_node=cluster.ranks_per_node,
                memory_bytes=cluster.memory_bytes,
            ),
            request=Request(global_batch=self.global_batch, sequence=self.sequence, dtype="bfloat16"),
            pp=self.pp,
            schedule="1f1b",
            num_micro_batches=self.num_micro_batches,
            layers_per_stage=tuple(blocks),
            strategies=(self.strategy,) * (self.arch.layers + 2),
            versions={},
        )

    @property
    def chunk_blocks(self) -> tuple[int, ...]:
        """Blocks of each virtual stage in model order; what does not divide is taken from the two ends.

        Balanced: a rank takes blocks until it has more than its share of the products, those of the logits included
        (nanotron, src/nanotron/models/base.py, build_model).
        """
        count = self.pp * self.chunks
        if self.balanced:
            return self._balanced_blocks(count)
        most = -(-self.arch.layers // count)
        blocks, missing = [most] * count, most * count - self.arch.layers
        order = [i for pair in zip(reversed(range(count)), range(count), strict=True) for i in pair][:count]
        while missing:
            for i in order:
                if missing and blocks[i]:
                    blocks[i] -= 1
                    missing -= 1
        return tuple(blocks)

    def _balanced_blocks(self, count: int) -> tuple[int, ...]:
        block, head = self.arch.block_products, self.arch.vocab * self.arch.hidden
        blocks, stage = [0] * count, 0
        for done in range(1, self.arch.layers + 1):
            blocks[stage] += 1
            if done * block * count > (self.arch.layers * block + head) * (stage + 1):
                stage += 1
        return tuple(blocks)


def model_flops(arch: Architecture, sequence: int, batch: float) -> float:
    """FLOPs of a step without recompute: 6 per parameter and token, 12 L h s for attention, not halved."""
    return (
        3
        * batch
        * sequence
        * (
            arch.layers * (2 * arch.block_products + 4 * sequence * arch.heads * arch.head_dim)
            + 2 * arch.hidden * arch.vocab
        )
    )
