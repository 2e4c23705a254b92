"""The one place that imports transformers: lazily, offline, and only the classes asked for.

Importing it costs seconds, so that a plain nn.Module never pays for it.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import InputError
from autopar.runtime.machine import machine_memory_bytes
from autopar.units import format_bytes

SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
_EVERY_CONFIG = ("tie_word_embeddings", "is_encoder_decoder", "num_labels", "problem_type", *SPECIAL_TOKENS)
_MOST_LAYERS = 10_000
_DROPS_A_MASK = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
_RUNTIME_SETS = ("attn_implementation", "use_cache", "dtype", "torch_dtype")


def is_hugging_face(model: nn.Module) -> bool:
    """Whether the model is a Hugging Face one; never imports transformers."""
    module = sys.modules.get("transformers.modeling_utils")
    return module is not None and isinstance(model, module.PreTrainedModel)


def recompute_buffers(model: nn.Module) -> None:
    """Let a Hugging Face model compute the buffers that it has on the meta device; others stay as they are.

    Its parameters must be on the meta device, where initialising them changes nothing. What is not computed is left on
    the meta device.
    """
    places = [
        (owner, leaf, buffer)
        for owner in model.modules()
        for leaf, buffer in owner.named_buffers(recurse=False, remove_duplicate=False)
        if buffer.is_meta
    ]
    if not places or not is_hugging_face(model):
        return
    for owner, leaf, buffer in places:
        setattr(owner, leaf, _impossible(buffer))
    whole: Any = model
    whole.initialize_weights()
    for owner, leaf, buffer in places:
        if torch.equal(_bits(getattr(owner, leaf)), _bits(_impossible(buffer))):
            setattr(owner, leaf, buffer)


def _impossible(buffer: torch.Tensor) -> torch.Tensor:
    """A tensor of this form with numbers that no buffer holds."""
    wrong = float("nan") if buffer.is_floating_point() else 0 if buffer.dtype == torch.bool else -1
    return torch.full(buffer.shape, wrong, dtype=buffer.dtype)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.isnan() if tensor.is_floating_point() else tensor


def trainer_class() -> Any:
    """transformers.Trainer; InputError where transformers is not installed."""
    return _attribute("Trainer")


def is_config_path(base: str) -> bool:
    """Whether a MODEL is to be read from a file or folder, rather than the name of a config class."""
    return base.endswith(".json") or os.path.isdir(base)


def build_hugging_face(base: str, overrides: dict[str, Any], dtype: torch.dtype, *, stored: bool = True) -> nn.Module:
    """The model of a config class, a model class, a folder with config.json or a config.json.

    Which class: the one that is named, or that the file's `architectures` name where it has a loss; otherwise the
    language model of the config (causal; of an encoder masked, of an encoder-decoder sequence to sequence), or what
    classifies images or transcribes speech. Attention runs as `sdpa` where the architecture has it, without a cache of
    keys and values. The weights come from torch's current generator on torch's current default device.
    Raises InputError.
    """
    with _quiet():
        config = _config(base, overrides)
        return _build(base, overrides, config, dtype, stored)


def _build(base: str, overrides: dict[str, Any], config: Any, dtype: torch.dtype, stored: bool) -> nn.Module:
    auto = _model_class(base, config)
    config.use_cache = False
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0  # as T5's own checkpoints do
    try:
        _check_size(auto, config, dtype, stored)
        model = _from_config(auto, config, dtype=dtype, attn_implementation=_attention(auto, config))
    except InputError:
        raise
    except Exception as error:
        what = f"{base}({_shown(overrides)}) makes no {auto.__name__}"
        raise InputError(what, why=_first_line(error), fix="change the settings that it names") from error
    if not isinstance(model, nn.Module):
        raise TypeError(f"{auto.__name__} gave a {type(model).__name__}")
    if getattr(model, "loss_type", "") is None:  # where it is unknown, transformers takes this one, with a warning
        model.loss_type = "ForCausalLM"
    return model


def is_model_class(base: str) -> bool:
    """Whether a MODEL is the name of a class for a task, as BertForMaskedLM is."""
    return re.fullmatch(r"\w+(For|LMHead)\w+", base, re.ASCII) is not None and not base.endswith("Config")


def _model_class(base: str, config: Any) -> Any:
    """The class to build for a config: as `build_hugging_face` says. An Auto class, or a model's own."""
    named = [base] if is_model_class(base) else [n for n in config.architectures or () if is_model_class(n)]
    if named and hasattr(importlib.import_module("transformers"), named[0]):
        return _attribute(named[0])
    kind = type(config)
    causal, masked, images = (
        kind in _attribute(f"MODEL_FOR_{task}_MAPPING") for task in ("CAUSAL_LM", "MASKED_LM", "IMAGE_CLASSIFICATION")
    )
    if getattr(config, "is_encoder_decoder", False):
        speech = kind in _attribute("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING")
        return _attribute("AutoModelForSpeechSeq2Seq" if speech else "AutoModelForSeq2SeqLM")
    if masked and not (causal and getattr(config, "is_decoder", False)):
        return _attribute("AutoModelForMaskedLM")
    return _attribute("AutoModelForImageClassification" if images and not causal else "AutoModelForCausalLM")


def _from_config(kind: Any, config: Any, **settings: Any) -> Any:
    """A model of an Auto class or of one of its own, which has the same function under a private name."""
    return (
        kind.from_config(config, **settings) if hasattr(kind, "from_config") else kind._from_config(config, **settings)
    )


def _attention(auto: Any, config: Any) -> str:
    """`sdpa` where the architecture has it, otherwise `eager`; tried on the meta device."""
    with torch.device("meta"):
        try:
            _from_config(auto, config, attn_implementation="sdpa")
        except (ValueError, ImportError):
            return "eager"
    return "sdpa"


def _check_size(auto: Any, config: Any, dtype: torch.dtype, stored: bool) -> None:
    """Refuse a model larger than this machine's memory: building it would end the process without a word."""
    layers = getattr(config, "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise InputError(f"{layers} layers are absurd", why=f"at most {_MOST_LAYERS} are built", fix="check the sizes")
    if torch.get_default_device().type != "cpu" or not stored:
        return
    with torch.device("meta"):
        size_bytes = sum(p.nbytes for p in _from_config(auto, config, dtype=dtype).parameters())
    memory_bytes = machine_memory_bytes()
    if size_bytes > memory_bytes:
        raise InputError(
            f"{type(config).__name__} makes a model of {format_bytes(size_bytes)}",
            why=f"this machine has {format_bytes(memory_bytes)}",
            fix="check the sizes, or take a smaller model",
        )


@contextmanager
def unpacked() -> Iterator[None]:
    """While inside, models take every row of a batch for one sequence, without a look at its positions.

    On fake tensors they cannot look, and make a mask of sequence^2 in case there are several, which no real run has.
    Nor can a truncated normal distribution look at its numbers: nothing is drawn.
    """
    if importlib.util.find_spec("transformers") is None:
        yield
        return
    masks: Any = importlib.import_module("transformers.masking_utils")
    first: Any = importlib.import_module("transformers.initialization")
    find, draw = masks.find_packed_sequence_indices, first.trunc_normal_
    masks.find_packed_sequence_indices = lambda position_ids: None
    first.trunc_normal_ = lambda tensor, *args, **kwargs: tensor
    try:
        yield
    finally:
        masks.find_packed_sequence_indices, first.trunc_normal_ = find, draw


@contextmanager
def masks_kept(model: nn.Module) -> Iterator[None]:
    """While inside, a Hugging Face model makes its attention mask whatever the samples are.

    Left to itself it drops the mask where no sample of the rank is padded, and ranks then differ in what they run.
    """
    if not is_hugging_face(model):
        yield
        return
    masks: Any = importlib.import_module("transformers.masking_utils")
    real = {name: getattr(masks, name) for name in _DROPS_A_MASK}
    for name in _DROPS_A_MASK:
        setattr(masks, name, lambda *args, **kwargs: False)
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(masks, name, function)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the advice that transformers logs about token ids and heads: it is about text, which we do not make."""
    log = _attribute("logging")
    level = log.get_verbosity()
    log.set_verbosity_error()
    try:
        yield
    finally:
        log.set_verbosity(level)


def _config(base: str, overrides: dict[str, Any]) -> Any:
    from_file = is_config_path(base)
    fields = _read_json(Path(base)) if from_file else {}
    if from_file:
        kind = _config_class(str(fields.get("model_type")))
    else:
        kind = _attribute(base).config_class if is_model_class(base) else _attribute(base)
    _check_names(kind, overrides)
    try:
        if not from_file:
            return kind(**overrides)
        aliases = getattr(kind, "attribute_map", {})
        named = {aliases.get(name, name): value for name, value in overrides.items()}
        return kind.from_dict({**fields, **named})
    except Exception as error:
        what = f"{base} is not acceptable" if not overrides else f"{base} does not accept {_shown(overrides)}"
        raise InputError(what, why=_first_line(error), fix="change the settings that it names") from error


def _shown(overrides: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in overrides.items())


def _first_line(error: Exception) -> str:
    cause = error.__cause__ or error
    return " ".join(str(cause).split())[:300] or type(cause).__name__


def _check_names(kind: Any, overrides: dict[str, Any]) -> None:
    """Refuse a setting that the config class does not know: it would be stored and change nothing."""
    known = {*inspect.signature(kind.__init__).parameters, *getattr(kind, "attribute_map", {}), *_EVERY_CONFIG}
    known -= {"self", "kwargs", *_RUNTIME_SETS}
    for name in overrides:
        if name in _RUNTIME_SETS:
            raise InputError(f"{name} cannot be set in a MODEL", why="autopar sets it itself", fix=f"leave out {name}")
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            raise InputError(
                f"{kind.__name__} has no setting {name!r}",
                why=f"it has {', '.join(sorted(known)[:12])}, ...",
                fix=f"did you mean {near[0]}?" if near else f"see the documentation of {kind.__name__}",
            )


def _read_json(path: Path) -> dict[str, Any]:
    path = path / "config.json" if os.path.isdir(path) else path
    fix = "give a folder or file of a Hugging Face model with its config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist", why="no such file", fix=fix) from None
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON", why=str(error), fix=fix) from None
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        kind = fields.get("kind") if isinstance(fields, dict) else None
        why = "it has no model_type" if kind is None else f"it is a file of kind {kind!r}"
        raise InputError(f"{path} is not a Hugging Face config", why=why, fix=fix)
    return {name: value for name, value in fields.items() if name not in ("dtype", "torch_dtype")}


def _config_class(model_type: str) -> Any:
    mapping = _attribute("CONFIG_MAPPING")
    if model_type not in mapping:
        near = difflib.get_close_matches(model_type, list(mapping.keys()), n=3)
        raise InputError(
            f"model_type {model_type!r} is unknown",
            why="the installed transformers has no such model",
            fix=f"did you mean {', '.join(near)}?" if near else "update transformers, or check model_type",
        )
    return mapping[model_type]


def _attribute(name: str) -> Any:
    """transformers.<name>; InputError where transformers or the name does not exist."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        module = importlib.import_module("transformers")
    except ImportError as error:
        raise InputError(
            f"{name} needs the package transformers",
            why=f"it cannot be imported: {_first_line(error)}",
            fix="pip install 'autopar[hf]'",
        ) from None
    try:
        return getattr(module, name)
    except AttributeError:
        near = _similar(name, [n for n in dir(module) if n.endswith("Config") or is_model_class(n)])
        raise InputError(
            f"transformers has no {'model' if is_model_class(name) else 'config'} class {name!r}",
            why=f"the nearest are {', '.join(near)}" if near else "none has a similar name",
            fix=f"did you mean {near[0]}?" if near else "write for example LlamaConfig(hidden_size=128)",
        ) from None


def _similar(name: str, known: list[str]) -> list[str]:
    """Up to three of `known` that differ little from `name`, whatever their case."""
    by_lower = {k.lower().removesuffix("config"): k for k in known}
    stem = name.lower().removesuffix("config")
    return [by_lower[near] for near in difflib.get_close_matches(stem, list(by_lower), n=3)]
