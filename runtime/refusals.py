"""Models that cannot be cut into layers, ranks and micro-batches without another result: InputError by name."""

from __future__ import annotations

from collections.abc import Mapping, Set

from torch import nn

from autopar.errors import InputError


def refuse_batch_statistics(model: nn.Module) -> None:
    """Raise InputError for batch norms: each rank and micro-batch would have statistics of its own."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise InputError(
                f"{name} is a {type(module).__name__}",
                why="its output depends on the whole batch, which ranks and micro-batches cut",
                fix="use a norm of each sample, such as LayerNorm or GroupNorm",
            )


def refuse_shared(named: Mapping[str, int], prefix: str, in_blocks: Set[int]) -> None:
    """Raise InputError for a parameter of several layers. Only embed and head may share: they are handled as one.

    named: the identity of each parameter under all of its names; prefix: of the names of the blocks' parameters;
    in_blocks: the identities of those that ran in blocks.
    """
    why = "layers have strategies and stages of their own; only embed and head may share parameters"
    home: dict[int, tuple[str, str]] = {}
    for name, identity in named.items():
        layer = name.removeprefix(prefix).partition(".")[0] if name.startswith(prefix) else ""
        other, first = home.setdefault(identity, (layer, name))
        if other != layer:
            raise InputError(
                f"{first} and {name} are one parameter in two layers",
                why=why,
                fix="give each block its own parameters",
            )
    for name, identity in named.items():
        if identity in in_blocks and not name.startswith(prefix):
            raise InputError(
                f"a block uses {name}, which is not its own",
                why=why,
                fix="make it a parameter of each block, or pass the block a tensor computed from it",
            )
