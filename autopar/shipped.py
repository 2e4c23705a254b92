"""Shipped clusters and models by name, from profiles/*.json: planning without a device and without torch.

A cluster is written `a100-80g:8x8` (8 nodes of 8 ranks), a model `llama2-7b`. Peaks and sizes are the makers' figures,
each with its address; how much of them is reached was fitted on published runs (profiles/efficiencies.json says on
which), per GPU class; devices without published runs of their own borrow the class named in `fitted_as`.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib import resources
from math import log2
from typing import Literal, TypeVar

from autopar import roofline
from autopar.architectures import Architecture, layer_profile, model_spec
from autopar.cluster import ClusterSpec
from autopar.encoders import ImageEncoder, WordEncoder
from autopar.errors import InputError
from autopar.experts import Mixture
from autopar.formats import from_plain, read_text
from autopar.measured import (
    COLLECTIVES,
    ClusterFile,
    Collective,
    GroupShape,
    LinkCurve,
    LinkProfile,
    ModelFile,
    Origin,
    Provenance,
)
from autopar.swin import WindowEncoder
from autopar.t5 import EncoderDecoder
from autopar.units import KIB

T = TypeVar("T")

SCHEMAS = {"architectures": 2, "devices": 1, "efficiencies": 1}
"""The schema of each file of autopar.profiles."""

DEFAULT_SEQUENCE = 2048
"""Tokens a sample of a shipped model, where nothing else is asked for and it takes so many."""

_CLUSTER = re.compile(r"([a-z0-9.-]+):(\d{1,5})x(\d{1,4})", re.ASCII)
_SIZES = tuple(KIB << shift for shift in range(0, 25, 2))


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number, the address that states it, and how it follows from what is stated there.

    source: `https://...`, or `measured DATE: COMMAND` for a command of this repository.
    """

    value: float
    source: str
    note: str = ""

    def __post_init__(self) -> None:
        if not self.value > 0 or not self.source.startswith(("https://", "measured ")):
            raise ValueError(f"a figure is positive and has its source, not {self.value} of {self.source!r}")


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device as its maker states it, and whose published runs say how much of it is reached (fitted_as).

    tensor_flops_per_s: dense, 16 bits; link_bytes_per_s: to its neighbours in the node, one direction;
    node_network_bytes_per_s: of all cards of a node of ranks_per_node, None where no common machine has one. A CPU is
    one core.
    """

    name: str
    kind: Literal["cpu", "cuda"] = "cuda"
    fitted_as: str
    tensor_flops_per_s: Figure
    fp8_flops_per_s: Figure | None
    memory_bytes: Figure
    memory_bytes_per_s: Figure
    link_bytes_per_s: Figure
    ranks_per_node: Figure | None
    node_network_bytes_per_s: Figure | None


@dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """What was fitted for one class of devices: on how many runs of which sources, and the median error left.

    assumed: the coefficients that nothing was fitted or measured for, where there are no runs.
    """

    gpu: str
    runs: int
    sources: tuple[str, ...]
    median_error_percent: float
    command: str
    coefficients: dict[str, float]
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Devices:
    devices: tuple[Device, ...]


@dataclass(frozen=True, kw_only=True)
class _Efficiencies:
    efficiencies: tuple[Efficiencies, ...]


@dataclass(frozen=True, kw_only=True)
class Named(Architecture):
    """An architecture with the address of its configuration."""

    source: str


@dataclass(frozen=True, kw_only=True)
class NamedMixture(Mixture):
    """The same with experts."""

    source: str


@dataclass(frozen=True, kw_only=True)
class NamedWordEncoder(WordEncoder):
    """The same of an encoder of words."""

    source: str


@dataclass(frozen=True, kw_only=True)
class NamedImageEncoder(ImageEncoder):
    """The same of an encoder of images."""

    source: str


@dataclass(frozen=True, kw_only=True)
class NamedWindowEncoder(WindowEncoder):
    """The same of an encoder of images in windows."""

    source: str


@dataclass(frozen=True, kw_only=True)
class NamedEncoderDecoder(EncoderDecoder):
    """The same of an encoder with a decoder."""

    source: str


Counted = NamedMixture | NamedWordEncoder | NamedImageEncoder | NamedWindowEncoder | NamedEncoderDecoder
"""A shipped model that is no plain decoder."""


@dataclass(frozen=True, kw_only=True)
class _Architectures:
    architectures: tuple[Named, ...]
    mixtures: tuple[NamedMixture, ...]
    word_encoders: tuple[NamedWordEncoder, ...]
    encoder_decoders: tuple[NamedEncoderDecoder, ...]
    image_encoders: tuple[NamedImageEncoder, ...]
    window_encoders: tuple[NamedWindowEncoder, ...]


def _read(name: str, kind: type[T]) -> T:
    text = resources.files("autopar.profiles").joinpath(f"{name}.json").read_text(encoding="utf-8")
    return from_plain(kind, read_text(text, f"{name}.json", f"autopar.{name}", SCHEMAS[name]), name)


@lru_cache(maxsize=1)
def devices() -> dict[str, Device]:
    """All shipped devices by name."""
    return {device.name: device for device in _read("devices", _Devices).devices}


def device_named(name: str) -> Device:
    """The shipped device of this name; InputError for an unknown one."""
    return _find(devices(), name, "device")


@lru_cache(maxsize=1)
def architectures() -> dict[str, Named | Counted]:
    """All shipped models by name."""
    read = _read("architectures", _Architectures)
    return {arch.name: arch for f in fields(_Architectures) for arch in getattr(read, f.name)}


@lru_cache(maxsize=1)
def efficiencies() -> dict[str, Efficiencies]:
    """What was fitted, by GPU class."""
    return {each.gpu: each for each in _read("efficiencies", _Efficiencies).efficiencies}


def cluster(text: str) -> tuple[ClusterFile, Device]:
    """The cluster that `NAME:NODESxRANKS` names, with links by its figures; InputError for an unknown one."""
    match = _CLUSTER.fullmatch(text)
    name = match[1] if match else text.partition(":")[0]
    device = _find(devices(), name, "cluster")
    if match is None or not int(match[2]) or not int(match[3]):
        raise InputError(
            f"{text!r} is not a shipped cluster",
            why="the form is NAME:NODESxRANKS, ranks of one node last",
            fix=f"write for example {name}:2x8",
        )
    nodes, per_node = int(match[2]), int(match[3])
    if nodes > 1 and device.node_network_bytes_per_s is None:
        raise InputError(
            f"{text} has {nodes} nodes and no known network",
            why=f"no source states how nodes of {name} are joined",
            fix=f"take one node ({name}:1x{per_node}) or measure yours with `autopar profile cluster`",
        )
    spec = ClusterSpec(
        name=text,
        device=device.kind,
        device_name=name,
        world_size=nodes * per_node,
        ranks_per_node=per_node,
        memory_bytes=round(device.memory_bytes.value),
    )
    return ClusterFile(cluster=spec, links=_links(device, nodes, per_node), provenance=_provenance(device)), device


def model(name: str, device: Device, *, sequence: int | None = None) -> ModelFile:
    """The shipped model of this name with the seconds of its layers on `device`; InputError for an unknown one.

    sequence: tokens a sample, of an encoder-decoder those of its encoder; None for DEFAULT_SEQUENCE, or what it takes.
    """
    arch = _find(architectures(), name, "model")
    tokens = _sequence(arch, sequence)
    if isinstance(arch, Architecture):
        plain = Architecture(**{f.name: getattr(arch, f.name) for f in fields(Architecture)})
        spec = model_spec(plain, dtype="bfloat16")
        layers = layer_profile(plain, machine(device), sequence=tokens, device_name=device.name)
    else:
        spec = arch.spec("bfloat16")
        layers = arch.profile(machine(device), sequence=tokens, device_name=device.name)
    origin: Origin = "fitted" if efficiencies()[device.fitted_as].runs else "assumed"
    costs = tuple(replace(cost, origin=origin) for cost in layers.costs)
    return ModelFile(
        model=spec,
        layers=replace(layers, device=device.kind, costs=costs),
        provenance=_provenance(device),
    )


def _sequence(arch: Named | Counted, asked: int | None) -> int:
    """The tokens of a sample; InputError for more than there are positions, or other than an image has."""
    longest = arch.positions if isinstance(arch, Architecture) else arch.longest
    if isinstance(arch, ImageEncoder | WindowEncoder):
        if asked not in (None, longest):
            raise InputError(
                f"{arch.name} has no samples of {asked} tokens",
                why=f"an image of {arch.image} x {arch.image} is {longest}",
                fix="leave --seq out",
            )
        return longest
    tokens = asked or min(DEFAULT_SEQUENCE, longest or DEFAULT_SEQUENCE)
    if longest and tokens > longest:
        raise InputError(f"{arch.name} has no {tokens} positions", why=f"it has {longest}", fix=f"--seq {longest}")
    return tokens


def machine(device: Device) -> roofline.Machine:
    """The device with the efficiencies of its class, in 16 bits."""
    c = efficiencies()[device.fitted_as].coefficients
    peak = device.tensor_flops_per_s.value
    return roofline.Machine(
        product_flops_per_s=peak,
        head_flops_per_s=peak,
        attention_flops_per_s=peak,
        memory_bytes_per_s=device.memory_bytes_per_s.value,
        product_share=c["product_share"],
        head_share=c["product_share"],
        product_edge=c["product_edge"],
        row_edge=c["row_edge"],
        head_edge=c["product_edge"],
        attention_share=c["attention_share"],
        scores_passes=c["scores_passes"],
        streamed_share=1 / c["streamed"],
        misaligned=c["misaligned"],
        misaligned_heads=c["misaligned_heads"],
        loss_passes=c["loss_passes"],
        launch_s=c["launch_s"],
        backward_ratio=c["backward_ratio"],
    )


def _links(device: Device, nodes: int, per_node: int) -> LinkProfile:
    """Curves of one group inside a node and one across two, by alpha and bandwidth; overlap as it was fitted."""
    c = efficiencies()[device.fitted_as].coefficients
    curves = []
    inside = max(2, per_node)
    rate = device.link_bytes_per_s.value * c["node_share"]
    curves += [_curve(name, GroupShape(ranks=inside), rate, c["node_alpha_s"]) for name in COLLECTIVES]
    if nodes > 1 and device.node_network_bytes_per_s is not None and device.ranks_per_node is not None:
        share = min(1.0, per_node / device.ranks_per_node.value)
        rate = device.node_network_bytes_per_s.value * share * c["network_share"]
        shape = GroupShape(ranks=2 * per_node, nodes=2)
        curves += [_curve(name, shape, rate, c["network_alpha_s"]) for name in COLLECTIVES]
    fitted = bool(efficiencies()[device.fitted_as].runs)
    slowdown = 1 + c["contention"]
    return LinkProfile(
        curves=tuple(curves), overlap_slowdown=slowdown, overlap_origin="fitted" if fitted else "assumed"
    )


def _curve(collective: Collective, shape: GroupShape, rate: float, alpha_s: float) -> LinkCurve:
    n = shape.ranks
    if collective == "p2p":
        shape, weight, steps = GroupShape(ranks=2, nodes=shape.nodes), 1.0, 1.0
    else:
        weight = (2.0 if collective == "all_reduce" else 1.0) * (n - 1) / n
        steps = log2(n)
    seconds = tuple(alpha_s * steps + weight * size / rate for size in _SIZES)
    return LinkCurve(collective=collective, shape=shape, size_bytes=_SIZES, seconds=seconds)


def _provenance(device: Device) -> Provenance:
    fitted = efficiencies()[device.fitted_as]
    machine = f"{device.name} by its maker's figures, efficiencies of {fitted.runs} {fitted.gpu} runs"
    return Provenance(
        machine=machine if fitted.runs else f"{device.name}: {device.tensor_flops_per_s.note}",
        date="",
        command=fitted.command,
        versions={},
    )


def _find(known: dict[str, T], name: str, what: str) -> T:
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "name one of them, or give a file"
    raise InputError(f"no shipped {what} is called {name!r}", why=f"there are {', '.join(known)}", fix=hint)
