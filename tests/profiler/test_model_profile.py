"""Profiles of models against whole-model runs, hand counts and sums of parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import InputError
from autopar.measured import LayerCost, Line, ModelFile
from autopar.profiler import timing
from autopar.profiler.layers import LayerBench, LayerKey
from autopar.profiler.models import profile_model
from autopar.profiler.rank import layer_bytes
from autopar.profiler.trace import LayerCall, fit, trace
from autopar.runtime.batches import example_batch
from autopar.runtime.losses import own_loss
from autopar.runtime.models import build_model
from autopar.runtime.probing import probe
from autopar.runtime.stage import StageBody, StageModule
from autopar.runtime.tracker import LiveBytes

SEQUENCE = 32
LLAMA = (
    "LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, "
    "num_key_value_heads=2)"
)
GPT2 = "GPT2Config(vocab_size=256, n_embd=64, n_layer=3, n_head=4, n_positions=64)"


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


class Plain(nn.Module):
    """Blocks of two kinds, narrow and wide in turn; knows nothing of autopar."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList([Block(16, 64 if i % 2 else 32) for i in range(4)])
        self.head = nn.Linear(16, 50)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def models() -> dict[str, nn.Module]:
    return {"llama": build_model(LLAMA), "gpt2": build_model(GPT2), "plain": Plain()}


@pytest.fixture(scope="module", params=["llama", "gpt2", "plain"])
def profiled(request: pytest.FixtureRequest) -> tuple[nn.Module, ModelFile]:
    model = models()[request.param]
    return model, autopar.profile(model, sequence=SEQUENCE, samples=(1, 2, 4))


def chain(found: ModelFile) -> list[LayerCost]:
    costs = [found.layers.find(name) for name in found.model.layers]
    assert None not in costs
    return costs  # type: ignore[return-value]


def whole_stage(model: nn.Module) -> StageModule:
    batch = example_batch(model, samples=3, sequence=8)
    structure = probe(model, batch).structure
    body = StageBody(model, structure, range(structure.num_blocks + 2))
    return StageModule(body, own_loss(model, batch))


@pytest.mark.parametrize("samples", [1, 2, 4])
def test_peaks_of_the_whole_model_follow_from_its_layers(profiled: tuple[nn.Module, ModelFile], samples: int) -> None:
    model, found = profiled
    batch = example_batch(model, samples=samples, sequence=SEQUENCE)
    stage = whole_stage(model)
    with LiveBytes().adopt(model, batch) as live:
        entry = live.current_bytes
        total = stage(None, **batch)
        forward_peak, kept = live.peak_bytes - entry, live.current_bytes - entry
        live.reset_peak()
        total.backward()
        backward_peak = live.peak_bytes - entry
    model.zero_grad()

    costs = chain(found)
    saved = [cost.saved_bytes.at(samples) for cost in costs]
    entering = [0.0, *(cost.input_bytes.at(samples) for cost in costs[1:])]
    gradients = [cost.trainable_bytes for cost in costs]
    forwards = [sum(saved[:i]) + entering[i] + cost.forward_peak_bytes.at(samples) for i, cost in enumerate(costs)]
    backwards = [
        sum(saved[:i]) + entering[i] + cost.backward_peak_bytes.at(samples) + sum(gradients[i + 1 :])
        for i, cost in enumerate(costs)
    ]
    assert sum(saved) == pytest.approx(kept, rel=0.02)
    assert max(forwards) == pytest.approx(forward_peak, rel=0.02)
    assert max(backwards) == pytest.approx(backward_peak, rel=0.02)


def test_parameters_are_all_there(profiled: tuple[nn.Module, ModelFile]) -> None:
    model, found = profiled
    kinds, costs = found.model.kinds, chain(found)
    for kind in kinds:
        cost = found.layers.find(kind.name)
        assert cost is not None
        assert cost.parameter_bytes == cost.trainable_bytes == kind.parameter_bytes
        assert cost.largest_parameter_bytes == max(p.size_bytes for p in kind.parameters)
    shared = model.get_input_embeddings().weight.nbytes if found.model.tied else 0  # type: ignore[operator]
    assert sum(cost.parameter_bytes for cost in costs) - shared == sum(p.nbytes for p in model.parameters())
    assert found.model.tied == (type(model).__name__ == "GPT2LMHeadModel")


def test_the_model_is_left_as_it_was() -> None:
    model = build_model(LLAMA)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    autopar.profile(model, sequence=8, samples=(1,))
    assert {name for name, _ in model.named_parameters()} == set(before)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    assert model.training
    assert torch.isfinite(model(**example_batch(model, samples=1, sequence=8)).loss)


def test_a_block_by_hand() -> None:
    width, hidden, samples = 16, 64, 2
    block = Block(width, hidden)
    x = torch.randn(samples, SEQUENCE, width)
    found = trace(LayerCall(module=block, hidden=x, sides=(), run=lambda h: block(h)))
    entering, inner = samples * SEQUENCE * width * 4, samples * SEQUENCE * hidden * 4
    weights = 2 * width * hidden * 4
    assert found.input_bytes == found.output_bytes == entering
    assert found.saved_bytes == entering + inner  # the input, and relu's result
    assert found.forward_peak_bytes == 2 * inner  # relu's input and result; the output comes when one is gone
    # In relu's backward: its saved result, the gradients of its result and of its input, the gradient of `down`;
    # and the scalar with which the trace starts the backward, with its gradient.
    assert found.backward_peak_bytes == 3 * inner + weights // 2 + 2 * 4
    assert found.flops == 2 * 2 * samples * SEQUENCE * width * hidden


def test_side_inputs_count_in_the_peaks_and_not_in_the_saved_set() -> None:
    block, table = Block(16, 64), torch.randn(4096)
    x = torch.randn(2, SEQUENCE, 16)

    def run(hidden: Tensor | None) -> Tensor:
        return block(hidden) * table[: SEQUENCE * 16].view(SEQUENCE, 16)

    with_side = trace(LayerCall(module=block, hidden=x, sides=[table], run=run), shared_bytes=table.nbytes)
    assert with_side.saved_bytes == x.nbytes + 2 * SEQUENCE * 64 * 4
    without = trace(LayerCall(module=block, hidden=x, sides=[table], run=run))
    assert with_side.forward_peak_bytes - without.forward_peak_bytes == table.nbytes


def test_flops_of_a_llama_block() -> None:
    bench = LayerBench(build_model(LLAMA), sequence=SEQUENCE)
    found = trace(bench.call(LayerKey(kind="block"), 2))
    tokens, width, inner, kv = 2 * SEQUENCE, 64, 160, 32
    linears = 2 * tokens * width * (2 * width + 2 * kv + 3 * inner)
    attention = 4 * tokens * SEQUENCE * width
    assert found.flops == linears + attention


def test_kinds_of_blocks_are_told_apart() -> None:
    found = autopar.profile(Plain(), sequence=SEQUENCE, samples=(1, 2))
    assert found.model.layers == ("embed", "block0", "block1", "block0", "block1", "head")
    narrow, wide = found.layers.find("block0"), found.layers.find("block1")
    assert narrow is not None
    assert wide is not None
    assert wide.parameter_bytes == 2 * narrow.parameter_bytes
    assert wide.saved_bytes.per_sample - narrow.saved_bytes.per_sample == SEQUENCE * 32 * 4


def worst_misfit(line: Line, samples: Sequence[int], values: Sequence[float]) -> float:
    return max(abs(line.at(n) - v) / max(abs(v), 1.0) for n, v in zip(samples, values, strict=True))


def test_bytes_lie_on_lines() -> None:
    bench = LayerBench(build_model(LLAMA), sequence=SEQUENCE)
    for kind in ("embed", "block", "head"):
        samples = (1, 2, 3, 4)
        traces = [trace(bench.call(LayerKey(kind=kind), n)) for n in samples]
        for field in ("saved_bytes", "input_bytes", "output_bytes", "flops"):
            values = [getattr(found, field) for found in traces]
            assert worst_misfit(fit(samples, values), samples, values) < 1e-3, (kind, field, values)
        for field in ("forward_peak_bytes", "backward_peak_bytes"):
            values = [getattr(found, field) for found in traces]
            line = fit(samples, values)  # a peak may bend, upwards only
            assert worst_misfit(line, samples, values) < 0.04, (kind, field, values)
            assert all(line.at(n) >= 0.998 * value for n, value in zip(samples, values, strict=True))


def test_fit() -> None:
    line = fit((1, 2, 4), (5, 8, 14))
    assert (line.fixed, line.per_sample) == (2, 3)
    assert fit((3,), (12,)).at(1) == 4
    assert all(fit((1, 2, 4), (5, 5, 14)).at(n) >= v for n, v in zip((1, 2, 4), (5, 5, 14), strict=True))
    with pytest.raises(ValueError, match="as many"):
        fit((1,), ())


def test_equal_blocks_take_turns_in_a_burst() -> None:
    model = build_model(LLAMA)
    bench = LayerBench(model, sequence=SEQUENCE)
    calls = bench.turns(LayerKey(kind="block"), 2)
    assert [call.module for call in calls] == list(model.get_submodule("model.layers"))
    assert [len(bench.turns(LayerKey(kind=kind), 2)) for kind in ("embed", "head")] == [1, 1]
    ran: list[int] = []
    for number, call in enumerate(calls):
        call.module.register_forward_hook(lambda *_, number=number: ran.append(number))
    timing.time_burst(calls, 5)
    assert ran == [0, 0, 1, 2, 0, 1]  # the first once more, for the shape of its gradient
    assert all(p.grad is None for p in model.parameters())


def test_a_burst_lasts_from_the_first_start_to_the_last_end(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = LayerBench(build_model(LLAMA), sequence=SEQUENCE).turns(LayerKey(kind="block"), 1)

    def burst_s(others: Callable[[list[float]], list[float]]) -> float:
        monkeypatch.setattr(timing, "slowest", lambda seconds, device: others(seconds))
        found = timing.time_burst(calls, 2)
        return 2 * (found.forward_s + found.backward_s)

    # Another rank began half a second before this one, or has a clock that began a day earlier.
    assert 0.5 < burst_s(lambda own: [own[0], own[1] + 0.5, 5.0]) < 5.0
    assert burst_s(lambda own: [own[0] + 86400, own[1], 5.0]) == pytest.approx(5.0)


@pytest.mark.parametrize("source", [LLAMA, pytest.param(GPT2, marks=pytest.mark.slow)])
def test_tensor_parallel_layers_at_local_shapes(source: str) -> None:
    model = build_model(source)
    bench = LayerBench(model, sequence=SEQUENCE, max_tp=2)
    keys = bench.keys([2])
    assert [str(key) for key in keys] == ["embed", "block", "block tp2", "block tp2s", "head"]
    whole, half, norms = (layer_bytes(bench, key, (2, 4)) for key in keys[1:4])
    assert half.flops.per_sample == pytest.approx(whole.flops.per_sample / 2)
    for local in (half, norms):
        # Norms and the biases after the reductions stay whole, everything else is halved.
        assert 0 < local.parameter_bytes - whole.parameter_bytes / 2 < 0.02 * whole.parameter_bytes
    assert norms.saved_bytes.at(2) < half.saved_bytes.at(2) < whole.saved_bytes.at(2)
    assert norms.input_bytes.at(2) == half.input_bytes.at(2) / 2
    # Two all-reduces of the whole activation each way; gathers and scatters move as much.
    activation = SEQUENCE * 64 * 4
    assert [(c.collective, c.phase, c.size_bytes.at(3)) for c in half.calls] == [
        ("all_reduce", phase, 3 * activation) for phase in ("forward", "forward", "backward", "backward")
    ]
    forward = [c for c in norms.calls if c.phase == "forward"]
    assert {c.collective for c in forward} == {"all_gather", "reduce_scatter"}
    assert all(c.size_bytes.at(3) == 3 * activation for c in forward)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("source", [GPT2, pytest.param(LLAMA, marks=pytest.mark.slow)])
def test_saved_sets_agree_with_what_stays_alive(source: str) -> None:
    bench = LayerBench(build_model(source), sequence=SEQUENCE, max_tp=2)
    for key in bench.keys([2])[1:4]:
        call = bench.call(key, 2)
        found = trace(call)
        assert call.hidden is not None
        hidden = call.hidden.requires_grad_()
        with LiveBytes().adopt(call.module, call.sides, hidden) as live:
            entry = live.current_bytes
            output = call.run(hidden)
            grown = live.current_bytes - entry
        # The block keeps its input too, which was alive before; its output is no part of the saved set.
        assert found.saved_bytes == grown + hidden.nbytes - output.nbytes, str(key)


@pytest.mark.slow
def test_profile_by_two_processes_and_its_file(tmp_path: Path) -> None:
    events: list[Any] = []
    found = profile_model(LLAMA, sequence=SEQUENCE, nproc=2, samples=(1, 2), progress=events.append)
    found.save(tmp_path / "model.json")
    again = ModelFile.load(tmp_path / "model.json")
    assert again == found
    assert again.dumps() == found.dumps()
    assert found.layers.processes == 2
    assert found.model.source == LLAMA
    assert build_model(found.model.source) is not None
    assert events[-1]["done"] == events[-1]["total"]
    assert [(c.kind, c.tp, c.sequence_norms) for c in found.layers.costs] == [
        ("embed", 1, False),
        ("block", 1, False),
        ("block", 2, False),
        ("block", 2, True),
        ("head", 1, False),
    ]
    alone = autopar.profile(build_model(LLAMA), sequence=SEQUENCE, samples=(1, 2), nproc=2)
    assert alone.model.fingerprint == found.model.fingerprint
    for cost in found.layers.costs:
        here = alone.layers.find(cost.kind, cost.tp, cost.sequence_norms)
        assert here is not None
        seconds: dict[str, Any] = {"forward_s": cost.forward_s, "backward_s": cost.backward_s}
        if cost.selective is not None and here.selective is not None:
            assert cost.selective.share > 0
            seconds["selective"] = replace(here.selective, share=cost.selective.share)
        assert replace(here, **seconds) == cost
        assert (cost.selective is None) == (cost.kind != "block")
        assert all(second > 0 for second in (*cost.forward_s, *cost.backward_s))


@pytest.mark.parametrize(
    ("source", "arguments", "words"),
    [
        (LLAMA, {"nproc": 0}, "0 processes"),
        (LLAMA, {"samples": (0,)}, "samples"),
        (LLAMA, {"samples": ()}, "samples"),
        (LLAMA, {"tp_degrees": (-2,)}, "degree is at least 1"),
        (LLAMA, {"sequence": 0}, "sequence 0"),
        (LLAMA, {"dtype": "float7"}, "not a dtype"),
    ],
)
def test_absurd_arguments_are_refused(source: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        profile_model(source, **arguments)


def test_models_that_cannot_be_profiled() -> None:
    with pytest.raises(InputError, match="max_position_embeddings"):
        autopar.profile(build_model(GPT2), sequence=4096)
    with pytest.raises(InputError, match="no chain of blocks"):
        autopar.profile(nn.Sequential(nn.Embedding(4, 4)), sequence=8)
    uneven = build_model(LLAMA.replace("num_key_value_heads=2", "num_key_value_heads=3"))
    with pytest.raises(InputError, match="does not run a batch"):
        autopar.profile(uneven, sequence=8)
