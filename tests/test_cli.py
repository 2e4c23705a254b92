"""The command line as a process, as a user runs it: results on stdout, one error of what, why and fix on stderr."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from autopar.plan import Plan, PlanCluster, PlanModel
from autopar.request import Request
from autopar.strategy import Strategy
from tests.command_line import SEARCH, Answer, Run, refused
from tests.values import measured

ROOT = Path(__file__).parent.parent
USAGE, INPUT, INFEASIBLE, INTERRUPTED = 2, 3, 4, 130


def autopar(arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """What `autopar ARGUMENTS` does in a folder."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "autopar", *arguments]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=280, stdin=subprocess.DEVNULL
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Missing command"),
        (("serch",), "serch"),
        (("profile",), "Missing command"),
        (("search", "--modle", "x"), "--modle"),
        (("search", "--model", "model.json"), "Missing option"),
        (("profile", "cluster", "--nproc", "0"), "--nproc"),
        (("profile", "cluster", "--nproc", "-3"), "--nproc"),
        (("profile", "cluster", "--nproc", "100000"), "--nproc"),
        (("profile", "cluster", "--nproc", "many"), "--nproc"),
        (("profile", "cluster", "--device", "tpu"), "tpu"),
        (("profile", "model"), "MODEL"),
        (("profile", "model", "LlamaConfig", "--set", "hidden_size"), "the form is K=V"),
        (("profile", "model", "LlamaConfig", "--seq", "0"), "--seq"),
        ((*SEARCH, "0"), "--global-batch"),
        ((*SEARCH, "-8"), "--global-batch"),
        ((*SEARCH, "99999999999999999999"), "--global-batch"),
        ((*SEARCH, "16", "--pp", "0"), "--pp"),
        (("run", "plan.json", "--steps", "0"), "--steps"),
        (("demo", "--nproc", "0"), "--nproc"),
        (("verify",), "PLAN"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_command_line_is_exit_2(here: Run, folder: Path, arguments: tuple[str, ...], words: str) -> None:
    assert words in refused(here, arguments, folder, USAGE)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*SEARCH, "16", "--memory", "abc"), "24GiB"),
        ((*SEARCH, "16", "--memory", "-1GiB"), "24GiB"),
        ((*SEARCH, "16", "--memory", "0"), "sensible"),
        ((*SEARCH, "16", "--dtype", "float12"), "float12"),
        ((*SEARCH, "16", "--pin", "0-3 dp4"), "is not a pin"),
        ((*SEARCH, "16", "--pin", "0-3: pp4"), "is not a strategy"),
        ((*SEARCH, "16", "--pin", "0-30: dp4"), "its blocks are 0-3"),
        ((*SEARCH, "16", "--pin", "*: dp8"), "8 ranks"),
        ((*SEARCH, "16", "--pp", "3"), "pp 3 does not divide the 4 ranks"),
        ((*SEARCH, "10", "--pp", "1", "--pin", "*: dp4"), "legal global batches near it: [8, 12]"),
        ((*SEARCH, "10", "--pp", "1"), "legal global batches near it: [8, 12]"),
        ((*SEARCH, "16", "--model", "heads14.json", "--pin", "*: tp4"), "heads 14, kv heads 2"),
        ((*SEARCH, "16", "--model", "none.json"), "none.json does not exist"),
        ((*SEARCH, "16", "--model", "cluster.json"), "is not an autopar.model file"),
        ((*SEARCH, "16", "--model", "truncated-model.json"), "truncated"),
        ((*SEARCH, "16", "--model", "foreign.json"), "kind"),
        ((*SEARCH, "16", "--model", "."), "cannot be read"),
        ((*SEARCH, "16", "--cluster", "truncated-cluster.json"), "truncated"),
        ((*SEARCH, "16", "--cluster", "world0.json"), "world_size"),
        ((*SEARCH, "16", "--cluster", "negative.json"), "memory_bytes"),
        ((*SEARCH, "16", "--cluster", "unknown.json"), "did you mean 'world_size'?"),
        ((*SEARCH, "16", "-o", "none/plan.json"), "there is no folder none"),
        ((*SEARCH, "16", "-o", "."), "it is a folder"),
        (("profile", "cluster", "-o", "none/cluster.json"), "there is no folder none"),
        (("run", "none.json"), "none.json does not exist"),
        (("run", "truncated-plan.json"), "truncated"),
        (("run", "model.json"), "is not an autopar.plan file"),
        (("run", "plan.json", "--text", "none.txt"), "none.txt does not exist"),
        (("verify", "none.json"), "none.json does not exist"),
        (("verify", "foreign.json"), "kind"),
        (("demo", "--text", "none.txt"), "none.txt does not exist"),
        (("demo", "--text", "empty.txt"), "empty.txt is empty"),
        (("demo", "--out", "plan.json"), "plan.json"),
    ],
    ids=lambda value: " ".join(value[:1] + value[7:]) if isinstance(value, tuple) else "",
)
def test_bad_input_is_exit_3(here: Run, folder: Path, arguments: tuple[str, ...], words: str) -> None:
    assert words in refused(here, arguments, folder, INPUT)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(("serch",), USAGE), (("verify", "none.json"), INPUT), ((*SEARCH, "16", "--memory", "100KB"), INFEASIBLE)],
    ids=["usage", "input", "infeasible"],
)
def test_the_exit_codes_of_a_process(folder: Path, arguments: tuple[str, ...], code: int) -> None:
    def run(arguments: Sequence[str]) -> Answer:
        done = autopar(arguments, folder)
        return Answer(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)

    refused(run, arguments, folder, code)


def test_a_budget_that_nothing_fits_is_exit_4_with_the_missing_bytes(here: Run, folder: Path) -> None:
    error = refused(here, (*SEARCH, "16", "--memory", "100KB"), folder, INFEASIBLE)
    assert "rank" in error
    assert "MiB" in error


def test_a_search_writes_a_plan_and_shows_it(folder: Path) -> None:
    done = autopar((*SEARCH, "16", "--memory", "24MB", "--pin", "1: dp2-tp2"), folder)
    assert done.returncode == 0, done.stderr
    plan = Plan.load(folder / "out.json")
    assert plan.strategies[2].short == "dp2-tp2"
    assert plan.predicted is not None
    assert max(rank.peak_bytes for rank in plan.predicted.memory) <= 24_000_000
    assert "layers" in done.stdout
    assert "predicted peak" in done.stdout
    assert done.stderr.startswith("search ...\n")
    assert "search: done in" in done.stderr


def test_a_search_takes_an_optimizer_in_host_memory(folder: Path) -> None:
    done = autopar((*SEARCH, "16", "--optimizer", "adamw-offloaded"), folder)
    assert done.returncode == 0, done.stderr
    assert Plan.load(folder / "out.json").request.optimizer == "adamw-offloaded"


def test_the_same_search_prints_the_same_bytes_as_json(folder: Path) -> None:
    one, other = (autopar((*SEARCH, "16", "--json"), folder).stdout for _ in range(2))
    assert one == other == (folder / "out.json").read_text()
    assert json.loads(one)["kind"] == "autopar.plan"


def _children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def test_help_is_quick_and_loads_nothing_heavy(folder: Path) -> None:
    best_s = 1e9  # of processor time: other processes may share the machine
    for _ in range(5):
        started_s = _children_s()
        done = autopar(("--help",), folder)
        best_s = min(best_s, _children_s() - started_s)
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("profile", "search", "run", "verify", "demo", "Exit codes"))
    assert best_s < 0.3
    program = (
        "import sys; sys.argv = ['autopar', '--help']\n"
        "import autopar.cli\n"
        "try: autopar.cli.main()\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'pandas', 'ortools', 'rich', 'numpy') if m in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout.splitlines()[-1] == "[]"


def test_planning_from_files_loads_no_torch(folder: Path) -> None:
    program = (
        f"import sys; sys.argv = ['autopar', *{(*SEARCH, '16')!r}]\n"
        "import autopar.cli\n"
        "try: autopar.cli.main()\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, env=env, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_version_goes_to_stdout(folder: Path) -> None:
    done = autopar(("--version",), folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, "autopar 0.1.0\n", "")


def test_a_bug_keeps_its_traceback(folder: Path) -> None:
    program = (
        "import sys, autopar.cli, autopar.searching\n"
        "def broken(*a, **k): raise ZeroDivisionError('planted')\n"
        "autopar.searching.search_files = broken\n"
        f"sys.argv = ['autopar', *{(*SEARCH, '16')!r}]\n"
        "autopar.cli.main()"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError: planted" in done.stderr


def test_a_model_is_planned_for_a_device_that_is_not_here(tmp_path: Path) -> None:
    source = f"{ROOT}/examples/gpt.py:build(width=32, heads=4, blocks=4, vocab=64, context=32)"
    counted = autopar(("profile", "model", source, "--seq", "32", "--for", "a100-80g", "--nproc", "1"), tmp_path)
    assert counted.returncode == 0, counted.stderr
    found = autopar(("search", "--model", "model.json", "--cluster", "a100-80g:1x2", "--global-batch", "8"), tmp_path)
    assert found.returncode == 0, found.stderr
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.predicted is not None
    assert plan.predicted.origin == "assumed"
    assert (plan.cluster.device, plan.request.dtype, plan.model.source) == ("cuda", "bfloat16", source)


def test_ctrl_c_in_a_search_keeps_the_best_so_far_and_ends_with_130(tmp_path: Path) -> None:
    model_file, cluster_file = measured(blocks=96, world_size=64, tp_degrees=(2, 4, 8))
    model_file.save(tmp_path / "model.json")
    cluster_file.save(tmp_path / "cluster.json")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "autopar", *SEARCH, "256", "--memory", "40MB"]
    for after_s in (0.1, 0.05, 0.0):  # a fast search may be done before the signal
        with subprocess.Popen(
            command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stderr is not None
            assert process.stderr.readline() == b"search ...\n"
            time.sleep(after_s)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=60)
        if process.returncode != 0:
            break
    assert process.returncode == INTERRUPTED, stderr
    assert b"Traceback" not in stderr
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left in (["cluster.json", "model.json", "out.json"], ["cluster.json", "model.json"])
    if "out.json" in left:
        Plan.load(tmp_path / "out.json")


@pytest.mark.parametrize("after_s", [0.6, 1.2])
def test_two_quick_ctrl_c_before_the_work_begins_end_with_130(after_s: float, tiny: Path) -> None:
    """While torch is imported an interrupt may be swallowed; the command must end all the same."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "autopar", "run", "plan.json", "--steps", "1000"]
    with subprocess.Popen(command, cwd=tiny, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        time.sleep(after_s)
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED, stderr
    assert b"Traceback" not in stderr


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A folder with plan.json for the model of examples/gpt.py on two ranks, written by hand."""
    from autopar.runtime.models import build_model
    from autopar.runtime.structure import fingerprint

    source = f"{ROOT / 'examples' / 'gpt.py'}:build(width=32, heads=2, blocks=2, context=32)"
    Plan(
        model=PlanModel(name="gpt", source=source, fingerprint=fingerprint(build_model(source))),
        cluster=PlanCluster(name="local", device="cpu", world_size=2, ranks_per_node=2, memory_bytes=1 << 30),
        request=Request(global_batch=4, sequence=32),
        pp=1,
        schedule="1f1b",
        num_micro_batches=2,
        layers_per_stage=(4,),
        strategies=tuple(Strategy.parse(short) for short in ("dp2-z3", "tp2", "dp2-z2-r", "dp2")),
        versions={},
    ).save(tmp_path / "plan.json")
    return tmp_path


def test_run_trains_a_plain_module_and_measures_every_rank(tiny: Path) -> None:
    done = autopar(("run", "plan.json", "--steps", "5", "--json"), tiny)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["plan"]["strategies"] == {"embed": "dp2-z3", "0": "tp2", "1": "dp2-z2-r", "head": "dp2"}
    assert found["predicted"] is None
    assert found["measured"]["step_s"] > 0
    assert len(found["measured"]["peak_memory_bytes"]) == 2
    assert len(found["losses"]) == 5
    assert found["losses"][-1] < found["losses"][0]
    assert "run: done in" in done.stderr


@pytest.mark.slow
def test_verify_compares_a_plan_with_one_process(tiny: Path) -> None:
    done = autopar(("verify", "plan.json", "--json"), tiny)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["verified"] is True
    assert found["gradient"] < 1e-4
    words = autopar(("verify", "plan.json"), tiny).stdout
    assert words.startswith("verified: equal to one process over 3 steps")


@pytest.mark.slow
def test_the_demo_does_the_whole_loop_and_leaves_its_files(tmp_path: Path) -> None:
    done = autopar(("demo", "--json", "--steps", "12", "--out", "here"), tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == [
        "cluster.json",
        "model.json",
        "plan.json",
        "run.json",
    ]
    assert (tmp_path / "here" / "run.json").read_text() == done.stdout
    plan = Plan.load(tmp_path / "here" / "plan.json")
    assert found["plan"] == json.loads(plan.dumps())
    budget_bytes = plan.request.memory_bytes
    assert budget_bytes is not None
    assert max(found["predicted"]["peak_memory_bytes"]) <= budget_bytes
    for key in ("predicted", "measured"):
        assert found[key]["step_s"] > 0
        assert len(found[key]["peak_memory_bytes"]) == 4
    pairs = zip(found["predicted"]["peak_memory_bytes"], found["measured"]["peak_memory_bytes"], strict=True)
    assert all(abs(predicted - measured) <= 0.05 * measured for predicted, measured in pairs)
    assert found["losses"][-1] < found["losses"][0] - 0.5
    assert found["verified"] is True


def test_every_command_in_the_documents_exists(here: Run) -> None:
    """Each `autopar ...` that a page shows names a command and options that --help knows."""
    shown = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"):
        shown |= set(
            re.findall(r"(?:^|`|&& |    )autopar ((?:profile )?[a-z]+)([^`\n]*)", page.read_text(), re.MULTILINE)
        )
    assert {command for command, _ in shown} >= {"profile cluster", "profile model", "search", "run", "verify", "demo"}
    pages = {command: here((*command.split(), "--help")).stdout for command, _ in shown}
    for command, rest in shown:
        for option in re.findall(r"(?<!\S)--?[a-z-]+", rest):
            assert re.search(rf"(?<!\S){option}\b", pages[command]), f"autopar {command}{rest}"
