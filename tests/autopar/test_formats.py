"""Files survive write, read, write byte for byte; no damaged file gives anything but InputError."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.errors import InputError
from autopar.formats import write_file
from autopar.measured import ClusterFile, ModelFile
from autopar.plan import Plan
from tests.draws import cluster_files, model_files, plans
from tests.values import GOLDEN, golden

KINDS: dict[str, type[Plan] | type[ClusterFile] | type[ModelFile]] = {
    "plan.json": Plan,
    "cluster.json": ClusterFile,
    "model.json": ModelFile,
}
quick = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@settings(quick, max_examples=60)
@given(value=st.one_of(plans(), cluster_files(), model_files()))
def test_write_read_write_gives_the_same_bytes(tmp_path: Path, value: Plan | ClusterFile | ModelFile) -> None:
    path = tmp_path / "file.json"
    value.save(path)
    again = type(value).load(path)
    assert again == value
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", golden())
def test_golden_files(name: str) -> None:
    value = golden()[name]
    assert (GOLDEN / name).read_text(encoding="utf-8") == value.dumps(), "the schema changed: see CONTRIBUTING.md"
    assert name not in KINDS or KINDS[name].load(GOLDEN / name) == value


def test_a_run_holds_predicted_and_measured_under_the_same_keys() -> None:
    content = json.loads((GOLDEN / "run.json").read_text())
    assert content["predicted"].keys() == content["measured"].keys() == {"step_s", "peak_memory_bytes"}
    assert len(content["predicted"]["peak_memory_bytes"]) == len(content["measured"]["peak_memory_bytes"]) == 4
    assert content["plan"] == json.loads((GOLDEN / "plan.json").read_text())


def _nodes(data: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of the data."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    found = []
    for key, value in items:
        found += [(data, key), *_nodes(value)]
    return found


junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.text(max_size=5),
    # Made anew for each example: a later mutation may go into them.
    st.builds(list),
    st.builds(dict),
    st.builds(lambda: [1]),
    st.builds(lambda: {"a": 1}),
)


@settings(quick, max_examples=250)
@given(name=st.sampled_from(sorted(KINDS)), data=st.data())
def test_a_mutated_file_is_an_input_error_or_still_a_value(tmp_path: Path, name: str, data: st.DataObject) -> None:
    content = json.loads((GOLDEN / name).read_text())
    if name == "plan.json" and data.draw(st.booleans()):
        content["predicted"] = None  # its count of ranks would otherwise catch every wrong world size
    for _ in range(data.draw(st.integers(1, 3))):
        nodes = _nodes(content)
        container, key = nodes[data.draw(st.integers(0, len(nodes) - 1))]
        match data.draw(st.sampled_from(("drop", "change", "rename", "add"))):
            case "drop":
                del container[key]
            case "rename" if isinstance(container, dict):
                container[data.draw(st.text(max_size=5))] = container.pop(key)
            case "add" if isinstance(container, list):
                container.append(data.draw(junk))
            case _:
                container[key] = data.draw(junk)
    path = tmp_path / name
    path.write_text(json.dumps(content))
    with contextlib.suppress(InputError):
        value = KINDS[name].load(path)
        value.save(path)
        assert KINDS[name].load(path) == value


@settings(quick, max_examples=100)
@given(name=st.sampled_from(sorted(KINDS)), data=st.data())
def test_a_truncated_or_garbled_file_is_an_input_error(tmp_path: Path, name: str, data: st.DataObject) -> None:
    whole = (GOLDEN / name).read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 3))
    path = tmp_path / name
    path.write_bytes(whole[:cut] + data.draw(st.binary(max_size=3)))
    with pytest.raises(InputError):
        KINDS[name].load(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"null", b"3", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"kind": "other"}', b'{"a": NaN}', b"9" * 9999],
)
@pytest.mark.parametrize("name", KINDS)
def test_foreign_content_is_an_input_error(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError):
        KINDS[name].load(path)


@pytest.mark.parametrize("name", KINDS)
def test_a_missing_file_and_a_folder_are_input_errors(tmp_path: Path, name: str) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(InputError):
            KINDS[name].load(path)


def test_one_kind_of_file_is_not_another() -> None:
    for name in KINDS:
        for other, kind in KINDS.items():
            if other != name:
                with pytest.raises(InputError, match=r"is not an autopar\.\w+ file"):
                    kind.load(GOLDEN / name)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_file(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_file(path, "new \udc80")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.json"]
    with pytest.raises(InputError):
        write_file(tmp_path / "missing" / "plan.json", "x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError):
        write_file(tmp_path / "folder", "x")
    assert sorted(os.listdir(tmp_path)) == ["folder", "plan.json"]


def test_a_killed_writer_never_leaves_half_a_file(tmp_path: Path) -> None:
    """A reader sees the old text or the new one, whenever the writer dies."""
    path = tmp_path / "plan.json"
    path.write_text("old" * 100_000)
    program = f"from autopar.formats import write_file\nwhile True: write_file({str(path)!r}, 'new' * 100_000)"
    writer = subprocess.Popen([sys.executable, "-c", program])
    with contextlib.suppress(subprocess.TimeoutExpired):
        writer.wait(timeout=1)
    writer.kill()
    writer.wait()
    assert path.read_text() in ("old" * 100_000, "new" * 100_000)


@pytest.mark.parametrize("number", ["9" * 400, "-" + "9" * 400, "9" * 4000, "1e999", "true"])
def test_a_number_beyond_every_float_is_an_input_error(tmp_path: Path, number: str) -> None:
    path = tmp_path / "cluster.json"
    content = json.loads((GOLDEN / "cluster.json").read_text())
    content["links"]["overlap_slowdown"] = "HERE"
    path.write_text(json.dumps(content).replace('"HERE"', number))
    with pytest.raises(InputError, match="must be a finite number"):
        ClusterFile.load(path)


def test_a_key_that_comes_twice_is_an_input_error() -> None:
    text = (GOLDEN / "plan.json").read_text().replace('"schema": 1,', '"schema": 1, "schedule": "gpipe",', 1)
    with pytest.raises(InputError, match="has the key 'schedule' twice") as caught:
        Plan.loads(text)
    assert caught.value.why
    assert caught.value.fix


@pytest.mark.parametrize("word", ["\ud800", "x" * 100_000, 7, None, [], {}])
def test_errors_of_any_value_are_short_and_say_what_why_and_fix(tmp_path: Path, word: object) -> None:
    path = tmp_path / "cluster.json"
    for keys in (("kind",), ("schema",), ("cluster", "device"), ("cluster", "world_size"), ("links", "curves")):
        content = json.loads((GOLDEN / "cluster.json").read_text())
        inside = content
        for key in keys[:-1]:
            inside = inside[key]
        if inside[keys[-1]] == word or (word == [] and keys[-1] == "curves"):
            continue
        inside[keys[-1]] = word
        path.write_text(json.dumps(content))
        with pytest.raises(InputError) as caught:
            ClusterFile.load(path)
        assert caught.value.why
        assert caught.value.fix
        assert len(str(caught.value)) < 1000


def test_text_that_no_file_can_hold_is_an_input_error(tmp_path: Path) -> None:
    content = json.loads((GOLDEN / "plan.json").read_text())
    for place in (("model", "name", "\ud800"), ("versions", "\ud800", "1")):
        changed = {**content, place[0]: {**content[place[0]], place[1]: place[2]}}
        with pytest.raises(InputError, match="UTF-8"):
            Plan.loads(json.dumps(changed))


def test_only_a_regular_file_is_replaced(tmp_path: Path) -> None:
    """Renaming over a device or a pipe would take it away from everyone else."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for path in (pipe, tmp_path / "link", tmp_path / "no" / "file", tmp_path / ("x" * 300), tmp_path):
        with pytest.raises(InputError, match="cannot be written") as caught:
            write_file(path, "text")
        assert caught.value.why
        assert len(str(caught.value)) < 1000
    assert pipe.is_fifo()
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


def test_a_link_stays_and_its_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "plan.json")
    write_file(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert os.listdir(tmp_path / "there") == ["plan.json"]
    assert (tmp_path / "there" / "plan.json").read_text() == "text"


def test_a_name_as_long_as_the_system_allows_can_be_written(tmp_path: Path) -> None:
    write_file(tmp_path / ("x" * 255), "text")
    assert os.listdir(tmp_path) == ["x" * 255]


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("cluster.json", ("links", "overlap_slowdown"), 0.0),
        ("cluster.json", ("links", "overlap_slowdown"), -1.5),
        ("cluster.json", ("links", "curves", 0, "shape", "ranks"), 0),
        ("cluster.json", ("links", "curves", 0, "shape", "concurrent"), -1),
        ("cluster.json", ("cluster", "ranks_per_node"), 10**9),
        ("cluster.json", ("cluster", "memory_bytes"), 10**30),
        ("model.json", ("layers", "processes"), 0),
        ("model.json", ("layers", "sequence"), -32),
        ("model.json", ("layers", "sequence"), 10**30),
        ("model.json", ("layers", "costs", 0, "kind"), "nobody"),
        ("model.json", ("layers", "costs", 0, "saved_bytes", "per_sample"), 1e308),
        ("model.json", ("layers", "costs", 0, "parameter_bytes"), 10**30),
        ("model.json", ("layers", "costs", 0, "largest_parameter_bytes"), 10**30),
        ("model.json", ("model", "kinds", 0, "parameters", 0, "shape", 0), 10**30),
    ],
)
def test_numbers_that_no_machine_has_are_input_errors(
    tmp_path: Path, name: str, place: tuple[str | int, ...], value: object
) -> None:
    content = json.loads((GOLDEN / name).read_text())
    inside = content
    for key in place[:-1]:
        inside = inside[key]
    assert place[-1] in inside or isinstance(place[-1], int)
    inside[place[-1]] = value
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(InputError, match="is not acceptable"):
        KINDS[name].load(tmp_path / name)
