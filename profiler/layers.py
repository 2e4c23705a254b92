"""The layers of a model one by one: each kind runs alone, at any number of samples, as one rank would run it.

A block runs as itself; embed and head run as the stages that hold nothing else, so that what the model does around its
blocks (masks, rotary tables, the loss) is measured where it is done.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from autopar.axes import prime_factors
from autopar.errors import InputError
from autopar.measured import SideBytes, TensorParallelCall
from autopar.model import ModelSpec
from autopar.profiler.clock import device_name
from autopar.profiler.trace import LayerCall, fit, in_graph, tie
from autopar.runtime.arguments import argument, replace_argument
from autopar.runtime.batches import example_batch, vocab_size
from autopar.runtime.crossing import Boundaries
from autopar.runtime.fakes import DEPENDS_ON_NUMBERS
from autopar.runtime.losses import own_loss, summed_loss
from autopar.runtime.probing import probe
from autopar.runtime.recompute import recomputed
from autopar.runtime.spec import FRONT, describe, kind_name, seam_kind
from autopar.runtime.stage import LossFunction, PassThrough, StageBody, StageModule
from autopar.runtime.structure import BlockForm, Probe
from autopar.runtime.tracker import storage_bytes

if TYPE_CHECKING:
    from autopar.runtime.tensor_parallel import BlockPlan

_PROBE_SAMPLES = 3
_MOST_TURNS = 4
"""How many equal blocks a timing goes through: enough that none finds its weights in the cache."""


@dataclass(frozen=True, kw_only=True, order=True)
class LayerKey:
    """What is measured: a kind of layer at a tensor-parallel degree."""

    kind: str
    tp: int = 1
    sequence_norms: bool = False

    def __str__(self) -> str:
        return self.kind if self.tp == 1 else f"{self.kind} tp{self.tp}{'s' if self.sequence_norms else ''}"


class LayerBench:
    """All layer kinds of a model at one sequence length.

    model: is not changed; its blocks are run, its embedding and head are copied. source: its MODEL string. loss,
    example: as in `autopar.parallelize`. max_tp: highest tensor-parallel degree to derive. fake: tensors have shapes
    only (autopar.runtime.fakes). Raises InputError when the model has no chain of blocks or cannot run this batch.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        sequence: int,
        source: str = "",
        max_tp: int = 1,
        loss: LossFunction | None = None,
        example: Mapping[str, Tensor] | None = None,
        fake: bool = False,
    ) -> None:
        if not any(p.is_floating_point() for p in model.parameters()):
            why = "it has no floating-point parameter"
            raise InputError(f"{type(model).__name__} has nothing to plan", why=why, fix="give a model with layers")
        self._device = next(model.parameters()).device
        self.device: Literal["cpu", "cuda"] = "cuda" if self._device.type == "cuda" else "cpu"
        self.device_name = device_name(self._device)
        batch = example if example is not None else example_batch(model, samples=_PROBE_SAMPLES, sequence=sequence)
        self._batch = _resized(batch, _PROBE_SAMPLES, self._device)
        self._probe = _probe(model, self._batch)
        described = describe(model, self._probe, source=source, max_tp=max_tp, vocab_size=vocab_size(model))
        self.spec: ModelSpec = described.spec
        self._derivations = described.derivations
        structure = self._probe.structure
        self._numbers = {kind_name(n, len(self._probe.inputs)): n for n in self._probe.inputs}
        self._first = {n: structure.kinds.index(n) for n in self._probe.inputs}
        self._blocks = {
            n: [structure.block(model, block) for block, kind in enumerate(structure.kinds) if kind == n][:_MOST_TURNS]
            for n in self._first
        }
        self._dtype: torch.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        # Which labels count cannot be seen on fake tensors, and the bytes do not depend on it.
        unseen = summed_loss(type(model).__name__, shifted=True) if fake else None
        self._loss = loss or unseen or own_loss(model, self._batch)
        self._model = model
        several = structure.sides and not structure.pipeline_reason
        self._boundaries = Boundaries(model, structure, (), self._device) if several else None
        self._modules: dict[LayerKey, nn.Module] = {}
        self._plans: dict[LayerKey, BlockPlan] = {}

    @property
    def dtype(self) -> str:
        """Torch's name of the dtype of the model's parameters."""
        return str(self._dtype).removeprefix("torch.")

    def keys(self, degrees: Sequence[int]) -> tuple[LayerKey, ...]:
        """What can be measured with these tensor-parallel degrees, in chain order.

        With sequence-parallel norms only where the block and the sequence allow it.
        """
        found = []
        for kind in self.spec.kinds:
            found.append(LayerKey(kind=kind.name))
            for tp in degrees if kind.role == "block" else ():
                if tp in kind.tp_degrees:
                    found.append(LayerKey(kind=kind.name, tp=tp))
                    derivation = self._derivations[self._numbers[kind.name]]
                    if kind.sequence_norms and derivation.why_no_sequence_norms(tuple(prime_factors(tp))) is None:
                        found.append(LayerKey(kind=kind.name, tp=tp, sequence_norms=True))
        return tuple(found)

    def turns(self, key: LayerKey, samples: int) -> tuple[LayerCall, ...]:
        """The layer, and some equal ones of the model, to be timed in turn as a step runs them.

        One that runs again and again has its weights in the cache, which with few samples is a tenth of its time.
        """
        one_alone = key.tp > 1 or key.kind not in self._numbers
        count = 1 if one_alone else len(self._blocks[self._numbers[key.kind]])
        return tuple(self.call(key, samples, turn) for turn in range(count))

    def call(self, key: LayerKey, samples: int, turn: int = 0) -> LayerCall:
        """The layer with random inputs of so many local samples; turn: which of the equal ones."""
        if key.kind not in self._numbers:
            return self._outer_call(key, samples)
        number = self._numbers[key.kind]
        form = self._form(number)
        args, kwargs = self._block_inputs(number, samples)
        module = self._module(key, turn)

        def run(hidden: Tensor | None) -> Tensor:
            given, named = replace_argument(args, kwargs, form.hidden, hidden)
            if torch.is_grad_enabled():  # the encoder's output and the like get their gradient too
                for side in form.learned:
                    value = argument(given, named, side)
                    value = in_graph(value, value.new_zeros((), requires_grad=True))
                    given, named = replace_argument(given, named, side, value)
            first = form.hidden_in(module(*given, **named))
            assert isinstance(first, Tensor)
            return first

        shape = argument(args, kwargs, form.hidden).shape[1:]
        hidden = self._hidden(samples, shape, sequence_shards=key.tp if key.sequence_norms else 1)
        sides = replace_argument(args, kwargs, form.hidden, None)
        return LayerCall(module=module, hidden=hidden, sides=sides, run=run)

    def selective_call(self, key: LayerKey, samples: int) -> LayerCall | None:
        """As `call` under selective recompute; None for embedding and head, which are not recomputed."""
        return next(iter(self.selective_turns(key, samples)), None)

    def selective_turns(self, key: LayerKey, samples: int) -> tuple[LayerCall, ...]:
        """As `turns` under selective recompute; none for embedding and head."""
        calls = self.turns(key, samples) if key.kind in self._numbers else ()
        return tuple(replace(call, run=recomputed(call.run, "selective")) for call in calls)

    def shared_bytes(self, key: LayerKey, samples: int) -> int:
        """Bytes of the side inputs of blocks that live, once a stage, while this layer runs.

        The embedding makes its own while it runs, and its trace sees them.
        """
        if key.kind not in self._numbers and key.kind != "head":
            return 0
        number = self._numbers.get(key.kind, 0)
        args, kwargs = self._block_inputs(number, samples)
        return storage_bytes(replace_argument(args, kwargs, self._form(number).hidden, None))

    def _form(self, number: int) -> BlockForm:
        """How the blocks of a kind take and return tensors."""
        return self._probe.structure.forms[self._first[number]]

    def calls(self, key: LayerKey) -> tuple[TensorParallelCall, ...]:
        """The collectives of the layer over its tensor-parallel group."""
        return self._plan(key).calls if key.tp > 1 else ()

    def _plan(self, key: LayerKey) -> BlockPlan:
        if key not in self._plans:
            derivation = self._derivations[self._numbers[key.kind]]
            self._plans[key] = derivation.plan(tuple(prime_factors(key.tp)), sequence_norms=key.sequence_norms)
        return self._plans[key]

    def _module(self, key: LayerKey, turn: int) -> nn.Module:
        block = self._blocks[self._numbers[key.kind]][turn]
        if key.tp == 1:
            return block
        if key not in self._modules:
            # torch.export takes a second to load and is needed under tensor parallelism only.
            from autopar.runtime.tensor_parallel import apply

            local = _copied(block)
            plan = self._plan(key)
            apply(local, plan, groups=None, coordinate=(0,) * len(plan.axis_sizes))
            self._modules[key] = local
        return self._modules[key]

    def _outer_call(self, key: LayerKey, samples: int) -> LayerCall:
        if key not in self._modules:
            self._modules[key] = self._outer_module(key.kind)
        module = self._modules[key]
        batch = _resized(self._batch, samples, self._device)

        def run(hidden: Tensor | None) -> Tensor:
            output = module(hidden, **batch)
            if isinstance(output, tuple):
                output = tie(output[0], [x for x in output[1:] if x is not None and x.requires_grad])
            assert isinstance(output, Tensor)
            return output

        hidden = None if key.kind in ("embed", FRONT) else self._hidden(samples, self._entering(key.kind))
        return LayerCall(module=module, hidden=hidden, sides=batch, run=run)

    def _outer_module(self, kind: str) -> nn.Module:
        """The stage that holds the embedding or the head alone; the blocks are shared with the model, not copied."""
        structure = self._probe.structure
        shared = _copied(self._model, shared=[structure.block(self._model, n) for n in range(structure.num_blocks)])
        last = structure.num_blocks + 1
        seam = next((seam for seam in structure.seams if seam_kind(structure, seam.block) == kind), None)
        if seam is not None:
            return self._seam_module(shared, seam.block)
        first = kind in ("embed", FRONT)
        body = StageBody(shared, structure, range(1) if first else range(last, last + 1), seams=kind == "embed")
        if kind == "embed":
            for number, form in enumerate(structure.forms):
                if form.learned:
                    structure.block(shared, number).register_forward_hook(_tied_to(form), with_kwargs=True)
        body.attach_ends()
        return body if first else StageModule(body, self._loss)

    def _seam_module(self, shared: nn.Module, number: int) -> nn.Module:
        """What runs right before the block after a seam: the stage of that block, which passes through."""
        structure = self._probe.structure
        body = StageBody(shared, structure, range(number + 1, number + 2))
        block = structure.block(shared, number)
        shared.set_submodule(structure.paths[number], PassThrough(structure.forms[number], block, None))
        body.attach_ends()
        return body

    def _entering(self, kind: str) -> Sequence[int]:
        """The shape of one sample of the hidden state that the head gets, or what runs at a seam."""
        structure = self._probe.structure
        for seam in structure.seams:
            if seam_kind(structure, seam.block) == kind:
                before = structure.kinds[seam.block - 1]
                inputs = self._probe.inputs[before]
                hidden: Tensor = argument(inputs.args, inputs.kwargs, self._form(before).hidden)
                return tuple(hidden.shape[1:])
        return self._probe.hidden_shape

    def sides(self, samples: Sequence[int]) -> tuple[SideBytes, ...]:
        """What layers hand on beside the hidden state, by the smallest and the largest of these numbers of samples."""
        if self._boundaries is None:
            return ()
        ends = list(dict.fromkeys((samples[0], samples[-1])))
        found = [self._boundaries.sides(_resized(self._batch, n, self._device)) for n in ends]
        return tuple(
            SideBytes(
                made=side.made + 1,
                last=max(user for user, _ in side.users) + 1,
                size_bytes=fit(ends, [x.nbytes for x in rows]),
                gradient_bytes=fit(ends, [x.nbytes * x.requires_grad for x in rows]),
            )
            for side, rows in zip(self._probe.structure.sides, zip(*found, strict=True), strict=True)
        )

    def _hidden(self, samples: int, shape: Sequence[int], sequence_shards: int = 1) -> Tensor:
        generator = torch.Generator().manual_seed(samples)
        tokens, *rest = shape
        return torch.randn((samples, tokens // sequence_shards, *rest), generator=generator).to(
            device=self._device, dtype=self._dtype
        )

    def _block_inputs(self, number: int, samples: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        inputs = self._probe.inputs[number]
        args, kwargs = inputs.args, inputs.kwargs
        for key, dim in self._form(number).batch_inputs:
            value = argument(args, kwargs, key)
            if isinstance(value, Tensor):
                args, kwargs = replace_argument(args, kwargs, key, _repeated(value, dim, samples))
        return args, kwargs


def _tied_to(form: BlockForm) -> Any:
    """A hook on what stands for a block: the backward reaches its learned side inputs, as through the block itself."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        sides = [argument(args, kwargs, key) for key in form.learned]
        hidden = tie(form.hidden_in(output), [x for x in sides if isinstance(x, Tensor) and x.requires_grad])
        return (hidden, *output[1:]) if form.output_length else hidden

    return hook


def _copied(module: nn.Module, shared: Iterable[nn.Module] = ()) -> nn.Module:
    """A copy of a module, in which the modules of `shared` stay the same objects.

    Tensors are cloned by hand: views of a fake tensor that deepcopy made would have storages of their own.
    """
    memo: dict[int, Any] = {id(each): each for each in shared}
    kept = {id(tensor) for each in shared for tensor in (*each.parameters(), *each.buffers())}
    for parameter in module.parameters():
        if id(parameter) not in kept:
            memo[id(parameter)] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
    for buffer in module.buffers():
        if id(buffer) not in kept:
            memo[id(buffer)] = buffer.detach().clone()
    return copy.deepcopy(module, memo)


def _repeated(tensor: Tensor, dim: int, samples: int) -> Tensor:
    places = torch.arange(samples, device=tensor.device) % tensor.shape[dim]
    return tensor.index_select(dim, places)


def _resized(batch: Mapping[str, Tensor], samples: int, device: torch.device) -> dict[str, Tensor]:
    return {name: _repeated(value.to(device), 0, samples) for name, value in batch.items()}


def _probe(model: nn.Module, batch: Mapping[str, Tensor]) -> Probe:
    try:
        return probe(model, batch)
    except (InputError, *DEPENDS_ON_NUMBERS):
        raise
    except Exception as error:
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in batch.items())
        raise InputError(
            f"{type(model).__name__} does not run a batch of {shapes}",
            why=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            fix="check the model's sizes and the sequence, or pass a batch as example=",
        ) from error
