"""How the tests run a command line, and what they expect of a refusal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

SEARCH = ("search", "--model", "model.json", "--cluster", "cluster.json", "-o", "out.json", "--global-batch")


@dataclass(frozen=True)
class Answer:
    returncode: int
    stdout: str
    stderr: str


Run = Callable[[Sequence[str]], Answer]


def refused(run: Run, arguments: Sequence[str], folder: Path, code: int) -> str:
    """The error text, after checking the exit code and that nothing else was said or left behind."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = run(arguments)
    error = done.stderr[done.stderr.find("error: ") :]
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert (done.stderr.count("error: "), error.count("\n  why: "), error.count("\n  fix: ")) == (1, 1, 1), done.stderr
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    return error
