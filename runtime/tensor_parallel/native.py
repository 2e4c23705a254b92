"""Makes a traced graph cheap to run from Python: direct bindings for its operators, and no operator that does nothing.

Calling an ATen overload matches its schema in Python-visible boxes, a few microseconds each; `torch.mul` and tensor
methods parse the same arguments in C++. For 40 operators of a block that is about 0.1 ms.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from autopar.runtime.tensor_parallel.graph import op_name

aten = torch.ops.aten

# Overloads that these take with the same positional arguments.
FUNCTIONS: dict[Any, Any] = {
    aten.linear.default: functional.linear,
    aten.addmm.default: torch.addmm,
    aten.matmul.default: torch.matmul,
    aten.bmm.default: torch.bmm,
    aten.scaled_dot_product_attention.default: functional.scaled_dot_product_attention,
    aten.layer_norm.default: torch.layer_norm,
    aten.gelu.default: functional.gelu,
    aten.silu.default: functional.silu,
    aten.mean.dim: torch.mean,
    aten.pow.Tensor_Scalar: torch.pow,
    aten.rsqrt.default: torch.rsqrt,
    aten.tanh.default: torch.tanh,
    aten.cat.default: torch.cat,
    aten.dropout.default: torch.dropout,
}
OPERATORS: dict[Any, Any] = {
    aten.add.Tensor: operator.add,
    aten.sub.Tensor: operator.sub,
    aten.mul.Tensor: operator.mul,
    aten.div.Tensor: operator.truediv,
    aten.neg.default: operator.neg,
}
METHODS: dict[Any, str] = {
    aten.view.default: "view",
    aten._unsafe_view.default: "view",
    aten.reshape.default: "reshape",
    aten.expand.default: "expand",
    aten.transpose.int: "transpose",
    aten.permute.default: "permute",
    aten.unsqueeze.default: "unsqueeze",
    aten.contiguous.default: "contiguous",
    aten.split_with_sizes.default: "split_with_sizes",
    aten.to.dtype: "to",
}


def make_native(graph: fx.Graph) -> None:
    """Replace what has an equal direct binding, in place, and drop inactive dropouts where nothing is mutated."""
    mutates = any(n.op == "call_function" and op_name(n).endswith("_") for n in graph.nodes)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.dropout.default and not mutates and not (node.args[1] and node.args[2]):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in FUNCTIONS:
            node.target = FUNCTIONS[node.target]
        elif node.kwargs:
            continue
        elif node.target in OPERATORS:
            node.target = OPERATORS[node.target]
        elif node.target in METHODS:
            node.op, node.target = "call_method", METHODS[node.target]
    graph.lint()
