"""Names of torch and transformers that may move with any version: each used in one place, each still there."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("autopar", "profiler", "runtime", "solvers")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))

MODULES = {
    "torch._guards": "runtime/tracker.py",
    "torch._subclasses": "runtime/fakes.py",
    "torch.distributed.elastic": "runtime/worker.py",
    "torch.distributed.fsdp": "runtime/zero.py",
    "torch.distributed.launcher": "runtime/worker.py",
    "torch.distributed.pipelining": "runtime/pipelining.py",
    "torch.export.graph_signature": "runtime/tensor_parallel/graph.py",
    "torch.testing._internal": "runtime/fakes.py",
    "torch.utils._python_dispatch": "runtime/dispatch.py",
    "torch.utils._pytree": "runtime/trees.py",
    "transformers": "runtime/hugging_face.py",
}
"""Modules that are private or still change, and the one file that imports each."""

ATTRIBUTES = {
    "_BatchNorm": ("runtime/refusals.py", nn.modules.batchnorm),
    "_PipelineSchedule": ("runtime/pipelining.py", torch.distributed.pipelining.schedules),
    "_current_frames": ("runtime/activity.py", sys),
    "_cdata": ("runtime/tracker.py", torch.zeros(1).untyped_storage()),
    "_foreach_copy_": ("runtime/buckets.py", torch),
    "_foreach_mul_": ("runtime/gradients.py", torch),
    "_foreach_norm": ("runtime/gradients.py", torch),
    "_is_view": ("runtime/stage.py", torch.Tensor),
    "_make_wrapper_subclass": ("runtime/sharded_logits.py", torch.Tensor),
    "_ops": ("runtime/tensor_parallel/graph.py", torch),
    "_overloadname": ("runtime/tensor_parallel/rewrite.py", torch.ops.aten.add_.Tensor),
    "_parameters": ("runtime/tensor_parallel/execute.py", nn.Linear(1, 1)),
    "_scaled_dot_product_flash_attention": ("runtime/flash.py", torch.ops.aten),
    "_scaled_dot_product_flash_attention_backward": ("runtime/flash.py", torch.ops.aten),
    "_scaled_dot_product_flash_attention_for_cpu": ("runtime/flash.py", torch.ops.aten),
    "_scaled_dot_product_flash_attention_for_cpu_backward": ("runtime/flash.py", torch.ops.aten),
    "_schema": ("runtime/tensor_parallel/graph.py", torch.ops.aten.add.Tensor),
    "_unsafe_view": ("runtime/tensor_parallel/native.py", torch.ops.aten),
}
"""Private attributes of torch's objects: the one file that uses each, and where it must be found."""


def imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant))


def own_names(tree: ast.Module) -> Iterator[str]:
    """The private names that our own classes and modules define."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def test_modules_that_change_are_imported_in_one_place() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for file, tree in TREES.items():
        for module in imported(tree):
            known = next((name for name in MODULES if f"{module}.".startswith(f"{name}.")), None)
            hidden = module.startswith(("torch.", "transformers.")) and "._" in module
            if known or hidden:
                found[known or module].add(file)
    assert found == {module: {file} for module, file in MODULES.items()}


def test_private_attributes_are_used_in_one_place() -> None:
    own = {name for tree in TREES.values() for name in own_names(tree)}
    found: dict[str, set[str]] = defaultdict(set)
    for file, tree in TREES.items():
        for node in ast.walk(tree):
            private = isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__")
            if private and node.attr not in own:
                found[node.attr].add(file)
    assert found == {name: {file} for name, (file, _) in ATTRIBUTES.items()}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_private_attribute_is_there(name: str) -> None:
    file, home = ATTRIBUTES[name]
    assert hasattr(home, name), f"{file} needs {home}.{name}, which this torch has not"


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("torch._guards", "active_fake_mode"),
        (
            "torch._subclasses.fake_tensor",
            "FakeTensor FakeTensorMode DataDependentOutputException DynamicOutputShapeException",
        ),
        ("torch.distributed.elastic.multiprocessing", "DefaultLogsSpecs"),
        ("torch.distributed.elastic.multiprocessing.errors", "ChildFailedError"),
        ("torch.distributed.fsdp", "FSDPModule MixedPrecisionPolicy fully_shard"),
        ("torch.distributed.launcher.api", "LaunchConfig elastic_launch"),
        (
            "torch.distributed.pipelining",
            "PipelineStage Schedule1F1B ScheduleDualPipeV ScheduleGPipe "
            "ScheduleInterleaved1F1B ScheduleInterleavedZeroBubble ScheduleLoopedBFS ScheduleZBVZeroBubble",
        ),
        ("torch.distributed.pipelining.schedules", "InferenceMode _batch_p2p"),
        ("torch.export.graph_signature", "ConstantArgument InputKind"),
        ("torch.testing._internal.distributed.fake_pg", "FakeStore"),
        ("torch.utils._python_dispatch", "TorchDispatchMode is_traceable_wrapper_subclass"),
        ("torch.utils._pytree", "tree_leaves tree_map tree_unflatten"),
        ("transformers", "AutoModelForCausalLM CONFIG_MAPPING LlamaConfig logging"),
        (
            "transformers.masking_utils",
            "_ignore_bidirectional_mask_sdpa _ignore_causal_mask_sdpa find_packed_sequence_indices",
        ),
        ("transformers.modeling_utils", "PreTrainedModel"),
    ],
)
def test_module_holds_what_is_imported(module: str, names: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in names.split() if not hasattr(found, name)] == []


def test_a_skeleton_knows_all_hooks_of_a_module() -> None:
    from autopar.runtime.tensor_parallel.skeleton import _HOOKS

    assert {name for name in vars(nn.Module()) if name.endswith(("_hooks", "_with_kwargs", "_called"))} == set(_HOOKS)


def test_sharded_modules_can_be_told_to_sum() -> None:
    from torch.distributed.fsdp import FSDPModule

    assert list(inspect.signature(FSDPModule.set_force_sum_reduction_for_comms).parameters) == ["self", "enable"]
    assert list(inspect.signature(FSDPModule.set_gradient_divide_factor).parameters) == ["self", "factor"]


def test_pipeline_stages_show_their_receive_buffers() -> None:
    from torch.distributed.pipelining import PipelineStage
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        sample = (torch.empty(1, 4, device="meta"),)
        stage = PipelineStage(nn.Linear(4, 4), 1, 2, torch.device("cpu"), input_args=sample, output_args=sample)
        assert stage.args_recv_info == {}
        assert stage.grad_recv_info == {}
    finally:
        dist.destroy_process_group()


def test_a_schedule_asks_its_neighbours_and_sends_by_names_that_are_replaced() -> None:
    from torch.distributed.pipelining import schedules

    asked = inspect.signature(schedules._PipelineSchedule._warmup_p2p)
    assert list(asked.parameters) == ["self", "stages", "has_backward", "p2p_done"]
    assert list(inspect.signature(schedules._batch_p2p).parameters) == ["p2p_ops", "desc"]
    assert "_inference_mode" in inspect.getsource(schedules._PipelineSchedule._warmup_p2p)


def test_the_launcher_takes_the_settings_that_a_worker_gives() -> None:
    from torch.distributed.launcher.api import LaunchConfig

    given = {
        keyword.arg
        for node in ast.walk(TREES["runtime/worker.py"])
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "LaunchConfig"
        for keyword in node.keywords
    }
    assert given
    assert given <= set(inspect.signature(LaunchConfig).parameters)


def test_configs_of_transformers_map_their_aliases() -> None:
    from transformers import GPT2Config

    assert GPT2Config.attribute_map["hidden_size"] == "n_embd"
