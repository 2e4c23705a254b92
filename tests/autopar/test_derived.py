"""Costs that no profile holds, counted by hand: bytes and collectives of a layer, on textbook links."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.axes import RankMesh
from autopar.derived import goes_around, local_cost
from autopar.layer_memory import Unit
from autopar.measured import LayerCost, LayerProfile
from autopar.memory import walk
from autopar.model import Attention, LayerKind
from autopar.orders import actions
from autopar.plan import Plan, PlanCluster, PlanModel
from autopar.predict import predict
from autopar.strategy import Strategy
from autopar.tables import tables
from autopar.work import Work, layer_work
from tests.pricing import ALPHA_S, BYTES_PER_S, HIDDEN, SEQUENCE, VOCAB, cluster_file, curve_s, model_file, request

FILE, MODEL = cluster_file(), model_file()
MESH = RankMesh.of(world_size=4)
KINDS = {kind.name: kind for kind in MODEL.model.kinds}
TOKEN = HIDDEN * 4
"""Bytes of one channel-wide float32 activation of one token; the block has 4 heads of 16 and as many kv heads."""


def _cost(short: str, kind: LayerKind = KINDS["block"], layers: LayerProfile = MODEL.layers) -> LayerCost:
    cost = local_cost(layers, kind, Strategy.parse(short))
    assert cost is not None
    return cost


def _work(short: str, samples: float = 4, kind: LayerKind = KINDS["block"], mesh: RankMesh = MESH) -> Work:
    return layer_work(
        _cost(short, kind),
        Strategy.parse(short),
        mesh=mesh,
        cluster=FILE.cluster,
        links=FILE.links,
        samples=samples,
        optimizer="adamw",
    )


def _s(collective: str, ranks: int, size: float) -> float:
    return curve_s(collective, ranks, size, alpha_s=ALPHA_S, bytes_per_s=BYTES_PER_S)  # type: ignore[arg-type]


def test_ulysses_exchanges_queries_keys_values_and_output_each_way() -> None:
    """4 samples of 32 tokens, half of them on a rank: 4 x 16 tokens of 256 bytes, four times each way."""
    work = _work("dp2-sp2")
    one_s = _s("all_to_all", 2, 4 * SEQUENCE // 2 * TOKEN)
    assert work.sequence_forward_s == pytest.approx(4 * one_s, rel=0.03)
    assert work.sequence_backward_s == pytest.approx(4 * one_s, rel=0.03)
    assert _work("dp2-sp2-r").sequence_backward_s == pytest.approx(8 * one_s, rel=0.03)
    assert work.tp_forward_s == 0.0
    assert work.origin == "assumed"


def test_fewer_kv_heads_exchange_less() -> None:
    grouped = replace(KINDS["block"], attention=Attention(heads=4, kv_heads=2, head_dim=16))
    sizes = [call.size_bytes.per_sample for call in _cost("dp2-sp2", grouped).calls if call.over == "sp"]
    half = SEQUENCE // 2 * TOKEN
    assert sizes == [half, half // 2, half // 2, half] * 2


def test_context_parallel_gathers_keys_and_values_and_scatters_their_gradients() -> None:
    work = _work("dp2-cp2")
    whole = 4 * SEQUENCE * TOKEN
    assert work.sequence_forward_s == pytest.approx(_s("all_gather", 2, 2 * whole), rel=0.03)
    assert work.sequence_backward_s == pytest.approx(_s("reduce_scatter", 2, 2 * whole), rel=0.03)
    # With both, a rank holds half of the heads: the gathered keys are half as large.
    both = [call for call in _cost("sp2-cp2").calls if call.over == "cp"]
    assert [call.size_bytes.per_sample for call in both] == [SEQUENCE * TOKEN] * 2


def test_keys_and_values_go_around_a_ring_where_gathered_ones_would_weigh() -> None:
    attention = Attention(heads=8, kv_heads=8, head_dim=16)
    grouped = replace(attention, kv_heads=1)
    taken = {short: goes_around(attention, Strategy.parse(short)) for short in ("cp4", "cp8", "cp8-r", "sp8", "dp8")}
    assert taken == {"cp4": False, "cp8": True, "cp8-r": False, "sp8": False, "dp8": False}
    assert not goes_around(grouped, Strategy.parse("cp32"))
    assert goes_around(grouped, Strategy.parse("cp49"))


def test_a_ring_keeps_the_own_keys_only_and_passes_them_twice() -> None:
    kind = replace(KINDS["block"], attention=Attention(heads=4, kv_heads=4, head_dim=16))
    plain, ring = _cost("dp8", kind), _cost("cp8", kind)
    assert ring.saved_bytes.per_sample == pytest.approx(plain.saved_bytes.per_sample / 8)
    whole = 2 * SEQUENCE * TOKEN
    calls = [(c.collective, c.phase, c.size_bytes.per_sample) for c in ring.calls if c.over == "cp"]
    assert calls == [
        ("all_gather", "forward", whole),
        ("all_gather", "backward", whole),
        ("reduce_scatter", "backward", pytest.approx(whole * 8 / 7)),
    ]


@pytest.mark.parametrize("recompute", ["", "-r"])
@pytest.mark.parametrize("short", ["dp2{z}-sp2", "dp2{z}-cp2", "cp4", "sp4", "sp2-cp2", "tp2-sp2", "tp2-cp2"])
def test_search_loses_nothing_without_cut_sequences(short: str, recompute: str) -> None:
    """More dp instead, as many tokens and shards on a rank, takes no more time and memory."""
    for zero in ("", "-z1", "-z2", "-z3") if "{z}" in short else ("",):
        cut = Strategy.parse(short.format(z=zero) + recompute)
        shards = cut.state_shards if cut.zero else None
        plain = replace(cut, dp=cut.dp * cut.sp * cut.cp, sp=1, cp=1, shard=shards)
        for samples in (4, 8, 32):
            mine, other = _work(cut.short, samples), _work(plain.short, samples / (cut.sp * cut.cp))
            for name in ("whole_forward_s", "whole_backward_s", "sync_s", "optimizer_s"):
                assert getattr(other, name) <= getattr(mine, name) * (1 + 1e-9), (name, zero)
            peaks = [_peak(cut.short, samples).peak_bytes, _peak(plain.short, samples / (cut.sp * cut.cp)).peak_bytes]
            assert peaks[1] <= peaks[0], zero


@pytest.mark.parametrize("short", ["dp2-sp2", "dp2-cp2"])
def test_a_cut_sequence_divides_the_compute(short: str) -> None:
    """Half of the tokens of 4 samples are as many as 2 samples have."""
    cut, half = _work(short), _work("dp4", 2)
    assert (cut.forward_s, cut.backward_s) == pytest.approx((half.forward_s, half.backward_s))


@pytest.mark.parametrize(("short", "ranks"), [("dp2-sp2", 4), ("sp4", 4), ("cp4", 4), ("tp2-sp2", 2), ("sp2-cp2", 4)])
def test_gradients_are_summed_over_all_that_hold_the_parameters(short: str, ranks: int) -> None:
    cost = _cost(short)
    assert _work(short).sync_s == pytest.approx(_s("all_reduce", ranks, cost.trainable_bytes), rel=0.03)


def test_zero_shards_over_dp_and_repeats_over_sp() -> None:
    size = _cost("dp2-z3-sp2").parameter_bytes
    gather, scatter = _s("all_gather", 2, size), _s("reduce_scatter", 2, size)
    across = _s("all_reduce", 2, size / 2)
    work = _work("dp2-z3-sp2")
    assert work.zero_forward_s == pytest.approx(gather, rel=0.03)
    assert work.zero_backward_s == pytest.approx(gather + scatter + across, rel=0.03)
    assert work.sync_s == 0.0


def test_zero_1_scatters_gradients_and_gathers_parameters_once_a_step() -> None:
    size = _cost("dp4").trainable_bytes
    work, plain = _work("dp4-z1"), _work("dp4")
    assert work.sync_s == pytest.approx(_s("reduce_scatter", 4, size) + _s("all_gather", 4, size), rel=0.03)
    assert (work.zero_forward_s, work.zero_backward_s) == (0.0, 0.0)
    assert work.optimizer_s == pytest.approx(plain.optimizer_s / 4)


def test_hsdp_stays_in_its_node_but_for_the_shards() -> None:
    """Two nodes of two: gathers and scatters between the ranks of a node, a half all-reduced between nodes."""
    mesh = RankMesh.of(world_size=4, ranks_per_node=2)
    size = _cost("dp4-z3-h2").parameter_bytes
    work = _work("dp4-z3-h2", mesh=mesh)
    gather, scatter = _s("all_gather", 2, size), _s("reduce_scatter", 2, size)
    assert work.zero_forward_s == pytest.approx(gather, rel=0.03)
    assert work.zero_backward_s == pytest.approx(gather + scatter + _s("all_reduce", 2, size / 2), rel=0.03)
    assert mesh.place(Strategy.parse("dp4-z3-h2")).dp_shard == ("a0",)


def _peak(short: str, samples: float = 4, kind: LayerKind = KINDS["block"], count: int = 3):
    unit = Unit.of(_cost(short, kind), Strategy.parse(short), samples)
    return walk([unit] * count, actions("1f1b", 1, 0, 2), optimizer="adamw")


def test_zero_1_cuts_the_optimizer_alone() -> None:
    size = _cost("dp4").parameter_bytes
    parts = [_peak(short).parts_bytes for short in ("dp4", "dp4-z1")]
    assert [part["parameters"] for part in parts] == [3 * size] * 2
    assert [part["optimizer"] for part in parts] == [3 * 2 * size, 3 * 2 * size // 4]
    assert parts[0]["gradients"] == parts[1]["gradients"]


def test_a_cut_sequence_keeps_its_part() -> None:
    plain, ulysses, context = (_cost(short) for short in ("dp4", "dp2-sp2", "dp2-cp2"))
    kept = plain.saved_bytes.at(4)
    assert ulysses.saved_bytes.at(4) == kept / 2
    # Keys and values are kept gathered: the other rank's half of both.
    assert context.saved_bytes.at(4) == kept / 2 + 2 * 4 * SEQUENCE // 2 * TOKEN
    assert ulysses.parameter_bytes == context.parameter_bytes == plain.parameter_bytes
    assert ulysses.forward_peak_bytes.at(4) == plain.forward_peak_bytes.at(2) + 4 * SEQUENCE // 2 * TOKEN
    more = (2 + 4) * 4 * SEQUENCE // 2 * TOKEN
    assert context.backward_peak_bytes.at(4) == plain.backward_peak_bytes.fixed + more + (
        plain.backward_peak_bytes.per_sample * 2
    )


def test_selective_recompute_adds_its_share_of_a_forward_and_keeps_less() -> None:
    plain, again = _work("dp4"), _work("dp4-rs")
    assert again.forward_s == plain.forward_s
    assert again.backward_s == pytest.approx(plain.backward_s + plain.forward_s / 4)
    whole, kept = _cost("dp4"), _cost("dp4-rs")
    assert whole.saved_bytes.at(2) - kept.saved_bytes.at(2) == 2 * 8 * SEQUENCE * TOKEN
    # What is computed again is back while one layer works backwards.
    assert _peak("dp4-rs", 2).peak_bytes < _peak("dp4", 2).peak_bytes


def test_collectives_run_again_under_selective_recompute() -> None:
    plain, again = _work("dp2-tp2"), _work("dp2-tp2-rs")
    assert again.tp_forward_s == plain.tp_forward_s
    assert again.tp_backward_s == pytest.approx(plain.tp_backward_s + plain.tp_forward_s)


def test_what_was_not_traced_under_selective_recompute_has_no_price() -> None:
    costs = tuple(replace(cost, selective=None) for cost in MODEL.layers.costs)
    assert local_cost(replace(MODEL.layers, costs=costs), KINDS["block"], Strategy.parse("dp4-rs")) is None


@pytest.mark.parametrize(("tp", "rows"), [(2, 128), (4, 64), (3, 86)])
def test_a_vocabulary_is_cut_by_rows_and_padded(tp: int, rows: int) -> None:
    """256 rows of 64 elements over 3 ranks: 86 each, two of them padding."""
    for role in ("embed", "head"):
        cost = local_cost(MODEL.layers, KINDS[role], Strategy(tp=tp))
        assert cost is not None
        assert cost.parameter_bytes == rows * TOKEN
        assert cost.trainable_bytes == rows * TOKEN


def test_a_cut_embedding_gathers_ids_and_scatters_its_output() -> None:
    """The tp ranks hold 4 samples together, 2 each; the profile's embedding takes `input_bytes` of ids a sample."""
    work, whole = _work("dp2-tp2", kind=KINDS["embed"]), _cost("dp4", KINDS["embed"])
    ids, output = whole.input_bytes.at(4), whole.output_bytes.at(4)
    expected = _s("all_gather", 2, ids) + _s("reduce_scatter", 2, output)
    assert work.tp_forward_s == pytest.approx(expected, rel=0.03)
    assert work.tp_backward_s == pytest.approx(_s("all_gather", 2, output), rel=0.03)
    assert work.sync_s == pytest.approx(_s("all_reduce", 2, VOCAB // 2 * TOKEN), rel=0.03)
    assert _cost("dp2-tp2", KINDS["embed"]).output_bytes.at(4) == whole.output_bytes.at(2)


def test_a_cut_head_reduces_three_numbers_a_token() -> None:
    work, whole = _work("dp2-tp2", kind=KINDS["head"]), _work("dp4", kind=KINDS["head"])
    hidden = 4 * SEQUENCE * TOKEN
    expected = _s("all_gather", 2, hidden) + 3 * _s("all_reduce", 2, 4 * SEQUENCE * 4)
    assert work.tp_forward_s == pytest.approx(expected, rel=0.05)
    assert work.tp_backward_s == pytest.approx(_s("reduce_scatter", 2, hidden), rel=0.03)
    assert (work.forward_s, work.backward_s) == pytest.approx((whole.forward_s / 2, whole.backward_s / 2))
    plain, cut = (_cost(short, KINDS["head"]) for short in ("dp4", "dp2-tp2"))
    kept = 4 * SEQUENCE * TOKEN
    # Its own half of what is no logit, the gathered input, half of the words' logits of both ranks.
    assert cut.saved_bytes.per_sample == kept / 2 + SEQUENCE * TOKEN + (plain.saved_bytes.per_sample - kept) / 2


def test_cut_ends_keep_the_boundary_layout() -> None:
    """From a cut embedding to a tp block the samples are gathered; between data-parallel ones nothing moves."""
    asked = request(allow_unrunnable=True)
    made = tables(
        MODEL.model, MODEL.layers, FILE.cluster, FILE.links, asked, pp=1, num_micro_batches=2, schedule="1f1b"
    )
    column = {(s.short, bool(made.feasible[0, i])): i for i, s in enumerate(made.strategies)}
    cut, block, plain = column["dp2-tp2", True], column["dp2-tp2", False], column["dp4", True]
    assert made.layout[cut] == made.layout[plain] != made.layout[block]
    assert made.transition_ns[cut, block] > 0
    assert made.transition_ns[cut, plain] == 0


SHARDED = (
    ("dp4", "dp4-z1", "dp4-z2", "dp4-z3"),
    ("dp4-z3-h2", "dp4-z3"),
    ("dp4-z2-h2", "dp4-z2"),
    ("dp4", "dp4-z1-h2", "dp4-z1"),
    ("dp4", "dp4-rs"),
)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SHARDED), st.sampled_from((1, 2, 4, 8)), st.integers(1, 4))
def test_more_shards_never_need_more_memory(shorts: tuple[str, ...], samples: int, count: int) -> None:
    """States only: what ZeRO-2 and 3 gather and scatter is beside them."""
    peaks = [_peak(short, samples, count=count) for short in shorts]
    states = [sum(p.parts_bytes[part] for part in ("parameters", "gradients", "optimizer")) for p in peaks]
    assert states == sorted(states, reverse=True)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(("sp", "cp")), st.sampled_from((1, 2, 4)), st.sampled_from((1, 2, 4)))
def test_a_finer_cut_of_the_sequence_never_needs_more(axis: str, dp: int, samples: int) -> None:
    """The same samples on a dp rank, over 1, 2 and 4 ranks of sp or cp."""
    costs = [_cost(Strategy(dp=dp, **{axis: degree}).short) for degree in (1, 2, 4)]
    for name in ("saved_bytes", "input_bytes", "forward_peak_bytes", "backward_peak_bytes"):
        lines = [getattr(cost, name).at(samples) for cost in costs[0 if name != "backward_peak_bytes" else 1 :]]
        assert lines == sorted(lines, reverse=True), name


FORMS = ("dp4", "dp4-z1", "dp4-z3-h2", "dp2-sp2", "sp4-rs", "dp2-cp2-r", "sp2-cp2", "dp2-z3-sp2", "tp2-sp2")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FORMS), st.floats(0.25, 16), st.floats(1, 4))
def test_time_and_memory_never_fall_with_samples(short: str, samples: float, factor: float) -> None:
    few, many = _work(short, samples), _work(short, samples * factor)
    for name in ("whole_forward_s", "whole_backward_s", "sync_s"):
        assert getattr(few, name) <= getattr(many, name) * (1 + 1e-9)
    assert _peak(short, samples).peak_bytes <= _peak(short, samples * factor).peak_bytes


@pytest.mark.parametrize("short", ["dp2-sp2", "dp2-z3-cp2-r", "dp4-z1", "dp4-rs", "sp2-cp2"])
def test_the_simulated_step_holds_all_that_a_layer_takes(short: str) -> None:
    """One stage: every second of every layer, micro-batch by micro-batch, and what comes once."""
    strategies = [Strategy.parse(text) for text in ("dp2-tp2", short, short, "dp4-z1")]
    plan = Plan(
        model=PlanModel(name="m", source="m", fingerprint="0" * 16),
        cluster=PlanCluster(name="c", device="cpu", world_size=4, ranks_per_node=4, memory_bytes=1 << 30),
        request=request(allow_unrunnable=True),
        pp=1,
        schedule="1f1b",
        num_micro_batches=2,
        layers_per_stage=(4,),
        strategies=tuple(strategies),
        versions={},
    )
    found = predict(plan, MODEL.model, MODEL.layers, FILE.cluster, FILE.links)
    works = [
        _work(strategy.short, 8 / strategy.dp, MODEL.model.kind(layer)) for layer, strategy in enumerate(strategies)
    ]
    layers_s = sum(2 * (work.whole_forward_s + work.whole_backward_s) + work.sync_s for work in works)
    assert found.step_s >= layers_s + max(work.optimizer_s for work in works)
    rest = {name: s for name, s in found.parts_s.items() if name not in ("relayout", "clip", "optimizer")}
    assert sum(rest.values()) == pytest.approx(layers_s)
    assert found.origin == "assumed"
