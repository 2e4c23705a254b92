"""What one would write by hand for four uniform plans on stock PyTorch: the other side of `runtime_overhead.py`.

Each builds on an unmodified Hugging Face Llama and returns a step: this rank's batch to the global mean loss, with
gradients ready for the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[dict[str, Tensor]], Tensor]
Made = tuple[list[nn.Parameter], Step]


def sharded(model: Any, world: int, micro_batches: int) -> Made:
    """ZeRO-3 of every block, embedding and head over all ranks."""
    mesh = init_device_mesh("cpu", (world,))
    for part in (model.model.embed_tokens, *model.model.layers, [model.model.norm, model.lm_head]):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return list(model.parameters()), lambda batch: _mean_over_ranks(model, batch, world)


def replicated(model: Any, world: int, micro_batches: int) -> Made:
    """Data parallel, gradients in buckets."""
    wrapped = DistributedDataParallel(model)
    return list(model.parameters()), lambda batch: _mean_over_ranks(wrapped, batch, world)


def _mean_over_ranks(model: Any, batch: dict[str, Tensor], world: int) -> Tensor:
    loss = model(**batch).loss
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean / world


def tensor_parallel(model: Any, world: int, micro_batches: int) -> Made:
    """Blocks tensor parallel over all ranks, embedding and head data parallel: gathered before blocks, cut after."""
    mesh = init_device_mesh("cpu", (world,))
    rank = dist.get_rank()
    columns, rows = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
    styles: dict[str, Any] = {f"self_attn.{name}": ColwiseParallel() for name in columns}
    styles |= {f"mlp.{name}": ColwiseParallel() for name in rows}
    styles |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    layers = model.model.layers
    for layer in layers:
        parallelize_module(layer, mesh, styles)

    def gather(module: nn.Module, args: Any, kwargs: Any) -> Any:
        hidden = funcol.all_gather_tensor_autograd(args[0], 0, mesh.get_group())
        return (_Whole.apply(hidden, world), *args[1:]), kwargs

    def cut(module: nn.Module, args: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        mine = _Part.apply(first, rank, world)
        return (mine, *output[1:]) if isinstance(output, tuple) else mine

    layers[0].register_forward_pre_hook(gather, with_kwargs=True)
    layers[-1].register_forward_hook(cut)
    own = [model.model.embed_tokens.weight, model.model.norm.weight, model.lm_head.weight]

    def step(batch: dict[str, Tensor]) -> Tensor:
        mean = _mean_over_ranks(model, batch, world)
        for parameter in own:
            dist.all_reduce(parameter.grad)
        grads = [p.grad for p in model.parameters()]
        torch._foreach_div_([grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads], world)
        return mean

    return list(model.parameters()), step


class _Whole(torch.autograd.Function):
    """Identity on what all ranks hold whole: the reduce-scatter behind it counts their gradients `world` times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: int) -> Tensor:
        ctx.world = world
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] / ctx.world, None


class _Part(torch.autograd.Function):
    """This rank's samples of what all ranks hold whole; the backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int, world: int) -> Tensor:
        ctx.world = world
        return x.chunk(world)[rank].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0].contiguous()
        out = grad.new_empty((grad.shape[0] * ctx.world, *grad.shape[1:]))
        dist.all_gather_single(out, grad)
        return out, None, None


class _Stage(nn.Module):
    """Some of the blocks; the first stage also embeds, the last computes the sum of the losses."""

    def __init__(self, model: Any, first: int, last: int) -> None:
        super().__init__()
        blocks = model.model.layers
        self.rotary = model.model.rotary_emb
        self.embed = model.model.embed_tokens if first == 0 else None
        self.layers = nn.ModuleList(blocks[first:last])
        self.norm, self.head = (model.model.norm, model.lm_head) if last == len(blocks) else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x if self.embed is None else self.embed(x)
        positions = torch.arange(hidden.shape[1])[None]
        tables = self.rotary(hidden, positions)
        for layer in self.layers:
            found = layer(hidden, position_embeddings=tables, attention_mask=None, position_ids=positions)
            hidden = found[0] if isinstance(found, tuple) else found
        return hidden if self.head is None else self.head(self.norm(hidden))


def pipelined(model: Any, world: int, micro_batches: int) -> Made:
    """As many stages as ranks under 1F1B, the blocks evenly dealt out."""
    rank, blocks = dist.get_rank(), len(model.model.layers)
    module = _Stage(model, rank * blocks // world, (rank + 1) * blocks // world)

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum")

    schedule = Schedule1F1B(
        PipelineStage(module, rank, world, torch.device("cpu")), micro_batches, loss_fn=loss_fn, scale_grads=False
    )

    def step(batch: dict[str, Tensor]) -> Tensor:
        losses: list[Tensor] = []
        inputs = (batch["input_ids"],) if rank == 0 else ()
        target = batch["labels"] if rank == world - 1 else None
        schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        total = torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros(())
        dist.all_reduce(total)
        count = batch["labels"][:, 1:].numel()
        torch._foreach_div_([p.grad for p in module.parameters()], count)
        return total / count

    return list(module.parameters()), step
