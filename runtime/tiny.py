"""A tiny replica of a model: the same architecture, depth and heads, with small widths; for checks before renting."""

from __future__ import annotations

from dataclasses import replace
from math import lcm

from torch import nn

from autopar.plan import Plan
from autopar.runtime.batches import example_batch
from autopar.runtime.hugging_face import SPECIAL_TOKENS, is_hugging_face
from autopar.runtime.losses import loss_of
from autopar.runtime.models import build_model
from autopar.runtime.source import canonical_source
from autopar.runtime.structure import fingerprint

SMALL_PARAMETERS = 2_000_000
"""Models up to this many parameters are checked as they are."""

_WIDTHS = (
    "intermediate_size", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size",
    "shared_expert_intermediate_size",
)  # fmt: skip
"""The names that configs have for the width of an MLP."""

_HEAD_WIDTH, _VOCABULARY, _SEQUENCE, _TRIED_TOKENS = 8, 96, 16, 8


def tiny_plan(plan: Plan) -> Plan:
    """The same plan for a tiny replica of its model and batch, without prediction and certificate.

    Layers, heads, stages, schedule and strategies stay; a micro-batch keeps one sample a rank. It runs on CPU, which
    is always there, in `exact_dtype`. A model that is not from a Hugging Face config has no widths to set, and is
    taken as it is.
    """
    tp = max(strategy.tp for strategy in plan.strategies)
    source = tiny_source(plan.model.source, tp=tp)
    dtype = exact_dtype(source)
    model = build_model(source, device="meta", dtype=dtype)
    cut = lcm(*(strategy.sequence_pieces for strategy in plan.strategies))
    sequence = min(plan.request.sequence, max(1, _SEQUENCE // cut) * cut)
    request = replace(
        plan.request,
        global_batch=plan.num_micro_batches * plan.mesh.ranks_per_stage,
        sequence=sequence,
        dtype=dtype,
    )
    return replace(
        plan,
        model=replace(plan.model, source=source, fingerprint=fingerprint(model)),
        cluster=replace(plan.cluster, device="cpu"),
        request=request,
        predicted=None,
        certificate=None,
    )


def exact_dtype(source: str) -> str:
    """float64 where the model runs in it, otherwise float32: the dtype in which a replica is compared.

    In float64 a gradient that is zero in exact arithmetic (of a bias of keys) is 1e-16 of the others, so that nothing
    wrong passes for rounding. torch.nn.functional.grouped_mm, for one, has no float64.
    """
    try:
        model = build_model(source, dtype="float64").eval()
        output = model(**example_batch(model, samples=2, sequence=_TRIED_TOKENS))
        loss = loss_of(output)
        if loss is not None:
            loss.backward()
    except Exception:  # whatever a model says of a dtype that it does not expect
        return "float32"
    return "float64"


def tiny_source(source: str, *, tp: int) -> str:
    """The MODEL string of a tiny replica, its widths divisible by `tp`; models that are small stay as they are."""
    model = build_model(source, device="meta")
    if is_hugging_face(model) and sum(p.numel() for p in model.parameters()) > SMALL_PARAMETERS:
        return canonical_source(source, _small_widths(model, tp))
    return source


def _small_widths(model: nn.Module, tp: int) -> dict[str, int]:
    """Overrides of the config, under the names that this architecture has; widths stay divisible by every tp."""
    config = model.config
    heads = config.num_attention_heads
    if not isinstance(heads, int):  # a hierarchical model doubles its width and heads from stage to stage
        return {"embed_dim": heads[0] * _HEAD_WIDTH}
    wanted = {"hidden_size": heads * _HEAD_WIDTH, "head_dim": _HEAD_WIDTH, "vocab_size": _VOCABULARY}
    wanted |= dict.fromkeys(_WIDTHS, tp * 12)
    aliases: dict[str, str] = getattr(config, "attribute_map", {})
    names = {name: aliases.get(name, name) for name in wanted}
    known = config.to_dict()
    found = {names[n]: value for n, value in wanted.items() if known.get(names[n]) is not None}
    special = {name: known.get(name) for name in SPECIAL_TOKENS}
    return found | {name: place % _VOCABULARY for name, place in special.items() if _is_outside(place)}


def _is_outside(place: object) -> bool:
    """Whether a special token is none of the small vocabulary."""
    return isinstance(place, int) and place >= _VOCABULARY
