from __future__ import annotations

import pytest

from autopar import shipped
from autopar.architectures import Architecture, layer_profile, model_spec
from tests.autopar.test_roofline import MACHINE

# Published parameter counts (model cards, safetensors indices).
PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    assert shipped.architectures()[name].parameter_count == PARAMETERS[name]


def test_tp_degrees_divide_heads_and_width() -> None:
    assert shipped.architectures()["llama3-8b"].tp_degrees == (2, 4, 8)
    assert shipped.architectures()["qwen2.5-0.5b"].tp_degrees == (2,)


def test_refuses_heads_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match="kv_heads"):
        Architecture(name="x", layers=1, hidden=8, heads=4, kv_heads=3, ffn=8, vocab=8, gated=True, tied=False)


def test_local_parameters_add_up_over_tp() -> None:
    arch = shipped.architectures()["llama2-7b"]
    costs = layer_profile(arch, MACHINE, sequence=4096)
    whole, cut = costs.find("block"), costs.find("block", 4, True)
    assert whole is not None
    assert cut is not None
    norms = 2 * 2 * arch.hidden
    assert 4 * (cut.parameter_bytes - norms) == whole.parameter_bytes - norms
    assert cut.forward_s < whole.forward_s
    assert {call.collective for call in cut.calls} == {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize(
    ("source", "arch"),
    [
        (
            "LlamaConfig(hidden_size=256, intermediate_size=768, num_hidden_layers=2, num_attention_heads=8, "
            "num_key_value_heads=4, vocab_size=1024, max_position_embeddings=256)",
            Architecture(
                name="l", layers=2, hidden=256, heads=8, kv_heads=4, ffn=768, vocab=1024, gated=True, tied=False
            ),
        ),
        (
            "GPT2Config(n_embd=256, n_layer=2, n_head=8, vocab_size=1024, n_positions=256, resid_pdrop=0.0, "
            "attn_pdrop=0.0, embd_pdrop=0.0)",
            Architecture(
                name="g",
                layers=2,
                hidden=256,
                heads=8,
                kv_heads=8,
                ffn=1024,
                vocab=1024,
                gated=False,
                tied=True,
                biased=True,
                positions=256,
            ),
        ),
    ],
    ids=["llama", "gpt2"],
)
def test_counted_bytes_are_what_the_profiler_traces(source: str, arch: Architecture) -> None:
    from autopar.profiler.layers import LayerBench
    from autopar.profiler.trace import trace
    from autopar.runtime.models import build_model

    bench = LayerBench(build_model(source, dtype="bfloat16"), sequence=128)
    costs = layer_profile(arch, MACHINE, sequence=128)
    spec = model_spec(arch, dtype="bfloat16")
    for key in bench.keys(()):
        counted = costs.find({"embed": "embed", "head": "head"}.get(key.kind, "block"))
        assert counted is not None
        traced = trace(bench.call(key, 2))
        assert counted.saved_bytes.at(2) == pytest.approx(traced.saved_bytes, rel=0.002, abs=2048)
        assert counted.forward_peak_bytes.at(2) == pytest.approx(traced.forward_peak_bytes, rel=0.01, abs=2e5)
        assert counted.backward_peak_bytes.at(2) == pytest.approx(traced.backward_peak_bytes, rel=0.2, abs=2e5)
    traced_kinds = {kind.role: kind.parameter_count for kind in bench.spec.kinds}
    assert traced_kinds == {kind.role: kind.parameter_count for kind in spec.kinds}
