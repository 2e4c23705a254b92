"""What was not measured of a layer, from what was: a cut sequence, a cut vocabulary; and selective recompute.

`local_cost` gives the LayerCost of one rank under one strategy, so that time and memory have one source. All of it is
`assumed`: counted, not measured. With n samples on a dp rank, S tokens a sample, b bytes an element, k = sp * cp:

    compute        seconds and activations of n / k samples: Ulysses gives each rank S tokens of 1/sp of the heads,
                   context parallelism (zigzag) 1/cp of the tokens and of the masked scores
    Ulysses        all-to-all of queries, keys, values and output, forward and backward each, every one the rank's
                   own n S / k tokens; one of them more is alive at the peaks
    context        all-gather of keys and values over cp in the forward, reduce-scatter of their gradients in the
                   backward; the backward keeps the gathered ones, and both gradients while it works. Around a ring
                   (`goes_around`): they come by once more in the backward, their gradients make one step more, and
                   nothing but the own ones is kept
    selective      as traced: the input, and the outputs of products with weights but the last, are kept, all else runs
                   again (autopar.runtime.recompute); of a cut sequence in proportion, as the rest
    vocabulary     ceil(V / tp) rows of the matrix on each rank (padded), for the tokens of all tp ranks, each of which
                   keeps its own samples outside. Embedding: seconds as whole; all-gather of the ids, reduce-scatter
                   of the output, all-gather of its gradient. Head: seconds and logits in proportion to the rows;
                   all-gather of the input, all-reduces of the maximum, the sum of exponentials and the label's logit
                   (4 bytes a token each), reduce-scatter of the input's gradient
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from autopar.measured import Collective, LayerCost, LayerProfile, Line, TensorParallelCall
from autopar.model import Attention, LayerKind, Parameter
from autopar.strategy import Strategy
from autopar.units import DTYPE_BYTES

WHOLE_HEAD_INPUTS = 4
"""Assumed: what a head keeps beside the logits, in copies of its input (Llama's norm keeps 8 bytes an element)."""

RING_WIDTHS = 12
"""From how many elements a token and channel on gathered keys and values go around a ring: half of what Llama's block
keeps, 23 (`profile model "LlamaConfig(hidden_size=1024, intermediate_size=2816)" --for h100-80g`, bfloat16)."""

LOSS_REDUCTIONS, LOSS_BYTES = 3, 4
"""The maximum, the sum of exponentials and the label's logit: one float32 a token each."""

_Phase = Literal["forward", "backward"]
_Group = Literal["tp", "sp", "cp"]
_BOTH: tuple[_Phase, ...] = ("forward", "backward")
_PEAKS = ("forward_peak_bytes", "backward_peak_bytes")


def local_cost(layers: LayerProfile, kind: LayerKind, strategy: Strategy) -> LayerCost | None:
    """The cost of a layer of this kind on one rank under a strategy; samples stay those of a dp rank.

    None where its tensor-parallel form was not measured and cannot be derived.
    """
    cost = layers.find(kind.name, strategy.tp, strategy.sequence_norms)
    if kind.role != "block":
        whole = layers.find(kind.name)
        if cost is None and whole is not None and not strategy.sequence_norms:
            cost = _with_cut_vocabulary(whole, kind, strategy.tp, layers.sequence)
        return cost
    if cost is not None and strategy.recompute == "selective":
        cost = _with_products_kept(cost)
    if cost is None or strategy.sp == strategy.cp == 1:
        return cost
    if kind.attention is None:
        return None
    return _with_cut_sequence(cost, kind.attention, strategy, layers.sequence * DTYPE_BYTES[layers.dtype])


def _with_products_kept(cost: LayerCost) -> LayerCost | None:
    """Under selective recompute, as traced; None where it was not."""
    found = cost.selective
    if found is None:
        return None
    return replace(
        cost,
        saved_bytes=found.saved_bytes,
        forward_peak_bytes=found.forward_peak_bytes,
        backward_peak_bytes=found.backward_peak_bytes,
        later_backward_peak_bytes=found.later_backward_peak_bytes,
        backward_s=tuple(b + found.share * f for f, b in zip(cost.forward_s, cost.backward_s, strict=True)),
        selective=None,
    )


def core_flops(attention: Attention, sequence: int) -> float:
    """FLOPs of the core attention of one sample, counted without the mask, as FLOP counters do."""
    return 4.0 * sequence**2 * attention.heads * attention.head_dim


def goes_around(attention: Attention, strategy: Strategy) -> bool:
    """Whether context parallelism sends keys and values around a ring instead of gathering them.

    A ring sends half as much again and keeps the own ones only. It is taken where the gathered ones, kept for the
    backward, would come to RING_WIDTHS of the queries' width a token: with 8 ranks where all heads have keys of their
    own, with 49 where 8 heads share theirs, never where the forward runs again.
    """
    if strategy.cp == 1 or strategy.recompute != "none":
        return False
    return 2 * (strategy.cp - 1) * attention.kv_heads >= RING_WIDTHS * attention.heads


def _with_cut_sequence(cost: LayerCost, attention: Attention, strategy: Strategy, token_bytes: int) -> LayerCost:
    """With 1/(sp * cp) of the tokens on a rank; token_bytes: of one channel of one sample, whole."""
    cut = strategy.sp * strategy.cp
    channel = token_bytes * attention.head_dim / cost.tp
    query, key = channel * attention.heads / cut, channel * attention.kv_heads / cut
    lines = ("input_bytes", "output_bytes", "saved_bytes", *_PEAKS, "flops")
    scaled: dict[str, Any] = {name: _scaled(getattr(cost, name), 1 / cut) for name in lines}
    calls = [replace(call, size_bytes=_scaled(call.size_bytes, 1 / cut)) for call in cost.calls]
    if strategy.sp > 1:
        for phase in _BOTH:
            calls += [_call("all_to_all", phase, size, "sp") for size in (query, key, key, query)]
        for name in _PEAKS:
            scaled[name] = _plus(scaled[name], query)
    if strategy.cp > 1:
        own, gathered = 2 * key, 2 * key * strategy.cp
        calls.append(_call("all_gather", "forward", gathered, "cp"))
        if goes_around(attention, strategy):
            # n steps of the own size, where a reduce-scatter of `gathered` bytes makes n - 1.
            steps = strategy.cp / (strategy.cp - 1)
            calls += [_call("all_gather", "backward", gathered, "cp")]
            calls += [_call("reduce_scatter", "backward", gathered * steps, "cp")]
            scaled["forward_peak_bytes"] = _plus(scaled["forward_peak_bytes"], own)
            scaled["backward_peak_bytes"] = _plus(scaled["backward_peak_bytes"], 3 * own)
        else:
            calls.append(_call("reduce_scatter", "backward", gathered, "cp"))
            for name in ("saved_bytes", *_PEAKS):
                scaled[name] = _plus(scaled[name], gathered - own)
            scaled["backward_peak_bytes"] = _plus(scaled["backward_peak_bytes"], gathered)
    return replace(
        cost,
        # The seconds of n samples are those of cut * n samples of 1/cut of the tokens.
        samples=tuple(n * cut for n in cost.samples),
        calls=tuple(calls),
        origin="assumed",
        later_backward_peak_bytes=None,
        selective=None,
        **scaled,
    )


def _with_cut_vocabulary(cost: LayerCost, kind: LayerKind, tp: int, sequence: int) -> LayerCost | None:
    """The embedding or head with its rows cut over tp ranks; None where it has no matrix of rows."""
    if kind.vocabulary is None:
        return None
    rows = kind.vocabulary.shape[0]
    share = -(-rows // tp) / rows
    away_bytes, away_trainable_bytes = (
        sum(p.size_bytes - local_bytes(p, kind, tp) for p in kind.parameters if p.trainable or not trained)
        for trained in (False, True)
    )
    largest = max(local_bytes(p, kind, tp) for p in kind.parameters)
    parameter_bytes = max(0, cost.parameter_bytes - away_bytes)
    # Lines count the samples of a dp rank, which are those of the tp group; each rank has its part of them.
    entering, leaving = cost.input_bytes.per_sample, cost.output_bytes.per_sample
    changed: dict[str, Any] = {
        "input_bytes": _scaled(cost.input_bytes, 1 / tp),
        "output_bytes": _scaled(cost.output_bytes, 1 / tp),
    }
    if kind.role == "head":
        for name in ("forward_s", "backward_s"):
            changed[name] = tuple(seconds * share for seconds in getattr(cost, name))
        for name in ("saved_bytes", *_PEAKS):
            line: Line = getattr(cost, name)
            kept = min(line.per_sample, WHOLE_HEAD_INPUTS * entering)
            sample_bytes = kept / tp + entering + (line.per_sample - kept) * share
            changed[name] = Line(fixed=line.fixed * share, per_sample=sample_bytes)
        calls = [
            _call("all_gather", "forward", entering, "tp"),
            *[_call("all_reduce", "forward", LOSS_BYTES * sequence, "tp")] * LOSS_REDUCTIONS,
            _call("reduce_scatter", "backward", entering, "tp"),
        ]
    else:
        peak = cost.backward_peak_bytes
        # The gradient of the matrix is dense; the whole output and its gradient lie beside the rank's part.
        changed["backward_peak_bytes"] = Line(fixed=peak.fixed * share, per_sample=peak.per_sample + leaving / tp)
        changed["forward_peak_bytes"] = _plus(cost.forward_peak_bytes, leaving / tp)
        calls = [
            _call("all_gather", "forward", entering, "tp"),
            _call("reduce_scatter", "forward", leaving, "tp"),
            _call("all_gather", "backward", leaving, "tp"),
        ]
    return replace(
        cost,
        tp=tp,
        parameter_bytes=parameter_bytes,
        trainable_bytes=max(0, cost.trainable_bytes - away_trainable_bytes),
        largest_parameter_bytes=min(cost.largest_parameter_bytes, largest, parameter_bytes),
        flops=_scaled(cost.flops, share),
        calls=tuple(calls),
        origin="assumed",
        later_backward_peak_bytes=None,
        **changed,
    )


def local_bytes(parameter: Parameter, kind: LayerKind, tp: int) -> int:
    """Bytes of a parameter of an embedding or head on one of tp ranks: its rows, where it has one for each token."""
    rows = kind.vocabulary.shape[0] if kind.vocabulary is not None else 0
    if not rows or parameter.shape[:1] != (rows,):
        return parameter.size_bytes
    return parameter.size_bytes // rows * -(-rows // tp)


def _call(collective: Collective, phase: _Phase, sample_bytes: float, over: _Group) -> TensorParallelCall:
    size = Line(fixed=0.0, per_sample=sample_bytes)
    return TensorParallelCall(collective=collective, phase=phase, size_bytes=size, over=over)


def _scaled(line: Line, factor: float) -> Line:
    return replace(line, per_sample=line.per_sample * factor)


def _plus(line: Line, more: float) -> Line:
    return replace(line, per_sample=line.per_sample + more)
