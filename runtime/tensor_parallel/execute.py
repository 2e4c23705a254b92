"""Runs a block under its plan: local parameters, and the rewritten graph of this rank as its forward."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from autopar.errors import RunError
from autopar.runtime.tensor_parallel.collectives import Team
from autopar.runtime.tensor_parallel.derive import derivation_of, make_teams, rewrite, solve
from autopar.runtime.tensor_parallel.layout import BlockPlan
from autopar.runtime.tensor_parallel.native import make_native
from autopar.runtime.tensor_parallel.sequence import SequenceTeams
from autopar.runtime.tensor_parallel.skeleton import Key, Skeleton, in_order, parameter_names, signature
from autopar.runtime.trees import tree_unflatten


@dataclass(frozen=True, eq=False)
class Compiled:
    """A local graph for one signature: its code, the names of the states it takes, and its result."""

    run: Any
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: tuple[Tensor, ...]
    spec: Any
    is_tensor: bool


@dataclass(eq=False)
class LocalGraphs:
    """The local graphs of one block kind on this rank, compiled when a signature is first met.

    The graph is exported again for every new signature (training flag, shapes, dtypes, structure, constants), about
    0.2 s. The plan must come out the same each time. Only blocks that differ in nothing but their weights may share
    one object: a number that a block multiplies with (a scale that depends on its depth) is part of the graph.
    """

    skeleton: Skeleton
    plan: BlockPlan
    coordinate: tuple[int, ...]
    teams: list[Team]
    sharing: SequenceTeams | None = None
    compiled: dict[Key, Compiled] = field(default_factory=dict)

    def get(self, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any], dtypes: dict[str, torch.dtype]) -> Compiled:
        """The local graph for this key; raises InputError or RunError."""
        found = self.compiled.get(key)
        if found is None:
            found = self.compiled[key] = self._compile(bool(key[0]), args, kwargs, dtypes)
        return found

    def _compile(
        self, training: bool, args: tuple[Any, ...], kwargs: dict[str, Any], dtypes: dict[str, torch.dtype]
    ) -> Compiled:
        plan = self.plan
        graph = self.skeleton.trace(args, kwargs, training, dtypes, plan.sequence_parts)
        derivation = derivation_of(self.skeleton, graph)
        solved = solve(derivation, plan.axis_sizes, plan.sequence_norms, plan.sp, plan.cp)
        if solved.layouts != plan.layouts:
            wrong = next(name for name in plan.layouts if plan.layouts[name] != solved.layouts.get(name))
            raise RunError(
                f"the tensor-parallel plan of {derivation.class_name} does not hold for these inputs",
                why=f"{wrong} would be cut differently for {graph.residual.meta['val'].shape}",
                fix="keep this block data parallel, or keep the shapes it was planned for",
            )
        local = rewrite(solved, self.teams, self.coordinate, self.sharing)
        make_native(local.graph)
        root = nn.Module()
        for name, module in local.modules.items():
            root.add_module(name, module)
        for node in local.graph.nodes:
            if node.op == "get_attr":
                setattr(root, str(node.target), getattr(graph.exported.graph_module, str(node.target)))
        device = graph.residual.meta["val"].device
        constants = [graph.exported.constants[name] for name in graph.constants.values()]
        module = fx.GraphModule(root, local.graph)
        return Compiled(
            module.forward,
            tuple(graph.parameters.values()),
            tuple(graph.buffers.values()),
            tuple(c.to(device) for c in constants),
            graph.exported.call_spec.out_spec,
            graph.exported.call_spec.out_spec.is_leaf(),
        )


class Executor:
    """The forward of a tensor-parallel block: takes the block's inputs, runs the local graph for their signature."""

    def __init__(self, block: nn.Module, graphs: LocalGraphs) -> None:
        self.block, self.graphs = block, graphs
        self.__signature__ = inspect.signature(block.forward)
        self._names = parameter_names(block)
        owners = dict(block.named_modules())
        self._owners: dict[str, tuple[dict[str, Any], str]] = {}
        for name, _ in block.named_parameters(remove_duplicate=False):
            owner, _, leaf = name.rpartition(".")
            self._owners[name] = (owners[owner]._parameters, leaf)

    def parameter(self, name: str) -> Tensor:
        """The local tensor of a parameter as it is now (FSDP2 puts the gathered one there)."""
        owner, leaf = self._owners[name]
        value = owner[leaf]
        return value.to_local() if isinstance(value, DTensor) else value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's output on this rank."""
        kwargs = in_order(self._names, kwargs)
        shape, flat = signature(args, kwargs)
        values = {name: self.parameter(name) for name in self._owners}
        key = (self.block.training, shape, *[v.dtype for v in values.values()])
        local = self.graphs.compiled.get(key)
        if local is None:
            local = self.graphs.get(key, args, kwargs, {name: v.dtype for name, v in values.items()})
        out = local.run(
            *[values[name] for name in local.parameters],
            *[self.block.get_buffer(name) for name in local.buffers],
            *local.constants,
            *flat,
        )
        return out[0] if local.is_tensor else tree_unflatten(list(out), local.spec)


def apply(
    block: nn.Module,
    plan: BlockPlan,
    groups: Sequence[Any] | None,
    coordinate: tuple[int, ...],
    graphs: LocalGraphs | None = None,
    sharing: SequenceTeams | None = None,
) -> LocalGraphs:
    """The local graphs, after replacing the block's parameters by local ones and its forward by their runner.

    groups: the process group of each axis, then one of all axes when there are several, ranks row major over the
    axes; None: collectives only change shapes. graphs: those of an earlier block, as LocalGraphs says.
    sharing: the ranks that share the sequence, None where it is not cut. Names, state-dict keys,
    requires_grad and hooks of the block stay. Raises ValueError for a block that is tensor parallel already, the plan
    of another block, or groups in which this rank stands elsewhere.
    """
    if isinstance(block.__dict__.get("forward"), Executor):
        raise ValueError("the block is tensor parallel already")
    missing = {name for name, _ in block.named_parameters(remove_duplicate=False)} ^ set(plan.layouts)
    if missing:
        raise ValueError(f"the plan is of another block: {sorted(missing)}")
    if graphs is None:
        teams = make_teams(plan.axis_sizes, coordinate, groups)
        for team in teams:
            if team.group is not None and dist.get_rank(team.group) != team.rank:
                raise ValueError(f"rank {dist.get_rank(team.group)} of its group stands at {coordinate}")
        shared = (1, 1) if sharing is None else (sharing.sp.ranks, sharing.cp.ranks)
        if shared != (plan.sp, plan.cp):
            raise ValueError(f"the plan cuts the sequence by sp {plan.sp} and cp {plan.cp}, not by {shared}")
        graphs = LocalGraphs(Skeleton(block), plan, coordinate, teams, sharing)
    executor = Executor(block, graphs)
    local: dict[int, nn.Parameter] = {}
    for name, p in list(block.named_parameters(remove_duplicate=False)):
        if plan.is_cut(name) and id(p) not in local:
            with torch.no_grad():
                local[id(p)] = nn.Parameter(plan.shard(name, p.detach(), coordinate), requires_grad=p.requires_grad)
        owner, _, leaf = name.rpartition(".")
        if id(p) in local:
            setattr(block.get_submodule(owner), leaf, local[id(p)])
    block.forward = executor
    return graphs
