"""Faults of pipelines over several chains, planted to be seen."""

from __future__ import annotations

from typing import Any

from autopar.runtime.arguments import argument, replace_argument
from autopar.runtime.parallel import ParallelModel


def _copies_apart(parallel: ParallelModel) -> None:
    """Stages that hold the same parameter do not add their gradients up."""
    parallel._sum_copies = lambda: None  # type: ignore[method-assign]


def _sides_without_gradient(parallel: ParallelModel) -> None:
    """What a stage received beside the hidden state gets no gradient from the blocks that take it."""
    for stage in parallel.stages:
        body = stage.body
        for number in body.structure.crossing(body.layers[0]):
            for user, key in body.structure.sides[number].users:
                if user + 1 in body.layers:
                    body.structure.block(body.model, user).register_forward_pre_hook(_detached(key), with_kwargs=True)


def _detached(key: Any) -> Any:
    def hook(module: Any, args: Any, kwargs: Any) -> Any:
        return replace_argument(args, kwargs, key, argument(args, kwargs, key).detach())

    return hook


CHAIN_PLANTS = {"copies apart": _copies_apart, "sides without gradient": _sides_without_gradient}
