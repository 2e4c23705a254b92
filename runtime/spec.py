"""The ModelSpec of an nn.Module: its chain, its kinds of layers, and the tensor-parallel degrees of each kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from autopar.axes import prime_factors
from autopar.errors import InputError
from autopar.model import LayerKind, ModelSpec, SeamKind
from autopar.runtime.arguments import argument
from autopar.runtime.structure import BlockInputs, Probe, Structure, fingerprint, parameters_of

if TYPE_CHECKING:
    from autopar.runtime.tensor_parallel import Derivation


@dataclass(frozen=True, kw_only=True, eq=False)
class DescribedModel:
    """A ModelSpec, and for each kind of block the derivation behind its tensor-parallel degrees."""

    spec: ModelSpec
    derivations: Mapping[int, Derivation]


FRONT = "front"
"""The kind of what runs before the first block, where more of the embedding runs at seams."""


def kind_name(number: int, count: int) -> str:
    """The name of a kind of block: `block` where there is one kind, otherwise `block0`, `block1`, ..."""
    return "block" if count == 1 else f"block{number}"


def seam_kind(structure: Structure, block: int) -> str:
    """The name of the kind of what runs right before the block after a seam."""
    return "between" if len(structure.seams) == 1 else f"between{block}"


def _embed_part(name: str, model: nn.Module, structure: Structure, used: Sequence[str]) -> LayerKind:
    """A part of the embedding: its parameters, under the names that the embedding knows them by."""
    embed = structure.layer_parameters(model, 0)
    own = parameters_of({name: p for name, p in embed.items() if name in used})
    return LayerKind(name=name, role="embed", class_name=type(model).__name__, parameters=own)


def describe(
    model: nn.Module, found: Probe, *, source: str = "", name: str = "", max_tp: int = 8, vocab_size: int | None = None
) -> DescribedModel:
    """The model as plain values; tensor-parallel degrees up to `max_tp` are derived from the graphs of its blocks.

    Nothing is derived for `max_tp` 1.
    """
    structure = found.structure
    count = len(found.inputs)
    kinds = [_outer_kind("embed", model, found, max_tp)]
    derivations: dict[int, Derivation] = {}
    for number in range(count):
        first = structure.kinds.index(number)
        block = model.get_submodule(structure.paths[first])
        inputs = found.inputs[number]
        derivation, reason = None, "not derived"
        if max_tp > 1:
            # torch.export takes a second to load and is needed under tensor parallelism only.
            from autopar.runtime.tensor_parallel import derive

            try:
                derivation = derivations[number] = derive(block, inputs.args, inputs.kwargs)
            except InputError as error:
                # Such a block still runs data parallel.
                reason = error.why
        kinds.append(
            LayerKind(
                name=kind_name(number, count),
                role="block",
                class_name=type(block).__name__,
                parameters=parameters_of(dict(block.named_parameters(remove_duplicate=False))),
                tp_degrees=derivation.degrees(max_tp) if derivation else (),
                tp_reason=derivation.reason if derivation else reason,
                sequence_norms=_sequence_norms(derivation, max_tp),
                attention=derivation.attention if derivation else None,
                sequence_reason=(derivation.why_no_cut_sequence() or "") if derivation else "",
                tokens=_own_tokens(inputs, structure.forms[first].hidden, found.tokens),
            )
        )
    kinds.append(_outer_kind("head", model, found, max_tp))
    seams = structure.seams if not structure.pipeline_reason else ()
    if seams:
        kinds.append(_embed_part(FRONT, model, structure, structure.front_parameters))
        kinds += [_embed_part(seam_kind(structure, s.block), model, structure, s.parameters) for s in seams]
    spec = ModelSpec(
        name=name or type(model).__name__,
        source=source,
        fingerprint=fingerprint(model),
        layers=("embed", *(kind_name(number, count) for number in structure.kinds), "head"),
        kinds=tuple(kinds),
        tied=structure.tied,
        hidden_size=structure.hidden_size,
        vocab_size=vocab_size,
        pipeline_reason=structure.pipeline_reason,
        front=FRONT if seams else "",
        seams=tuple(SeamKind(layer=s.block + 1, kind=seam_kind(structure, s.block)) for s in seams),
    )
    return DescribedModel(spec=spec, derivations=derivations)


def _outer_kind(role: str, model: nn.Module, found: Probe, max_tp: int) -> LayerKind:
    structure, vocabulary = found.structure, found.lookup if role == "embed" else found.projection
    layer = 0 if role == "embed" else structure.num_blocks + 1
    parameters = structure.layer_parameters(model, layer)
    return LayerKind(
        name=role,
        role="embed" if role == "embed" else "head",
        class_name=type(model).__name__,
        parameters=parameters_of(parameters),
        tp_degrees=vocabulary.degrees(max_tp),
        tp_reason=vocabulary.reason or f"vocabulary {vocabulary.words}",
    )


def _own_tokens(inputs: BlockInputs, hidden: int | str, tokens: int | None) -> int:
    """The tokens of a block's hidden state where they are not those of the batch, otherwise 0."""
    shape = argument(inputs.args, inputs.kwargs, hidden).shape
    return 0 if len(shape) < 3 or shape[1] == tokens else int(shape[1])


def _sequence_norms(derivation: Derivation | None, max_tp: int) -> bool:
    """Whether a block runs with sequence-parallel norms at its smallest tensor-parallel degree."""
    degrees = derivation.degrees(max_tp) if derivation else ()
    return (
        derivation is not None
        and bool(degrees)
        and not derivation.why_no_sequence_norms(tuple(prime_factors(degrees[0])))
    )
