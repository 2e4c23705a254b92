"""Plan: one strategy per layer, the stages, the schedule, what is predicted and how good it is; plan.json.

The plan holds no dates and no elapsed times: the same build and input give the same bytes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, Literal, cast

from autopar.axes import RankMesh
from autopar.cluster import usable_bytes
from autopar.errors import InputError
from autopar.formats import dumps, from_plain, omitted, read_file, read_text, to_plain, write_file
from autopar.legality import (
    why_batch_illegal,
    why_illegal,
    why_not_runnable,
    why_pipeline_not_runnable,
    why_schedule_illegal,
    why_schedule_not_runnable,
    why_sharding_illegal,
)
from autopar.model import ModelSpec, Role, layer_names
from autopar.request import Forbid, Pin, Request, Schedule
from autopar.schedules import rank_stages, why_stages_illegal
from autopar.strategy import Strategy

PLAN_KIND, PLAN_SCHEMA = "autopar.plan", 1


@dataclass(frozen=True, kw_only=True)
class PlanModel:
    """Which model the plan is for: how to build it again, and a hash of its parameter names, shapes and dtypes."""

    name: str
    source: str
    fingerprint: str
    profile: str = ""


@dataclass(frozen=True, kw_only=True)
class PlanCluster:
    """Which machine the plan is for, and the hash of its profile."""

    name: str
    device: Literal["cpu", "cuda"]
    world_size: int
    ranks_per_node: int
    memory_bytes: int
    profile: str = ""

    def __post_init__(self) -> None:
        for field, limit in (("world_size", 1 << 20), ("ranks_per_node", 1 << 20), ("memory_bytes", 1 << 60)):
            if not 1 <= getattr(self, field) <= limit:
                raise ValueError(f"PlanCluster.{field} must lie between 1 and {limit}, not {getattr(self, field)}")

    @property
    def usable_bytes(self) -> int:
        """As of ClusterSpec."""
        return usable_bytes(self.device, self.memory_bytes)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The predicted peak of one rank and its parts, all at the same moment of the step."""

    peak_bytes: int
    parts_bytes: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the plan is expected to cost.

    step_s: one optimizer step, with its parts for the rank that ends last; memory: per rank; worst_rank: the rank of
    the highest peak; origin: the weakest origin of the numbers behind it; step_s_interval: where a calibrated cluster
    expects the step to lie in 80 % of cases, None without a calibration.
    """

    step_s: float
    parts_s: dict[str, float]
    memory: tuple[RankMemory, ...]
    worst_rank: int
    origin: Literal["measured", "fitted", "interpolated", "assumed"] = "measured"
    step_s_interval: tuple[float, float] | None = omitted(None)

    def __post_init__(self) -> None:
        if self.step_s_interval is not None and not 0 <= self.step_s_interval[0] <= self.step_s_interval[1] < 1e12:
            raise ValueError("Prediction.step_s_interval must be two seconds, the smaller first")
        sizes = [size for rank in self.memory for size in rank.parts_bytes.values()]
        if not 0 <= self.step_s < 1e12 or not all(abs(seconds) < 1e12 for seconds in self.parts_s.values()):
            raise ValueError("Prediction.step_s must not be negative, and no seconds absurd")
        if not all(0 <= rank.peak_bytes < 1 << 60 for rank in self.memory) or not all(abs(s) < 1 << 60 for s in sizes):
            raise ValueError("Prediction.memory must not be negative, and no bytes absurd")


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """How good the plan is: the solver's objective, a proven lower bound on it, and who proved it.

    The objective is a surrogate of the step (`predicted.step_s` is the simulated one); status "optimal" speaks of the
    surrogate. gap = (objective - bound) / objective.
    """

    objective_ns: int
    lower_bound_ns: int
    status: Literal["optimal", "gap"]
    solver: str
    verified_by: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.lower_bound_ns <= self.objective_ns < 1 << 62:
            raise ValueError(
                f"Certificate.lower_bound_ns {self.lower_bound_ns} exceeds {self.objective_ns}, or is absurd"
            )

    @property
    def gap(self) -> float:
        """The part of the objective that is not proven necessary."""
        return (self.objective_ns - self.lower_bound_ns) / max(1, self.objective_ns)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How every layer of a model runs on a cluster.

    pp pipeline ranks in `schedule` order of `num_micro_batches`; layers_per_stage: how many layers of the chain
    (embed, blocks, head) each stage holds, the same number of stages for each rank (one under 1f1b and gpipe);
    strategies: one per layer of the chain.
    Raises ValueError when the counts do not agree.
    """

    model: PlanModel
    cluster: PlanCluster
    request: Request
    pp: int
    schedule: Schedule
    num_micro_batches: int
    layers_per_stage: tuple[int, ...]
    strategies: tuple[Strategy, ...]
    predicted: Prediction | None = None
    certificate: Certificate | None = None
    versions: dict[str, str]

    def __post_init__(self) -> None:
        if self.pp < 1 or self.cluster.world_size % self.pp:
            raise ValueError(f"pp {self.pp} does not divide the world size {self.cluster.world_size}")
        if self.num_micro_batches < 1:
            raise ValueError(f"num_micro_batches must be >= 1, not {self.num_micro_batches}")
        per_rank, rest = divmod(len(self.layers_per_stage), self.pp)
        reason = why_stages_illegal(self.schedule, pp=self.pp, stages_per_rank=per_rank)
        if rest or reason or any(n < 1 for n in self.layers_per_stage):
            words = reason or "each stage needs a layer, each rank equally many stages"
            raise ValueError(f"layers_per_stage {list(self.layers_per_stage)} does not fit pp {self.pp}: {words}")
        if sum(self.layers_per_stage) != len(self.strategies):
            raise ValueError(f"{sum(self.layers_per_stage)} layers on the stages, {len(self.strategies)} strategies")
        if len(self.strategies) < 3:
            raise ValueError("a plan has embed, one block or more, and head")
        if self.predicted is not None and len(self.predicted.memory) != self.cluster.world_size:
            raise ValueError("predicted.memory must have one entry a rank")
        if self.predicted is not None and not 0 <= self.predicted.worst_rank < self.cluster.world_size:
            raise ValueError(f"predicted.worst_rank {self.predicted.worst_rank} is no rank of the cluster")

    @property
    def mesh(self) -> RankMesh:
        """The factored mesh of the plan."""
        return RankMesh.of(world_size=self.cluster.world_size, pp=self.pp, ranks_per_node=self.cluster.ranks_per_node)

    @property
    def micro_batch(self) -> int:
        """Samples of one micro-batch over all ranks of a stage."""
        return self.request.global_batch // self.num_micro_batches

    @property
    def num_stages(self) -> int:
        """The stages of the chain, over all pipeline ranks."""
        return len(self.layers_per_stage)

    @property
    def stages_per_rank(self) -> int:
        """The stages of one pipeline rank."""
        return self.num_stages // self.pp

    def stages_of_rank(self, pp_rank: int) -> tuple[int, ...]:
        """The stages of a pipeline rank, in the order of the chain."""
        return rank_stages(self.schedule, pp=self.pp, rank=pp_rank, stages_per_rank=self.stages_per_rank)

    def stage_layers(self, stage: int) -> range:
        """The places of the chain that a stage holds."""
        ends = list(accumulate(self.layers_per_stage))
        return range(ends[stage] - self.layers_per_stage[stage], ends[stage])

    def stage_of(self, layer: int) -> int:
        """The stage that holds the layer at this place of the chain."""
        return next(stage for stage in range(self.num_stages) if layer in self.stage_layers(stage))

    @property
    def not_runnable(self) -> tuple[str, ...]:
        """The parts of the plan that the runtime of this version cannot run, each with why and the layers."""
        found: dict[str, list[str]] = {}
        for name, strategy in zip(layer_names(len(self.strategies)), self.strategies, strict=True):
            reason = why_not_runnable(strategy, "block" if name.isdigit() else cast(Role, name))
            if reason:
                found.setdefault(reason, []).append(name)
        parts = [f"{reason} (layers {', '.join(names)})" for reason, names in found.items()]
        schedule = why_schedule_not_runnable(self.schedule, self.request.dtype) if self.pp > 1 else None
        return (*((schedule,) if schedule else ()), *parts)

    def check_runnable(self) -> None:
        """Return when the runtime of this version has all parts of the plan; otherwise InputError that names them."""
        if self.not_runnable:
            raise InputError(
                "the plan has parts that do not run yet",
                why="; ".join(self.not_runnable),
                fix="search again without --allow-unrunnable; `estimate --allow-unrunnable` prices it",
            )

    def check(self, model: ModelSpec, *, unrunnable: bool = False) -> None:
        """Return when the runtime can run this plan on this model; otherwise InputError by field.

        unrunnable: also when only the runtime of this version lacks parts of it. The same rules make the search
        space: see autopar.legality.
        """
        if model.fingerprint != self.model.fingerprint:
            raise InputError(
                "the plan was made for another model",
                why=f"its model {self.model.name} is {self.model.fingerprint}, this one, {model.name}, "
                f"is {model.fingerprint} (a hash of parameter names, shapes and dtypes)",
                fix="search again for this model",
            )
        if len(model.layers) != len(self.strategies):
            raise InputError(
                "the plan does not have one strategy per layer",
                why=f"it has {len(self.strategies)}, the model {len(model.layers)}",
                fix="search again for this model",
            )
        mesh = self.mesh
        reason = why_batch_illegal(self.request.global_batch, self.num_micro_batches, mesh) or why_schedule_illegal(
            self.schedule,
            pp=self.pp,
            num_micro_batches=self.num_micro_batches,
            stages_per_rank=self.stages_per_rank,
        )
        if reason:
            raise InputError(
                "the plan's batch is not legal", why=reason, fix="change global_batch or the micro-batches"
            )
        if not unrunnable:
            self.check_runnable()
            reason = why_pipeline_not_runnable(model, self.pp)
            if reason:
                raise InputError(f"the model does not run with pp {self.pp} yet", why=reason, fix="pp 1")
        for layer, (name, strategy) in enumerate(zip(model.layer_names, self.strategies, strict=True)):
            reason = why_illegal(
                strategy,
                model.kind(layer),
                mesh,
                micro_batch=self.micro_batch,
                sequence=self.request.sequence,
                unrunnable=unrunnable,
            ) or (why_sharding_illegal(strategy, self.schedule) if self.pp > 1 else None)
            if reason:
                raise InputError(f"layer {name} cannot run as {strategy}", why=reason, fix="search again")
        if model.tied and self.strategies[0] != self.strategies[-1]:
            raise InputError(
                "embed and head share parameters but not their strategy",
                why=f"embed {self.strategies[0]}, head {self.strategies[-1]}",
                fix="give both the same strategy",
            )

    def dumps(self) -> str:
        """The text of plan.json."""
        body = {f.name: to_plain(getattr(self, f.name)) for f in fields(self)}
        body["request"]["pins"] = [pin.short for pin in self.request.pins]
        body["request"]["forbids"] = [ban.short for ban in self.request.forbids]
        mesh = self.mesh
        body["mesh"] = {"pp": mesh.pp, **{axis.name: axis.size for axis in mesh.axes}}
        body["strategies"] = _run_length(self.strategies)
        order = ("model", "cluster", "request", "mesh", "schedule", "num_micro_batches", "layers_per_stage")
        rest = ("strategies", "not_runnable", "predicted", "certificate", "versions")
        if self.request.allow_unrunnable:
            body["not_runnable"] = list(self.not_runnable)
        return dumps(PLAN_KIND, PLAN_SCHEMA, {key: body[key] for key in (*order, *rest) if key in body})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write plan.json, whole or not at all."""
        write_file(path, self.dumps())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan of a file; InputError when it is not one or contradicts itself."""
        return cls._read(read_file(path, PLAN_KIND, PLAN_SCHEMA), str(path))

    @classmethod
    def loads(cls, text: str, name: str = "plan") -> Plan:
        """The plan of the text of a plan.json; `name` is what errors call it."""
        return cls._read(read_text(text, name, PLAN_KIND, PLAN_SCHEMA), name)

    @classmethod
    def _read(cls, data: dict[str, Any], where: str) -> Plan:
        mesh = from_plain(dict[str, int], data.pop("mesh", None), f"{where}.mesh")
        data["pp"] = mesh.get("pp")
        # For the reader only: another version may run more.
        from_plain(tuple[str, ...], data.pop("not_runnable", []), f"{where}.not_runnable")
        data["strategies"] = _expand(from_plain(dict[str, str], data.get("strategies"), f"{where}.strategies"), where)
        request = data.get("request")
        for key, read in (("pins", Pin.parse), ("forbids", Forbid.parse)):
            if isinstance(request, dict) and isinstance(request.get(key), list):
                texts = from_plain(tuple[str, ...], request[key], f"{where}.request.{key}")
                request[key] = [to_plain(read(text)) for text in texts]
        plan = from_plain(cls, data, where)
        expected = {"pp": plan.mesh.pp, **{axis.name: axis.size for axis in plan.mesh.axes}}
        if mesh != expected:
            raise InputError(
                f"{where}.mesh does not fit the cluster",
                why=f"it is {mesh}, expected {expected}",
                fix="search again",
            )
        return plan


def _run_length(strategies: tuple[Strategy, ...]) -> dict[str, str]:
    names = layer_names(len(strategies))
    runs: list[tuple[int, int, str]] = []
    for block in range(len(strategies) - 2):
        short = strategies[block + 1].short
        if runs and runs[-1][2] == short:
            runs[-1] = (runs[-1][0], block, short)
        else:
            runs.append((block, block, short))
    blocks = {(f"{a}-{b}" if b > a else f"{a}"): short for a, b, short in runs}
    return {names[0]: strategies[0].short, **blocks, names[-1]: strategies[-1].short}


def _expand(runs: dict[str, str], where: str) -> list[Any]:
    """The strategies of the chain as plain data; every block must be named once, in order."""
    found: list[Any] = []
    keys = list(runs)
    if len(keys) < 3 or keys[0] != "embed" or keys[-1] != "head":
        what = f"{where}.strategies must go from embed over the blocks to head"
        raise InputError(what, why=f"its keys are {keys[:9]}", fix="search again")
    for key in keys:
        count = 1
        if key not in ("embed", "head"):
            first, _, last = key.partition("-")
            expected = len(found) - 1
            well_formed = first.isascii() and first.isdigit() and (not last or (last.isascii() and last.isdigit()))
            if not well_formed or int(first) != expected or int(last or first) < expected:
                raise InputError(
                    f"{where}.strategies[{key!r}] is out of order",
                    why=f"the next block is {expected}",
                    fix='name runs of blocks such as "0-3" in order',
                )
            count = int(last or first) - expected + 1
            if count > 100_000:
                raise InputError(f"{where}.strategies[{key!r}] is absurd", why=f"{count} blocks", fix="search again")
        found += [to_plain(Strategy.parse(runs[key]))] * count
    return found
