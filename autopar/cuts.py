"""The ways to cut a machine and a batch, which of them are legal, and the tables of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

from autopar.axes import RankMesh, divisors
from autopar.errors import InputError, RunError
from autopar.legality import why_batch_illegal, why_pipeline_not_runnable, why_schedule_illegal
from autopar.measured import ClusterFile, ModelFile
from autopar.price import CostTables
from autopar.request import Request, Schedule
from autopar.schedules import PLAIN
from autopar.space import StrategySpace
from autopar.tables import Memory, Prices, floor_ns

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


@dataclass(frozen=True, kw_only=True, eq=False)
class CutTables:
    """The tables of each cut, in one order: with memory bounded from below, estimated, and bounded from above.

    Each is made when it is asked for; all of a cut have the same times. floors_ns: lower bounds of their objectives.
    """

    cuts: tuple[Cut, ...]
    spaces: tuple[StrategySpace, ...]
    floors_ns: tuple[int, ...]
    price: Callable[[Cut, StrategySpace], Prices]
    made: dict[tuple[Memory, int], CostTables] = field(default_factory=dict)
    priced: dict[tuple[int, int], Prices] = field(default_factory=dict)

    @property
    def is_large(self) -> bool:
        """Whether asking once more takes noticeable time."""
        return max((len(one.allowed) * len(one.strategies) for one in self.spaces), default=0) > LARGE

    @property
    def lower(self) -> Sequence[CostTables]:
        """The tables with memory bounded from below."""
        return Lower(self)

    def table(self, memory: Memory, place: int) -> CostTables:
        """The table of the cut at this place."""
        if (memory, place) not in self.made:
            self.made[memory, place] = self.prices(place).tables(self.cuts[place].schedule, memory)
        return self.made[memory, place]

    def prices(self, place: int) -> Prices:
        """What the tables of the cut at this place are made from."""
        cut = self.cuts[place]
        name = cut.pp, cut.num_micro_batches
        if name not in self.priced:
            self.priced[name] = self.price(cut, self.spaces[place])
        return self.priced[name]


class Lower(Sequence[CostTables]):
    """The tables of all cuts with memory bounded from below, each made when it is taken."""

    def __init__(self, owner: CutTables) -> None:
        self._owner = owner

    def __len__(self) -> int:
        return len(self._owner.cuts)

    @overload
    def __getitem__(self, place: int) -> CostTables: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[CostTables, ...]: ...
    def __getitem__(self, place: int | slice) -> CostTables | tuple[CostTables, ...]:
        if isinstance(place, slice):
            return tuple(self[one] for one in range(*place.indices(len(self))))
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        return self._owner.table("lower", place % len(self))


def legal_cuts(
    model_file: ModelFile, cluster_file: ClusterFile, request: Request
) -> tuple[tuple[Cut, ...], tuple[str, ...]]:
    """The legal ways to cut machine and batch, and the reasons why the others are not; both in a fixed order.

    Under GPipe and 1F1B alone: other schedules start from the choices of these (see autopar.virtual).
    """
    cluster, layers = cluster_file.cluster, len(model_file.model.layers)
    found: list[Cut] = []
    skipped: list[str] = []
    plain = tuple(schedule for schedule in request.schedules if schedule in PLAIN)
    schedules = plain if len(plain) == len(request.schedules) else PLAIN
    counts = request.num_micro_batches or [m for m in divisors(request.global_batch) if m <= MOST_MICRO_BATCHES]
    for pp in request.pp or divisors(cluster.world_size):
        if cluster.world_size % pp:
            skipped.append(f"pp {pp} does not divide the {cluster.world_size} ranks")
            continue
        if pp > layers:
            skipped.append(f"pp {pp} is more than the {layers} layers of the model, embed and head included")
            continue
        alone = None if request.allow_unrunnable else why_pipeline_not_runnable(model_file.model, pp)
        if alone:
            skipped.append(f"pp {pp}: {alone}")
            continue
        mesh = RankMesh.of(world_size=cluster.world_size, pp=pp, ranks_per_node=cluster.ranks_per_node)
        for count in counts:
            # One stage runs its micro-batches one after another, whatever the schedule is called.
            for schedule in schedules if pp > 1 else schedules[:1]:
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
    """The tables, to be made, of the cuts that have a legal strategy for every layer, and why the others have none.

    GPipe has none where 1F1B is legal: every choice takes the same time there, and the lower bound on its memory is
    one for GPipe, which has at least as many saved sets alive, so that the bound on the objective holds for both.
    Raises the InputError of the most telling cut when none has a strategy, RunError when `halted`.
    """
    model, layers, cluster = model_file.model, model_file.layers, cluster_file.cluster
    spaces: dict[Cut, StrategySpace] = {}
    floors: list[int] = []
    known = set(legal)
    failures: list[tuple[Cut, InputError]] = []
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
            mesh = RankMesh.of(world_size=cluster.world_size, pp=cut.pp, ranks_per_node=cluster.ranks_per_node)
            micro_batch = request.global_batch // cut.num_micro_batches
            space = StrategySpace.of(model, layers, mesh, request, micro_batch)
        except InputError as error:
            failures.append((cut, error))
            continue
        spaces[cut] = space
        count = cut.num_micro_batches
        floor = floor_ns(model, layers, cluster, space, pp=cut.pp, num_micro_batches=count, micro_batch=micro_batch)
        floors.append(floor)
    tell(len(legal), len(legal))
    if not spaces:
        # The reason of a cut whose stages are as wide as the pins says more than "occupies 4 ranks, a stage has 2".
        widths = {pin.strategy.ranks for pin in request.pins}
        world = cluster_file.cluster.world_size
        fitting = [error for cut, error in failures if world // cut.pp in widths]
        if not fitting:
            _explain_pins(cluster_file, request)
        raise (fitting or [failures[0][1]])[0]
    reasons = [f"pp {cut.pp}, {cut.num_micro_batches} micro-batches: {error.why}" for cut, error in failures]

    def price(cut: Cut, space: StrategySpace) -> Prices:
        links, count = cluster_file.links, cut.num_micro_batches
        return Prices.of(model, layers, cluster, links, request, pp=cut.pp, num_micro_batches=count, space=space)

    made = CutTables(cuts=tuple(spaces), spaces=tuple(spaces.values()), floors_ns=tuple(floors), price=price)
    return made, tuple(dict.fromkeys(reasons))


def _explain_pins(cluster_file: ClusterFile, request: Request) -> None:
    """Raise InputError when no batch is legal for the numbers of stages whose ranks the pins occupy."""
    world = cluster_file.cluster.world_size
    counts = request.num_micro_batches or (1,)
    for pin in request.pins:
        if world % pin.strategy.ranks or (request.pp and world // pin.strategy.ranks not in request.pp):
            continue
        pp = world // pin.strategy.ranks
        mesh = RankMesh.of(world_size=world, pp=pp, ranks_per_node=cluster_file.cluster.ranks_per_node)
        reasons = [why_batch_illegal(request.global_batch, count, mesh) for count in counts]
        if all(reasons):
            raise InputError(
                f"the pin {pin.short!r} is not legal with this batch",
                why=f"it needs pp {pp}: {reasons[0]}",
                fix="change the global batch, or drop the pin",
            )
