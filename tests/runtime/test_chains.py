"""Encoder-decoders on several stages, cut anywhere, under every schedule, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.plan import Plan
from autopar.predict import rank_memory
from autopar.profiler.models import profile
from autopar.runtime.models import build_model
from autopar.runtime.probing import probe
from tests.runtime.test_architectures import MODELS
from tests.runtime.test_equality import check
from tests.runtime.test_probing import IDS, Block

Ranks = Callable[..., list[Any]]

BART = (
    "BartConfig(d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, "
    "encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=64, max_position_embeddings=32)"
)
MARIAN = BART.replace("Bart", "Marian").replace(
    "vocab_size=64", "vocab_size=64, pad_token_id=0, decoder_start_token_id=1, eos_token_id=2, forced_eos_token_id=2"
)
SOURCES = {"whisper": MODELS["whisper"], "t5": MODELS["t5"], "bart": BART, "marian": MARIAN, "swin": MODELS["swin"]}
EVERY = ("looped-bfs", "interleaved-1f1b", "interleaved-zero-bubble", "zbv", "dualpipev")


def equals(name: str, ranks: Ranks, strategies: list[str], world: int, **shape: Any) -> None:
    check(ranks("compare_with_one_process", world, source=SOURCES[name], strategies=strategies, **shape))


@pytest.mark.parametrize(("name", "cut"), [("whisper", [4, 2]), ("bart", [3, 3])])
def test_two_stages(name: str, cut: list[int], ranks: Ranks) -> None:
    equals(name, ranks, ["dp1"] * 6, 2, pp=2, layers_per_stage=cut, micro_batches=2)


def test_t5_with_strategies_of_many_kinds_in_its_stages(ranks: Ranks) -> None:
    strategies = ["dp2-z3", "tp2", "dp2-z2-r", "dp2-z1", "tp2-r", "dp2-z3"]
    equals("t5", ranks, strategies, 4, pp=2, layers_per_stage=[4, 2], micro_batches=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("cut", [[1, 5], [2, 4], [3, 3], [4, 2], [5, 1]])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_every_cut(name: str, cut: list[int], schedule: str, ranks: Ranks) -> None:
    equals(name, ranks, ["dp1"] * 6, 2, pp=2, layers_per_stage=cut, micro_batches=4, schedule=schedule)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("schedule", EVERY)
@pytest.mark.parametrize("cut", [[2, 1, 1, 2], [1, 1, 2, 2], [2, 2, 1, 1]])
def test_every_schedule(name: str, schedule: str, cut: list[int], ranks: Ranks) -> None:
    strategies = ["dp2-z2", "tp2", "dp2-z2", "dp2", "dp2-r", "dp2-z2"]
    if name == "swin":
        strategies[1] = "dp2"
    equals(name, ranks, strategies, 4, pp=2, layers_per_stage=cut, micro_batches=4, schedule=schedule)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whisper", "t5"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_four_stages_hand_sides_on(name: str, schedule: str, ranks: Ranks) -> None:
    source = SOURCES[name].replace("decoder_layers=2", "decoder_layers=4").replace("num_layers=2", "num_layers=4")
    layers = {"whisper": 8, "t5": 10}[name]
    cut = [layers - 4, 1, 1, 2]
    shape = {"pp": 4, "layers_per_stage": cut, "micro_batches": 8, "schedule": schedule}
    check(ranks("compare_with_one_process", 4, source=source, strategies=["dp1"] * layers, **shape))


FAULTS = {"copies apart": ("bart", [2, 4]), "sides without gradient": ("whisper", [4, 2])}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault: str, ranks: Ranks) -> None:
    name, cut = FAULTS[fault]
    shape = {"pp": 2, "layers_per_stage": cut, "micro_batches": 2, "plant": fault, "steps": 1}
    found = ranks("compare_with_one_process", 2, source=SOURCES[name], strategies=["dp1"] * 6, **shape)
    assert all(not result["agrees"] for result in found)
    assert max(result["gradient"] for result in found) > 0.01


LARGER = {
    "whisper": "WhisperConfig(d_model=64, encoder_layers=4, decoder_layers=4, encoder_attention_heads=4, "
    "decoder_attention_heads=4, encoder_ffn_dim=160, decoder_ffn_dim=160, vocab_size=256, num_mel_bins=8, "
    "max_source_positions=48, max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, "
    "decoder_start_token_id=1)",
    "t5": "T5Config(d_model=64, d_kv=16, d_ff=160, num_layers=4, num_heads=4, vocab_size=256)",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGER)
def test_predicted_peaks_are_within_three_percent_of_tracked_ones(name: str, ranks: Ranks) -> None:
    profiled = profile(build_model(LARGER[name]), sequence=32, samples=(1, 2))
    shapes: list[dict[str, Any]] = [
        {"pp": 2, "layers_per_stage": cut, "micro_batches": 4, "schedule": schedule}
        for cut, schedule in (([3, 7], "1f1b"), ([5, 5], "1f1b"), ([6, 4], "gpipe"))
    ]
    for shape in shapes:
        found = ranks(
            "train", 2, source=LARGER[name], strategies=["dp1"] * 10, global_batch=16, sequence=32, steps=4, **shape
        )
        plan = Plan.loads(found[0]["plan"])
        for rank, one in enumerate(found):
            predicted = rank_memory(plan, rank, profiled.model, profiled.layers)
            assert predicted.peak_bytes == pytest.approx(one["peak_memory_bytes"], rel=0.03), (shape, rank, predicted)


class TwoChains(nn.Module):
    """An encoder and a decoder; what stands between them, and after, may use more than the last hidden state."""

    def __init__(self, uses: str = "") -> None:
        super().__init__()
        self.uses, self.embedding, self.words = uses, nn.Embedding(16, 8), nn.Embedding(16, 8)
        self.encoder, self.decoder = (nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        first = x = self.embedding(ids)
        for block in self.encoder:
            x = block(x)
        encoded = self.norm(x + first if self.uses == "first" else x)
        y = self.words(ids)
        for block in self.decoder:
            y = block(y, encoded)
        out: Tensor = self.head(y + encoded if self.uses == "encoded" else y)
        return out


@pytest.mark.parametrize(
    ("uses", "words"), [("", ""), ("first", "before its block 2"), ("encoded", "after its last block")]
)
def test_code_outside_the_blocks_may_use_the_last_hidden_state_only(uses: str, words: str) -> None:
    found = probe(TwoChains(uses), IDS).structure
    assert words in found.pipeline_reason
    assert bool(words) == bool(found.pipeline_reason)
    assert [found.crossing(layer) for layer in range(1, 6)] == [(), (), (), (0,), ()]
    (seam,) = found.seams
    assert (seam.block, set(seam.parameters)) == (2, {"norm.weight", "norm.bias", "words.weight"})
    assert set(found.front_parameters) == {"embedding.weight"}
    assert torch.is_grad_enabled()
