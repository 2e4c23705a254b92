"""Models built without storage know, bit by bit, the weights that a plain build gives from the same seed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autopar.runtime.models import build_empty, build_model
from autopar.runtime.recording import empty_weights, recorded, written_since
from autopar.runtime.replaying import made, writes_of
from autopar.runtime.stand_ins import with_numbers
from autopar.runtime.tracker import LiveBytes
from tests.runtime.test_equality import LLAMA4, PLAIN

TIED = "GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64, tie_word_embeddings=True)"
SMALL = "hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64"
FAMILIES = [
    f"Gemma2Config({SMALL}, num_key_value_heads=2, head_dim=8)",
    f"MixtralConfig({SMALL}, num_key_value_heads=2, num_local_experts=4)",
    "BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=64)",
    f"GPTNeoXConfig({SMALL})",
    f"BertConfig({SMALL}, is_decoder=True)",
    "WhisperConfig(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, vocab_size=64, "
    "decoder_attention_heads=4, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)",
]


class Odd(nn.Module):
    """Initialised in all the ways that we know of."""

    def __init__(self) -> None:
        super().__init__()
        self.made = nn.Parameter(torch.randn(5, 6) * 0.1)
        self.shared = nn.Linear(6, 5)
        self.shared.weight = self.made
        self.padded = nn.Embedding(7, 3, padding_idx=2)
        nn.init.trunc_normal_(self.padded.weight, std=0.02)
        self.square = nn.Linear(8, 16)
        nn.init.orthogonal_(self.square.weight)
        self.copied = copy.deepcopy(self.square)
        self.assigned = nn.Parameter(torch.empty(3))
        self.assigned.data = torch.arange(3.0)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.constant = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.part = nn.Parameter(torch.ones(4, 6)[1:3].t())
        self.register_buffer("length", self.square.weight.detach().norm()[None])
        self.rates = [rate.item() for rate in self.shared.bias] + self.shared.bias.tolist()
        self.rates.append(float(self.padded.weight.detach().numpy().sum()))
        with empty_weights() if self.made.untyped_storage().data_ptr() == 0 else nullcontext():
            self.inner = nn.Linear(3, 3)
        if self.shared.bias.sum() > 0 or float(self.square.bias.max()) > 0:
            self.more = nn.Linear(2, 2)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        where = self.square.weight.device
        self.register_buffer("table", torch.arange(4, device=where) + torch.rand(4, device=where))


def both(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A plain build and one without storage, after which the generator is where it was."""
    torch.manual_seed(3)
    plain, state = build(), torch.get_rng_state()
    torch.manual_seed(3)
    with empty_weights():
        empty = build()
    assert torch.equal(state, torch.get_rng_state())
    return plain, empty


def value(parameter: Tensor) -> Tensor:
    view = recorded(parameter)
    assert view is not None
    return made(view)


def differences(plain: nn.Module, empty: nn.Module) -> list[str]:
    """The names of what differs, in bits, form, or in which parameters are one."""
    want, got = (dict(m.named_parameters(remove_duplicate=False)) for m in (plain, empty))
    assert want.keys() == got.keys()
    assert all(p.is_meta for p in got.values())
    found = []
    for name, p in want.items():
        again = value(got[name])
        same = torch.equal(again, p) and again.dtype == p.dtype and again.stride() == p.stride()
        ties = [[other for other in m if m[other] is m[name]] for m in (want, got)]
        if not same or ties[0] != ties[1] or p.requires_grad != got[name].requires_grad:
            found.append(name)
    theirs = dict(empty.named_buffers())
    found += [n for n, b in plain.named_buffers() if theirs[n].is_meta or not torch.equal(b, theirs[n])]
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("source", [LLAMA4, TIED, PLAIN, *(pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES)])
def test_weights_are_those_of_a_plain_build(source: str, dtype: str) -> None:
    assert differences(*both(lambda: build_model(source, dtype=dtype, seed=7))) == []


def test_whatever_a_model_does_to_its_weights_is_done_again() -> None:
    assert differences(*both(Odd)) == []
    assert differences(*both(lambda: Odd().to(torch.bfloat16))) == []
    plain, empty = both(Odd)
    assert plain.rates == empty.rates


class Scaled(nn.Module):
    """Its table is of whole numbers times a fraction, and so in torch's default dtype (Whisper's sinusoids)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(6))
        with torch.no_grad():
            self.table.copy_((torch.arange(6) * 0.3).sin())
        self.own = nn.Parameter((torch.arange(6) * 0.3).cos())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_computed_in_the_default_dtype_is_so_again(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        plain, empty = both(Scaled)
    finally:
        torch.set_default_dtype(torch.float32)
    assert differences(plain, empty) == []
    assert torch.get_default_dtype() == torch.float32


def test_a_model_that_cannot_be_recorded_is_built_plainly(tmp_path: Path) -> None:
    lines = ["import torch", "from torch import nn", "def build():", "    layer = nn.Linear(2, 2)"]
    lines += [
        "    torch.frombuffer(memoryview(layer.weight.detach().__array__()), dtype=torch.float32)",
        "    return layer",
    ]
    file = tmp_path / "reads.py"
    file.write_text("\n".join(lines))
    model, plain = build_empty(f"{file}:build"), build_model(f"{file}:build")
    assert torch.equal(model.weight, plain.weight)


def test_a_part_of_the_history_left_out_shows() -> None:
    plain, empty = both(Odd)
    view = recorded(empty.padded.weight)
    assert view is not None
    writes = writes_of([view])
    assert len(writes) > 3
    writes[0].random = torch.Generator().manual_seed(0).get_state()
    assert differences(plain, empty) == ["padded.weight"]


def test_building_holds_one_parameter_at_a_time() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(12)))

    with LiveBytes() as live, empty_weights():
        model = build()
    assert live.peak_bytes <= 2.1 * 256 * 256 * 4
    with LiveBytes() as live:
        value(model[7].weight)
    assert live.peak_bytes <= 1.1 * 256 * 256 * 4


def test_only_what_was_recorded_has_a_value() -> None:
    model = build_model(PLAIN, device="meta")
    assert all(recorded(p) is None for p in model.parameters())
    with empty_weights():
        model = nn.Linear(3, 3)
        with torch.device("meta"):
            other = nn.Linear(3, 3)
            model.weight.data = other.weight.data
    assert recorded(model.weight) is None
    assert recorded(model.bias) is not None
    nn.init.zeros_(model.bias)
    assert written_since(model.bias)
    assert recorded(model.bias) is None


def test_stand_ins_come_and_go() -> None:
    with empty_weights():
        model = build_model(TIED)
    before = dict(model.named_parameters(remove_duplicate=False))
    with with_numbers(model, torch.device("cpu")):
        during = dict(model.named_parameters(remove_duplicate=False))
        assert during["lm_head.weight"] is during["transformer.wte.weight"]
        assert not any(p.is_meta or torch.isnan(p).any() for p in during.values())
        block = "transformer.h.{}.mlp.c_fc.weight"
        assert during[block.format(0)] is not during[block.format(1)]
        assert during[block.format(0)].data_ptr() == during[block.format(1)].data_ptr()
    assert {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)} == {
        n: id(p) for n, p in before.items()
    }
