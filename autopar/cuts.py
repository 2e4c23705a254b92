"""The ways to cut a machine and a batch, which of them are legal, and the tables of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autopar.axes import RankMesh, divisors
from autopar.errors import InputError, RunError
from autopar.legality import why_batch_illegal, why_schedule_illegal
from autopar.measured import ClusterFile, ModelFile
from autopar.price import CostTables
from autopar.request import Request, Schedule
from autopar.tables import Prices

MOST_MICRO_BATCHES = 1024
"""More micro-batches than this are tried only when the request names them."""


LARGE = 2000
"""Tables with more entries are large."""


@dataclass(frozen=True, kw_only=True)
class Cut:
    """One way to cut the machine and the batch."""

    pp: int
    num_micro_batches: int
    schedule: Schedule


@dataclass(frozen=True, kw_only=True)
class CutTables:
    """The tables of each cut, in one order: with memory bounded from below, estimated, and bounded from above."""

    cuts: tuple[Cut, ...]
    lower: tuple[CostTables, ...]
    near: tuple[CostTables, ...]
    upper: tuple[CostTables, ...]

    @property
    def is_large(self) -> bool:
        """Whether asking once more takes noticeable time."""
        return max((one.time_ns.size for one in self.lower), default=0) > LARGE


def legal_cuts(
    model_file: ModelFile, cluster_file: ClusterFile, request: Request
) -> tuple[tuple[Cut, ...], tuple[str, ...]]:
    """The legal ways to cut machine and batch, and the reasons why the others are not; both in a fixed order."""
    cluster, layers = cluster_file.cluster, len(model_file.model.layers)
    found: list[Cut] = []
    skipped: list[str] = []
    counts = request.num_micro_batches or [m for m in divisors(request.global_batch) if m <= MOST_MICRO_BATCHES]
    for pp in request.pp or divisors(cluster.world_size):
        if cluster.world_size % pp:
            skipped.append(f"pp {pp} does not divide the {cluster.world_size} ranks")
            continue
        if pp > layers:
            skipped.append(f"pp {pp} is more than the {layers} layers of the model, embed and head included")
            continue
        mesh = RankMesh.of(world_size=cluster.world_size, pp=pp, ranks_per_node=cluster.ranks_per_node)
        for count in counts:
            # One stage runs its micro-batches one after another, whatever the schedule is called.
            for schedule in request.schedules if pp > 1 else request.schedules[:1]:
                reason = why_batch_illegal(request.global_batch, count, mesh)
                if reason is None and pp > 1:
                    reason = why_schedule_illegal(schedule, pp=pp, num_micro_batches=count)
                if reason is None:
                    found.append(Cut(pp=pp, num_micro_batches=count, schedule=schedule))
                else:
                    skipped.append(f"pp {pp}: {reason}")
    return tuple(found), tuple(dict.fromkeys(skipped))


def check_files(model_file: ModelFile, cluster_file: ClusterFile, request: Request) -> None:
    """InputError when the profile was made for something else than what is asked."""
    layers, cluster = model_file.layers, cluster_file.cluster
    asked = (("sequence", request.sequence), ("dtype", request.dtype), ("device", cluster.device))
    for name, wanted in asked:
        profiled = getattr(layers, name)
        if profiled != wanted:
            raise InputError(
                f"the model's profile is for another {name}",
                why=f"it was measured with {name} {profiled}, the request is for {wanted}",
                fix="profile the model again with `autopar profile model`",
            )
    if request.global_batch >= 1 << 32:
        raise InputError(
            f"a global batch of {request.global_batch} is absurd",
            why="it must be below 2^32 samples",
            fix="give the samples of one optimizer step",
        )


def cut_tables(
    model_file: ModelFile,
    cluster_file: ClusterFile,
    request: Request,
    legal: Sequence[Cut],
    tell: Callable[[int, int], None] = lambda done, total: None,
    halted: Callable[[], bool] = lambda: False,
) -> tuple[CutTables, tuple[str, ...]]:
    """The tables of the cuts that have a legal strategy for every layer, and why the others have none.

    GPipe has none where 1F1B is legal: every choice takes the same time there, in no more memory, so that its bound
    holds for both. Raises the InputError of the most telling cut when none has a strategy, RunError when `halted`.
    """
    tried: list[Cut] = []
    made: dict[str, list[CostTables]] = {"lower": [], "near": [], "upper": []}
    known = set(legal)
    failures: list[tuple[Cut, InputError]] = []
    prices: Prices | None = None
    sides: tuple[Literal["lower", "near", "upper"], ...] = ("lower", "near", "upper")
    for i, cut in enumerate(legal):
        tell(i, len(legal))
        if halted():
            raise RunError(
                "the search was stopped before it found a plan that fits",
                why=f"{i} of {len(legal)} tables were made",
                fix="give it more time",
            )
        if cut.schedule == "gpipe" and replace(cut, schedule="1f1b") in known:
            continue
        try:
            if prices is None or (prices.mesh.pp, prices.micro_batches) != (cut.pp, cut.num_micro_batches):
                prices = None
                prices = Prices.of(
                    model_file.model,
                    model_file.layers,
                    cluster_file.cluster,
                    cluster_file.links,
                    request,
                    pp=cut.pp,
                    num_micro_batches=cut.num_micro_batches,
                )
            sided = [prices.tables(cut.schedule, side) for side in sides]
        except InputError as error:
            failures.append((cut, error))
            continue
        tried.append(cut)
        for side, one in zip(sides, sided, strict=True):
            made[side].append(one)
    tell(len(legal), len(legal))
    if not tried:
        # The reason of a cut whose stages are as wide as the pins says more than "occupies 4 ranks, a stage has 2".
        widths = {pin.strategy.ranks for pin in request.pins}
        world = cluster_file.cluster.world_size
        raise next((error for cut, error in failures if world // cut.pp in widths), failures[0][1])
    reasons = [f"pp {cut.pp}, {cut.num_micro_batches} micro-batches: {error.why}" for cut, error in failures]
    return (
        CutTables(cuts=tuple(tried), lower=tuple(made["lower"]), near=tuple(made["near"]), upper=tuple(made["upper"])),
        tuple(dict.fromkeys(reasons)),
    )
