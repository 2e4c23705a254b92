"""Optimizers: any elementwise one steps as in one process, others are refused, and the plan's own runs and resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.errors import InputError
from autopar.plan import Plan
from autopar.predict import rank_memory
from autopar.profiler.models import profile
from autopar.runtime.gradients import _squared_norm
from autopar.runtime.models import build_model
from autopar.runtime.stepping import refuse_whole_tensors
from autopar.runtime.verify import WEIGHT_TOLERANCE

Ranks = Callable[..., list[Any]]

SMALL = "LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)"
RUN = SMALL.replace("vocab_size=64", "vocab_size=256")
MIXED = ["dp2-z1", "dp2-z1", "dp2-z3", "dp2"]


def test_every_elementwise_optimizer_steps_as_in_one_process(ranks: Ranks) -> None:
    for found in ranks("optimizer_jobs:steps_of_optimizers", 2, source=SMALL, strategies=MIXED):
        assert max(found.values()) <= WEIGHT_TOLERANCE, found


def test_optimizers_that_need_whole_tensors_are_refused_by_name(ranks: Ranks) -> None:
    for found in ranks("optimizer_jobs:refused_optimizers", 2, source=SMALL, strategies=["dp2-z1"] * 4):
        assert "LBFGS does not run on a part of each parameter" in found["LBFGS"]
        assert "Adafactor is not elementwise" in found["Adafactor"]


def test_the_norm_of_many_and_of_large_gradients_is_right_to_1e_7() -> None:
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(shape, generator=generator) for shape in ((3,), (64, 44), (0, 5), (700, 1000), (1024, 17))]
    grads[3][:7] *= 100  # torch's float32 norm of it is off by 1e-5
    exact = sum(float(grad.double().square().sum()) for grad in grads)
    assert float(_squared_norm(grads)) == pytest.approx(exact, rel=2e-7)
    assert float(_squared_norm([grad.t() for grad in grads])) == pytest.approx(exact, rel=2e-7)


def test_optimizers_step_plain_views_of_shards(ranks: Ranks) -> None:
    for found in ranks("optimizer_jobs:state_bytes", 2, source=SMALL, strategies=["dp2-z3"] * 4):
        assert found["plain"]
        assert found["parameters"] == found["with rows"]
        assert found["moments"] == 2 * found["parameters"]


def test_muon_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="Muon is not elementwise"):
        refuse_whole_tensors(torch.optim.Muon([torch.nn.Parameter(torch.ones(6, 4))]))


@pytest.mark.parametrize("kind", [torch.optim.RAdam, torch.optim.Adamax, torch.optim.NAdam, torch.optim.Adagrad])
def test_elementwise_optimizers_are_not_refused(kind: type[torch.optim.Optimizer]) -> None:
    refuse_whole_tensors(kind([torch.nn.Parameter(torch.ones(6, 4))], lr=0.01))  # type: ignore[call-arg]


@pytest.mark.parametrize("optimizer", ["sgd-momentum", pytest.param("sgd", marks=pytest.mark.slow)])
def test_sgd_runs_and_resumes_within_its_predicted_memory(optimizer: str, ranks: Ranks, tmp_path: Path) -> None:
    shape = {"optimizer": optimizer, "sequence": 16, "global_batch": 8}
    results = ranks("optimizer_jobs:run_and_resume", 2, source=RUN, strategies=MIXED, folder=f"{tmp_path}/c", **shape)
    measured = profile(build_model(RUN), sequence=16, tp_degrees=(), samples=(1, 2, 4))
    plan = Plan.loads(results[0]["plan"])
    predicted = rank_memory(plan, 0, measured.model, measured.layers).peak_bytes
    for found in results:
        assert found["parts"] == pytest.approx(found["whole"], rel=1e-6)
        assert found["whole"][3] < found["whole"][0]
        assert predicted == pytest.approx(found["peak"], rel=0.05)
