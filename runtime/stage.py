"""One stage of a model: any contiguous part of its chain, run by the model's own forward.

Blocks of other stages become pass-throughs without parameters, foreign parameters of embedding and head become
stubs of stride 0 (right shape, no memory). The received activation is fed in at the input of the first own layer, and
after the last own layer the forward is left early. Masks, positions and rotary tables are thus computed by the model
itself on every stage (where no number of the batch matters, once a step), and parameter names stay as they were.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime.activity import activity
from autopar.runtime.arguments import argument, replace_argument
from autopar.runtime.side_inputs import SideInputs
from autopar.runtime.standing import Call, StandingInputs
from autopar.runtime.structure import BlockForm, Structure

LossFunction = Callable[[Any, Mapping[str, Tensor]], tuple[Tensor, Tensor]]
"""(what the model returned, the batch) -> (sum of the losses, number of their tokens or samples)."""


class _LeftEarly(Exception):  # noqa: N818  (no error: the way out of a forward)
    """Carries the hidden state out of the model's forward."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class PassThrough(nn.Module):
    """Stands for a block of another stage: returns the hidden state as that block would, without parameters.

    What the model asks of the block besides (its settings) is answered by the block's own modules, without storage.
    """

    def __init__(self, form: BlockForm, block: nn.Module, device: torch.device | None) -> None:
        super().__init__()
        self._hidden, self._length = form.hidden, form.output_length
        stubs = {p: _stub(p.detach(), device) for p in block.parameters()}
        memo: dict[int, Any] = {id(p): nn.Parameter(stub, p.requires_grad) for p, stub in stubs.items()}
        memo |= {id(b): b for b in block.buffers()}
        memo |= {id(v): v for m in block.modules() for name, v in vars(m).items() if not name.startswith("_")}
        object.__setattr__(self, "_block", copy.deepcopy(block, memo))  # no submodule: it has no layer here

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_block" not in self.__dict__:
                raise
            return getattr(self.__dict__["_block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The hidden state, in a tuple of the block's length where the block returns one."""
        hidden = argument(args, kwargs, self._hidden)
        return (hidden, *(None,) * (self._length - 1)) if self._length else hidden


class StageBody(nn.Module):
    """The part `layers` of a model's chain as a module.

    forward(hidden, **batch): `hidden` is what the stage before sent (None on the first). Returns the hidden state
    after the last layer, or, when the stage holds the head, what the model returns.
    The model is changed in place: layers outside `layers` lose their parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        layers: range,
        side_inputs: SideInputs | None = None,
        *,
        device: torch.device | None = None,
    ) -> None:
        """device: where stubs for parameters on the meta device are; default: with the parameter."""
        super().__init__()
        self._device = device
        self.side_inputs = side_inputs or SideInputs()
        self.model = model
        self.structure = structure
        self.layers = layers
        self.holds_embed = layers[0] == 0
        self.holds_head = layers[-1] == structure.num_blocks + 1
        self._fed: Tensor | None = None
        self._drop_foreign_parameters()
        numbers = tuple(layer - 1 for layer in layers)
        middle = not (self.holds_embed or self.holds_head) and len(structure.starts) == 1
        plain = middle and not any(structure.forms[number].learned for number in numbers)
        self._standing = StandingInputs(model, structure, numbers) if plain else None

    def blocks(self) -> dict[int, nn.Module]:
        """The own blocks by their number."""
        return {layer - 1: self._block(layer - 1) for layer in self.layers if 0 < layer <= self.structure.num_blocks}

    def _block(self, number: int) -> nn.Module:
        return self.structure.block(self.model, number)

    def _drop_foreign_parameters(self) -> None:
        structure = self.structure
        for number in range(structure.num_blocks):
            if number + 1 not in self.layers:
                self.model.set_submodule(
                    structure.paths[number], PassThrough(structure.forms[number], self._block(number), self._device)
                )
        own = {*(structure.embed_parameters if self.holds_embed else ())}
        own |= {*(structure.head_parameters if self.holds_head else ())}
        for name in {*structure.embed_parameters, *structure.head_parameters} - own:
            path, _, leaf = name.rpartition(".")
            owner = self.model.get_submodule(path)
            stub = _stub(getattr(owner, leaf), self._device)
            delattr(owner, leaf)
            owner.register_buffer(leaf, stub, persistent=False)

    def attach_ends(self) -> None:
        """Feed the first own layer and leave after the last. Call it when all other hooks are in place.

        The feed must come before every other hook of its block: fully_shard ties its backward to the inputs it sees.
        """
        self._attach_feed()
        self._attach_exit()

    def _attach_feed(self) -> None:
        if self.holds_embed:
            return
        first = min(self.layers[0] - 1, self.structure.num_blocks - 1)

        def feed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            fed, self._fed = self._fed, None
            return replace_argument(args, kwargs, self.structure.forms[first].hidden, fed)

        self._block(first).register_forward_pre_hook(feed, with_kwargs=True, prepend=True)

    def _attach_exit(self) -> None:
        if self.holds_head:
            return
        if self.layers[-1] == 0 and len(self.structure.starts) == 1:

            def leave_before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                raise _LeftEarly(argument(args, kwargs, self.structure.forms[0].hidden))

            self._block(0).register_forward_pre_hook(leave_before, with_kwargs=True)
            return

        # A chain of several parts has no stages; its embedding alone is all that runs around the blocks.
        last = (self.layers[-1] or self.structure.num_blocks) - 1

        def leave_after(module: nn.Module, args: Any, output: Any) -> None:
            raise _LeftEarly(self.structure.forms[last].hidden_in(output))

        self._block(last).register_forward_hook(leave_after)

    def forward(self, hidden: Tensor | None, **batch: Tensor) -> Any:
        """The hidden state after the last own layer, or the model's output when the stage holds the head."""
        self._fed = hidden
        try:
            with self.side_inputs.during(self.model, batch):
                calls = None if self._standing is None else self._standing.calls(batch)
                return self.model(**batch) if calls is None else self._run_blocks(hidden, calls)
        except _LeftEarly as left:
            # The traceback holds the frames of the whole forward, and with them every local tensor.
            left.__traceback__ = None
            return left.hidden

    def _run_blocks(self, hidden: Any, calls: Mapping[int, Call]) -> Any:
        """The own blocks alone, with these arguments."""
        for number, (args, kwargs) in calls.items():
            form = self.structure.forms[number]
            args, kwargs = replace_argument(args, kwargs, form.hidden, hidden)
            hidden = form.hidden_in(self._block(number)(*args, **kwargs))
        return hidden

    def begin_step(self) -> None:
        """Make again what the micro-batches of a step share."""
        if self._standing is not None:
            self._standing.forget()


def same_tensors_again(model: nn.Module) -> nn.Module:
    """The tree of modules once more, with the very same parameters and buffers: for a further stage on this rank."""
    return copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})


def _stub(parameter: Tensor, device: torch.device | None) -> Tensor:
    place = device if parameter.is_meta else None
    zero = torch.zeros((), dtype=parameter.dtype, device=place or parameter.device)
    return zero.expand(parameter.shape)


class StageModule(nn.Module):
    """A stage as the pipeline runs it: hidden in, hidden out, and on the last stage the sum of the losses.

    Around a sharded `body` it stays a plain module, so that a pipeline schedule leaves the gradient synchronisation of
    sharded layers to themselves, micro-batch by micro-batch; where backwards run in two parts the schedule must do it,
    and this is what is sharded (see runtime/zero.py). loss: what the last stage sums up; counted: micro-batch by
    micro-batch, the (sum, count) of the losses since `reset`.
    """

    def __init__(self, body: StageBody, loss: LossFunction) -> None:
        super().__init__()
        self.body = body
        self.loss = loss
        self.counted: list[tuple[Tensor, Tensor]] = []

    def reset(self) -> None:
        """Begin a step: forget the counted losses, and what the micro-batches of the step before shared."""
        self.counted.clear()
        self.body.begin_step()

    def forward(self, hidden: Tensor | None, **batch: Tensor) -> Tensor:
        """The hidden state for the next stage, or the sum of the losses over this rank's tokens."""
        activity.beat()
        output = self.body(None if self.body.holds_embed else hidden, **batch)
        if not self.body.holds_head:
            assert isinstance(output, Tensor)
            return output.clone() if output._is_view() else output
        total, count = self.loss(output, batch)
        self.counted.append((total.detach(), count))
        return total
