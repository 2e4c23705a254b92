"""What blocks take beside the hidden state (masks, positions), and how it reaches ranks that hold other samples.

Such inputs come from the model's own forward on each rank's own samples. A model may leave one out, or make one, as
its batch says (an attention mask), which is seen once by running small batches with what the model can take. All
ranks of a stage must then do the same: they compare their batches once a step, models that drop a mask where nothing
is padded are told to keep it, and the ranks compare what they have before the first collective that depends on it.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.axes import Layout
from autopar.errors import InputError
from autopar.runtime.arguments import Key, argument, replace_argument
from autopar.runtime.fakes import has_numbers
from autopar.runtime.hugging_face import masks_kept
from autopar.runtime.probing import probe
from autopar.runtime.relayout import GroupOf, relayout
from autopar.runtime.structure import BlockForm, Probe

MASK, POSITIONS = "attention_mask", "position_ids"
"""What a batch may hold beside the entries of the example."""


def probe_optional(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Probe | str]:
    """What a whole model does with a mask or positions in its batch, or why it could not be run with them.

    Only those that its forward names. batch: a small example, whose own mask and positions are taken if it has them.
    """
    taken = inspect.signature(model.forward).parameters
    ids = next((x for x in batch.values() if x.dim() == 2 and not x.is_floating_point()), None)
    found: dict[str, Probe | str] = {}
    if ids is None:
        return found
    samples, tokens = ids.shape
    places = torch.arange(tokens, device=ids.device).repeat(samples, 1)
    made = {MASK: (places < max(1, tokens - tokens // 4)).long(), POSITIONS: places}
    for name in made:
        if name in taken:
            try:
                with masks_kept(model):
                    found[name] = probe(model, {**batch, name: batch.get(name, made[name])})
            except Exception as error:  # whatever a model says of an input that it does not expect
                found[name] = f"{type(error).__name__}: {str(error).strip()[:200]}"
    return found


@dataclass(eq=False)
class SideInputs:
    """The side inputs of the blocks of one stage; the default is for bodies that no layout is moved in.

    group: the ranks of the stage, None where all layers have the boundary's samples; boundary: how those are cut;
    usual: the entries of a batch that need no second look; found: as `probe_optional` has it; always: the forms of the
    blocks without them; checks: what is to be run before the first batch with an entry; handed_on: other stages take
    side inputs of this one, whose shapes must not depend on what is padded.
    """

    group: Any = None
    boundary: Layout = field(default_factory=lambda: Layout(batch=()))
    usual: frozenset[str] = frozenset()
    found: Mapping[str, Probe | str] = field(default_factory=dict)
    always: Sequence[BlockForm] = ()
    checks: dict[str, list[Callable[[], object]]] = field(default_factory=dict)
    handed_on: bool = False
    _now: tuple[Sequence[BlockForm], ...] = ()
    _samples: int = 0
    _agreed: bool = True
    _moved: dict[tuple[int, Layout], tuple[Tensor, Tensor]] = field(default_factory=dict)

    @contextmanager
    def during(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Iterator[None]:
        """The time of one forward of a model on a batch."""
        unusual = () if self.group is None else tuple(sorted(set(batch) - self.usual))
        self._now, self._agreed = (self.always, *self._forms_with(MASK)), not unusual
        for name in unusual:
            self._refuse_unknown(name)
            for check in self.checks.get(name, ()):
                check()
            self.checks.pop(name, None)
            self._now += self._forms_with(name)
        self._samples = next((x.shape[0] for x in batch.values()), 0)
        try:
            if unusual or self.keeps_masks(batch):
                with masks_kept(model):
                    yield
            else:
                yield
        finally:
            self._moved.clear()

    def keeps_masks(self, batch: Mapping[str, Tensor]) -> bool:
        """Whether the model must make its masks also where nothing is padded, as other stages count on them."""
        return self.handed_on and not self.usual.issuperset(batch)

    def _forms_with(self, name: str) -> tuple[Sequence[BlockForm], ...]:
        found = self.found.get(name)
        return (found.structure.forms,) if isinstance(found, Probe) else ()

    def _inputs(self, number: int) -> dict[tuple[Key, int], None]:
        """The side inputs of a block that may carry the batch now, with its dimension."""
        return dict.fromkeys(one for forms in self._now for one in forms[number].batch_inputs)

    def _refuse_unknown(self, name: str) -> None:
        found = self.found.get(name)
        if isinstance(found, str):
            raise InputError(
                f"the batch has {name}, with which the model could not be tried",
                why=found,
                fix=f"give autopar.parallelize(..., example=) a small batch that has {name}",
            )

    def agree(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: int | str) -> None:
        """Raise InputError, on all ranks of the stage alike, when they do not have the same inputs of a block.

        Once a forward, before the first collective; a batch with nothing unusual is not looked at.
        """
        if self._agreed:
            return
        self._agreed = True
        keys: list[Key] = [hidden, *(key for key, _ in self._inputs(number))]
        mine = {str(key): _shape(argument(args, kwargs, key)) for key in keys}
        self._compare(mine, "inputs of their blocks", argument(args, kwargs, hidden).device)

    def agree_on_batch(self, batch: Mapping[str, Any], device: torch.device) -> None:
        """Raise InputError, on all ranks of the stage alike, when their batches differ in entries or shapes.

        Once a step, before all else. Cost: an all-reduce of 16 bytes where samples move between ranks, else nothing.
        """
        if self.group is not None:
            self._compare({name: _shape(batch[name]) for name in sorted(batch)}, "batches", device)

    def _compare(self, mine: Mapping[str, Any], what: str, device: torch.device) -> None:
        code = zlib.crc32(repr(mine).encode())
        ends = torch.tensor([code, -code], dtype=torch.int64, device=device)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self.group)
        if not has_numbers(ends) or int(ends[0]) == -int(ends[1]):
            return
        all_of_them: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(all_of_them, mine, group=self.group)
        names = sorted(set().union(*all_of_them))
        name = next(name for name in names if len({repr(one.get(name)) for one in all_of_them}) > 1)
        seen = "; ".join(f"rank {rank}: {one.get(name)}" for rank, one in enumerate(all_of_them[:4]))
        raise InputError(
            f"the ranks of a stage have different {what} ({name})",
            why=f"samples move between ranks, and they do not go together ({seen})",
            fix="give all ranks as many samples, padded to one length, and a mask also where nothing is padded",
        )

    def laid_out(
        self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any], target: Layout, group_of: GroupOf
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a block with its side inputs for the samples of its layout, each moved once a forward."""
        whole, local = Layout(batch=self.boundary.batch), Layout(batch=target.batch)
        if whole == local:
            return args, kwargs
        for key, dim in self._inputs(number):
            value = argument(args, kwargs, key)
            if not isinstance(value, Tensor) or (value.shape[dim] == 1 and self._samples != 1):
                continue
            known = self._moved.get((id(value), local))
            if known is None:
                known = self._moved[id(value), local] = value, relayout(value, whole, local, group_of, batch_dim=dim)
            args, kwargs = replace_argument(args, kwargs, key, known[1])
        return args, kwargs


def _shape(value: Any) -> Any:
    return (tuple(value.shape), str(value.dtype)) if isinstance(value, Tensor) else type(value).__name__
