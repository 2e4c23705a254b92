from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autopar import shipped
from autopar.axes import RankMesh
from autopar.comm import boundary_shape, seconds, shape_of
from autopar.errors import InputError
from autopar.estimating import Degrees, files, priced, uniform
from autopar.measured import GroupShape
from autopar.plan import Plan

ROOT = Path(__file__).resolve().parents[2]


def estimate(cluster: str, degrees: Degrees, *, model: str = "llama2-7b", batch: int = 512, seq: int = 4096) -> Plan:
    model_file, cluster_file = files(model, cluster, sequence=seq)
    return priced(uniform(model_file, cluster_file, degrees, global_batch=batch), model_file, cluster_file)


@pytest.mark.parametrize("name", list(shipped.devices()))
def test_every_device_prices_every_model(name: str) -> None:
    for model, arch in shipped.architectures().items():
        model_file, cluster_file = files(model, f"{name}:1x8")
        assert model_file.model.num_blocks == arch.layers
        plan = uniform(model_file, cluster_file, Degrees(zero=3, recompute="full"), global_batch=64)
        predicted = priced(plan, model_file, cluster_file).predicted
        assert predicted is not None
        assert predicted.origin == ("assumed" if name == "cpu" else "fitted")
        assert 0 < predicted.step_s < (1e6 if name == "cpu" else 1e5)


def test_figures_lie_where_the_makers_state_them() -> None:
    """Ratios that the data sheets imply, independent of the file."""
    d = shipped.devices()
    assert d["h200-141g"].tensor_flops_per_s.value == d["h100-80g"].tensor_flops_per_s.value
    assert d["a100-80g"].link_bytes_per_s.value == 2 * d["v100-32g"].link_bytes_per_s.value
    for device in d.values():
        if device.kind == "cpu":
            continue
        # Arithmetic intensity of the ridge: tens to hundreds of FLOPs a byte, or a unit is wrong.
        assert 100 < device.tensor_flops_per_s.value / device.memory_bytes_per_s.value < 450
        assert 16e9 <= device.memory_bytes.value <= 192e9
    for each in shipped.efficiencies().values():
        if each.gpu == "CPU":
            continue
        assert each.runs >= 80
        assert 0.5 < each.coefficients["product_share"] < 1


def test_every_figure_says_where_it_is_stated() -> None:
    """An address, or the command of this repository that measured it, with its date."""
    measured = re.compile(r"measured \d{4}-\d\d-\d\d: python tests/bench/(\w+\.py)( --\w+)*")
    figures = [value for device in shipped.devices().values() for value in vars(device).values()]
    figures = [figure for figure in figures if isinstance(figure, shipped.Figure)]
    assert len(figures) > 60
    for figure in figures:
        command = measured.fullmatch(figure.source)
        assert figure.source.startswith("https://") or (command and (ROOT / "tests/bench" / command[1]).exists())
    for arch in shipped.architectures().values():
        assert arch.source.startswith("https://huggingface.co/")
        assert arch.source.endswith("/blob/main/config.json")
    for each in shipped.efficiencies().values():
        assert each.sources
        assert bool(each.runs) != bool(each.assumed)
        assert set(each.assumed) <= set(each.coefficients)
        assert (ROOT / each.command.removeprefix("python ").split()[0]).exists()
    with pytest.raises(ValueError, match="has its source"):
        shipped.Figure(value=1.0, source="a colleague")


def test_a_cpu_is_planned_for_without_a_profile() -> None:
    model_file, cluster_file = files("bert-base", "cpu:1x4")
    assert (cluster_file.cluster.device, model_file.layers.device) == ("cpu", "cpu")
    plan = uniform(model_file, cluster_file, Degrees(), global_batch=16)
    predicted = priced(plan, model_file, cluster_file).predicted
    assert predicted is not None
    # 6 FLOPs a parameter and token, on a core of some 10^10 to 10^12 a second.
    flops = 6 * 85e6 * 4 * 512
    assert flops / 2e12 < predicted.step_s < flops / 5e9
    with pytest.raises(InputError, match="no known network"):
        files("bert-base", "cpu:2x4")


@pytest.mark.parametrize(
    ("model", "cluster", "words"),
    [
        ("llama2-7", "a100-80g:1x8", "did you mean 'llama2-7b'"),
        ("llama2-7b", "a100-80:1x8", "did you mean 'a100-80g'"),
        ("llama2-7b", "a100-80g", "write for example a100-80g:2x8"),
        ("llama2-7b", "a100-80g:0x8", "write for example"),
        ("llama2-7b", "l40s-48g:2x8", "no known network"),
        ("llama2-7b", "cluster.json", "profile the model on that machine"),
        ("gpt2", "a100-80g:1x8", "--seq 1024"),
    ],
)
def test_refusals_say_what_to_do(model: str, cluster: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        files(model, cluster, sequence=4096)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        (Degrees(dp=4), "is not the 16 ranks"),
        (Degrees(tp=3), "is not the 16 ranks"),
        (Degrees(pp=16, num_micro_batches=2), "1f1b needs at least"),
        (Degrees(num_micro_batches=64), "not divisible"),
    ],
)
def test_illegal_degrees_are_refused(degrees: Degrees, words: str) -> None:
    with pytest.raises(InputError) as error:
        estimate("a100-80g:2x8", degrees)
    assert words in str(error.value)


def test_links_recover_rate_and_latency() -> None:
    file, device = shipped.cluster("a100-80g:2x8")
    c = shipped.efficiencies()["A100"].coefficients
    size = 1 << 30
    found = seconds(file.links, "all_gather", GroupShape(ranks=4), size)
    assert found.origin == "fitted"
    assert found.seconds == pytest.approx(0.75 * size / (300e9 * c["node_share"]), rel=0.05)
    across = seconds(file.links, "all_gather", GroupShape(ranks=16, nodes=2), size)
    latency = 4 * c["network_alpha_s"]
    assert across.seconds == pytest.approx(15 / 16 * size / (200e9 * c["network_share"]) + latency, rel=1e-6)
    assert device.name == "a100-80g"


def test_groups_share_the_cards_of_their_own_node_only() -> None:
    mesh = RankMesh.of(world_size=512, pp=8, ranks_per_node=8)
    inner = tuple(axis.name for axis in mesh.axes if axis.name.startswith("a"))
    outer = tuple(name for name in mesh.names if name not in inner)
    assert shape_of(mesh, outer, 8) == GroupShape(ranks=8, nodes=8, contiguous=False, concurrent=8)
    assert shape_of(mesh, mesh.names, 8) == GroupShape(ranks=64, nodes=8, concurrent=1)
    assert boundary_shape(mesh, 8) == GroupShape(ranks=2, nodes=2, contiguous=False, concurrent=8)
    # More nodes of the same plan per node cost a group no bandwidth.
    small = RankMesh.of(world_size=128, pp=2, ranks_per_node=8)
    assert shape_of(small, small.names, 8).concurrent == shape_of(mesh, mesh.names, 8).concurrent


def test_uneven_blocks_leave_the_ends_light() -> None:
    plan = estimate("a100-80g:1x8", Degrees(pp=8, num_micro_batches=64), model="mistral-7b")
    assert plan.layers_per_stage == (5, 4, 4, 4, 4, 4, 4, 5)
    plan = estimate("a100-80g:1x4", Degrees(pp=4, num_micro_batches=64), model="qwen2.5-7b", seq=1024)
    assert plan.layers_per_stage == (8, 7, 7, 8)
    model_file, cluster_file = files("llama3-405b", "h100-80g:8x8", sequence=4096)
    plan = uniform(model_file, cluster_file, Degrees(pp=8, tp=8, num_micro_batches=64), global_batch=512)
    assert plan.layers_per_stage == (16, 16, 16, 16, 16, 16, 16, 16)


def test_search_runs_on_shipped_names() -> None:
    from autopar.request import Request
    from autopar.searching import search_files

    model_file, cluster_file = files("gpt2", "a100-40g:1x4", sequence=1024)
    request = Request(global_batch=32, sequence=1024, dtype="bfloat16", pp=(1,), num_micro_batches=(1, 2))
    plan = search_files(model_file, cluster_file, request).plan
    assert plan.predicted is not None
    rival = uniform(model_file, cluster_file, Degrees(num_micro_batches=2), global_batch=32)
    found = priced(rival, model_file, cluster_file).predicted
    assert found is not None
    assert plan.predicted.step_s <= found.step_s * 1.001


def test_schedules_that_leave_smaller_bubbles_are_predicted_faster() -> None:
    model_file, cluster_file = files("llama2-7b", "a100-80g:2x8", sequence=2048)
    took = {}
    for schedule in ("1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"):
        degrees = Degrees(pp=4, tp=4, num_micro_batches=8, schedule=schedule)  # type: ignore[arg-type]
        plan = uniform(model_file, cluster_file, degrees, global_batch=32, allow_unrunnable=True)
        assert plan.stages_per_rank == (2 if schedule in ("interleaved-1f1b", "zbv") else 1)
        found = priced(plan, model_file, cluster_file).predicted
        assert found is not None
        took[schedule] = found.step_s, found.parts_s["bubble"]
    steps, bubbles = zip(*took.values(), strict=True)
    assert list(steps) == sorted(steps, reverse=True)
    assert list(bubbles) == sorted(bubbles, reverse=True)
    with pytest.raises(InputError, match="zbv puts exactly 2 stages on a rank, not 3"):
        uniform(model_file, cluster_file, Degrees(pp=4, tp=4, schedule="zbv", stages_per_rank=3), global_batch=32)


def test_the_command_prices_a_shipped_name_without_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "autopar", "estimate", "llama2-7b", "--cluster", "a100-80g:8x8", "--zero", "3"]
    options = ["--global-batch", "1024", "--micro-batches", "16", "--seq", "4096", "--recompute", "--json"]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=True)
    plan = Plan.loads(done.stdout)
    assert plan.predicted is not None
    assert plan.strategies[1].short == "dp64-z3-r"
    saved = tmp_path / "plan.json"
    saved.write_text(done.stdout)
    again = subprocess.run(
        [*command[:7], "--plan", str(saved), "--seq", "4096", "--json", "--trace", str(tmp_path / "trace.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(again.stdout)["predicted"] == json.loads(done.stdout)["predicted"]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    program = "import sys, autopar.estimating; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    clean = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert clean.stdout == "[]\n"


def test_a_plan_for_other_ranks_is_refused() -> None:
    plan = estimate("a100-80g:2x8", Degrees(zero=3))
    model_file, cluster_file = files("llama2-7b", "a100-80g:1x8", sequence=4096)
    with pytest.raises(InputError, match="the plan is for 16 ranks"):
        priced(replace(plan, predicted=None), model_file, cluster_file)
