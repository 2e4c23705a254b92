"""The chain of a model, found by its lists of blocks and one small forward of two batch sizes. No table of names.

The forwards tell in which order the blocks run, how each takes and returns the hidden state, which side inputs carry
the batch, which are computed from parameters of other layers, and whether anything but the blocks changes the hidden
state between them. A parameter belongs to where it is used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autopar.errors import InputError
from autopar.runtime.batches import sequence_length
from autopar.runtime.chains import Lists, find_lists
from autopar.runtime.ends import SeenEnds
from autopar.runtime.refusals import refuse_auxiliary_loss, refuse_batch_statistics, refuse_shared
from autopar.runtime.seen import Run, Seen, forms_of, kinds_of, sides_of, why_no_pipeline
from autopar.runtime.structure import Probe, Seam, Structure
from autopar.runtime.trees import tree_leaves


class UsedParameters(TorchFunctionMode):
    """Notes which parameters torch functions get, by the phase of the forward in which they run.

    between: those used between blocks, by the number of the next one; called: the modules that ran there; taken:
    where something else of the layers before is used outside the blocks than the hidden state that came last
    (`handed`, with what was made of it).
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.block = "embed", 0
        self.handed: dict[int, Tensor] = {}
        self.used: dict[str, set[int]] = {"embed": set(), "between": set(), "blocks": set(), "head": set()}
        self.between: defaultdict[int, set[int]] = defaultdict(set)
        self.called: defaultdict[int, set[str]] = defaultdict(set)
        self.taken = ""

    def _take(self, func: Any) -> None:
        if getattr(func, "__name__", "") != "__get__":  # shapes may be looked at
            where = "after its last block" if self.phase == "head" else f"before its block {self.block}"
            self.taken = f"its forward uses more than the last hidden state {where}"

    def watch(self, model: nn.Module) -> list[Any]:
        """Hooks that note which modules with parameters of their own run before each block, outside the blocks."""

        def see(path: str) -> Any:
            def hook(module: nn.Module, args: Any) -> None:
                if self.phase in ("embed", "between"):
                    self.called[self.block].add(path)

            return hook

        owners = [(path, m) for path, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))]
        return [module.register_forward_pre_hook(see(path)) for path, module in owners]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outside = self.phase in ("between", "head")
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, nn.Parameter):
                self.used[self.phase].add(id(leaf))
                if self.phase == "between":
                    self.between[self.block].add(id(leaf))
            elif outside and isinstance(leaf, Tensor) and leaf.requires_grad and id(leaf) not in self.handed:
                self._take(func)
        result = func(*args, **kwargs)
        if outside:
            self.handed |= {id(leaf): leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
        return result


@contextmanager
def _hooked(model: nn.Module, handles: list[Any]) -> Iterator[None]:
    """While inside, the model is in evaluation mode; then its hooks and mode are as before."""
    was_training = model.training
    try:
        model.eval()
        yield
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()


def probe(model: nn.Module, batch: Mapping[str, Tensor]) -> Probe:
    """The structure of the model, from one forward of `batch` and one of its samples but the last.

    batch: keyword inputs of the model whose first dimension is at least 2 samples. Raises InputError when the model
    has no blocks, when they do not run once each, or when it cannot be cut exactly (autopar.runtime.refusals).
    """
    if next(iter(batch.values())).shape[0] < 2:
        raise ValueError("probe needs a batch of at least 2 samples")
    refuse_batch_statistics(model)
    refuse_auxiliary_loss(model)
    *finer, coarse = find_lists(model)
    for lists in finer:
        try:
            return _probe(model, batch, lists, fine=True)
        except InputError:
            continue
    return _probe(model, batch, coarse)


def _probe(model: nn.Module, batch: Mapping[str, Tensor], lists: Lists, *, fine: bool = False) -> Probe:
    """The probe for these lists; fine: InputError where the blocks of a list do not hand the hidden state on."""
    samples = next(iter(batch.values())).shape[0]
    usage = UsedParameters()
    seen = Seen(model, lists, usage)
    ends = SeenEnds(model, [path for paths in lists for path in paths], batch, lambda: usage.phase)
    with _hooked(model, [*ends.handles, *seen.handles, *usage.watch(model)]):
        # Gradients are enabled to see which tensors depend on parameters; `Seen` cuts the graph at each block.
        with usage, torch.enable_grad():
            model(**batch)
        first = seen.take()
        with torch.enable_grad():
            model(**{name: value[: samples - 1] for name, value in batch.items()})
        second = seen.take()
    if fine and not any(run.direct for run in first):
        raise InputError("the inner blocks are no chains", why="none gets what another returned", fix="")
    _check_lists(first, lists, fine=fine)
    named = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    paths = tuple(run.path for run in first)
    refuse_shared(named, paths, usage.used["blocks"])
    outside = {name: i for name, i in named.items() if not name.startswith(tuple(f"{path}." for path in paths))}
    embed, head, tied = _ends(outside, usage.used["embed"] | usage.used["between"], usage.used["head"])
    kinds, inputs = kinds_of(model, lists, first)
    starts = tuple(number for number, run in enumerate(first) if not run.direct)
    between = {n: next(name for name, i in named.items() if i in ids) for n, ids in usage.between.items()}
    structure = Structure(
        paths=paths,
        forms=forms_of(first, second),
        starts=starts,
        hidden_size=first[-1].hidden_shape[-1],
        embed_parameters=embed,
        head_parameters=head,
        tied=tied,
        kinds=kinds,
        pipeline_reason=why_no_pipeline(first, lists, between, usage.taken),
        front_parameters=_used_before(0, outside, embed, usage) if len(starts) > 1 else embed,
        seams=tuple(Seam(block=n, parameters=_used_before(n, outside, embed, usage)) for n in starts[1:]),
        sides=sides_of(first),
    )
    used = set().union(*usage.used.values())
    # The hidden state enters a chain of several parts more than once, and so may the ids.
    whole = len(structure.starts) == 1
    return Probe(
        structure=structure,
        used=tuple(name for name, i in named.items() if i in used),
        lookup=ends.lookup(shared=not whole),
        projection=ends.projection(shared=not whole and tied),
        inputs=inputs,
        hidden_shape=first[-1].hidden_shape[1:],
        tokens=sequence_length(batch),
    )


def _check_lists(runs: Sequence[Run], lists: Lists, *, fine: bool) -> None:
    """Raise InputError unless each block ran once, those of a list in their order."""
    order = [run.path for run in runs]
    places = {path: (number, place) for number, paths in enumerate(lists) for place, path in enumerate(paths)}
    for number, paths in enumerate(lists):
        ran = [places[path][1] for path in order if places[path][0] == number]
        if ran != list(range(len(paths))):
            raise InputError(
                "the blocks do not run once each in order",
                why=f"one forward ran {ran} of the {len(paths)} blocks of {paths[0].rpartition('.')[0]}",
                fix="give a model whose forward runs its blocks one after the other",
            )
        if fine and any(not run.direct for run in runs if places[run.path][0] == number and places[run.path][1]):
            raise InputError("the inner blocks are no chains", why="something runs between them", fix="")


def _used_before(
    block: int, outside: Mapping[str, int], embed: Sequence[str], usage: UsedParameters
) -> tuple[str, ...]:
    """The names of the parameters of the embedding that are used right before a block, before the first those that
    nothing uses too; of a shared one also those under which modules that run there know it.
    """
    used = (
        usage.between[block]
        if block
        else usage.used["embed"] | set(outside.values()) - set().union(*usage.used.values())
    )
    called = usage.called[block]
    return tuple(
        name for name, i in outside.items() if i in used and (name in embed or name.rpartition(".")[0] in called)
    )


def _ends(
    outside: Mapping[str, int], in_embed: set[int], in_head: set[int]
) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """The names of the parameters of embedding and head, and whether some are tied.

    outside: the identity of each parameter outside the blocks by name; in_embed, in_head: the identities of those that
    ran there. A tied parameter goes by its last name in the head and by the others in the embedding; what ran in
    neither is counted to the embedding.
    """
    tied = in_embed & in_head & set(outside.values())
    names = {i: [name for name, j in outside.items() if j == i] for i in tied}
    first, last = {found[0] for found in names.values()}, {found[-1] for found in names.values()}
    embed = [name for name, i in outside.items() if i in in_embed and (i not in tied or name in first)]
    head = [name for name, i in outside.items() if i in in_head and (i not in tied or name in last)]
    unused = [name for name, i in outside.items() if i not in in_embed | in_head]
    return (*embed, *unused), tuple(head), bool(tied)
