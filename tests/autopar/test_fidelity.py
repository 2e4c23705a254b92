"""The bench against published runs: its mapping, schedules, fit and folds, on records made here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.pipeline import StageTimes, simulate
from autopar.request import Schedule
from autopar.units import GIB
from tests.bench.fidelity_lib import judging, memory
from tests.bench.fidelity_lib.fitting import fit
from tests.bench.fidelity_lib.records import map_all, map_record
from tests.bench.fidelity_lib.schedules import critical_path
from tests.bench.fidelity_lib.steps import COEFFICIENTS, batch, predict, with_paths

ROOT = Path(__file__).resolve().parents[2]
PRIOR = {name: c.start for name, c in COEFFICIENTS.items()}


def record(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "source_id": "vtrain-multi",
        "source_note": "",
        "framework": "Megatron-DeepSpeed",
        "gpu": "A100",
        "gpu_class": "A100",
        "n_gpus": 64,
        "gpus_per_node": 8,
        "model": {"name": "GPT-3.6B", "layers": 30, "hidden": 3072, "heads": 32, "ffn": 12288, "vocab": 51200},
        "seq_len": 2048,
        "precision": "fp16",
        "tp": 4,
        "pp": 2,
        "cp": 1,
        "micro_batch": 4,
        "global_batch": 512,
        "activation_checkpointing": "full",
        "attention": "non-flash",
        "measured": {"step_time_s": 4.0},
        "trust": "high",
        "split_suggestion": "calibrate",
    }
    model = {**found["model"], **changes.pop("model", {})}
    return {**found, **changes, "model": model}


def test_a_record_becomes_a_plan_of_its_degrees() -> None:
    case = map_record(record())
    plan = case.plan()
    assert (case.dp, case.num_micro_batches, case.micro_batch) == (8, 16, 4.0)
    assert plan.layers_per_stage == (16, 16)
    assert {strategy.short for strategy in plan.strategies} == {"dp8-tp4-r"}
    assert plan.cluster.world_size == 64
    assert case.model().num_blocks == 30


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": {"experts": 8}}, "MoE, hybrid or convolution"),
        ({"gpu_class": "GB200"}, "GPU class without calibration"),
        ({"n_gpus": 60}, "mesh product does not match the GPUs"),
        ({"tp": None}, "plan (tp, pp) not stated"),
        ({"oom": True}, "the run did not fit"),
        ({"measured": None}, "no time"),
        ({"framework": "JAX"}, "JAX/XLA FSDP"),
        ({"split_suggestion": "reference-only"}, "reference only"),
        ({"global_batch": None}, "global batch missing"),
        ({"model": {"hidden": None}}, "dimensions unknown"),
    ],
)
def test_what_cannot_be_mapped_is_counted_by_its_reason(changes: dict[str, Any], reason: str) -> None:
    cases, reasons = map_all([record(), record(**changes)])
    assert len(cases) == 1
    assert {text: count for why in reasons.values() for text, count in why.items()} == {reason: 1}


def test_a_source_never_seen_is_mapped_by_what_it_states() -> None:
    case = map_record(record(source_id="another", interconnect=None))
    assert case.arch == map_record(record()).arch
    assert "interconnect" in case.assumed


def test_a_batch_of_twelve_on_eight_ranks_is_one_and_a_half_samples_each() -> None:
    case = map_record(record(n_gpus=8, tp=1, pp=1, micro_batch=1, global_batch=12))
    assert (case.num_micro_batches, case.micro_batch) == (2, 0.75)


def test_heads_left_out_are_those_the_source_states_for_that_width() -> None:
    cases, _ = map_all([record(), record(model={"heads": None})])
    assert cases[1].arch.heads == 32
    assert any("heads" in text for text in cases[1].assumed)


def test_model_flops_become_seconds() -> None:
    measured = {"tflops_per_gpu": 150.0, "tflops_kind": "model"}
    case = map_record(record(measured=measured))
    a = case.arch
    per_token = 6 * (a.layers * a.block_products + a.vocab * a.hidden) + 12 * a.layers * 3072 * 2048
    assert case.step_s == pytest.approx(512 * 2048 * per_token / (64 * 150e12))


@given(pp=st.integers(1, 6), chunks=st.integers(1, 3), m=st.integers(1, 12), seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_a_path_is_as_long_as_what_it_passes(pp: int, chunks: int, m: int, seed: int) -> None:
    chunks, m = (chunks, m * pp) if pp > 1 else (1, m)
    rng = np.random.default_rng(seed)
    blocks = [int(n) for n in rng.integers(1, 4, pp * chunks)]
    f, b, embed, head_f, head_b, send = (float(x) for x in rng.uniform(0.1, 2.0, 6))
    step, path = critical_path(
        blocks,
        pp=pp,
        micro_batches=m,
        forward_s=f,
        backward_s=b,
        embed_s=embed,
        head_forward_s=head_f,
        head_backward_s=head_b,
        send_s=send,
    )
    assert np.dot(path.counts, (f, b, embed, head_f, head_b, send)) == pytest.approx(step, rel=1e-9)
    stages = [
        StageTimes(
            forward_s=n * f + (embed if s == 0 else 0) + (head_f if s == len(blocks) - 1 else 0),
            backward_s=n * b + (embed if s == 0 else 0) + (head_b if s == len(blocks) - 1 else 0),
        )
        for s, n in enumerate(blocks)
    ]
    schedule: Schedule = "1f1b" if chunks == 1 else "interleaved-1f1b"
    line = simulate(stages, schedule=schedule, micro_batches=m, send_s=send, pp=pp)
    assert step == pytest.approx(line.step_s, rel=1e-9)


@pytest.mark.parametrize(("pp", "chunks", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 16), (8, 6, 64), (4, 2, 10)])
def test_interleaving_divides_the_bubble(pp: int, chunks: int, m: int) -> None:
    """Equal stages without sends: m rounds and (pp - 1) / chunks of one (Megatron-LM, SC21, section 2.2.2)."""
    step, path = critical_path(
        [1] * (pp * chunks),
        pp=pp,
        micro_batches=m,
        forward_s=1.0,
        backward_s=2.0,
        embed_s=0.0,
        head_forward_s=0.0,
        head_backward_s=0.0,
        send_s=0.0,
    )
    if m % pp == 0:
        assert step == pytest.approx(3 * m * chunks + 3 * (pp - 1))
    else:
        assert 3 * m * chunks < step < 3 * (m + pp) * chunks + 3 * pp
    assert path.block_forwards + 2 * path.block_backwards == pytest.approx(step)


def some_records() -> list[dict[str, Any]]:
    return [
        record(tp=tp, pp=pp, micro_batch=mb, model={"hidden": h, "ffn": 4 * h}, source_id=source)
        for tp in (1, 2, 8)
        for pp in (1, 2)
        for mb in (1, 4)
        for h in (2048, 4096)
        for source in ("vtrain-multi", "megatron-2020-weak")
    ]


def test_the_fit_finds_planted_coefficients() -> None:
    cases, _ = map_all(some_records())
    b = with_paths(batch(cases), PRIOR)
    planted = PRIOR | {"product_share": 0.6, "node_share": 0.5}
    measured = predict(b, planted)
    made = type(b)(cases=b.cases, shape=b.shape, columns=b.columns, paths=b.paths, log_seconds=np.log(measured))
    free = ["product_share", "node_share"]
    found = fit(made, free=free)
    for name in free:
        assert found[name] == pytest.approx(planted[name], rel=0.08)  # the prior pulls a little
    assert judging.ape(cases, predict(made, fit(made)) / measured * [c.step_s for c in cases]).max() < 2


def test_one_outlier_does_not_bend_the_fit() -> None:
    cases, _ = map_all(some_records())
    b = with_paths(batch(cases), PRIOR)
    truth = np.log(predict(b, PRIOR))
    truth[0] += 2.0
    made = type(b)(cases=b.cases, shape=b.shape, columns=b.columns, paths=b.paths, log_seconds=truth)
    assert fit(made, free=["product_share"])["product_share"] == pytest.approx(PRIOR["product_share"], rel=0.02)


def test_no_configuration_lies_on_both_sides_of_a_fold() -> None:
    cases, _ = map_all(some_records() * 3)
    seen: list[int] = []
    for known, test in judging.folds(cases):
        assert not {cases[i].configuration for i in known} & {cases[i].configuration for i in test}
        seen += test
    assert sorted(seen) == list(range(len(cases)))
    known, test = judging.halves(cases, "vtrain-multi")
    assert not {cases[i].configuration for i in known} & {cases[i].configuration for i in test}


def test_kendall_counts_pairs_of_one_model_and_cluster() -> None:
    cases, _ = map_all(
        [record(tp=tp, measured={"step_time_s": t}) for tp, t in ((1, 1.0), (2, 2.0), (4, 3.0), (8, 3.01))]
    )
    assert judging.kendall(cases, np.array([1.0, 2.0, 3.0, 4.0])) == (1.0, 5)
    assert judging.kendall(cases, np.array([4.0, 3.0, 2.0, 1.0])) == (-1.0, 5)
    others, _ = map_all([record(), record(model={"hidden": 4096, "ffn": 16384})])
    assert judging.kendall(others, np.array([1.0, 2.0])) == (None, 0)


def test_the_command_prints_the_sources_as_json(tmp_path: Path) -> None:
    data, known = tmp_path / "data.jsonl", tmp_path / "fit.jsonl"
    data.write_text("".join(json.dumps(r) + "\n" for r in [*some_records()[:6], record(oom=True)]))
    known.write_text("".join(json.dumps(r) + "\n" for r in some_records()))
    for extra in ([], ["--fit", str(known)]):
        done = subprocess.run(
            [sys.executable, "tests/bench/fidelity.py", "--data", str(data), "--json", *extra],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        sources = json.loads(done.stdout)["sources"]
        assert [s["source"] for s in sources] == ["megatron-2020-weak", "vtrain-multi"]
        keys = {"source", "gpu", "n", "skipped", "reasons", "mape", "bias", "p90", "kendall_tau"}
        assert all(set(s) == keys for s in sources)
        assert sources[1]["n"] == 3
        assert sources[1]["skipped"] == 1
        assert sources[1]["reasons"] == {"the run did not fit": 1}


def test_parameters_that_a_source_states_say_whether_embedding_and_head_are_one() -> None:
    model = {"name": "llama-like", "layers": 16, "hidden": 2048, "heads": 32, "ffn": 8192, "vocab": 131072}
    assert not map_record(record(model=model)).arch.tied
    assert map_record(record(model=model, params_b=1.34)).arch.tied
    assert not map_record(record(model=model, params_b=1.61)).arch.tied
    assert not map_record(record(model=model, params_b=1.45)).arch.tied  # neither: what the family does


def test_stages_cut_by_cost_count_the_head() -> None:
    """By hand: blocks of 67.1 M and a head of 268.4 M make 1342.2 M; the first rank takes until above half of that."""
    model = {"name": "llama-like", "layers": 16, "hidden": 2048, "heads": 32, "ffn": 8192, "vocab": 131072}
    case = map_record(record(framework="nanotron", model=model))
    assert case.chunk_blocks == (11, 5)
    assert map_record(record(model=model)).chunk_blocks == (8, 8)


def test_memory_of_a_run_counted_by_hand() -> None:
    model = {"layers": 2, "hidden": 1024, "heads": 16, "ffn": 4096, "vocab": 50000}
    run = record(n_gpus=1, tp=1, pp=1, micro_batch=2, global_batch=2, model=model)
    parameters = 2 * (12 * 1024**2 + 13 * 1024) + 50000 * 1024
    tokens = 2 * 2048
    inputs, scores = 2 * 2 * tokens * 1024, 2 * 16 * 2048**2
    block = tokens * 1024 * 34 + 5 * scores - inputs / 2 + 4 * scores
    work = max(block, 12 * tokens * 50000)
    megatron = memory.reported_bytes(map_record({**run, "framework": "Megatron-LM"}))
    assert megatron == pytest.approx(1.06 * (16 * parameters + inputs + work) + 0.5 * GIB, rel=1e-9)
    oneflow = memory.reported_bytes(map_record({**run, "framework": "OneFlow-GPT"}))
    work = max(block, 6 * tokens * 50000)
    assert oneflow == pytest.approx(18 * parameters + inputs + work + 0.5 * GIB, rel=1e-9)


def test_a_figure_of_rank_0_is_of_the_first_stage() -> None:
    model = {"name": "llama-like", "layers": 8, "hidden": 1024, "heads": 16, "ffn": 4096, "vocab": 131072}
    changes = {"pp": 2, "tp": 1, "n_gpus": 2, "activation_checkpointing": "none", "attention": "flash-2"}
    case = map_record(record(framework="nanotron", model=model, **changes))
    first, last = (memory._stage(case, stage) for stage in (0, 1))
    assert memory.stage_bytes(case) == first
    assert sum(last.values()) > sum(first.values())  # it has the logits


def test_a_buffered_pipeline_keeps_room_for_twice_its_stages() -> None:
    changes = {"pp": 4, "tp": 4, "n_gpus": 16}
    plain, buffered = (map_record(record(framework=name, **changes)) for name in ("Megatron-LM", "OneFlow-GPT"))
    block = 2 * 4 * 2048 * 3072
    assert memory._stage(plain, 0)["activations"] == plain.chunk_blocks[0] * 4 * block
    assert memory._stage(buffered, 0)["activations"] == plain.chunk_blocks[0] * 8 * block


def test_memory_is_printed_for_each_source(capsys: pytest.CaptureFixture[str]) -> None:
    cases, _ = map_all([record(memory_gib=20.0), record(), record(source_id="another", memory_gib=20.0)])
    memory.print_memory(cases)
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert [line.split()[:3] for line in lines] == [["another", "A100", "1"], ["vtrain-multi", "A100", "1"]]
