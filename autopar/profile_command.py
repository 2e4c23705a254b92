"""What `autopar profile` does: measures this machine, or a model on it or for another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from autopar.formats import check_writable
from autopar.interrupts import step
from autopar.options import Device, Dtype, Json, Nproc, Out, Settings, answer, settings, shown

profile_app = typer.Typer(help="Measure this machine, or a model on it.", rich_markup_mode=None)


@profile_app.command("cluster")
def profile_cluster(
    output: Out = Path("cluster.json"), device: Device = None, nproc: Nproc = None, json: Json = False
) -> None:
    """Measure the links, the memory and the versions of this machine."""
    from autopar.profiler.cluster import Interrupted
    from autopar.profiler.cluster import profile_cluster as measure
    from autopar.report import cluster_table

    check_writable(output)
    try:
        with step("profile cluster") as report:
            found = measure(device=device, nproc=nproc, progress=report)
    except Interrupted as interrupt:
        if interrupt.partial is not None:
            interrupt.partial.save(output)
            print(f"{output} has the {len(interrupt.partial.links.curves)} finished curves", file=sys.stderr)
        raise
    found.save(output)
    answer(found.dumps() if json else shown(cluster_table(found)))


@profile_app.command("model")
def profile_model(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A config class, folder, config.json, or code.py:function.")
    ],
    output: Out = Path("model.json"),
    seq: Annotated[int, typer.Option("--seq", min=1, max=1 << 24, help="Tokens of one sample.")] = 2048,
    dtype: Dtype = None,
    set_: Settings = None,
    device: Device = None,
    nproc: Nproc = None,
    for_: Annotated[
        str | None, typer.Option("--for", metavar="NAME", help="A shipped device (h100-80g): trace here, run nothing.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure the layers of MODEL: time, parameters, activations, and which tensor-parallel degrees they allow."""
    check_writable(output)
    overrides = settings(set_ or ())
    from autopar.profiler.cluster import default_device, default_nproc
    from autopar.profiler.models import profile_model as measure
    from autopar.report import model_table
    from autopar.runtime.source import canonical_source
    from autopar.shipped import device_named
    from autopar.units import dtype_name

    source, name = canonical_source(model, overrides), dtype_name(dtype or ("fp32" if for_ is None else "bf16"))
    with step("profile model") as report:
        if for_ is not None:
            from autopar.profiler.counted import count_model

            target = device_named(for_)
            found = count_model(source, target, sequence=seq, dtype=name, max_tp=nproc or 8, progress=report)
        else:
            where = device or default_device()
            found = measure(
                source, sequence=seq, dtype=name, device=where, nproc=nproc or default_nproc(where), progress=report
            )
    found.save(output)
    answer(found.dumps() if json else shown(model_table(found)))
