"""The collectives of a derived plan as values: which, in which phase, over how many bytes."""

from __future__ import annotations

from math import prod

from torch import fx

from autopar.measured import Collective, Line, TensorParallelCall
from autopar.runtime.tensor_parallel.graph import BlockGraph, batch_leaves, is_tensor
from autopar.runtime.tensor_parallel.rewrite import Edit

_FORWARD: dict[str, Collective] = {"reduce": "all_reduce", "gather": "all_gather", "scatter": "reduce_scatter"}
_BACKWARD: dict[str, Collective] = {
    "copy": "all_reduce",
    "copy_some": "all_reduce",
    "gather": "reduce_scatter",
    "scatter": "all_gather",
}


def calls_of(graph: BlockGraph, edits: list[Edit], trainable: set[str]) -> tuple[TensorParallelCall, ...]:
    """The collectives of one forward and one backward, forward in order and backward in reverse.

    Bytes are those of the gathered output, or the input of a reduction. They grow with the samples where the tensor
    has the batch dimension. A backward call needs a gradient: from `trainable` parameters or the block's input.
    """
    with_grad, from_input = _reachable(graph, trainable), _reachable(graph, set())
    batch, samples = batch_leaves(graph), graph.residual.meta["val"].shape[0]
    forward: list[TensorParallelCall] = []
    backward: list[TensorParallelCall] = []
    for edit in edits:
        size = prod(edit.shape) * int(edit.source.meta["val"].element_size())
        # With one sample the batch has no factor; then what comes from the input has the batch dimension.
        grows = bool(graph.leaves_of(edit.source) & batch) if batch else edit.source in from_input
        line = Line(fixed=0.0, per_sample=size / samples) if grows else Line(fixed=float(size), per_sample=0.0)
        if edit.kind in _FORWARD:
            forward.append(TensorParallelCall(collective=_FORWARD[edit.kind], phase="forward", size_bytes=line))
        if edit.kind in _BACKWARD and edit.source in with_grad:
            backward.append(TensorParallelCall(collective=_BACKWARD[edit.kind], phase="backward", size_bytes=line))
    return (*forward, *reversed(backward))


def _reachable(graph: BlockGraph, trainable: set[str]) -> set[fx.Node]:
    """The floating-point nodes that depend on the block's activation input or on these parameters."""
    out = {graph.residual} | {node for node, name in graph.parameters.items() if name in trainable}
    for node in graph.nodes:
        floating = not is_tensor(node) or node.meta["val"].is_floating_point()
        if node.op == "call_function" and floating and any(x in out for x in node.all_input_nodes):
            out.add(node)
    return out
