"""Tensor parallelism derived from the exported graph of any block.

    derivation = derive(block, args, kwargs)       the graph and what it allows: degrees, reason
    plan = derivation.plan(axis_sizes)             who holds what of each parameter, which collectives
    check_plan(block, plan, groups, ...)           every gradient against the unsharded block, on the real ranks
    apply(block, plan, groups, coordinate)         local parameters and the rewritten local graph as forward

Gradients follow the SUM convention: the loss is the same on all ranks of a group, and the gradient of what they all
hold comes out whole and equal on each of them.
"""

from autopar.runtime.tensor_parallel.check import check_again, check_plan
from autopar.runtime.tensor_parallel.collectives import Team
from autopar.runtime.tensor_parallel.derive import Derivation, derive
from autopar.runtime.tensor_parallel.execute import LocalGraphs, apply
from autopar.runtime.tensor_parallel.layout import BlockPlan
from autopar.runtime.tensor_parallel.sequence import SequenceTeams

__all__ = [
    "BlockPlan",
    "Derivation",
    "LocalGraphs",
    "SequenceTeams",
    "Team",
    "apply",
    "check_again",
    "check_plan",
    "derive",
]
