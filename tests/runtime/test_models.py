"""Models from MODEL strings, their batches, and text."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from autopar.errors import InputError
from autopar.runtime.batches import BatchForm, batch_form, example_batch, max_sequence, vocab_size
from autopar.runtime.models import build_model
from autopar.runtime.source import canonical_source, parse_source
from autopar.runtime.text import ByteBatches, check_vocabulary, default_text, read_text

LLAMA = (
    "LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, "
    "num_key_value_heads=2)"
)
GPT2 = "GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=4)"

PLAIN = """
import torch
from torch import nn

class Plain(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.head = nn.Linear(width, 50)

    def forward(self, idx, targets=None):
        return self.head(self.embedding(idx))

def build(width=8):
    return Plain(width)

def broken():
    raise RuntimeError("no luck")

def number():
    return 3
"""


@pytest.fixture
def plain(tmp_path: Path) -> str:
    path = tmp_path / "plain.py"
    path.write_text(PLAIN)
    return str(path)


@pytest.mark.parametrize("source", [LLAMA, GPT2])
def test_hugging_face_models_are_equal_for_equal_seeds(source: str) -> None:
    state = torch.random.get_rng_state()
    first, second, other = build_model(source), build_model(source), build_model(source, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    same = [torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)]
    assert all(same)
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    assert first.training
    assert first.config._attn_implementation == "sdpa"  # type: ignore[union-attr]
    assert vocab_size(first) == 256
    batch = example_batch(first, samples=2, sequence=8)
    assert torch.isfinite(first(**batch).loss)
    assert torch.equal(batch["input_ids"], batch["labels"])


def test_dtype_and_meta_device() -> None:
    model = build_model(LLAMA, dtype="bf16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()} == {torch.float32}  # rotary frequencies stay exact
    assert {p.device.type for p in build_model(LLAMA, device="meta").parameters()} == {"meta"}


def test_a_config_file_and_folder_with_overrides(tmp_path: Path) -> None:
    build_model(LLAMA).config.save_pretrained(tmp_path)  # type: ignore[operator, union-attr]
    for source in (str(tmp_path), str(tmp_path / "config.json")):
        assert len(build_model(source).model.layers) == 2  # type: ignore[arg-type, union-attr]
    model = build_model(f"{tmp_path}(num_hidden_layers=3)")
    assert len(model.model.layers) == 3  # type: ignore[arg-type, union-attr]
    assert max_sequence(model) == 2048


def test_an_alias_overrides_the_field_of_a_config_file(tmp_path: Path) -> None:
    build_model(GPT2).config.save_pretrained(tmp_path)  # type: ignore[operator, union-attr]
    assert len(build_model(f"{tmp_path}(num_hidden_layers=3)").transformer.h) == 3  # type: ignore[arg-type, union-attr]


def test_a_function_of_a_file(plain: str) -> None:
    model = build_model(f"{plain}:build(width=12)", seed=3)
    assert model.head.in_features == 12
    assert torch.equal(model.head.weight, build_model(f"{plain}:build(width=12)", seed=3).head.weight)
    assert batch_form(model) == BatchForm(ids="idx", labels="targets", shifted=True)
    batch = example_batch(model, samples=2, sequence=6)
    assert batch["idx"].shape == batch["targets"].shape == (2, 6)
    assert torch.equal(batch["idx"][:, 1:], batch["targets"][:, :-1])
    assert vocab_size(model) == 50
    assert max_sequence(model) is None


def test_a_function_of_a_module() -> None:
    assert isinstance(build_model("torch.nn:Linear(in_features=3, out_features=4)"), nn.Linear)


class Positioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(8, 4)
        self.words = nn.Embedding(300, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.positions(torch.arange(x.shape[1])[None]) + self.words(x)


def test_the_vocabulary_is_of_the_table_that_gets_the_ids() -> None:
    model = Positioned()
    assert vocab_size(model) == 300
    assert model.training
    assert example_batch(model, samples=2, sequence=4)["x"].shape == (2, 4)
    assert not model.words._forward_pre_hooks


def test_a_model_without_vocabulary_needs_an_example() -> None:
    with pytest.raises(InputError, match="example="):
        example_batch(nn.Linear(3, 4), samples=1, sequence=2)


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(InputError, match="max_position_embeddings"):
        example_batch(build_model(GPT2), samples=1, sequence=4096)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("LamaConfig", "did you mean LlamaConfig?"),
        ("QqqqzzConfig", "no config class"),
        ("LlamaConfig(hidden_sizze=3)", "did you mean hidden_size?"),
        ("LlamaConfig(hidden_size=100, num_attention_heads=7)", "multiple"),
        ("LlamaConfig(hidden_size=-4)", "does not accept"),
        ("LlamaConfig(vocab_size=-4)", "makes no AutoModelForCausalLM"),
        ("LlamaConfig(hidden_size='a')", "expected int"),
        ("LlamaConfig(vocab_size=1000000000000)", "this machine has"),
        ("LlamaConfig(num_hidden_layers=1000000000)", "absurd"),
        ("LlamaConfig(use_cache=True)", "autopar sets it"),
        ("LlamaConfig(3)", "name=value"),
        ("LlamaConfig(vocab_size=2*3)", "literal"),
        ("LlamaConfig(vocab_size=2, vocab_size=3)", "given once|repeated"),
        ("LlamaConfig(vocab_size=2", "not closed"),
        ("GPT2Config(n_embd=65, n_head=4)", "divisible"),
        ("CLIPVisionConfig()", "makes no AutoModelForCausalLM"),
        ("llama", "did you mean LlamaConfig?"),
        ("", "empty"),
        ("/nowhere/config.json", "does not exist"),
        ("/nowhere/model", "no such file"),
        ("llama" * 1000, "a MODEL is"),
        ("llama/" * 1000, "no such file"),
        ("n" * 300 + ".json", "File name too long"),
        ("nowhere.py:build", "does not exist"),
        ("nowhere.module:build", "No module named"),
        ("os.path:joinn", "did you mean os.path:join?"),
        ("os:getcwd", "returned no nn.Module"),
    ],
)
def test_what_is_no_model_is_refused(source: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        build_model(source)
    assert any(word in str(error.value) for word in words.split("|"))
    assert error.value.fix


def test_functions_that_fail(plain: str) -> None:
    for name, words in (("broken", "no luck"), ("number", "returned a int"), ("buildd", "did you mean")):
        with pytest.raises(InputError, match=words):
            build_model(f"{plain}:{name}")
    with pytest.raises(InputError, match="unexpected keyword"):
        build_model(f"{plain}:build(depth=3)")


def test_a_file_with_a_syntax_error(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def f(:\n")
    with pytest.raises(InputError, match="SyntaxError"):
        build_model(f"{tmp_path}/bad.py:f")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"kind": "autopar.plan"}', "autopar.plan"),
        ("[]", "no model_type"),
        ('{"model_type": "lama"}', "llama"),
        ('{"model_type":', "not JSON"),
        ('{"model_type": "llama", "hidden_size": "a"}', "expected int"),
    ],
)
def test_a_config_file_that_is_none(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=words):
        build_model(str(tmp_path))


def test_without_transformers_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"pip install 'autopar\[hf\]'"):
        build_model(LLAMA)


def test_canonical_source() -> None:
    assert canonical_source("LlamaConfig", {"hidden_size": 8}) == "LlamaConfig(hidden_size=8)"
    assert canonical_source(" LlamaConfig( a=1 ,b='x') ", {"a": 2, "c": None}) == "LlamaConfig(a=2, b='x', c=None)"
    assert canonical_source("a.b:c()") == "a.b:c"
    text = "m.py:f(a=[1, 2], b={'k': (1, 2)}, c=-1.5, d=True)"
    assert canonical_source(text) == text
    assert parse_source(text)[1] == {"a": [1, 2], "b": {"k": (1, 2)}, "c": -1.5, "d": True}


def test_a_path_with_brackets_is_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "model(1)"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}))
    assert len(build_model(str(folder)).transformer.h) == 1  # type: ignore[arg-type, union-attr]


def test_byte_batches_come_from_the_text() -> None:
    text = default_text()
    assert len(text) > 100_000
    batches = ByteBatches(text=text, sequence=32, global_batch=4, seed=5)
    batch = batches.batch(7)
    assert torch.equal(
        batch["input_ids"], ByteBatches(text=text, sequence=32, global_batch=4, seed=5).batch(7)["labels"]
    )
    assert not torch.equal(batch["input_ids"], batches.batch(8)["input_ids"])
    for row in batch["input_ids"]:
        assert bytes(row.tolist()) in text
    first = next(iter(batches))
    assert torch.equal(first["input_ids"], batches.batch(0)["input_ids"])
    shifted = ByteBatches(
        text=text, sequence=32, global_batch=4, seed=5, form=BatchForm(ids="x", labels="y", shifted=True)
    ).batch(7)
    assert torch.equal(shifted["x"], batch["input_ids"])
    assert torch.equal(shifted["x"][:, 1:], shifted["y"][:, :-1])


def test_every_window_of_a_short_text_is_reachable() -> None:
    batches = ByteBatches(text=b"abcd", sequence=2, global_batch=64)
    assert {bytes(row.tolist()) for row in batches.batch(0)["input_ids"]} == {b"ab", b"bc"}


def test_text_that_does_not_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="one sample takes 9"):
        ByteBatches(text=b"12345678", sequence=8, global_batch=1)
    with pytest.raises(InputError, match="does not exist"):
        read_text(tmp_path / "none.txt")
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(InputError, match="is empty"):
        read_text(tmp_path / "empty.txt")
    with pytest.raises(InputError, match="cannot be read"):
        read_text(tmp_path)
    (tmp_path / "latin.txt").write_bytes("Straße".encode("latin-1"))
    assert read_text(tmp_path / "latin.txt")[4] == 0xDF
    with pytest.raises(InputError, match="256"):
        check_vocabulary(100)


@pytest.mark.parametrize(
    "code", ["import sys; sys.exit(0)", "raise SystemExit", "1 / 0", "def build(:", "import nowhere"]
)
def test_a_file_that_fails_or_ends_the_interpreter_is_an_input_error(tmp_path: Path, code: str) -> None:
    path = tmp_path / "model.py"
    path.write_text(code)
    with pytest.raises(InputError, match="cannot be imported"):
        build_model(f"{path}:build")


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "raise KeyError(3)"])
def test_a_function_that_fails_or_ends_the_interpreter_is_an_input_error(tmp_path: Path, code: str) -> None:
    path = tmp_path / "model.py"
    path.write_text(f"def build():\n    {code}\n")
    with pytest.raises(InputError, match="raised an error"):
        build_model(f"{path}:build")
