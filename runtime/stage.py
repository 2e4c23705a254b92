"""One stage of a model: any contiguous part of its chain, run by the model's own forward.

Blocks of other stages become pass-throughs without parameters, foreign parameters of embedding and head become
stubs of stride 0 (right shape, no memory). The received activation is fed in at the input of the first own layer, and
after the last own layer the forward is left early. Masks, positions and rotary tables are thus computed by the model
itself on every stage (where no number of the batch matters, once a step), and parameter names stay as they were. What
blocks take besides of other layers (the encoder's output, position biases that a block returns) is handed from stage
to stage beside the hidden state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.runtime.activity import activity
from autopar.runtime.arguments import Key, argument, replace_argument
from autopar.runtime.side_inputs import SideInputs
from autopar.runtime.standing import Call, StandingInputs
from autopar.runtime.structure import BlockForm, Structure

LossFunction = Callable[[Any, Mapping[str, Tensor]], tuple[Tensor, Tensor]]
"""(what the model returned, the batch) -> (sum of the losses, number of their tokens or samples)."""


class _LeftEarly(Exception):  # noqa: N818  (no error: the way out of a forward)
    """Carries what the next stage gets out of the model's forward."""

    def __init__(self, hidden: Tensor, sides: list[Tensor]) -> None:
        super().__init__()
        self.sent = (hidden, *sides) if sides else hidden


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

    forward(hidden, *sides, **batch): what the stage before sent (hidden None on the first), sides as in
    `structure.crossing`. Returns the hidden state after the last layer, in a tuple with the sides that follow where
    there are any; or, when the stage holds the head, what the model returns.
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
        seams: bool = False,
    ) -> None:
        """device: where stubs for parameters on the meta device are; default: with the parameter.

        seams: the embedding alone runs all that stands outside the blocks before the head, around pass-throughs.
        """
        super().__init__()
        self._device = device
        self.side_inputs = side_inputs or SideInputs()
        self.model = model
        self.structure = structure
        self.layers = layers
        self.holds_embed = layers[0] == 0
        self.holds_head = layers[-1] == structure.num_blocks + 1
        self._seams = seams
        self._fed: Tensor | None = None
        self._received: Tensor | None = None
        self._sides: dict[int, Tensor] = {}
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
        self._own = {*structure.embed_parameters} if self._seams else structure.outside_names(self.layers)
        known = {*structure.embed_parameters, *structure.head_parameters}
        if structure.seams and len(self.layers) <= structure.num_blocks + 1 and not self._seams:
            # A shared parameter under other names is not this stage's either.
            known |= {n for n, _ in self.model.named_parameters(remove_duplicate=False) if structure.is_outside(n)}
        for name in known - self._own:
            path, _, leaf = name.rpartition(".")
            owner = self.model.get_submodule(path)
            stub = _stub(getattr(owner, leaf), self._device)
            delattr(owner, leaf)
            owner.register_buffer(leaf, stub, persistent=False)

    @property
    def held_layers(self) -> tuple[int, ...]:
        """The layers of which the stage has parameters: its own, and the embedding where it holds a seam."""
        return (*(() if 0 in self.layers or not self.layer_parameters(0) else (0,)), *self.layers)

    def layer_parameters(self, layer: int) -> dict[str, nn.Parameter]:
        """The parameters that the stage has of a layer, by full name."""
        if layer:
            return self.structure.layer_parameters(self.model, layer)
        named = dict(self.model.named_parameters(remove_duplicate=False))
        return {name: named[name] for name in self.structure.embed_parameters if name in self._own}

    def attach_ends(self) -> None:
        """Feed the first own layer and leave after the last. Call it when all other hooks are in place.

        The feed must come before every other hook of its block: fully_shard ties its backward to the inputs it sees.
        """
        self._attach_feed()
        self._attach_sides()
        self._attach_exit()

    def _attach_feed(self) -> None:
        if self.holds_embed:
            return
        first = min(self.layers[0] - 1, self.structure.num_blocks - 1)
        if any(seam.block == self.layers[0] - 1 for seam in self.structure.seams):
            before = self.structure.forms[first - 1]

            def feed_seam(module: nn.Module, args: Any, output: Any) -> Any:
                fed, self._fed = self._fed, None
                return (fed, *output[1:]) if before.output_length else fed

            self._block(first - 1).register_forward_hook(feed_seam)
            return

        def feed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            fed, self._fed = self._fed, None
            return replace_argument(args, kwargs, self.structure.forms[first].hidden, fed)

        self._block(first).register_forward_pre_hook(feed, with_kwargs=True, prepend=True)

    def _attach_sides(self) -> None:
        """Give the own blocks the sides that were received, and keep those that are made here for the next stage."""
        received, sides = self.structure.crossing(self.layers[0]), self.structure.sides
        for seam in self.structure.seams:
            if seam.block + 1 in self.layers and not self.holds_embed:
                hook = self._tied(self.structure.forms[seam.block].hidden)
                self._block(seam.block).register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        taken = [(number, user, key) for number in received for user, key in sides[number].users]
        for number, user, key in taken:
            if user + 1 in self.layers:
                hook = self._given(number, key)
                self._block(user).register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
        for number in self.structure.crossing(self.layers[-1] + 1):
            if number not in received:
                made, take_in, take_out = sides[number], *self._kept(number)
                block = self._block(made.made)
                if made.place:
                    block.register_forward_hook(take_out)
                else:
                    block.register_forward_pre_hook(take_in, with_kwargs=True, prepend=True)

    def _tied(self, hidden: Key) -> Any:
        """A backward in two parts finds the parameters of a stage by what depends on its input: so must words that the
        decoder looks up."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return replace_argument(args, kwargs, hidden, passed(argument(args, kwargs, hidden), self._received))

        return hook

    def _given(self, number: int, key: Key) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return replace_argument(args, kwargs, key, self._sides[number])

        return hook

    def _kept(self, number: int) -> tuple[Any, Any]:
        side = self.structure.sides[number]

        def take_in(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._sides[number] = argument(args, kwargs, side.key)

        def take_out(module: nn.Module, args: Any, output: Any) -> None:
            self._sides[number] = output[side.place]

        return take_in, take_out

    def _attach_exit(self) -> None:
        if self.holds_head:
            return
        if self.layers[-1] == 0 and not (self._seams and self.structure.seams):

            def leave_before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                raise _LeftEarly(argument(args, kwargs, self.structure.forms[0].hidden), [])

            self._block(0).register_forward_pre_hook(leave_before, with_kwargs=True)
            return

        last = (self.layers[-1] or self.structure.num_blocks) - 1
        sent = self.structure.crossing(last + 2)

        def leave_after(module: nn.Module, args: Any, output: Any) -> None:
            hidden = self.structure.forms[last].hidden_in(output)
            raise _LeftEarly(hidden, [self._sides[number] for number in sent])

        self._block(last).register_forward_hook(leave_after)

    def forward(self, hidden: Tensor | None, *sides: Tensor, **batch: Tensor) -> Any:
        """What the next stage gets, or the model's output when the stage holds the head."""
        self._fed = self._received = hidden
        self._sides = dict(zip(self.structure.crossing(self.layers[0]), sides, strict=True))
        try:
            with self.side_inputs.during(self.model, batch):
                calls = None if self._standing is None else self._standing.calls(batch)
                return self.model(**batch) if calls is None else self._run_blocks(hidden, calls)
        except _LeftEarly as left:
            # The traceback holds the frames of the whole forward, and with them every local tensor.
            left.__traceback__ = None
            return left.sent
        finally:
            self._received, self._sides = None, {}

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


def empty_like_parameters(model: nn.Module, device: torch.device | None) -> dict[int, Any]:
    """For a copy of a model: by identity, stubs for its parameters, and its buffers as they are."""
    memo: dict[int, Any] = {id(b): b for b in model.buffers()}
    return memo | {id(p): nn.Parameter(_stub(p.detach(), device), p.requires_grad) for p in model.parameters()}


def _stub(parameter: Tensor, device: torch.device | None) -> Tensor:
    place = device if parameter.is_meta else None
    zero = torch.zeros((), dtype=parameter.dtype, device=place or parameter.device)
    return zero.expand(parameter.shape)


class StageModule(nn.Module):
    """A stage as the pipeline runs it: in what the stage before sent, out what the next one gets or the sum of losses.

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

    def forward(self, hidden: Tensor | None, *sides: Tensor, **batch: Tensor) -> Tensor | tuple[Tensor, ...]:
        """What the next stage gets, or the sum of the losses over this rank's tokens."""
        activity.beat()
        output = self.body(None if self.body.holds_embed else hidden, *sides, **batch)
        if not self.body.holds_head:
            return _own(output) if isinstance(output, Tensor) else tuple(_own(x, hidden) for x in output)
        total, count = self.loss(output, batch)
        self.counted.append((total.detach(), count))
        return total


def _own(sent: Tensor, received: Tensor | None = None) -> Tensor:
    """A tensor that the schedule may send and detach: contiguous, no view, and not what the stage itself received.

    received: on which its gradient shall seem to depend (see StageBody).
    """
    assert isinstance(sent, Tensor)
    if sent._is_view() or not sent.is_contiguous():
        sent = sent.clone(memory_format=torch.contiguous_format)
    return passed(sent, received) if sent.requires_grad and (sent.is_leaf or received is not None) else sent


def passed(x: Tensor, beside: Tensor | None = None) -> Tensor:
    """The same numbers in the same memory, in a tensor that is no view; its graph has `beside`, with no gradient."""
    out: Tensor = _Passed.apply(x, beside)
    return out


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, beside: Tensor | None) -> Tensor:
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None
