"""Where a block's inputs are: hooks that move the hidden state from one layer's layout to the next one's."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from autopar.axes import Layout
from autopar.plan import Plan
from autopar.runtime.arguments import argument, replace_argument
from autopar.runtime.groups import RankGroups
from autopar.runtime.relayout import GroupOf, relayout
from autopar.runtime.stage import StageBody
from autopar.runtime.structure import Structure


def attach_relayouts(body: StageBody, plan: Plan, groups: RankGroups) -> None:
    """Hooks that move the hidden state from layout to layout, beginning and ending in that of the boundary."""
    mesh, structure = plan.mesh, body.structure
    before = mesh.boundary
    blocks = body.blocks()

    def group_of(axis: str) -> dist.ProcessGroup:
        return groups.along((axis,))

    for number, block in blocks.items():
        layout = mesh.place(plan.strategies[number + 1]).layout
        hook = _Entry(structure, source=before, boundary=mesh.boundary, target=layout, group_of=group_of)
        if hook.needed:
            block.register_forward_pre_hook(hook, with_kwargs=True)
        before = layout
    if blocks and before != mesh.boundary:
        last = blocks[max(blocks)]
        last.register_forward_hook(_exit(structure, before, mesh.boundary, group_of))


class _Entry:
    """A pre-hook that brings a block's inputs into its layout: the hidden state from `source`, the rest from outside.

    Side inputs that carry the batch come from the model's forward, which runs in the boundary layout.
    """

    def __init__(
        self, structure: Structure, *, source: Layout, boundary: Layout, target: Layout, group_of: GroupOf
    ) -> None:
        self.structure, self.group_of = structure, group_of
        self.source, self.boundary, self.target = source, boundary, target

    @property
    def needed(self) -> bool:
        return self.source != self.target or bool(
            self.structure.batch_inputs and self.boundary.batch != self.target.batch
        )

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = argument(args, kwargs, self.structure.hidden)
        moved = relayout(hidden, self.source, self.target, self.group_of)
        args, kwargs = replace_argument(args, kwargs, self.structure.hidden, moved)
        for key, dim in self.structure.batch_inputs:
            value = argument(args, kwargs, key)
            if isinstance(value, Tensor):
                whole, local = Layout(batch=self.boundary.batch), Layout(batch=self.target.batch)
                value = relayout(value, whole, local, self.group_of, batch_dim=dim)
                args, kwargs = replace_argument(args, kwargs, key, value)
        return args, kwargs


def _exit(structure: Structure, source: Layout, target: Layout, group_of: GroupOf) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        moved = relayout(structure.hidden_in(output), source, target, group_of)
        return (moved, *output[1:]) if structure.output_length else moved

    return hook
