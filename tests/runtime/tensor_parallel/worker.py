"""One of 4 gloo processes of the tensor-parallel tests: runs every case and rank 0 prints the results as JSON."""

import copy
import datetime
import json
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parent))
import blocks

from autopar.errors import RunError
from autopar.runtime.tensor_parallel import BlockPlan, apply, check_plan, collectives, derive

PLAIN = ("llama", "llama_kv2", "gpt2", "nano")


class Ranks:
    """The groups of this process: 2 x 2 axes, the inner axis alone, and 3 ranks."""

    def __init__(self, rank, path):
        dist.init_process_group(
            "gloo", init_method=f"file://{path}", rank=rank, world_size=4, timeout=datetime.timedelta(seconds=90)
        )
        self.rank = rank
        self.mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        self.three = dist.new_group([0, 1, 2])
        outer, inner = self.mesh.get_group("outer"), self.mesh.get_group("inner")
        self.groups = {(2,): [inner], (2, 2): [outer, inner, dist.group.WORLD], (3,): [self.three]}
        self.coordinates = {(2,): (rank % 2,), (2, 2): (rank // 2, rank % 2), (3,): (rank,)}


def relative(found, expected, floor):
    if found.shape != expected.shape:
        return float("inf")
    return float((found - expected).norm() / max(expected.norm(), floor))


def whole(plan, name, local, group):
    """The whole of a local tensor: gathered from the ranks and joined as the plan says."""
    parts = [torch.empty_like(local) for _ in range(plan.tp)]
    dist.all_gather(parts, local.contiguous(), group=group)
    return plan.unshard(name, parts), max(float((p - parts[0]).abs().max()) for p in parts)


def compare(ranks, name, sizes, sequence_norms):
    """The largest relative errors of output, input gradient and parameter gradients, all joined to whole tensors."""
    block, args, kwargs = blocks.make(name)
    plan = derive(block, args, kwargs).plan(sizes, sequence_norms=sequence_norms)
    groups, coordinate = ranks.groups[sizes], ranks.coordinates[sizes]
    local = copy.deepcopy(block)
    apply(local, plan, groups, coordinate)
    x = args[0].clone().requires_grad_()
    out = first(block(x, *args[1:], **kwargs))
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out * direction).sum().backward()
    place = dist.get_rank(groups[-1])
    cut = (lambda t: t.chunk(plan.tp, 1)[place]) if sequence_norms else (lambda t: t)
    y = cut(args[0]).clone().requires_grad_()
    found = first(local(y, *args[1:], **kwargs))
    (found * cut(direction)).sum().backward()
    floor = 1e-4 * max(float(p.grad.norm()) for p in block.parameters())
    errors = {"output": relative(found.detach(), cut(out.detach()), floor)}
    errors["input"] = relative(y.grad, cut(x.grad), floor)
    locals_ = dict(local.named_parameters())
    for parameter, p in block.named_parameters():
        got, spread = whole(plan, parameter, locals_[parameter].grad, groups[-1])
        errors[parameter] = relative(got, p.grad, floor)
        if not plan.is_cut(parameter):
            errors[f"{parameter} across ranks"] = spread / float(p.grad.abs().max())
    assert list(local.state_dict()) == list(block.state_dict())
    assert all(tuple(locals_[n].shape) == shape for n, shape in plan.local_shapes.items())
    return {"worst": max(errors, key=errors.get), "error": max(errors.values())}


def first(out):
    return out if isinstance(out, torch.Tensor) else out[0]


class Net(nn.Module):
    def __init__(self, layers, recompute=False):
        super().__init__()
        self.layers, self.head, self.recompute = nn.ModuleList(layers), nn.Linear(blocks.HIDDEN, 8), recompute

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x)


def with_fsdp(ranks, recompute):
    """The largest relative weight error after 3 AdamW steps, dp 2 (outer) x tp 2 (inner), against one process."""
    torch.manual_seed(5)
    reference = Net([blocks.NanoBlock(heads=4) for _ in range(2)])
    net = copy.deepcopy(reference)
    net.recompute = recompute
    data, target = torch.randn(4, 12, blocks.HIDDEN), torch.randint(0, 8, (4, 12))
    example = torch.empty(2, 12, blocks.HIDDEN)
    plan = derive(net.layers[0], (example,), {}).plan((2,))
    coordinate, graphs = ranks.coordinates[(2,)], None
    for layer in net.layers:
        graphs = apply(layer, plan, ranks.groups[(2,)], coordinate, graphs)
    for module in (*net.layers, net):
        fully_shard(module, mesh=ranks.mesh["outer"])
    mine = slice(2 * (ranks.rank // 2), 2 * (ranks.rank // 2) + 2)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-5) for m in (reference, net)]
    for _ in range(3):
        for model, optimizer, rows in zip((reference, net), optimizers, (slice(0, 4), mine), strict=True):
            loss = nn.functional.cross_entropy(model(data[rows]).flatten(0, 1), target[rows].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    errors = {}
    full = dict(net.named_parameters())
    for name, p in reference.named_parameters():
        got = full[name].full_tensor()
        inside = name.split(".", 2)[2] if name.startswith("layers") else None
        want = plan.shard(inside, p.detach(), coordinate) if inside else p.detach()
        errors[name] = relative(got, want, 1e-6)
    compiled = len(graphs.compiled)
    return {"worst": max(errors, key=errors.get), "error": max(errors.values()), "graphs": compiled}


class Contiguous(BlockPlan):
    """A plan that cuts fused weights contiguously."""

    def shard(self, name, tensor, coordinate):
        local = self.local_shapes[name]
        for dim, size in enumerate(local):
            if size != tensor.shape[dim]:
                tensor = tensor.narrow(dim, size * coordinate[0], size)
        return tensor.contiguous().clone()


def fault(ranks, kind):
    """What check_plan says of a plan with a planted fault ("half": of a right one, in half precision)."""
    block, args, kwargs = blocks.make("nano")
    if kind == "half":
        block, args = block.bfloat16(), tuple(x.bfloat16() for x in args)
    plan = derive(block, args, kwargs).plan((2,), sequence_norms=kind.endswith("s"))
    identity = lambda self, x: x  # noqa: E731
    changed = {
        "copy": (collectives.Copy, "forward"),
        "copy-s": (collectives.Copy, "forward"),
        "share": (collectives.Share, "forward"),
    }.get(kind)
    saved = getattr(*changed) if changed else None
    if changed:
        setattr(*changed, identity)
    if kind == "contiguous":
        plan = Contiguous(**{f: getattr(plan, f) for f in ("axis_sizes", "sequence_norms", "layouts", "calls")})
    try:
        check_plan(block, plan, ranks.groups[(2,)], ranks.coordinates[(2,)], args, kwargs)
    except RunError as error:
        return str(error)
    finally:
        if changed:
            setattr(*changed, saved)
    return "no error"


def dropout(ranks):
    """With dropout: outputs and replicated gradients equal on the ranks; recompute draws the same numbers."""
    torch.manual_seed(9)
    block, args, kwargs = blocks.nano(heads=4, dropout=0.5)
    plan = derive(block, args, kwargs).plan((2,))
    apply(block, plan, ranks.groups[(2,)], ranks.coordinates[(2,)])
    results = []
    for recompute in (False, True):
        torch.manual_seed(11)
        x = args[0].clone().requires_grad_()
        out = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        out.square().sum().backward()
        results.append((out.detach(), x.grad, block.fc.weight.grad.clone()))
        block.zero_grad()
    torch.manual_seed(12)
    other = block(args[0]).detach()
    inner = [torch.empty_like(results[0][2]) for _ in range(2)]
    dist.all_gather(inner, (results[0][2] == 0).float(), group=ranks.groups[(2,)][0])
    both = []
    for t in results[0][:2]:
        copies = [torch.empty_like(t) for _ in range(2)]
        dist.all_gather(copies, t, group=ranks.groups[(2,)][0])
        both.append(float((copies[0] - copies[1]).abs().max()))
    again = max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))
    return {"between_ranks": max(both), "recompute": again, "other_seed": float((other - results[0][0]).abs().max())}


def plan_case(ranks, name, sizes, sequence_norms):
    label = f"{name} {'x'.join(map(str, sizes))}{'s' if sequence_norms else ''}"
    inside = ranks.rank < 3 or sizes != (3,)
    return label, lambda: compare(ranks, name, sizes, sequence_norms) if inside else None


def quick(ranks):
    yield plan_case(ranks, "llama_kv2", (2, 2), False)
    yield plan_case(ranks, "llama_kv2", (2, 2), True)
    yield plan_case(ranks, "gpt2", (2,), False)
    yield plan_case(ranks, "nano6", (3,), True)
    yield "fsdp recompute", lambda: with_fsdp(ranks, True)
    yield "fault copy", lambda: fault(ranks, "copy")
    yield "fault contiguous", lambda: fault(ranks, "contiguous")
    yield "fault half", lambda: fault(ranks, "half")


def slow(ranks):
    for name in PLAIN:
        for sizes in ((2,), (2, 2)):
            for sequence_norms in (False, True):
                yield plan_case(ranks, name, sizes, sequence_norms)
    yield plan_case(ranks, "llama_eager", (2,), True)
    yield plan_case(ranks, "encoder", (2,), True)
    yield plan_case(ranks, "nano6", (3,), False)
    yield "fsdp plain", lambda: with_fsdp(ranks, False)
    for kind in ("copy-s", "share", "none"):
        yield f"fault {kind}", lambda k=kind: fault(ranks, k)
    yield "dropout", lambda: dropout(ranks)


def main(rank, path, suite):
    torch.set_num_threads(1)
    ranks, results = Ranks(rank, path), {}
    for label, run in {"quick": quick, "slow": slow}[suite](ranks):
        try:
            results[label] = run()
        except Exception:
            results[label] = traceback.format_exc()
            break
    gathered = [None] * 4
    dist.all_gather_object(gathered, results)
    if rank == 0:
        print(json.dumps(gathered))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
