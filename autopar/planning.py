"""`autopar.search`: a plan for a model on a cluster in one call; what was not measured yet is measured first."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any

from autopar.batch_choice import search_batches
from autopar.errors import InputError
from autopar.estimating import files
from autopar.formats import read_kind
from autopar.measured import MODEL_KIND, ClusterFile, ModelFile
from autopar.plan import Plan
from autopar.request import SCHEDULES, Forbid, Optimizer, Pin, Request, Schedule
from autopar.shipped import devices
from autopar.units import dtype_name, parse_bytes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from autopar.runtime.stage import LossFunction

Path = str | os.PathLike[str]


def search(
    model: nn.Module | ModelFile | Path,
    *,
    cluster: ClusterFile | Path = "local",
    global_batch: int | Sequence[int],
    sequence: int | None = None,
    memory: int | str | None = None,
    dtype: str | None = None,
    optimizer: Optimizer = "adamw",
    pp: Sequence[int] = (),
    micro_batches: Sequence[int] = (),
    micro_batch_sizes: Sequence[int] = (),
    schedules: Sequence[Schedule] = SCHEDULES,
    pins: Sequence[str] = (),
    forbids: Sequence[str] = (),
    max_strategies: int | None = None,
    tp_across_nodes: bool = False,
    allow_unrunnable: bool = False,
    verify: bool = False,
    time_limit_s: float | None = None,
    example: Mapping[str, Tensor] | None = None,
    loss: LossFunction | None = None,
) -> Plan:
    """The fastest plan that fits.

    model: an nn.Module, a MODEL string, or what `profile model` measured (the value or its file); cluster: what
    `profile cluster` measured, "local", which measures this machine now, or a shipped one ("h100-80g:8x8", with a
    shipped model or a file); global_batch: samples of one step over all ranks, or several, of which the one with the
    most samples a second is planned; sequence: tokens a sample (default: of the profile, of the example, or 2048);
    memory: budget of one rank in bytes or as `24GiB`; dtype: such as `bf16` (default: of the profile, or float32);
    optimizer: what steps the parameters; pp: the allowed numbers of stages (empty: all); micro_batches: how many are
    allowed; micro_batch_sizes: how many samples each may have; schedules: the allowed ones; pins: such as
    "0-3: dp4-z3"; forbids: such as "*: tp4"; max_strategies: at most so many different ones over the blocks;
    tp_across_nodes: let tp groups leave a node; allow_unrunnable: also what cannot run yet; verify: let two other
    solvers check the bound; time_limit_s: of the search, measurements aside, after which the plan is the best so far,
    with its gap; example, loss: as in `autopar.parallelize`, for an nn.Module.
    Raises InputError, InfeasibleError when nothing fits, RunError when a measurement fails or the time is too short.
    """
    name = None if dtype is None else dtype_name(str(dtype))
    batches = (global_batch,) if isinstance(global_batch, int) else global_batch
    try:
        several: dict[str, object] = {
            "global_batch": batches,
            "pp": pp,
            "micro_batches": micro_batches,
            "schedules": schedules,
        }
        several |= {"micro_batch_sizes": micro_batch_sizes, "pins": pins, "forbids": forbids}
        for argument, values in several.items():
            if isinstance(values, str) or not isinstance(values, Iterable):
                raise ValueError(f"{argument} must be a list, not {values!r}")
        batches = tuple(batches)
        _check_kinds(model, cluster, time_limit_s, {"example": example, "loss": loss})
        flags = {"tp_across_nodes": tp_across_nodes, "allow_unrunnable": allow_unrunnable, "verify": verify}
        for argument, flag in flags.items():
            if not isinstance(flag, bool):
                raise ValueError(f"{argument} must be True or False, not {flag!r}")
        for argument, texts in {"pins": pins, "forbids": forbids}.items():
            if not all(isinstance(text, str) for text in texts):
                raise ValueError(f"{argument} must be texts such as '0-3: dp4-z3', not {texts!r}")
        if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in micro_batch_sizes):
            raise ValueError(f"micro_batch_sizes must be whole numbers >= 1, not {micro_batch_sizes!r}")
        wanted = [
            Request(
                global_batch=batch,
                sequence=1 if sequence is None else sequence,
                dtype=name or "float32",
                optimizer=optimizer,
                memory_bytes=parse_bytes(memory) if isinstance(memory, str) else memory,
                pp=tuple(pp),
                num_micro_batches=tuple(micro_batches),
                schedules=tuple(schedules),
                pins=tuple(Pin.parse(pin) for pin in pins),
                forbids=tuple(Forbid.parse(ban) for ban in forbids),
                max_strategies=max_strategies,
                tp_across_nodes=tp_across_nodes,
                allow_unrunnable=allow_unrunnable,
            )
            for batch in batches or (0,)
        ]
    except ValueError as error:
        raise InputError("the request is not acceptable", why=str(error), fix="give what is asked for there") from None
    if isinstance(cluster, str) and cluster.partition(":")[0] in devices():
        if not isinstance(model, str | os.PathLike):
            raise InputError(
                f"{type(model).__name__} has no seconds on {cluster}",
                why="a shipped cluster is planned for from a shipped model or a file of `profile model`",
                fix=f"autopar profile model MODEL --for {cluster.partition(':')[0]}",
            )
        model_file, cluster_file = files(os.fspath(model), cluster, sequence=sequence)
    else:
        cluster_file = _cluster(cluster)
        model_file = _model(model, cluster_file, sequence, name or "float32", example, loss)
    layers = model_file.layers
    request = replace(
        min(wanted, key=lambda one: one.global_batch),
        sequence=layers.sequence if sequence is None else sequence,
        dtype=name or layers.dtype,
    )
    return search_batches(
        model_file,
        cluster_file,
        request,
        batches,
        micro_batch_sizes=micro_batch_sizes,
        deadline=None if time_limit_s is None else monotonic() + time_limit_s,
        verify=verify,
    )[0]


def _check_kinds(model: object, cluster: object, time_limit_s: object, for_modules: Mapping[str, object]) -> None:
    """Raise ValueError for an argument of another type than the signature says."""
    if not isinstance(cluster, ClusterFile | str | os.PathLike):
        raise ValueError(f"cluster must be a ClusterFile, a name or a path, not {cluster!r}")
    is_module = hasattr(model, "named_parameters")  # torch is not loaded for a file
    if not is_module and not isinstance(model, ModelFile | str | os.PathLike):
        raise ValueError(f"model must be an nn.Module, a ModelFile, a MODEL or a path, not {model!r}")
    number = time_limit_s is None or (isinstance(time_limit_s, int | float) and not isinstance(time_limit_s, bool))
    if not number or (isinstance(time_limit_s, int | float) and not time_limit_s >= 0):
        raise ValueError(f"time_limit_s must be seconds >= 0, not {time_limit_s!r}")
    for argument, value in for_modules.items():
        if value is not None and not is_module:
            raise ValueError(f"{argument} goes with an nn.Module, and the model is {model!r}")
    example, loss = for_modules["example"], for_modules["loss"]
    if example is not None and not (isinstance(example, Mapping) and all(hasattr(v, "dim") for v in example.values())):
        raise ValueError(f"example must map names to tensors, not {type(example).__name__}")
    if loss is not None and not callable(loss):
        raise ValueError(f"loss must be a function of (output, batch), not {loss!r}")


def _cluster(cluster: ClusterFile | Path) -> ClusterFile:
    if isinstance(cluster, ClusterFile):
        return cluster
    if cluster == "local":
        from autopar.profiler.cluster import profile_cluster

        return profile_cluster(command="autopar.search")
    return ClusterFile.load(cluster)


def _model(
    model: nn.Module | ModelFile | Path,
    cluster: ClusterFile,
    sequence: int | None,
    dtype: str,
    example: Mapping[str, Tensor] | None,
    loss: LossFunction | None,
) -> ModelFile:
    if isinstance(model, ModelFile):
        return model
    if isinstance(model, os.PathLike) or (isinstance(model, str) and read_kind(model) == MODEL_KIND):
        return ModelFile.load(model)
    from autopar.profiler.models import profile

    return profile(
        model,
        sequence=sequence or _tokens(example) or 2048,
        dtype=dtype,
        nproc=cluster.cluster.world_size,
        device=cluster.cluster.device,
        example=example,
        loss=loss,
    )


def _tokens(example: Mapping[str, Any] | None) -> int | None:
    """The sequence length of an example: the second dimension of its first matrix."""
    return next((int(value.shape[1]) for value in (example or {}).values() if value.dim() == 2), None)
