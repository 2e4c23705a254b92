"""MODEL strings: what stands before the brackets, and the overrides in them. No torch.

A MODEL string is one of, each with optional overrides in brackets (keyword literals only):

    LlamaConfig(hidden_size=128, num_hidden_layers=4)   a Hugging Face config class
    BertForSequenceClassification(num_labels=3)   a Hugging Face model class, of a task
    path/to/folder, path/to/config.json(num_hidden_layers=2)   a saved Hugging Face config
    package.module:function(depth=4), path/to/file.py:function   a function that returns an nn.Module
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Mapping
from typing import Any

from autopar.errors import InputError

FORMS = (
    "a Hugging Face config class such as LlamaConfig(hidden_size=128), a folder with config.json, a config.json, "
    "package.module:function or path/to/file.py:function"
)
"""What a MODEL string can be, in words."""

_CALL = re.compile(r"(?P<base>.+?)\s*(?P<arguments>\(.*\))", re.DOTALL)


def parse_source(text: str) -> tuple[str, dict[str, Any]]:
    """The part of a MODEL string before its brackets, and the overrides in them; InputError for anything else."""
    text = text.strip()
    match = None if os.path.exists(text) else _CALL.fullmatch(text)
    if match is None:
        if not text:
            raise InputError("the MODEL is empty", why=f"it is {FORMS}", fix="name a model")
        return text, {}
    fix = "write for example LlamaConfig(hidden_size=128, num_hidden_layers=4)"
    try:
        call = ast.parse(f"f{match['arguments']}", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{text!r} is not a MODEL", why=f"its brackets do not parse: {error}", fix=fix) from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise InputError(f"{text!r} is not a MODEL", why="the brackets hold only name=value", fix=fix)
    overrides: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in overrides:
            raise InputError(f"{text!r} is not a MODEL", why="each override is name=value, given once", fix=fix)
        try:
            overrides[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            why = f"the value of {keyword.arg} is not a literal (a number, string, list, True, None, ...)"
            raise InputError(f"{text!r} is not a MODEL", why=why, fix=fix) from None
    return match["base"], overrides


def canonical_source(text: str, overrides: Mapping[str, Any] | None = None) -> str:
    """The MODEL string with `overrides` merged into its brackets (the later value wins, the order is kept)."""
    base, given = parse_source(text)
    merged = {**given, **(overrides or {})}
    for name in merged:
        if not name.isidentifier():
            raise InputError(
                f"{name!r} is not the name of a setting", why="it is no identifier", fix="write name=value"
            )
    return f"{base}({', '.join(f'{name}={value!r}' for name, value in merged.items())})" if merged else base
