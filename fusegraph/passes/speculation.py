"""Rewrites that are undone where no kernel takes what they make, so that every well-formed graph compiles.

Attention is recognised before it is known where the tensors around it will lie, gradients are fused before a schedule
is chosen, reductions are split before it is known which kernel makes the parts.  Where that is not accepted, the
pipeline runs again without that one rewrite, and the reason becomes part of its decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from codegen.declined import Declined
from fusegraph.graph import Node
from fusegraph.lowering.attention_prologue import prologues_of
from fusegraph.lowering.base import LeftOut
from fusegraph.ops.base import Kind, Role

Made = TypeVar("Made")
Accepted = TypeVar("Accepted")

#: Passes whose rewrites can be left out one by one, and fusion: the names by which they are known in `LeftOut`.
ATTENTION, PROLOGUE = "attention", "attention's operands"
GRADIENTS, FUSED_GRADIENTS = "attention's gradients", "fused gradients"
FUSION = "fusion"
#: The pass that leaves products to sparse tensor cores.
SPARSE = "sparse products"
#: The pass that assigns parts of inputs where only these change, and the one that says who writes assigned values.
REGIONS, ASSIGNMENTS = "assignments", "assigned values"


class NotAccepted(Declined):
    """Some rewrites are not accepted; ``rewrites`` tells which, and why."""

    def __init__(self, text: str, rewrites: LeftOut) -> None:
        super().__init__(text)
        self.rewrites = rewrites


class NoKernel(NotAccepted):
    """No kernel takes some groups of nodes; ``groups`` has the nodes and the reason of each."""

    def __init__(self, groups: Sequence[tuple[Sequence[Node], str]]) -> None:
        (node, *_), reason = groups[0]
        undo = {key: reason for nodes, reason in groups for key in _rewrites(nodes)}
        super().__init__(f"{node.op.name} {node.name!r}: {reason}", undo)
        self.groups = tuple(groups)


def attempt(rewrite: Callable[[LeftOut], Made], *, accepted_by: Callable[[Made], Accepted]) -> tuple[Made, Accepted]:
    """Returns what a rewrite makes, and what accepts that, with every part left out that is not accepted.

    ``rewrite`` is called with what to leave out, and may not accept what it made before either.  Raises NotAccepted if
    there is nothing more to leave out.
    """
    left_out: LeftOut = {}
    while True:
        try:
            made = rewrite(left_out)
            return made, accepted_by(made)
        except NotAccepted as refusal:
            more = {key: reason for key, reason in refusal.rewrites.items() if key not in left_out}
            if not more:
                raise
            left_out = {**left_out, **more}


def _rewrites(nodes: Sequence[Node]) -> list[tuple[str, str]]:
    """Returns the last rewrite that made a group of nodes; none if they are as users write them."""
    for node in nodes:
        if node.kind is Kind.ATTENTION:
            return [(PROLOGUE if any(prologues_of(node)) else ATTENTION, node.attributes["origin"])]
        if node.kind is Kind.ATTENTION_BACKWARD:
            fused = "by_queries" in node.attributes["results"]
            return [(FUSED_GRADIENTS if fused else GRADIENTS, node.attributes["origin"])]
        if node.op.role is Role.SPARSE_MATMUL:
            return [(SPARSE, node.attributes["origin"])]
    return [(FUSION, node.name) for node in nodes] if len(nodes) > 1 else []
