"""The layout is a test: links, package list, sizes of files, documents and imports agree."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from autopar.legality import why_not_runnable
from autopar.report import strategy_words
from autopar.strategy import Strategy
from tests.values import GOLDEN

ROOT = Path(__file__).parent.parent
ROOMS = ("profiler", "solvers", "runtime", "profiles")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = sorted(path for folder in ("autopar", *ROOMS, "examples", "tests") for path in (ROOT / folder).rglob("*.py"))


def test_rooms_are_links_to_the_folders_at_the_top() -> None:
    for room in ROOMS:
        link = ROOT / "autopar" / room
        assert link.is_symlink()
        assert link.readlink() == Path("..") / room
        assert (ROOT / room / "__init__.py").is_file()


def test_the_package_list_names_every_folder_with_code() -> None:
    settings = PROJECT["tool"]["setuptools"]
    found = {"autopar": "autopar"}
    for room in ROOMS:
        folders = {path.parent.relative_to(ROOT) for path in (ROOT / room).rglob("*.py")}
        found |= {".".join(("autopar", *folder.parts)): folder.as_posix() for folder in folders}
    for folder in {path.parent for path in (ROOT / "autopar").glob("*/*.py")}:
        assert folder.is_symlink(), f"{folder.name} is neither a room nor listed"
    assert settings["package-dir"] == found
    assert sorted(settings["packages"]) == sorted(found)


def test_each_folder_with_code_has_an_init() -> None:
    for folder in {path.parent for room in ROOMS for path in (ROOT / room).rglob("*.py")}:
        assert (folder / "__init__.py").is_file(), folder
    assert not list((ROOT / "tests").rglob("__init__.py")), "tests are collected by importlib, without packages"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_file_holds_two_subjects(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


def test_every_module_stands_on_a_floor() -> None:
    contracts = {c["name"]: c for c in PROJECT["tool"]["importlinter"]["contracts"]}
    layers = contracts["floors: imports go strictly down"]["layers"]
    floors = {name.strip(" ()") for layer in layers for name in layer.split("|")}
    modules = {f"autopar.{path.stem}" for path in (ROOT / "autopar").glob("*.py") if not path.stem.startswith("__")}
    rooms = {f"autopar.{room}" for room in ROOMS if room != "profiles"}
    assert floors == modules | rooms
    torchless = set(contracts["torch only in profiler and runtime"]["source_modules"])
    assert torchless == floors - {"autopar.profiler", "autopar.runtime"}
    assert set(contracts["solver libraries only in solvers"]["source_modules"]) == floors - {"autopar.solvers"}


def test_a_value_loads_no_torch() -> None:
    heavy = "torch transformers pandas ortools pulp highspy typer rich"
    program = f"""
import sys, autopar
for name in "Plan ModelSpec ClusterSpec Strategy Request AutoparError".split(): getattr(autopar, name)
import autopar.measured, autopar.price, autopar.report, autopar.progress
print([name for name in {heavy!r}.split() if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_public_names_exist() -> None:
    import autopar

    assert set(autopar.__all__) <= set(dir(autopar))
    for name in autopar.__all__:
        assert getattr(autopar, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = autopar.nothing


@pytest.mark.parametrize("name", ["main", "test"])
def test_ci_finds_the_commands_of_the_readme(name: str) -> None:
    """With the very lines of .ci/run, so that a changed README cannot silently run nothing."""
    script = (ROOT / ".ci" / "run").read_text()
    found = re.search(r"^readme_command\(\) \{.*?^\}", script, re.DOTALL | re.MULTILINE)
    assert found is not None
    done = subprocess.run(
        ["bash", "-euc", f"{found[0]}\nreadme_command {name}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    expected = {"main": "pip install -e '.[hf]' && autopar demo", "test": "pip install -e '.[test]' && pytest"}
    assert done.stdout == expected[name] + "\n"


def test_strategies_page_agrees_with_the_code() -> None:
    page = (ROOT / "docs" / "strategies.md").read_text()
    parts = re.findall(r"^\| `(\S+)` \| .* \| (yes|not yet) \|$", page, re.MULTILINE)
    assert len(parts) == 12
    for part, runs in parts:
        strategy = Strategy.parse(part if not part.startswith("-") else f"dp8{'-z3' * (part[1] == 'h')}{part}")
        assert (why_not_runnable(strategy) is None) == (runs == "yes"), part
    examples = re.findall(r"^\| `(\S+)` \| (\d+) \| (.*) \|$", page, re.MULTILINE)
    assert len(examples) == 4
    for short, ranks, words in examples:
        strategy = Strategy.parse(short)
        assert (strategy.short, strategy.ranks, strategy_words(strategy)) == (short, int(ranks), words)


@pytest.mark.parametrize("name", ["plan.json", "cluster.json", "model.json", "run.json"])
def test_files_page_names_every_key(name: str) -> None:
    page = (ROOT / "docs" / "files.md").read_text()
    content = json.loads((GOLDEN / name).read_text())
    if name == "run.json":
        content["plan"] = None  # described under plan.json
    kind, schema = content["kind"], content["schema"]
    section = page.partition(f"## {name}: kind `{kind}`, schema {schema}\n")[2].partition("\n## ")[0]
    assert section, "the page does not name this kind and schema"

    def keys(value: object) -> set[str]:
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        own = set(value) if isinstance(value, dict) else set()
        return own.union(*map(keys, items))

    free = {"torch", "autopar", "parameters", "activations", "compute", "collectives", "a0", "a1"}
    runs = set(content.get("strategies", ()))
    shared = {"kind", "schema", "machine", "date", "command", "versions"}
    missing = {key for key in keys(content) - free - runs - shared if f"`{key}`" not in section}
    assert not missing


def _links() -> list[tuple[Path, str]]:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    return [(page, link) for page in pages for link in re.findall(r"\]\(([^)#]+)\)", page.read_text())]


@pytest.mark.parametrize(("page", "link"), _links(), ids=lambda value: getattr(value, "name", value))
def test_links_between_pages_lead_somewhere(page: Path, link: str) -> None:
    assert "://" in link or (page.parent / link).exists()
