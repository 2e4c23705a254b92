"""Shipped models against the Hugging Face classes of the same configuration: parameters, FLOPs, kept bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from autopar import shipped
from autopar.boundaries import Part, crossing, doubled_bytes, parts_of
from autopar.encoders import ImageEncoder, WordEncoder
from autopar.errors import InputError
from autopar.estimating import Degrees, files, priced, uniform
from autopar.experts import Mixture
from autopar.measured import LayerCost
from autopar.model import ModelSpec
from autopar.request import Request
from autopar.searching import search_files
from autopar.swin import WindowEncoder
from autopar.t5 import EncoderDecoder
from tests.autopar.test_roofline import MACHINE

COUNTED = [name for name, arch in shipped.architectures().items() if isinstance(arch, shipped.Counted)]

WORDS = WordEncoder(name="b", layers=2, hidden=96, heads=4, ffn=320, vocab=512, positions=128, types=2)
IMAGES = ImageEncoder(name="v", layers=2, hidden=96, heads=4, ffn=320, image=160, patch=16, channels=3, classes=10)
WINDOWS = WindowEncoder(
    name="s", depths=(2, 2), heads=(4, 8), hidden=32, image=56, patch=2, channels=3, window=7, classes=10
)
MIXTURE = Mixture(name="m", layers=2, hidden=96, heads=4, kv_heads=2, ffn=320, vocab=512, experts=4, top_k=2)
BOTH = EncoderDecoder(
    name="t",
    encoder_layers=3,
    decoder_layers=2,
    hidden=96,
    heads=4,
    head_dim=32,
    ffn=320,
    vocab=512,
    buckets=32,
    decoder_part=2,
)


def hugging_face(arch: Any, device: str = "meta") -> Any:
    """The model of the class that publishes this architecture, its configuration written out once more."""
    import torch
    import transformers as hf

    none: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if isinstance(arch, WordEncoder):
        config = hf.BertConfig(
            hidden_size=arch.hidden,
            num_attention_heads=arch.heads,
            intermediate_size=arch.ffn,
            num_hidden_layers=arch.layers,
            vocab_size=arch.vocab,
            max_position_embeddings=arch.positions,
            type_vocab_size=arch.types,
            **none,
        )
        made: Any = hf.BertForMaskedLM
    elif isinstance(arch, ImageEncoder):
        config = hf.ViTConfig(
            hidden_size=arch.hidden,
            num_attention_heads=arch.heads,
            intermediate_size=arch.ffn,
            num_hidden_layers=arch.layers,
            image_size=arch.image,
            patch_size=arch.patch,
            num_labels=arch.classes,
            **none,
        )
        made = hf.ViTForImageClassification
    elif isinstance(arch, WindowEncoder):
        config = hf.SwinConfig(
            embed_dim=arch.hidden,
            depths=list(arch.depths),
            num_heads=list(arch.heads),
            image_size=arch.image,
            patch_size=arch.patch,
            window_size=arch.window,
            num_labels=arch.classes,
            drop_path_rate=0.0,
            attn_implementation="eager",
            **none,
        )
        made = hf.SwinForImageClassification
    elif isinstance(arch, EncoderDecoder):
        config = hf.T5Config(
            d_model=arch.hidden,
            d_kv=arch.head_dim,
            num_heads=arch.heads,
            d_ff=arch.ffn,
            num_layers=arch.encoder_layers,
            num_decoder_layers=arch.decoder_layers,
            vocab_size=arch.vocab,
            relative_attention_num_buckets=arch.buckets,
            dropout_rate=0.0,
            use_cache=False,
            attn_implementation="eager",
        )
        made = hf.T5ForConditionalGeneration
    else:
        config = hf.MixtralConfig(
            hidden_size=arch.hidden,
            intermediate_size=arch.ffn,
            num_attention_heads=arch.heads,
            num_key_value_heads=arch.kv_heads,
            num_hidden_layers=arch.layers,
            vocab_size=arch.vocab,
            num_local_experts=arch.experts,
            num_experts_per_tok=arch.top_k,
            use_cache=False,
        )
        made = hf.MixtralForCausalLM
    with torch.device(device):
        return made(config)


@pytest.mark.parametrize("name", COUNTED)
def test_parameters_are_those_of_the_published_class(name: str) -> None:
    arch = shipped.architectures()[name]
    model = hugging_face(arch)
    assert arch.parameter_count == sum(p.numel() for p in model.parameters())


def batch(arch: Any, samples: int, sequence: int) -> dict[str, Any]:
    import torch

    if isinstance(arch, ImageEncoder | WindowEncoder):
        shape = (samples, arch.channels, arch.image, arch.image)
        return {"pixel_values": torch.empty(shape, device="meta"), "labels": _ids(samples)}
    ids = {"input_ids": _ids(samples, sequence)}
    if isinstance(arch, EncoderDecoder):
        return {**ids, "decoder_input_ids": _ids(samples, arch.decoder_tokens(sequence))}
    return ids


def _ids(*shape: int) -> Any:
    import torch

    return torch.zeros(shape, dtype=torch.long, device="meta")


@pytest.mark.parametrize("arch", [WORDS, IMAGES, WINDOWS, BOTH], ids=lambda arch: type(arch).__name__)
def test_flops_of_a_whole_model_are_those_that_torch_counts(arch: Any) -> None:
    """Every product of the chain, embedding and head among them; torch masks nothing either."""
    from torch.utils.flop_counter import FlopCounterMode

    model, sequence = hugging_face(arch), arch.longest or 64
    with FlopCounterMode(display=False) as counter:
        model(**batch(arch, 2, sequence))
    layers = arch.profile(MACHINE, sequence=sequence)
    spec = arch.spec("bfloat16")
    counted = sum(found(layers.find(kind)).flops.at(2) for kind in spec.layers)
    assert counted == pytest.approx(counter.get_total_flops(), rel=1e-9)


def found(cost: LayerCost | None) -> LayerCost:
    assert cost is not None
    return cost


def blocks(arch: Any, sequence: int) -> dict[str, tuple[Any, Any, list[Any], Callable[[Any], Any]]]:
    """By kind: a module of the published class, its input of two samples, what else it reads, how it is called."""
    import torch

    def tensor(*shape: int) -> Any:
        return torch.randn(*shape, dtype=torch.bfloat16)

    model = hugging_face(arch, device="cpu").to(torch.bfloat16).train()
    if isinstance(arch, WordEncoder):
        layer = model.bert.encoder.layer[0]
        return {"block": (layer, tensor(2, sequence, arch.hidden), [], layer)}
    if isinstance(arch, ImageEncoder):
        layer = model.vit.layers[0]
        return {"block": (layer, tensor(2, arch.longest, arch.hidden), [], layer)}
    if isinstance(arch, WindowEncoder):
        stage, side = model.swin.encoder.layers[0], arch.side(0)
        shifted, image = stage.blocks[1], tensor(2, side**2, arch.hidden)
        both = torch.nn.ModuleList([shifted, stage.downsample])
        return {
            "stage0": (shifted, image, [], lambda x: shifted(x, (side, side))[0]),
            "stage0-merge": (
                both,
                image,
                [],
                lambda x: stage.downsample(shifted(x, (side, side))[0], (side, side)),
            ),
        }
    if isinstance(arch, Mixture):
        layer, places = model.model.layers[0], torch.arange(sequence)[None]
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        rope = model.model.rotary_emb(tensor(2, sequence, arch.hidden), places)
        return {
            "block": (layer, tensor(2, sequence, arch.hidden), [rope], lambda x: layer(x, position_embeddings=rope))
        }
    encoder, decoder, own = model.encoder.block[1], model.decoder.block[1], arch.decoder_tokens(sequence)
    bias, mine = (tensor(1, arch.heads, n, n).requires_grad_() for n in (sequence, own))
    seen, other = tensor(2, sequence, arch.hidden).requires_grad_(), tensor(1, arch.heads, own, sequence)
    return {
        "encoder": (
            encoder,
            tensor(2, sequence, arch.hidden),
            [bias],
            lambda x: encoder(x, position_bias=bias)[0],
        ),
        "decoder": (
            decoder,
            tensor(2, own, arch.hidden),
            [mine, seen, other],
            lambda x: decoder(x, position_bias=mine, encoder_hidden_states=seen, encoder_decoder_position_bias=other)[
                0
            ],
        ),
    }


@pytest.mark.parametrize("sequence", [256, pytest.param(384, marks=pytest.mark.slow)])
@pytest.mark.parametrize("arch", [WORDS, IMAGES, WINDOWS, BOTH, MIXTURE], ids=lambda arch: type(arch).__name__)
def test_counted_blocks_are_what_a_run_traces(arch: Any, sequence: int) -> None:
    """Kept bytes and FLOPs to the last one, peaks within 20 %."""
    from autopar.profiler.trace import LayerCall, trace

    arch = replace(arch, positions=sequence) if isinstance(arch, WordEncoder) else arch
    layers = arch.profile(MACHINE, sequence=sequence)
    for kind, (module, hidden, sides, run) in blocks(arch, sequence).items():

        def call(x: Any, run: Callable[[Any], Any] = run) -> Any:
            output = run(x)
            return output[0] if isinstance(output, tuple) else output

        cost = found(layers.find(kind))
        traced = trace(LayerCall(module=module, hidden=hidden, sides=sides, run=call))
        assert cost.saved_bytes.at(2) == pytest.approx(traced.saved_bytes, rel=1e-4)
        assert cost.flops.at(2) == pytest.approx(traced.flops, rel=1e-9)
        assert cost.forward_peak_bytes.at(2) == pytest.approx(traced.forward_peak_bytes, rel=0.2)
        assert cost.backward_peak_bytes.at(2) == pytest.approx(traced.backward_peak_bytes, rel=0.2)


def large_calls(cost: LayerCost) -> list[tuple[str, str, float]]:
    """The collectives of activations with their bytes, sorted: those of a norm's gradient move next to nothing."""
    calls = [(call.phase, call.collective, round(call.size_bytes.at(2))) for call in cost.calls]
    most = max(size for *_, size in calls)
    return sorted(call for call in calls if call[2] > most / 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "arch"),
    [
        (
            "BertConfig(hidden_size=96, num_attention_heads=4, intermediate_size=320, num_hidden_layers=2, "
            "vocab_size=512, max_position_embeddings=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)",
            WORDS,
        ),
        (
            "MixtralConfig(hidden_size=96, intermediate_size=320, num_attention_heads=4, num_key_value_heads=2, "
            "num_hidden_layers=2, vocab_size=512, num_local_experts=4, num_experts_per_tok=2)",
            MIXTURE,
        ),
    ],
    ids=["bert", "mixtral"],
)
def test_counted_layers_are_what_profile_model_counts(source: str, arch: Any) -> None:
    """Embedding, block at tp 1 and 2, with and without sequence-parallel norms, and head."""
    from autopar.profiler.counted import count_model

    traced = count_model(source, shipped.devices()["a100-80g"], sequence=128, max_tp=2).layers
    counted = arch.profile(MACHINE, sequence=128)
    for cost in counted.costs:
        if cost.tp > 2:
            continue
        other = found(traced.find(cost.kind, cost.tp, cost.sequence_norms))
        # What norms on half of the sequence leave of a router's few bytes is not counted apart.
        near = 0.05 if cost.sequence_norms else 0.005
        assert cost.saved_bytes.at(2) == pytest.approx(other.saved_bytes.at(2), rel=near, abs=4096)
        assert cost.forward_peak_bytes.at(2) == pytest.approx(other.forward_peak_bytes.at(2), rel=0.25, abs=2e5)
        assert cost.backward_peak_bytes.at(2) == pytest.approx(other.backward_peak_bytes.at(2), rel=0.25, abs=2e5)
        if cost.tp == 1:
            assert cost.flops.at(2) == pytest.approx(other.flops.at(2), rel=1e-9)
        else:
            assert large_calls(cost) == large_calls(other)


def test_seconds_follow_what_each_token_multiplies() -> None:
    """Twice the experts of a token cost twice the products of experts; twice as many experts to choose from do not."""
    base = replace(MIXTURE, hidden=4096, heads=32, kv_heads=8, ffn=14336)

    def block_flops(arch: Mixture) -> float:
        return found(arch.profile(MACHINE, sequence=2048).find("block")).flops.at(1)

    one, two, four = (block_flops(replace(base, top_k=k)) for k in (1, 2, 4))
    assert (four - two) == pytest.approx(2 * (two - one))
    assert two - one == 2 * 2048 * 3 * 4096 * 14336
    assert block_flops(replace(base, experts=8)) == pytest.approx(two, rel=1e-4)  # a wider router
    parameters = [found(replace(base, experts=e).profile(MACHINE, sequence=64).find("block")) for e in (4, 8)]
    assert parameters[1].parameter_bytes > 1.8 * parameters[0].parameter_bytes


@pytest.mark.parametrize("arch", [WORDS, WINDOWS, BOTH, MIXTURE], ids=lambda arch: type(arch).__name__)
def test_local_parameters_add_up_over_tp(arch: Any) -> None:
    layers, spec = arch.profile(MACHINE, sequence=arch.longest or 64), arch.spec("bfloat16")
    assert isinstance(spec, ModelSpec)
    for kind in spec.kinds:
        for tp in kind.tp_degrees if kind.role == "block" else ():
            whole, cut = found(layers.find(kind.name)), found(layers.find(kind.name, tp))
            same = (tp * cut.parameter_bytes - whole.parameter_bytes) / (tp - 1)
            assert 0 < same < whole.parameter_bytes / 2
            assert cut.saved_bytes.at(4) < whole.saved_bytes.at(4)
            assert max(cut.forward_s) < max(whole.forward_s) + 1e-3


def test_widths_that_change_go_from_stage_to_stage() -> None:
    layers = WINDOWS.profile(MACHINE, sequence=WINDOWS.longest)
    chain = [found(layers.find(kind)) for kind in WINDOWS.spec("bfloat16").layers]
    for before, after in pairwise(chain[1:]):
        assert before.output_bytes == after.input_bytes
    assert chain[1].input_bytes.at(1) == 2 * chain[-1].input_bytes.at(1)


def test_images_have_one_length_and_words_as_many_as_there_are_positions() -> None:
    for name, tokens in (
        ("vit-base-16", 197),
        ("swin-base", 3136),
        ("bert-large", 512),
        ("gpt2", 1024),
        ("t5-3b", 2048),
    ):
        assert files(name, "a100-80g:1x8")[0].layers.sequence == tokens
    for name, words in (("vit-base-16", "is 197"), ("bert-large", "--seq 512")):
        with pytest.raises(InputError, match=words):
            files(name, "a100-80g:1x8", sequence=1024)


def test_a_pipeline_of_encoder_and_decoder_is_searched_and_runs() -> None:
    model, cluster = files("t5-base", "a100-80g:1x4", sequence=512)
    plan = uniform(model, cluster, Degrees(pp=4, num_micro_batches=8), global_batch=64)
    assert priced(plan, model, cluster).predicted is not None
    request = Request(global_batch=64, sequence=512, dtype="bfloat16", pp=(2, 4))
    found = search_files(model, cluster, request)
    assert {finalist.plan.pp for finalist in found.finalists} == {2, 4}
    for finalist in found.finalists:
        finalist.plan.check(model.model)


def test_what_crosses_stages_of_encoder_and_decoder_by_hand() -> None:
    """T5-base, 512 tokens and 128 of the decoder, 12 heads, 768 wide, two bytes each; biases whole on each rank."""
    model, _ = files("t5-base", "a100-80g:1x4", sequence=512)
    hidden, encoder, decoder, cross = 2 * 640 * 768, 24 * 512 * 512, 24 * 128 * 128, 24 * 128 * 512
    for layer, sides, back in (
        (1, 0, 0),  # embedding to encoder
        (7, encoder, encoder),
        (13, 0, 0),  # encoder to decoder
        (20, decoder + cross, decoder),
        (25, 0, 0),  # decoder to head
    ):
        found = crossing(model.model, model.layers, layer, 8, 2)
        assert (found.hidden_bytes, found.sides_bytes, found.back_bytes) == (4 * hidden, sides, 4 * hidden + back)
    words = 32128 * 768 * 2
    parts = parts_of(model.model, range(7, 26), 2)
    assert [part.kind for part in parts if part.layer in (0, 25)] == ["between", "head"]
    assert doubled_bytes(model.model, parts, len(parts) - 1) == words
    assert parts_of(model.model, range(26), 1) == tuple(
        Part(layer=layer, kind=kind) for layer, kind in enumerate(model.model.layers)
    )
