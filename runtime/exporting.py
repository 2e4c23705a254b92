"""Plain safetensors files under the model's own names, as Hugging Face reads and writes them; any plan, both ways.

The writers of the stages write a file each, with an index beside them where there are several; a reader opens files
lazily and takes one tensor at a time, of which it keeps its piece. This is the one place that imports safetensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import InputError
from autopar.runtime.checkpoint import raise_where_failed
from autopar.runtime.finite import is_finite, refuse_weights
from autopar.runtime.gradients import HeldParameter, whole
from autopar.runtime.weights import put_weight

try:
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file
except ImportError as error:
    raise InputError(
        "plain weights need the package safetensors",
        why=f"it cannot be imported: {error}",
        fix="pip install 'autopar[hf]'",
    ) from None

INDEX = "model.safetensors.index.json"
_ONE = "model.safetensors"


def export_weights(
    folder: str | os.PathLike[str],
    held: Sequence[HeldParameter],
    *,
    writes: bool,
    dtype: torch.dtype | None = None,
    buffers: Mapping[str, Tensor] | None = None,
) -> None:
    """Write all parameters (and persistent buffers) as safetensors into `folder`; a collective of the world.

    writes: whether this rank writes the parameters that it holds; dtype: what they are rounded to, None for theirs.
    A writer holds the whole parameters of its stages in host memory. Raises InputError when a file cannot be saved,
    RunError, before any is, when a trained parameter is not finite.
    """
    target, rank = Path(folder), dist.get_rank()
    state: dict[str, Tensor] = {}
    bad = ""
    for entry in held:
        full = whole(entry, entry.stepped)
        if writes and entry.counted:
            if not bad and entry.stepped.requires_grad and not is_finite(full):
                bad = entry.name
            state[entry.name] = full.to("cpu", dtype or full.dtype).clone(memory_format=torch.contiguous_format)
    refuse_weights(bad, f"{target}")
    if writes and rank == 0:
        state |= {name: value.cpu().clone() for name, value in (buffers or {}).items() if name not in state}
    sizes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, {name: value.nbytes for name, value in state.items()})
    writers = [number for number, names in enumerate(sizes) if names]
    names = {r: f"model-{n + 1:05}-of-{len(writers):05}.safetensors" for n, r in enumerate(writers)}
    if len(writers) == 1:
        names = {writers[0]: _ONE}
    failed = ""
    try:
        target.mkdir(parents=True, exist_ok=True)
        if state:
            save_file(state, target / names[rank], metadata={"format": "pt"})
        if rank == 0 and len(writers) > 1:
            index = {
                "metadata": {"total_size": sum(size for found in sizes for size in found.values())},
                "weight_map": {name: names[r] for r in writers for name in sizes[r]},
            }
            (target / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    except (OSError, SafetensorError) as error:
        failed = str(error)
    raise_where_failed(failed, target)


def import_weights(folder: str | os.PathLike[str], held: Sequence[HeldParameter]) -> None:
    """Fill this rank's pieces from the safetensors files of a folder (or one file), one whole tensor at a time.

    Raises InputError when there are none, a parameter is missing, or one has another shape.
    """
    files = weight_files(folder)
    for entry in held:
        name = next((n for n in (entry.name, *entry.aliases) if n in files), None)
        if name is None:
            raise InputError(
                f"{folder} lacks {entry.name}",
                why=f"it holds {len(files)} tensors, such as {', '.join(sorted(files)[:3])}",
                fix="give the weights of this model",
            )
        put_weight(entry, read_weight(files[name], name))


def weight_files(folder: str | os.PathLike[str]) -> dict[str, Path]:
    """The safetensors file of each tensor of a folder with one file or an index, or of one file."""
    source = Path(folder)
    try:
        if (source / INDEX).exists():
            found = json.loads((source / INDEX).read_text(encoding="utf-8"))["weight_map"]
            return {str(name): source / str(file) for name, file in found.items()}
        file = source if source.is_file() else source / _ONE
        with safe_open(file, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), file)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{source} holds no weights",
            why=f"{type(error).__name__}: {error}",
            fix=f"give a folder with {_ONE} or {INDEX}",
        ) from None


def read_weight(file: Path, name: str) -> Tensor:
    """One whole tensor of a safetensors file."""
    try:
        with safe_open(file, framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
            return tensor
    except (OSError, SafetensorError) as error:
        raise InputError(f"{name} cannot be read from {file}", why=str(error), fix="check the file") from None
