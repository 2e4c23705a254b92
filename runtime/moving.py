"""Where a block's inputs are: hooks that move them from one layer's layout to the next one's."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from autopar.axes import Layout
from autopar.plan import Plan
from autopar.runtime.arguments import argument, replace_argument
from autopar.runtime.groups import RankGroups
from autopar.runtime.relayout import GroupOf, relayout
from autopar.runtime.side_inputs import SideInputs
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
        hook = _Entry(body.side_inputs, structure, source=before, target=layout, group_of=group_of)
        if before != layout or mesh.boundary.batch != layout.batch:
            block.register_forward_pre_hook(hook, with_kwargs=True)
        before = layout
    if blocks and before != mesh.boundary:
        last = blocks[max(blocks)]
        last.register_forward_hook(_exit(structure, before, mesh.boundary, group_of))


class _Entry:
    """A pre-hook that lays a block's inputs out: the hidden state from `source`, the rest from outside."""

    def __init__(
        self, side: SideInputs, structure: Structure, *, source: Layout, target: Layout, group_of: GroupOf
    ) -> None:
        self.side, self.hidden, self.group_of = side, structure.hidden, group_of
        self.source, self.target = source, target

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.side.agree(args, kwargs, self.hidden)
        hidden = argument(args, kwargs, self.hidden)
        moved = relayout(hidden, self.source, self.target, self.group_of)
        args, kwargs = replace_argument(args, kwargs, self.hidden, moved)
        return self.side.laid_out(args, kwargs, self.target, self.group_of)


def _exit(structure: Structure, source: Layout, target: Layout, group_of: GroupOf) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        moved = relayout(structure.hidden_in(output), source, target, group_of)
        return (moved, *output[1:]) if structure.output_length else moved

    return hook
