"""`autopar profile model --for DEVICE`: the layers of a model traced without storage and without running them.

Torch's fake tensors have shapes and no numbers, so that a model of any size is traced on any machine; the seconds are
those of a shipped device (autopar.elsewhere).
"""

from __future__ import annotations

from autopar.axes import divisors
from autopar.elsewhere import check_dtype, on_device
from autopar.errors import InputError
from autopar.measured import LayerCost, LayerProfile, ModelFile
from autopar.profiler.layers import LayerBench
from autopar.profiler.provenance import provenance
from autopar.profiler.rank import layer_bytes
from autopar.runtime.fakes import DEPENDS_ON_NUMBERS, shapes_only
from autopar.runtime.hugging_face import unpacked
from autopar.runtime.launch import Progress
from autopar.runtime.models import build_model
from autopar.shipped import Device
from autopar.units import dtype_name

SAMPLES = (1, 2, 4, 8, 16)
"""Local samples at which a counted layer has seconds; the bytes are traced at the first and the second."""


def count_model(
    source: str,
    device: Device,
    *,
    sequence: int,
    dtype: str = "bfloat16",
    max_tp: int = 8,
    progress: Progress | None = None,
) -> ModelFile:
    """The layers of the model of a MODEL string as they would be on `device`, at the divisors of max_tp.

    Raises InputError for what is no model, for one whose course depends on the numbers in its tensors (as experts
    chosen by token do), and for a dtype that is not of 16 bits.
    """
    check_dtype(dtype_name(dtype), source, device)
    command = f"autopar profile model {source!r} --for {device.name} --seq {sequence}"
    try:
        with shapes_only(), unpacked():
            model = build_model(source, dtype=dtype, stored=False)
            bench = LayerBench(model, sequence=sequence, source=source, max_tp=max_tp, fake=True)
            keys = bench.keys([degree for degree in divisors(max_tp) if degree > 1])
            costs = []
            for done, key in enumerate(keys):
                if progress is not None:
                    progress({"done": done, "total": len(keys), "what": f"memory of {key}"})
                traced = layer_bytes(bench, key, SAMPLES[:2])
                none = (0.0,) * len(SAMPLES)
                costs.append(LayerCost(**vars(traced), samples=SAMPLES, forward_s=none, backward_s=none))
            sides = bench.sides(SAMPLES[:2])
    except DEPENDS_ON_NUMBERS as error:
        raise InputError(
            f"{source} cannot be traced without running it",
            why=f"its course depends on the numbers in its tensors ({error})",
            fix="profile it on a machine where it runs: leave --for out",
        ) from error
    layers = LayerProfile(
        device="cuda",
        device_name=device.name,
        processes=1,
        sequence=sequence,
        dtype=dtype_name(dtype),
        costs=tuple(costs),
        sides=sides,
    )
    found = ModelFile(model=bench.spec, layers=layers, provenance=provenance(command, device.name))
    return on_device(found, device)
