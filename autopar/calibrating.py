"""A cluster corrected by whole runs: `autopar calibrate`.

A run is a plan, the profile of its model, and its measured step. A few factors on what the cluster file says,

    compute        seconds of all layers
    bandwidth      per byte of collectives inside a node, and of those across nodes
    latency        of a collective's smallest message, likewise
    zero           what fully_shard adds to collectives
    optimizer      seconds of clipping and the optimizer

are fitted by robust least squares in log space: r_i = log(predicted_i / measured_i), Huber's weights, and for each
factor f the prior log f ~ N(0, PRIOR), so that what the runs do not show stays as measured.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Calibration, ClusterSpec, UpdateCost, ZeroCost
from autopar.errors import InputError
from autopar.formats import check_writable, dumps
from autopar.measured import ClusterFile, LinkCurve, ModelFile
from autopar.plan import Plan
from autopar.predict import predict
from autopar.work import ASSUMED_OPTIMIZER_ACCESSES, ASSUMED_OPTIMIZER_BYTES_PER_S

PRIOR = {"compute": 0.3, "zero": 0.5, "optimizer": 0.5} | {
    f"{what}_{level}": 0.5 for what in ("bandwidth", "latency") for level in ("inside", "across")
}
"""Spread of the logarithm of each factor before any run is seen."""

LEAST_RUNS = 3
_HUBER, _ITERATIONS, _STEP = 1.345, 12, 0.02

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A plan with its model's profile and its measured seconds."""

    plan: Plan
    model: ModelFile
    step_s: float

    def predicted_s(self, cluster: ClusterFile) -> float:
        """The step that this cluster predicts."""
        return predict(self.plan, self.model.model, self.model.layers, cluster.cluster, cluster.links).step_s


@dataclass(frozen=True, kw_only=True)
class Factor:
    """A fitted factor with its 80 % interval."""

    name: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """The corrected cluster, its factors, and the median error over the runs before and after."""

    file: ClusterFile
    factors: tuple[Factor, ...]
    before: float
    after: float

    def dumps(self) -> str:
        """One JSON object without the cluster."""
        fields = {"factors": self.factors, "median_error_before": self.before, "median_error_after": self.after}
        return dumps("autopar.calibration", 1, {**fields, "calibration": self.file.cluster.calibration})


def calibrate_files(cluster: Path, runs: Path, *, model: Path | None, output: Path) -> Calibrated:
    """The calibration of a cluster.json by a file of runs, its cluster written to `output`; InputError as below."""
    check_writable(output)
    found = calibrate(ClusterFile.load(cluster), read_runs(runs, model))
    found.file.save(output)
    return found


def read_runs(path: Path, model: Path | None) -> list[MeasuredRun]:
    """The runs of a file of JSON objects, one after another; InputError for what is none.

    Each has `plan` (the content of a plan.json, or the path of one, from the file's folder), `step_s` or the
    `measured` of `autopar run --json`, and `model`, the path of a model.json, where `model` here does not name it.
    """
    models: dict[Path, ModelFile] = {}
    runs = []
    for number, entry in enumerate(_objects(path), 1):
        where = f"run {number} of {path}"
        given = entry.get("model")
        source = path.parent / given if isinstance(given, str) else model
        if source is None:
            raise InputError(
                f"{where} does not say which model it ran", why="it has no `model`", fix="add it, or give --model"
            )
        if source not in models:
            models[source] = ModelFile.load(source)
        plan = _plan(entry.get("plan"), path.parent, where)
        plan.check(models[source].model)
        runs.append(MeasuredRun(plan=plan, model=models[source], step_s=_step_s(entry, where)))
    return runs


def _objects(path: Path) -> list[dict[str, Any]]:
    fix = "give a file of objects with `plan` and `step_s`, such as `autopar run --json` prints"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read", why=str(error), fix=fix) from None
    decoder, place = json.JSONDecoder(), 0
    found: list[dict[str, Any]] = []
    while text[place:].strip():
        place += len(text[place:]) - len(text[place:].lstrip())
        try:
            entry, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} is not JSON after {len(found)} runs", why=str(error), fix=fix) from None
        if not isinstance(entry, dict):
            raise InputError(f"run {len(found) + 1} of {path} is no object", why=f"it is {entry!r:.60}", fix=fix)
        found.append(entry)
    return found


def _plan(value: object, folder: Path, where: str) -> Plan:
    if isinstance(value, str):
        return Plan.load(folder / value)
    if not isinstance(value, dict):
        raise InputError(f"{where} has no plan", why=f"its `plan` is {value!r:.60}", fix="give the plan or its path")
    return Plan.loads(json.dumps(value), f"the plan of {where}")


def _step_s(entry: Mapping[str, Any], where: str) -> float:
    measured = entry.get("measured")
    value = measured.get("step_s") if isinstance(measured, dict) else entry.get("step_s")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise InputError(
            f"{where} has no measured seconds", why=f"its step_s is {value!r:.60}", fix="give a positive number"
        )
    return float(value)


def calibrate(file: ClusterFile, runs: Sequence[MeasuredRun]) -> Calibrated:
    """The cluster with factors fitted to the runs; InputError for too few of them, or of another machine.

    Cost: about 100 predictions of each run.
    """
    if len(runs) < LEAST_RUNS:
        raise InputError(
            f"{len(runs)} runs are too few to calibrate",
            why=f"{LEAST_RUNS} at least say something about the error that is left",
            fix="run more plans",
        )
    spec = file.cluster
    for number, run in enumerate(runs, 1):
        if (run.plan.cluster.world_size, run.plan.cluster.device) != (spec.world_size, spec.device):
            raise InputError(
                f"run {number} was on {run.plan.cluster.world_size} ranks of {run.plan.cluster.device}",
                why=f"the cluster file has {spec.world_size} of {spec.device}",
                fix="calibrate each machine with its own runs",
            )
    names = [name for name in PRIOR if not name.endswith("_across") or spec.world_size > spec.ranks_per_node]
    spread = np.array([PRIOR[name] for name in names])

    def residuals(logs: Floats) -> Floats:
        scaled = with_factors(file, {name: math.exp(x) for name, x in zip(names, logs, strict=True)})
        return np.array([math.log(run.predicted_s(scaled) / run.step_s) for run in runs])

    logs = np.zeros(len(names))
    error = before = residuals(logs)
    freedom = max(1.0, len(runs) - len(names))
    for _ in range(_ITERATIONS):
        slopes = np.stack([(residuals(logs + _STEP * unit) - error) / _STEP for unit in np.eye(len(names))], axis=1)
        middle = 1.4826 * float(np.median(np.abs(error))) * math.sqrt(len(runs) / freedom)
        weights = 1 / np.maximum(1.0, np.abs(error) / (_HUBER * max(1e-3, middle)))
        scale = max(1e-3, math.sqrt(float(weights @ error**2) / freedom))
        weighted = slopes * (weights / scale**2)[:, None]
        normal = weighted.T @ slopes + np.diag(spread**-2)
        change = np.linalg.solve(normal, -(weighted.T @ error + logs / spread**2))
        logs, was = np.clip(logs + np.clip(change, -0.5, 0.5), -3, 3), logs
        error = residuals(logs)
        if np.abs(logs - was).max() < 1e-3:
            break
    deviations = np.sqrt(np.diag(np.linalg.inv(normal)))
    # Factors that the runs decide cost degrees of freedom, those left to their prior do not.
    decided = float(np.sum(1 - np.minimum(1.0, deviations**2 / spread**2)))
    wide = math.sqrt(len(runs) / max(1.0, len(runs) - decided))
    calibration = Calibration(
        runs=len(runs),
        median_error=_median_error(error),
        log_spread=float(np.quantile(np.abs(error), 0.8)) * wide,
        compute_factor=spec.compute_factor * math.exp(logs[names.index("compute")]),
    )
    scaled = with_factors(file, {name: math.exp(x) for name, x in zip(names, logs, strict=True)})
    factors = tuple(
        Factor(name=name, value=math.exp(x), low=math.exp(x - 1.2816 * d), high=math.exp(x + 1.2816 * d))
        for name, x, d in zip(names, logs, deviations, strict=True)
    )
    return Calibrated(
        file=replace(scaled, cluster=replace(scaled.cluster, calibration=calibration)),
        factors=factors,
        before=_median_error(before),
        after=calibration.median_error,
    )


def _median_error(logs: Floats) -> float:
    return float(np.median(np.abs(np.expm1(logs))))


def with_factors(file: ClusterFile, factors: Mapping[str, float]) -> ClusterFile:
    """The cluster with the seconds of everything that a factor names multiplied by it."""
    spec = file.cluster
    changed = replace(
        spec,
        updates=_updates(spec, factors.get("optimizer", 1.0)),
        zero=spec.zero and _zero(spec.zero, factors.get("zero", 1.0)),
        calibration=Calibration(compute_factor=spec.compute_factor * factors.get("compute", 1.0)),
    )
    curves = []
    for curve in file.links.curves:
        level = "across" if curve.shape.nodes > 1 else "inside"
        curves.append(_curve(curve, factors.get(f"latency_{level}", 1.0), factors.get(f"bandwidth_{level}", 1.0)))
    return replace(file, cluster=changed, links=replace(file.links, curves=tuple(curves)))


def _curve(curve: LinkCurve, latency: float, bandwidth: float) -> LinkCurve:
    """The smallest time of a curve is latency, what is above it bandwidth."""
    least_s = min(curve.seconds)
    return replace(curve, seconds=tuple(latency * least_s + bandwidth * (s - least_s) for s in curve.seconds))


def _zero(cost: ZeroCost, factor: float) -> ZeroCost:
    return ZeroCost(call_s=cost.call_s * factor, byte_s=cost.byte_s * factor)


def _updates(spec: ClusterSpec, factor: float) -> tuple[UpdateCost, ...]:
    """The seconds of the optimizer times a factor; those that a cluster without them is priced with, else."""
    assumed_s = ASSUMED_OPTIMIZER_ACCESSES["adamw"] / ASSUMED_OPTIMIZER_BYTES_PER_S[spec.device]
    known = spec.updates or tuple(
        UpdateCost(optimizer="adamw", sharded=sharded, tensor_s=0.0, byte_s=assumed_s) for sharded in (False, True)
    )
    return tuple(replace(u, tensor_s=u.tensor_s * factor, byte_s=u.byte_s * factor) for u in known)


def run_line(plan: Plan, step_s: float, model: str | os.PathLike[str] | None = None) -> str:
    """One line of a file of runs."""
    entry = {"plan": json.loads(plan.dumps()), "step_s": step_s}
    return json.dumps(entry if model is None else {**entry, "model": os.fspath(model)}) + "\n"
