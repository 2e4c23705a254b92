"""What was measured on a machine: seconds of collectives, seconds and bytes of layers. Values and their two files.

`cluster.json` (kind autopar.cluster) holds a ClusterSpec with its LinkProfile, `model.json` (kind autopar.model) a
ModelSpec with its LayerProfile. Both say on what, when and by which command they were measured.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from autopar.cluster import ClusterSpec
from autopar.formats import dumps, from_plain, omitted, read_file, to_plain, write_file
from autopar.model import ModelSpec

CLUSTER_KIND, CLUSTER_SCHEMA = "autopar.cluster", 1
MODEL_KIND, MODEL_SCHEMA = "autopar.model", 1

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"]
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p")

Origin = Literal["measured", "fitted", "interpolated", "assumed"]
ORIGINS: tuple[Origin, ...] = ("measured", "interpolated", "fitted", "assumed")
"""Where a number comes from, the most trustworthy first."""

_MOST_BYTES = 1 << 50
"""Of one layer: more is no measurement."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Predicted seconds and where they come from."""

    seconds: float
    origin: Origin


def weakest(*origins: Origin) -> Origin:
    """The least trustworthy of these origins, `measured` for none."""
    return max(origins, key=ORIGINS.index, default="measured")


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """On what, when, by which command and with which versions something was measured."""

    machine: str
    date: str
    command: str
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class GroupShape:
    """What a group looks like to the links.

    ranks: its size; nodes: over how many nodes; contiguous: its ranks are neighbours; concurrent: how many such
    groups of the cluster communicate at the same time, as all groups of one mesh dimension do.
    """

    ranks: int
    nodes: int = 1
    contiguous: bool = True
    concurrent: int = 1

    def __post_init__(self) -> None:
        for field in ("ranks", "nodes", "concurrent"):
            if not 1 <= getattr(self, field) <= 1 << 20:
                raise ValueError(f"GroupShape.{field} must lie between 1 and 2^20, not {getattr(self, field)}")

    @classmethod
    def of(cls, groups: tuple[tuple[int, ...], ...], ranks_per_node: int) -> GroupShape:
        """The shape of equal groups that communicate at the same time (all groups of one dimension)."""
        first = groups[0]
        return cls(
            ranks=len(first),
            nodes=len({rank // ranks_per_node for rank in first}),
            contiguous=first == tuple(range(first[0], first[0] + len(first))),
            concurrent=len(groups),
        )


@dataclass(frozen=True, kw_only=True)
class LinkCurve:
    """Measured seconds of one collective on one group shape over message sizes (ascending).

    The size is the gathered output of an all-gather, the input of a reduce-scatter or all-reduce, the per-rank
    buffer of an all-to-all, the message of a p2p.
    """

    collective: Collective
    shape: GroupShape
    size_bytes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.size_bytes) != len(self.seconds) or not self.size_bytes:
            raise ValueError("LinkCurve needs as many seconds as sizes, at least one")
        if any(b <= a for a, b in zip(self.size_bytes, self.size_bytes[1:], strict=False)) or self.size_bytes[0] < 1:
            raise ValueError("LinkCurve.size_bytes must be positive and ascending")
        if any(not 0 < s < 1e6 for s in self.seconds):
            raise ValueError("LinkCurve.seconds must be positive")


@dataclass(frozen=True, kw_only=True)
class LinkProfile:
    """All measured curves of a cluster, and `overlap_slowdown`: compute and network slow each other by this factor."""

    curves: tuple[LinkCurve, ...]
    overlap_slowdown: float = 1.0
    overlap_origin: Literal["measured", "fitted", "assumed"] = "assumed"

    def __post_init__(self) -> None:
        if not 0 < self.overlap_slowdown <= 1000:
            raise ValueError(f"LinkProfile.overlap_slowdown must lie between 0 and 1000, not {self.overlap_slowdown}")

    @cached_property
    def _hash(self) -> int:
        return hash((self.curves, self.overlap_slowdown, self.overlap_origin))

    def __hash__(self) -> int:
        # Kept: the fits are cached by profile, and hashing thousands of numbers at each price would cost most of it.
        return self._hash


@dataclass(frozen=True, kw_only=True)
class Line:
    """fixed + per_sample * samples, the samples being those of one rank."""

    fixed: float
    per_sample: float

    def at(self, samples: float) -> float:
        """The value at this many samples."""
        return self.fixed + self.per_sample * samples


@dataclass(frozen=True, kw_only=True)
class TensorParallelCall:
    """One collective of a layer over its tp group: forward or backward, bytes as LinkCurve counts them.

    over: the group, also that of sp or cp where the layer is cut so (see autopar.derived).
    """

    collective: Collective
    phase: Literal["forward", "backward"]
    size_bytes: Line
    over: Literal["tp", "sp", "cp"] = omitted("tp")


@dataclass(frozen=True, kw_only=True)
class SelectiveCost:
    """What selective recompute changes of a layer: bytes as in LayerCost, traced as it runs, recompute included.

    share: the seconds that it adds to forward and backward, in forwards of the layer.
    """

    saved_bytes: Line
    forward_peak_bytes: Line
    backward_peak_bytes: Line
    later_backward_peak_bytes: Line
    share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1000:
            raise ValueError(f"SelectiveCost.share must lie between 0 and 1000, not {self.share}")
        _check_lines(self, "saved_bytes", "forward_peak_bytes", "backward_peak_bytes", "later_backward_peak_bytes")


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer kind at one tensor-parallel degree on one rank, at the profile's sequence length.

    samples / forward_s / backward_s: seconds at these numbers of local samples, tp collectives not included.
    parameter_bytes, trainable_bytes: local to one tp rank; largest_parameter_bytes: of the largest local one.
    saved_bytes: what autograd keeps from the forward to the backward, parameters excluded, each storage once, the
    layer's input included where it is kept. input_bytes, output_bytes: the activation at entry and exit.
    forward_peak_bytes: highest live bytes during the forward above those at its entry (saved set included).
    backward_peak_bytes: highest live bytes during the backward above those live before the forward, counting the
    saved set, the incoming and outgoing gradients and the growing parameter gradients.
    later_backward_peak_bytes: likewise where all gradients exist before, above them; None where it was not traced.
    flops: of one forward; origin: of the seconds; trainable_tensors: how many parameters are trained; selective: under
    selective recompute, None where it was not traced.
    """

    kind: str
    tp: int = 1
    sequence_norms: bool = False
    samples: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    parameter_bytes: int
    trainable_bytes: int
    largest_parameter_bytes: int
    input_bytes: Line
    output_bytes: Line
    saved_bytes: Line
    forward_peak_bytes: Line
    backward_peak_bytes: Line
    flops: Line
    calls: tuple[TensorParallelCall, ...] = ()
    origin: Origin = omitted("measured")
    trainable_tensors: int = omitted(1)
    later_backward_peak_bytes: Line | None = omitted(None)
    selective: SelectiveCost | None = omitted(None)

    def __post_init__(self) -> None:
        if not len(self.samples) == len(self.forward_s) == len(self.backward_s) or not self.samples:
            raise ValueError("LayerCost needs as many forward_s and backward_s as samples, at least one")
        if any(b <= a for a, b in zip(self.samples, self.samples[1:], strict=False)) or self.samples[0] < 1:
            raise ValueError("LayerCost.samples must be positive and ascending")
        if any(not 0 <= s < 1e6 for s in (*self.forward_s, *self.backward_s)):
            raise ValueError("LayerCost.forward_s and backward_s must not be negative")
        if not 0 <= self.trainable_bytes <= self.parameter_bytes:
            raise ValueError("LayerCost.trainable_bytes must lie between 0 and parameter_bytes")
        if not 0 <= self.largest_parameter_bytes <= self.parameter_bytes <= _MOST_BYTES:
            raise ValueError("LayerCost.largest_parameter_bytes <= parameter_bytes <= 2^50 must hold")
        _check_lines(
            self,
            "input_bytes",
            "output_bytes",
            "saved_bytes",
            "forward_peak_bytes",
            "backward_peak_bytes",
            "later_backward_peak_bytes",
        )


def _check_lines(value: object, *fields: str) -> None:
    for field in fields:
        line: Line | None = getattr(value, field)
        if line is not None and max(abs(line.fixed), abs(line.per_sample)) > _MOST_BYTES:
            raise ValueError(
                f"{type(value).__name__}.{field} is absurd: {line.fixed:g} + {line.per_sample:g} a sample"
            )


@dataclass(frozen=True, kw_only=True)
class SideBytes:
    """A tensor beside the hidden state that layer `made` makes and layers up to `last` take (the encoder's output).

    gradient_bytes: of its gradient, 0 where it has none.
    """

    made: int
    last: int
    size_bytes: Line
    gradient_bytes: Line

    def __post_init__(self) -> None:
        if not 0 < self.made <= self.last:
            raise ValueError(f"SideBytes needs 0 < made <= last, not {self.made} and {self.last}")
        _check_lines(self, "size_bytes", "gradient_bytes")


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """All measured layers of a model, with `processes` computing at once on `device_name`, at this sequence length.

    sides: what layers hand on beside the hidden state.
    """

    device: Literal["cpu", "cuda"]
    device_name: str
    processes: int
    sequence: int
    dtype: str
    costs: tuple[LayerCost, ...]
    sides: tuple[SideBytes, ...] = omitted(())

    def __post_init__(self) -> None:
        for field, limit in (("processes", 1 << 20), ("sequence", 1 << 24)):
            if not 1 <= getattr(self, field) <= limit:
                raise ValueError(f"LayerProfile.{field} must lie between 1 and {limit}, not {getattr(self, field)}")
        if len(self._by_key) < len(self.costs):
            raise ValueError("LayerProfile.costs has a kind, tp and sequence_norms twice")

    @cached_property
    def _by_key(self) -> dict[tuple[str, int, bool], LayerCost]:
        return {(c.kind, c.tp, c.sequence_norms): c for c in self.costs}

    def find(self, kind: str, tp: int = 1, sequence_norms: bool = False) -> LayerCost | None:
        """The cost of a layer kind at this tensor-parallel degree, or None where it was not measured."""
        return self._by_key.get((kind, tp, sequence_norms))


@dataclass(frozen=True, kw_only=True)
class ClusterFile:
    """A cluster with its measured links: the content of cluster.json."""

    cluster: ClusterSpec
    links: LinkProfile
    provenance: Provenance

    def dumps(self) -> str:
        """The text of the file."""
        return dumps(CLUSTER_KIND, CLUSTER_SCHEMA, to_plain(self))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all."""
        write_file(path, self.dumps())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ClusterFile:
        """The content of a cluster.json; InputError when it is not one."""
        return from_plain(cls, read_file(path, CLUSTER_KIND, CLUSTER_SCHEMA), str(path))

    @property
    def fingerprint(self) -> str:
        """A short hash of the numbers (not of the provenance)."""
        return _fingerprint(self.cluster, self.links)


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """A model with its measured layers: the content of model.json."""

    model: ModelSpec
    layers: LayerProfile
    provenance: Provenance

    def __post_init__(self) -> None:
        known = {kind.name for kind in self.model.kinds}
        unknown = sorted({cost.kind for cost in self.layers.costs} - known)
        if unknown:
            raise ValueError(f"layers.costs names kinds that the model does not have: {unknown}")

    def dumps(self) -> str:
        """The text of the file."""
        return dumps(MODEL_KIND, MODEL_SCHEMA, to_plain(self))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all."""
        write_file(path, self.dumps())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ModelFile:
        """The content of a model.json; InputError when it is not one."""
        return from_plain(cls, read_file(path, MODEL_KIND, MODEL_SCHEMA), str(path))

    @property
    def fingerprint(self) -> str:
        """A short hash of the numbers (not of the provenance)."""
        return _fingerprint(self.model, self.layers)


def _fingerprint(*values: object) -> str:
    text = json.dumps([to_plain(value) for value in values], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
