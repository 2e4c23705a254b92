"""Where a block's inputs are: hooks that move the hidden state from one layer's layout to the next one's.

What blocks take and return beside the hidden state (masks, rotary tables, position biases, the encoder's output)
crosses layers in the layout of the boundary, in which all of the model outside its blocks runs. So does the hidden
state where something runs between two blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autopar.axes import Layout, Placement, RankMesh
from autopar.plan import Plan
from autopar.runtime.arguments import replace_argument, tensor_arguments
from autopar.runtime.groups import RankGroups
from autopar.runtime.relayout import GroupOf, relayout, share_gradient, sum_gradient
from autopar.runtime.side_inputs import SideInputs
from autopar.runtime.stage import StageBody
from autopar.runtime.structure import BlockForm


def attach_relayouts(body: StageBody, plan: Plan, groups: RankGroups) -> None:
    """Hooks that move the hidden state from layout to layout, beginning and ending in that of the boundary."""
    mesh, structure = plan.mesh, body.structure
    before = mesh.boundary
    blocks = body.blocks()
    move = _Move(mesh=mesh, side=body.side_inputs, group_of=lambda axis: groups.along((axis,)))
    for number, block in blocks.items():
        placed = mesh.place(plan.strategies[number + 1])
        layout = placed.layout
        if number in structure.starts:
            before = mesh.boundary
        leaves = number + 1 in structure.starts or number + 1 not in blocks
        after = mesh.boundary if leaves else layout
        form = structure.forms[number]
        if before != layout or layout.batch != mesh.boundary.batch:
            block.register_forward_pre_hook(_entry(move, number, form, before, layout), with_kwargs=True)
        if after != layout or layout.batch != mesh.boundary.batch:
            block.register_forward_hook(_exit(move, form, placed, after))
        before = layout


@dataclass(frozen=True, kw_only=True)
class _Move:
    """Moves what is not the hidden state between a layer's layout and the boundary's."""

    mesh: RankMesh
    side: SideInputs
    group_of: GroupOf

    def hidden(self, x: Tensor, source: Layout, target: Layout) -> Tensor:
        return relayout(x, source, target, self.group_of)

    def shared(self, x: Tensor, target: Layout) -> Tensor:
        """A side input that has no samples and is the same on all ranks: each of those that share the block's samples
        gives its part of the gradient, which outside is summed over all ranks."""
        return share_gradient(x, self.mesh.size(self._apart(target))) if x.requires_grad else x

    def out(self, x: Tensor, source: Placement, batch_dim: int | None) -> Tensor:
        """What a block returns beside the hidden state.

        Without samples, the ranks that share the block's samples add up the gradients of their users. Those that share
        a sequence do not: their parts of a gradient are added up where it arrives, at parameters and side inputs, so
        each gives what its own users gave, and of a gradient that all of them have, its share.
        """
        boundary, parts = self.mesh.boundary.batch, (*source.sp, *source.cp)
        if batch_dim is not None:
            x = share_gradient(x, self.mesh.size(parts)) if parts and x.requires_grad else x
            batch = Layout(batch=source.layout.batch)
            return relayout(x, batch, Layout(batch=boundary), self.group_of, batch_dim=batch_dim)
        whole = [self.group_of(axis) for axis in self._apart(source.layout) if axis not in parts]
        return sum_gradient(x, whole) if whole and x.requires_grad else x

    def _apart(self, layout: Layout) -> tuple[str, ...]:
        """The axes along which the ranks share samples in a layout, and do not at the boundary."""
        return tuple(axis for axis in self.mesh.boundary.batch if axis not in layout.batch)


def _entry(move: _Move, number: int, form: BlockForm, source: Layout, target: Layout) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        move.side.agree(number, args, kwargs, form.hidden)
        before = dict(tensor_arguments(args, kwargs))
        args, kwargs = move.side.laid_out(number, args, kwargs, target, move.group_of)
        for key, value in tensor_arguments(args, kwargs):
            if key == form.hidden:
                args, kwargs = replace_argument(args, kwargs, key, move.hidden(value, source, target))
            elif value is before[key] and value.requires_grad:
                args, kwargs = replace_argument(args, kwargs, key, move.shared(value, target))
        return args, kwargs

    return hook


def _exit(move: _Move, form: BlockForm, source: Placement, target: Layout) -> Any:
    dims = dict(form.batch_outputs)

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        moved = move.hidden(form.hidden_in(output), source.layout, target)
        if not form.output_length:
            return moved
        sides = enumerate(output[1:], start=1)
        return (moved, *(move.out(x, source, dims.get(i)) if isinstance(x, Tensor) else x for i, x in sides))

    return hook
