"""Frozen values to JSON and back: versioned, strict, written whole or not at all.

A file is one object `{"kind": ..., "schema": ..., <fields>}`. The reader checks every key and type against the
dataclass; an unknown key is an error that suggests the nearest known one. The same value gives the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import os
import stat
import tempfile
import types
import typing
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from autopar.errors import InputError

T = TypeVar("T")

_OMITTED = "autopar.omitted"
_CORRECT = "correct the file or write it again"


def omitted(default: T) -> T:
    """The default of a dataclass field that files leave out while it holds: older files keep their bytes."""
    return dataclasses.field(default=default, metadata={_OMITTED: True})


def to_plain(value: Any) -> Any:
    """The value as JSON types: dataclasses become objects in field order, tuples become arrays."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {f.name: to_plain(getattr(value, f.name)) for f in fields if not _is_left_out(f, value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return value


def _is_left_out(field: dataclasses.Field[Any], value: Any) -> bool:
    return _OMITTED in field.metadata and getattr(value, field.name) == field.default


def from_plain(kind: type[T], data: Any, where: str) -> T:
    """The value of type `kind` that `data` (JSON types) describes.

    `where` names the file and field in errors. Raises InputError for unknown, missing or ill-typed fields, numbers
    that are not finite, and values that the dataclass itself refuses.
    """
    return typing.cast(T, _read(kind, data, where))


def _read(kind: Any, data: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _read_dataclass(kind, data, where)
    if origin in (types.UnionType, typing.Union):
        options = typing.get_args(kind)
        if data is None and type(None) in options:
            return None
        (option,) = (o for o in options if o is not type(None))
        return _read(option, data, where)
    if origin is typing.Literal:
        options = typing.get_args(kind)
        if data not in options or isinstance(data, bool):
            hint = _nearest(str(data)[:100], [str(o) for o in options])
            raise InputError(
                f"{where} cannot be {_shown(data)}", why=f"it is one of {list(options)}", fix=hint or _CORRECT
            )
        return data
    if origin is tuple:
        if not isinstance(data, list):
            raise _wrong(where, "a list", data)
        items = typing.get_args(kind)
        if items[-1:] == (...,):
            return tuple(_read(items[0], item, f"{where}[{i}]") for i, item in enumerate(data))
        if len(items) != len(data):
            raise _wrong(where, f"a list of {len(items)}", data)
        return tuple(_read(item, d, f"{where}[{i}]") for i, (item, d) in enumerate(zip(items, data, strict=True)))
    if origin in (dict, Mapping) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        if not isinstance(data, dict):
            raise _wrong(where, "an object", data)
        value = typing.get_args(kind)[1]
        return {_read(str, key, where): _read(value, item, f"{where}.{key[:60]}") for key, item in data.items()}
    return _read_scalar(kind, data, where)


def _read_scalar(kind: Any, data: Any, where: str) -> Any:
    if kind is Any:
        return data
    if kind is float:
        if isinstance(data, bool) or not isinstance(data, int | float):
            raise _wrong(where, "a finite number", data)
        try:
            number = float(data)
        except OverflowError:  # a whole number of more than 308 digits
            number = math.inf
        if not math.isfinite(number):
            raise _wrong(where, "a finite number", data)
        return number
    names = {int: "a whole number", str: "a string", bool: "true or false"}
    if kind not in names:
        raise TypeError(f"formats cannot read {kind!r} ({where})")
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise _wrong(where, names[kind], data)
    if kind is str and not _encodable(data):  # half of a pair, written as an escape: no file could hold it
        raise _wrong(where, "text that UTF-8 can write", data)
    return data


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@lru_cache(maxsize=256)
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read_dataclass(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise _wrong(where, "an object", data)
    hints = _hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key in data:
        if key not in fields:
            raise InputError(
                f"{where} has an unknown key {_shown(key)}",
                why=f"known keys: {', '.join(fields)}",
                fix=_nearest(key[:100], list(fields)) or "remove it, or read the file with the version that wrote it",
            )
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _read(hints[name], data[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InputError(f"{where} lacks {name!r}", why="the file is truncated or foreign", fix="write it again")
    try:
        return kind(**values)
    except ValueError as error:
        raise InputError(f"{where} is not acceptable", why=str(error), fix=_CORRECT) from None


def _wrong(where: str, expected: str, data: Any) -> InputError:
    return InputError(f"{where} must be {expected}", why=f"it is {_shown(data)}", fix=_CORRECT)


def _shown(data: Any) -> str:
    """The data in at most 60 characters."""
    try:
        shown = ascii(data)
    except ValueError:  # Python refuses to print whole numbers of more than 4300 digits
        return "a number of thousands of digits"
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _nearest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}?" if near else ""


def dumps(kind: str, schema: int, fields: Mapping[str, Any]) -> str:
    """The text of a file of this kind: one field a line, a trailing newline, no number that is not finite."""
    body = {"kind": kind, "schema": schema, **{key: to_plain(value) for key, value in fields.items()}}
    return json.dumps(body, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def read_file(path: str | os.PathLike[str], kind: str, schema: int) -> dict[str, Any]:
    """The fields of a JSON file of this kind and schema, unchecked beyond those two; InputError otherwise."""
    if not isinstance(path, str | os.PathLike):
        raise InputError("a file must be a path", why=f"it is {path!r:.80}", fix=f"give the path of an {kind!r} file")
    name = Path(path)
    try:
        text = name.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{name} does not exist", why="no such file", fix="check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        fix = f"give a file that autopar wrote as {kind!r}"
        raise InputError(f"{name} cannot be read", why=str(error), fix=fix) from None
    return read_text(text, str(name), kind, schema)


def read_text(text: str, name: str, kind: str, schema: int) -> dict[str, Any]:
    """The fields of the text of such a file; `name` is what errors call it."""
    fix = f"give a file that autopar wrote as {kind!r}"
    if not isinstance(text, str):
        raise InputError(f"{name} is not a text", why=f"it is of type {type(text).__name__}", fix=fix)
    try:
        data = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_once)
    except InputError as error:
        raise InputError(f"{name} has {error.what}", why=error.why, fix=error.fix) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is not JSON", why=f"{error} (truncated?)", fix=fix) from None
    if not isinstance(data, dict) or data.get("kind") != kind:
        found = data.get("kind") if isinstance(data, dict) else type(data).__name__
        raise InputError(f"{name} is not an {kind} file", why=f"its kind is {_shown(found)}", fix=fix)
    if data.get("schema") != schema or isinstance(data.get("schema"), bool):
        raise InputError(
            f"{name} has schema {_shown(data.get('schema'))}",
            why=f"this version reads schema {schema} of {kind}",
            fix="write the file again with this version (CHANGELOG.md lists the changes)",
        )
    return {key: value for key, value in data.items() if key not in ("kind", "schema")}


def read_kind(path: str | os.PathLike[str]) -> str | None:
    """The kind of a file of ours; None for anything else, also for no file at all."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    kind = data.get("kind") if isinstance(data, dict) else None
    return kind if isinstance(kind, str) else None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs; InputError for a key that comes twice: one of its values would go unread."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InputError(f"the key {_shown(twice)} twice", why="only one of its values could count", fix=_CORRECT)
    return found


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise InputError when `path` cannot become a file: it is a folder, device or pipe, or its folder takes none."""
    target = Path(path)
    fix = "name a file in a folder that exists and can be written"
    try:
        folder = _real(target).parent
        mode = _real(target).stat().st_mode if _real(target).exists() else None
        if mode is not None and not stat.S_ISREG(mode):
            why = "it is a folder" if stat.S_ISDIR(mode) else "it is a device or a pipe, not a regular file"
        elif not folder.is_dir():
            why = f"there is no folder {target.parent}"
        elif not os.access(folder, os.W_OK | os.X_OK):
            why = f"the folder {target.parent} is read-only"
        else:
            return
    except (OSError, ValueError) as error:  # a name too long, a loop of links, a zero byte
        why = str(error)
    raise InputError(f"{_name(target)} cannot be written", why=why, fix=fix)


def write_file(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` whole or not at all: to a temporary file beside `path`, then renamed over it.

    A link stays a link: what it points to is replaced. Raises InputError as `check_writable`, and for a full disk.
    """
    check_writable(path)
    target = _real(Path(path))
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".autopar-")
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        mode = os.umask(0)
        os.umask(mode)
        os.chmod(temporary, 0o666 & ~mode)
        os.replace(temporary, target)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        if isinstance(error, OSError):
            raise InputError(
                f"{_name(target)} cannot be written", why=str(error), fix="choose a writable folder with space"
            ) from None
        raise


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _name(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 200 else f"{text[:100]}...{text[-60:]}"
