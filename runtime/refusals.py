"""Models that cannot be cut into layers, ranks and micro-batches without another result: InputError by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

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


def refuse_auxiliary_loss(model: nn.Module) -> None:
    """Raise InputError for a loss that balances the load of experts.

    It multiplies two means over the tokens of a batch, so that its value over parts of the batch is another one.
    """
    config = getattr(model, "config", None)
    if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0):
        raise InputError(
            f"{type(model).__name__} adds a load-balancing loss of its routers (output_router_logits)",
            why="it is a product of means over the whole batch, which ranks and micro-batches cut",
            fix="set output_router_logits=False, or router_aux_loss_coef=0",
        )


def refuse_shared(named: Mapping[str, int], paths: Sequence[str], in_blocks: Set[int]) -> None:
    """Raise InputError for a parameter of several layers. Only embed and head may share: they are handled as one.

    named: the identity of each parameter under all of its names; paths: of the blocks; in_blocks: the identities of
    those that ran in blocks.
    """
    why = "layers have strategies and stages of their own; only embed and head may share parameters"
    home: dict[int, tuple[str, str]] = {}
    for name, identity in named.items():
        layer = _block_of(name, paths)
        other, first = home.setdefault(identity, (layer, name))
        if other != layer:
            raise InputError(
                f"{first} and {name} are one parameter in two layers",
                why=why,
                fix="give each block its own parameters",
            )
    for name, identity in named.items():
        if identity in in_blocks and not _block_of(name, paths):
            raise InputError(
                f"a block uses {name}, which is not its own",
                why=why,
                fix="make it a parameter of each block, or pass the block a tensor computed from it",
            )


def _block_of(name: str, paths: Sequence[str]) -> str:
    """The path of the block that holds a parameter, "" for none."""
    return next((path for path in paths if name.startswith(f"{path}.")), "")
