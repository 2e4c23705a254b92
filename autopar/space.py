"""Which strategies each layer may take on one mesh with one micro-batch, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import gcd

from autopar.axes import RankMesh, divisors
from autopar.derived import local_cost
from autopar.errors import InputError
from autopar.legality import why_illegal, why_not_runnable
from autopar.measured import LayerProfile
from autopar.model import LayerKind, ModelSpec
from autopar.request import Forbid, Request
from autopar.strategy import Recompute, Strategy

_RECOMPUTE: tuple[Recompute, ...] = ("none", "full", "selective")


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """Why layers of a kind cannot take a strategy."""

    kind: str
    strategy: Strategy
    reason: str


@dataclass(frozen=True, kw_only=True)
class StrategySpace:
    """The strategies that some layer may take, in a fixed order; for each layer of the chain those that it may take.

    allowed: places in `strategies`, ascending, one tuple a layer; cut_ends: the places that are tensor parallelism of
    embedding and head, beside those of blocks (the one keeps the boundary layout inside a stage, the other does not);
    rejections: all others that were considered.
    """

    strategies: tuple[Strategy, ...]
    allowed: tuple[tuple[int, ...], ...]
    cut_ends: frozenset[int]
    rejections: tuple[Rejection, ...]

    @classmethod
    def of(
        cls, model: ModelSpec, layers: LayerProfile, mesh: RankMesh, request: Request, micro_batch: int
    ) -> StrategySpace:
        """The space of one mesh and micro-batch; O(kinds * strategies).

        Raises InputError with the reason for a pin that is not legal, and for a layer that nothing is legal for.
        """
        legal: dict[str, dict[Strategy, None]] = {}
        rejections = []
        for kind in (kind for kind in model.kinds if kind.name in model.layers):
            legal[kind.name] = {}
            for strategy in candidates(mesh, request.allow_unrunnable):
                reason = why_not(strategy, kind, layers, mesh, request, micro_batch)
                if reason is None:
                    legal[kind.name][strategy] = None
                else:
                    rejections.append(Rejection(kind=kind.name, strategy=strategy, reason=reason))
        pinned, forbidden = _pinned(model, request), _forbidden(model, request)
        chosen: list[tuple[Strategy, ...]] = []
        rows: dict[tuple[str, tuple[Forbid, ...]], tuple[Strategy, ...]] = {}
        for layer, name in enumerate(model.layer_names):
            kind, bans = model.kind(layer), forbidden.get(layer, ())
            if layer in pinned:
                strategy, short = pinned[layer]
                reason = why_not(strategy, kind, layers, mesh, request, micro_batch)
                if reason:
                    raise InputError(
                        f"the pin {short!r} is not legal for layer {name}",
                        why=reason,
                        fix="pin a legal strategy, or leave the layer to the search",
                    )
                ban = next((ban for ban in bans if ban.meets(strategy)), None)
                if ban is not None:
                    raise InputError(
                        f"layer {name} is pinned to what is forbidden for it",
                        why=f"--pin {short!r} and --forbid {ban.short!r}",
                        fix="drop one of the two",
                    )
                chosen.append((strategy,))
                continue
            if not legal[kind.name]:
                reasons = [r.reason for r in rejections if r.kind == kind.name]
                raise InputError(f"no strategy is legal for layer {name}", why=reasons[0], fix="change the request")
            if (kind.name, bans) not in rows:
                left = tuple(s for s in legal[kind.name] if not any(ban.meets(s) for ban in bans))
                if not left:
                    were = ", ".join(map(str, legal[kind.name]))
                    raise InputError(
                        f"every legal strategy of layer {name} is forbidden",
                        why=f"legal: {were}; bans: {'; '.join(b.short for b in bans)}",
                        fix="forbid less",
                    )
                rows[kind.name, bans] = left
            chosen.append(rows[kind.name, bans])
        # Many layers share one row: what is done per strategy is done once a row.
        ends = {id(row) for row in (chosen[0], chosen[-1])}
        distinct = {id(row): row for row in chosen}
        keys = {name: [(s, name in ends and s.tp > 1) for s in row] for name, row in distinct.items()}
        used = {key for row in keys.values() for key in row}
        asked = dict.fromkeys((*candidates(mesh, request.allow_unrunnable), *sorted({s for s, _ in used}, key=str)))
        columns = [key for s in asked for key in ((s, False), (s, True)) if key in used]
        place = {key: i for i, key in enumerate(columns)}
        places = {name: tuple(sorted(place[key] for key in row)) for name, row in keys.items()}
        return cls(
            strategies=tuple(s for s, _ in columns),
            allowed=tuple(places[id(row)] for row in chosen),
            cut_ends=frozenset(i for i, (_, is_end) in enumerate(columns) if is_end),
            rejections=tuple(rejections),
        )


@lru_cache(maxsize=256)
def candidates(mesh: RankMesh, unrunnable: bool = False) -> tuple[Strategy, ...]:
    """All strategies of a stage that are worth asking for, legal or not: each way to cut it over tp, sp, cp and dp.

    HSDP is tried where the dp ranks span nodes, its shards inside the node. Without `unrunnable` what no layer can run
    is left out, and sp (which stays inside a node) and cp: dp does the same work without their exchanges.
    """
    ranks, found = mesh.ranks_per_stage, []
    inside = mesh.size(tuple(name for name in mesh.names if not name.startswith("n")))
    for tp in divisors(ranks):
        for sp in divisors(gcd(ranks // tp, inside)) if unrunnable else (1,):
            for cp in divisors(ranks // tp // sp) if unrunnable else (1,):
                dp = ranks // (tp * sp * cp)
                local, rest = divmod(inside, tp * sp * cp)
                shards = (None, local) if rest == 0 and 1 < local < dp else (None,)
                for zero, norms, recompute, shard in product(range(4), (False, True), _RECOMPUTE, shards):
                    if (zero and dp == 1) or (norms and tp == 1) or (shard and zero < 2):
                        continue
                    strategy = Strategy(
                        dp=dp,
                        zero=zero,
                        shard=shard,
                        tp=tp,
                        sequence_norms=norms,
                        sp=sp,
                        cp=cp,
                        recompute=recompute,
                    )
                    if unrunnable or why_not_runnable(strategy) is None:
                        found.append(strategy)
    return tuple(found)


def why_not(
    strategy: Strategy,
    kind: LayerKind,
    layers: LayerProfile,
    mesh: RankMesh,
    request: Request,
    micro_batch: int,
) -> str | None:
    """Why layers of this kind cannot take this strategy here: illegal or not measured; None when they can."""
    reason = why_illegal(
        strategy,
        kind,
        mesh,
        micro_batch=micro_batch,
        sequence=request.sequence,
        unrunnable=request.allow_unrunnable,
    )
    if reason is None and not request.tp_across_nodes:
        crossed = [name for name in mesh.place(strategy).tp if name.startswith("n")]
        if crossed:
            reason = f"tp {strategy.tp} would leave its node; --tp-across-nodes allows it"
    if reason is None and local_cost(layers, kind, strategy) is None:
        again = " under selective recompute" if strategy.recompute == "selective" else ""
        norms = " with sequence-parallel norms" if strategy.sequence_norms else ""
        measured = sorted({cost.tp for cost in layers.costs if cost.kind == kind.name})
        reason = f"{kind.name} was not measured at tp {strategy.tp}{norms}{again} (measured: tp {measured})"
    return reason


def _forbidden(model: ModelSpec, request: Request) -> dict[int, tuple[Forbid, ...]]:
    """The bans on each layer that has some."""
    found: dict[int, tuple[Forbid, ...]] = {}
    for ban in request.forbids:
        for layer in ban.indices(len(model.layers)):
            found[layer] = (*found.get(layer, ()), ban)
    return found


def _pinned(model: ModelSpec, request: Request) -> dict[int, tuple[Strategy, str]]:
    """The pinned strategy of each pinned layer, and the pin; InputError when two pins contradict each other."""
    found: dict[int, tuple[Strategy, str]] = {}
    for pin in request.pins:
        for layer in pin.indices(len(model.layers)):
            if layer in found and found[layer][0] != pin.strategy:
                raise InputError(
                    f"two pins contradict each other on layer {model.layer_names[layer]}",
                    why=f"{found[layer][1]!r} and {pin.short!r}",
                    fix="pin each layer once",
                )
            found[layer] = (pin.strategy, pin.short)
    if model.tied and 0 in found and len(model.layers) - 1 in found:
        first, last = found[0], found[len(model.layers) - 1]
        if first[0] != last[0]:
            raise InputError(
                "embed and head share parameters but are pinned differently",
                why=f"{first[1]!r} and {last[1]!r}",
                fix="pin both to the same strategy, or only one of them",
            )
    return found
