"""What passes speculate on and undo: a node that stands for several others, for which there is no kernel after all.

Attention is recognised before it is known where the tensors around it will lie, gradients are joined before a schedule
is chosen, groups are merged before their kernel is rendered.  Where a family then declines, the graph is planned again
with that one rewrite left out, and the reason becomes part of its decisions: every well-formed graph compiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TypeAlias

from codegen.declined import Declined
from fusegraph.graph import Node
from fusegraph.lowering.attention_front import fronts_of
from fusegraph.ops.base import Kind


class Rewriting(Enum):
    """A rewrite that can be left out, and what it goes by."""

    ATTENTION = "attention"  #: `passes.attention`, by the name of the result
    FRONT = "front"  #: `passes.attention_front`, by the attention's
    GRADIENTS = "gradients"  #: `passes.attention_backward`, by the name of the exponential
    JOINED = "joined"  #: `passes.join_gradients`, by the same
    FUSION = "fusion"  #: `passes.fuse`, by the name of a node, which stays a kernel of its own


#: Rewrites that are left out, and why.
LeftOut: TypeAlias = Mapping[tuple[Rewriting, str], str]


class NoKernel(Declined):
    """No kernel takes some groups of nodes; ``groups`` has the nodes and the reason of each."""

    def __init__(self, groups: Sequence[tuple[Sequence[Node], str]]) -> None:
        (node, *_), reason = groups[0]
        super().__init__(f"{node.op.name} {node.name!r}: {reason}")
        self.groups = tuple(groups)

    def undo(self, left_out: LeftOut) -> LeftOut:
        """What to leave out besides: of each group the last rewrite that made it; nothing if all are nodes as users
        write them.
        """
        found = {key: reason for nodes, reason in self.groups for key in _rewrites(nodes)}
        return {key: reason for key, reason in found.items() if key not in left_out}


def _rewrites(nodes: Sequence[Node]) -> list[tuple[Rewriting, str]]:
    for node in nodes:
        if node.kind is Kind.ATTENTION:
            last = Rewriting.FRONT if any(fronts_of(node)) else Rewriting.ATTENTION
            return [(last, node.attributes["origin"])]
        if node.kind is Kind.ATTENTION_BACKWARD:
            last = Rewriting.JOINED if "by_queries" in node.attributes["results"] else Rewriting.GRADIENTS
            return [(last, node.attributes["origin"])]
    return [(Rewriting.FUSION, node.name) for node in nodes] if len(nodes) > 1 else []
