"""What the tests run on real ranks. Each function is called on every rank inside a gloo group."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

import autopar.plan
import autopar.runtime.moving
import autopar.runtime.side_inputs
from autopar.axes import Axis, Layout, RankMesh
from autopar.errors import AutoparError
from autopar.plan import Plan, PlanCluster, PlanModel
from autopar.request import Request
from autopar.runtime.batches import example_batch, labels_of
from autopar.runtime.gradients import whole
from autopar.runtime.groups import RankGroups
from autopar.runtime.losses import loss_of
from autopar.runtime.models import build_model
from autopar.runtime.parallel import ParallelModel, parallelize
from autopar.runtime.relayout import relayout
from autopar.runtime.structure import fingerprint
from autopar.runtime.train import train_rank
from autopar.runtime.verify import compare
from autopar.strategy import Strategy
from tests.runtime.chain_plants import CHAIN_PLANTS


def make_plan(
    source: str,
    strategies: list[str],
    *,
    world: int,
    pp: int = 1,
    layers_per_stage: list[int] | None = None,
    global_batch: int = 8,
    micro_batches: int = 1,
    schedule: str = "1f1b",
    sequence: int = 8,
    dtype: str = "float32",
    optimizer: str = "adamw",
) -> Plan:
    model = build_model(source, device="meta", dtype=dtype)
    return Plan(
        model=PlanModel(name="test", source=source, fingerprint=fingerprint(model)),
        cluster=PlanCluster(name="test", device="cpu", world_size=world, ranks_per_node=world, memory_bytes=1 << 30),
        request=Request(global_batch=global_batch, sequence=sequence, dtype=dtype, optimizer=optimizer),
        pp=pp,
        schedule=schedule,  # type: ignore[arg-type]
        num_micro_batches=micro_batches,
        layers_per_stage=tuple(layers_per_stage or [len(strategies)]),
        strategies=tuple(Strategy.parse(s) for s in strategies),
        versions={},
    )


def compare_with_one_process(
    source: str, strategies: list[str], steps: int = 3, plant: str = "", **shape: Any
) -> dict[str, Any]:
    """Largest relative errors over the steps against one process."""
    plan = make_plan(source, strategies, world=dist.get_world_size(), **shape)

    def tamper(parallel: ParallelModel) -> None:
        _PLANTS[plant](parallel)

    try:
        found = compare(plan, steps=steps, tamper=tamper if plant else None)
    finally:
        while _patched:
            setattr(*_patched.pop())
    return {**asdict(found), "agrees": found.agrees}


def compare_plans(plans: list[str]) -> list[dict[str, Any]]:
    """The largest relative errors of each of some plans against one process."""
    found = [compare(Plan.loads(text)) for text in plans]
    return [{**asdict(one), "agrees": one.agrees} for one in found]


def what_is_refused_is_wrong(source: str, strategies: list[str], **shape: Any) -> dict[str, Any]:
    """`compare_with_one_process` for a plan that legality refuses under its schedule; what fails outright says how."""
    legal, autopar.plan.why_sharding_illegal = autopar.plan.why_sharding_illegal, lambda strategy, schedule: None
    try:
        return compare_with_one_process(source, strategies, steps=1, **shape)
    except Exception as error:
        return {"agrees": False, "gradient": float("inf"), "error": f"{type(error).__name__}: {error}"}
    finally:
        autopar.plan.why_sharding_illegal = legal


def _average_one_layer(parallel: ParallelModel) -> None:
    """The first block averages its replicated gradients instead of summing them."""
    for entry in parallel.held:
        if entry.layer == 1 and entry.group is not None:
            size = dist.get_world_size(entry.group)
            entry.parameter.register_hook(lambda grad, n=size: grad / n)


def _average_one_sharded_layer(parallel: ParallelModel) -> None:
    """The first sharded block divides by its number of ranks, as fully_shard does by default."""
    for block in parallel.stage.body.blocks().values():
        if isinstance(block, FSDPModule):
            block.set_gradient_divide_factor(float(dist.get_world_size()))
            return


def _forget_one_axis(parallel: ParallelModel) -> None:
    """What is not of the vocabulary in embedding and head is summed over the data-parallel ranks only."""
    groups, mesh = parallel._groups, parallel.plan.mesh
    parallel.held = tuple(
        dataclasses.replace(e, group=groups.along(mesh.place(parallel.plan.strategies[e.layer]).dp))
        for e in parallel.held
    )


def _no_norm_reduction(parallel: ParallelModel) -> None:
    """Parameters that a tensor-parallel rank holds whole, but uses on its part of the sequence, are not summed."""
    from autopar.runtime.tensor_parallel.collectives import _Copy

    _patch(_Copy, "backward", staticmethod(lambda ctx, grad: (grad, None)))


def _swapped_rows(parallel: ParallelModel) -> None:
    """The first fused weight that is cut has its q and k the other way round."""
    entry = next(e for e in parallel.held if e.name.endswith("attn.c_attn.weight") and e.tensor_parallel)
    q, k, v = entry.parameter.data.chunk(3, dim=-1)
    entry.parameter.data.copy_(torch.cat([k, q, v], dim=-1))


def own_only(relayout: Any) -> Any:
    """Side inputs stay what this rank has of them, repeated to the size of the samples that it now holds."""

    def wrong(value: torch.Tensor, *layouts: Any, batch_dim: int) -> torch.Tensor:
        ranks = relayout(value, *layouts, batch_dim=batch_dim).shape[batch_dim] // value.shape[batch_dim]
        return torch.cat([value] * ranks, batch_dim)

    return wrong


def _local_mask(parallel: ParallelModel) -> None:
    _patch(autopar.runtime.side_inputs, "relayout", own_only(autopar.runtime.side_inputs.relayout))


def _mean_of_means(parallel: ParallelModel) -> None:
    """Every rank and micro-batch counts the same, however many labels it has."""
    for stage in parallel.stages:
        stage.loss = lambda output, batch, own=stage.loss: _mean(*own(output, batch))


def _mean(total: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return total / count, torch.ones_like(count)


def _side_gradients_whole(parallel: ParallelModel) -> None:
    """Each rank that shares a block's samples adds the whole gradient of a side input that it has."""
    _patch(autopar.runtime.moving, "share_gradient", lambda x, ranks: x)


def _side_gradients_apart(parallel: ParallelModel) -> None:
    """A block that makes a side input takes only the gradient of its users on this rank."""
    _patch(autopar.runtime.moving, "sum_gradient", lambda x, groups: x)


def _side_gradients_twice(parallel: ParallelModel) -> None:
    """Ranks that share a sequence add up the gradient of what a block makes beside the hidden state at once, too."""
    out = autopar.runtime.moving._Move.out

    def wrong(self: Any, x: torch.Tensor, source: Any, batch_dim: int | None) -> torch.Tensor:
        return out(self, x, dataclasses.replace(source, sp=(), cp=()), batch_dim)

    _patch(autopar.runtime.moving._Move, "out", wrong)


def _little_where_zero(parallel: ParallelModel) -> None:
    """The gradient of the first bias of keys, zero in exact arithmetic, is 1e-9."""
    entry = next(e for e in parallel.held if e.name.endswith("key.bias"))
    entry.parameter.register_hook(lambda grad: grad + 1e-9)


_PLANTS = {
    **CHAIN_PLANTS,
    "average": _average_one_layer,
    "sharded average": _average_one_sharded_layer,
    "forgotten axis": _forget_one_axis,
    "no norm reduction": _no_norm_reduction,
    "swapped rows": _swapped_rows,
    "local mask": _local_mask,
    "mean of means": _mean_of_means,
    "side gradients whole": _side_gradients_whole,
    "side gradients apart": _side_gradients_apart,
    "side gradients twice": _side_gradients_twice,
    "side gradients of samples twice": _side_gradients_twice,
    "a little where zero": _little_where_zero,
}
_patched: list[tuple[Any, str, Any]] = []


def _patch(home: Any, name: str, value: Any) -> None:
    """Change an attribute until the job is over: the process goes on to the next one."""
    _patched.append((home, name, vars(home)[name]))
    setattr(home, name, value)


def relayout_pairs(sizes: list[int], ways: list[str]) -> dict[str, Any]:
    """Every layout to every other: values against cutting the whole tensor, gradients and values against DTensor.

    A sequence that is dealt out in pairs has no counterpart there.
    """
    names = tuple(f"a{i}" for i in range(len(sizes)))
    mesh = RankMesh(pp=1, axes=tuple(Axis(name=n, size=s) for n, s in zip(names, sizes, strict=True)))
    groups = RankGroups(mesh)
    groups.prepare([])
    device_mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=names)
    uses = list(itertools.product(("", *ways), repeat=len(names)))
    layouts = [
        Layout(
            batch=tuple(n for n, u in zip(names, use, strict=True) if u == "batch"),
            sequence=tuple(n for n, u in zip(names, use, strict=True) if u in ("sequence", "dealt")),
            dealt=tuple(n for n, u in zip(names, use, strict=True) if u == "dealt"),
        )
        for use in uses
    ]
    whole = torch.arange(12 * 24 * 2, dtype=torch.float64).reshape(12, 24, 2)
    weight = torch.randn(whole.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def part(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        where = mesh.coordinates(dist.get_rank())
        pairs = mesh.size(layout.dealt)
        if pairs > 1:
            place = 0
            for axis in layout.dealt:
                place = place * mesh.size((axis,)) + where[axis]
            pieces = tensor.chunk(2 * pairs, 1)
            tensor = torch.cat([pieces[place], pieces[2 * pairs - 1 - place]], 1)
        for dim, axes in ((0, layout.batch), (1, layout.sequence)):
            for axis in axes:
                if axis not in layout.dealt:
                    tensor = tensor.chunk(mesh.size((axis,)), dim)[where[axis]]
        return tensor.clone(memory_format=torch.contiguous_format)

    def placements(layout: Layout) -> list[Any]:
        return [Shard(0) if n in layout.batch else Shard(1) if n in layout.sequence else Replicate() for n in names]

    worst = {"value_error": 0.0, "gradient_error": 0.0, "dtensor_error": 0.0}
    for source, target in itertools.product(layouts, layouts):
        x = part(whole, source).requires_grad_()
        y = relayout(x, source, target, lambda axis: groups.along((axis,)))
        (y * part(weight, target)).sum().backward()
        assert x.grad is not None
        worst["value_error"] = max(worst["value_error"], distance(y, part(whole, target)))
        worst["gradient_error"] = max(worst["gradient_error"], distance(x.grad, part(weight, source)))
        if source.dealt or target.dealt:
            continue
        stock = DTensor.from_local(part(whole, source), device_mesh, placements(source), run_check=False)
        moved = stock.redistribute(device_mesh, placements(target)).to_local()
        worst["dtensor_error"] = max(worst["dtensor_error"], distance(y, moved))
    return {**worst, "pairs": len(layouts) ** 2}


def count_groups() -> dict[str, Any]:
    """How many process groups a 2 x 2 mesh makes, and whether asking again gives the same one."""
    mesh = RankMesh.of(world_size=4)
    groups = RankGroups(mesh)
    placed = [mesh.place(Strategy.parse(s)) for s in ("dp4", "dp2-tp2", "tp4", "dp4-z3", "dp2-z3-tp2s", "tp4s")]
    groups.prepare(placed)
    groups.prepare(placed)
    same = groups.along(("a1",)) is groups.along(("a1",)) and groups.along(mesh.names) is dist.group.WORLD
    return {"groups": len(groups._groups), "same": same}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max()) if a.shape == b.shape else float("inf")


def train(source: str, strategies: list[str], steps: int, **shape: Any) -> dict[str, Any]:
    """A short training run under a plan, one of its steps tracked; with the plan as text."""
    text = make_plan(source, strategies, world=dist.get_world_size(), **shape).dumps()
    return {"plan": text, **train_rank({"plan": text, "text": None, "steps": steps}, lambda event: None)}


def own_loop(source: str, strategies: list[str], accumulate: int = 2, **shape: Any) -> dict[str, float]:
    """A user's own loop (model(**batch).loss.backward(), with accumulation) against one process: largest errors."""
    plan = make_plan(source, strategies, world=dist.get_world_size(), **shape)
    reference, wrapped = build_model(source).eval(), parallelize(build_model(source).eval(), plan)
    named = dict(reference.named_parameters())
    worst = {"loss": 0.0, "gradient": 0.0}
    for part in range(accumulate):
        batch = example_batch(reference, samples=plan.request.global_batch, sequence=8, seed=part)
        batch[labels_of(batch)][: plan.request.global_batch // 2, 3:] = -100
        expected, found = loss_of(reference(**batch)), loss_of(wrapped(**wrapped.shard_batch(batch)))
        assert expected is not None
        assert found is not None
        (expected / accumulate).backward()
        (found / accumulate).backward()
        worst["loss"] = max(worst["loss"], abs(float(found) / float(expected) - 1))
    for entry in wrapped.held:
        grad = named[entry.name].grad
        assert grad is not None
        assert entry.stepped.grad is not None
        error = float((whole(entry, entry.stepped.grad) - grad).norm()) / max(1e-6, float(grad.norm()))
        worst["gradient"] = max(worst["gradient"], error)
    return worst


def refused(case: str) -> str:
    """The words with which parallelize or a step refuses a case, the same on every rank."""
    source = (
        "LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)"
    )
    world = dist.get_world_size()
    plan = make_plan(source, ["dp2", "dp2", "dp2", "dp2"], world=world)
    model = build_model(source)
    try:
        if case == "another model":
            parallelize(build_model(source.replace("vocab_size=64", "vocab_size=80")), plan)
        elif case == "another world":
            parallelize(model, make_plan(source, ["dp4"] * 4, world=4))
        elif case == "uneven heads":
            parallelize(model, make_plan(source, ["dp3", "tp3", "tp3", "dp3"], world=3, global_batch=9))
        elif case == "unused parameter":
            model.model.layers[0].mlp.spare = torch.nn.Linear(4, 4)
            plan = dataclasses.replace(plan, model=dataclasses.replace(plan.model, fingerprint=fingerprint(model)))
            wrapped = parallelize(model, plan)
            wrapped.train_step(wrapped.shard_batch(example_batch(wrapped.model, samples=8, sequence=8)))
        elif case == "a batch of another size":
            wrapped = parallelize(model, plan)
            wrapped.train_step(example_batch(wrapped.model, samples=3, sequence=8))
        elif case == "forward of a pipeline":
            stages = make_plan(source, ["dp1"] * 4, world=world, pp=2, layers_per_stage=[2, 2], micro_batches=2)
            parallelize(model, stages)(**example_batch(model, samples=8, sequence=8))
        elif case == "rows not cut":
            with mock.patch("autopar.runtime.stepping.own_rows", lambda full, group: full):
                parallelize(model, make_plan(source, ["dp2-z1"] * 4, world=world))
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def unequal_start() -> dict[str, Any]:
    """Differently seeded ranks begin with rank 0's weights: the loss of the first step is that of rank 0's model."""
    source = (
        "LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)"
    )
    plan = make_plan(source, ["dp2-z3", "tp2", "dp2", "dp2"], world=2)
    wrapped = parallelize(build_model(source, seed=dist.get_rank()).eval(), plan)
    first = build_model(source, seed=0).eval()
    batch = example_batch(first, samples=8, sequence=8)
    expected = loss_of(first(**batch))
    assert expected is not None
    return {"loss": float(wrapped.train_step(wrapped.shard_batch(batch))), "expected": float(expected)}


def dropout(strategy: str) -> dict[str, Any]:
    """One training step with dropout: the loss, all gradients as one vector, and whether the tensor group agrees."""
    source = "GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64)"
    plan = make_plan(source, ["dp4", strategy, strategy, "dp4"], world=4)
    torch.manual_seed(5)
    wrapped = parallelize(build_model(source).train(), plan)
    # All samples are equal, so that only the random streams tell the data-parallel ranks apart.
    batch = {
        name: value[:1].repeat(8, 1) for name, value in example_batch(wrapped.model, samples=8, sequence=8).items()
    }
    seen: list[torch.Tensor] = []
    block = wrapped.stage.body.blocks()[0]
    block.register_forward_hook(lambda module, args, output: seen.append(first_tensor(output).detach().clone()))
    torch.manual_seed(dist.get_rank())
    loss = wrapped.train_step(wrapped.shard_batch(batch))
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, seen[0])
    grads = [whole(e, e.stepped.grad).flatten() for e in wrapped.held if e.stepped.grad is not None]
    return {"loss": float(loss), "gradient": torch.cat(grads).tolist(), "hidden": [h.tolist() for h in everyone]}


def first_tensor(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def sampled() -> list[int]:
    """The places of a dataset of 16 that this rank's sampler gives, in two stages of two ranks."""
    source = (
        "LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64)"
    )
    plan = make_plan(source, ["dp2"] * 4, world=4, pp=2, layers_per_stage=[2, 2], micro_batches=2)
    wrapped = parallelize(build_model(source), plan)
    return list(wrapped.sampler(torch.utils.data.TensorDataset(torch.arange(16))))
