"""What fusion knows of groups before it merges pairs: sums of many products, and what makes operands of fewer bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Protocol

from codegen.declined import Declined
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering import prologue
from fusegraph.lowering.base import GroupView, Lowering, Options
from fusegraph.lowering.divided import made_of_less, multiplies_codes
from fusegraph.ops.base import Kind, Role


class Groups(Protocol):
    """The graph of groups that fusion merges: see `passes.fuse`."""

    graph: Graph
    alone: dict[str, str]
    apart: tuple[Set[Node], Set[Node]]
    order: dict[Node, int]
    group_of: dict[Node, int]
    members: dict[int, list[Node]]
    declined: dict[tuple[Node, Node], Declined]

    def gather(self, nodes: Set[Node]) -> None:
        """Merges the groups of some nodes."""


def additions(graph: Graph, order: Mapping[Node, int]) -> dict[Node, Node]:
    """Returns the nodes that add up three or more products one by one, and the last product that each takes.

    Its kernel is to make the node: that of an earlier one would wait while all later ones lie in memory.
    """
    last: dict[Node, Node] = {}
    first: dict[Node, Node] = {}  # of the additions one after the other that a node is among
    products: Counter[Node] = Counter()
    for node in graph.nodes:
        if node.op.role is not Role.SUM:
            continue
        made = [p for t in node.inputs if (p := graph.producer(t)) is not None and graph.consumers(t) == [node]]
        own = [p for p in made if p.kind is Kind.CONTRACTION and p.output.shape == node.output.shape]
        if own:
            last[node] = max(own, key=order.__getitem__)
            first[node] = next((first[p] for p in made if p in first), node)
            products[first[node]] += len(own)
    return {node: product for node, product in last.items() if products[first[node]] > 2}


def gather_operands(quotient: Groups, options: Options, backend: Lowering) -> None:
    """Merges products with what makes their operands of fewer bytes by movement and pointwise nodes.

    Pair by pair they would not come together: movement behind pointwise nodes is a view for whoever reads it.  What a
    product had better not take of one operand it may take of both: then it multiplies the 8-bit floats that they are
    made of.
    """
    graph = quotient.graph
    for anchor in graph.nodes:
        if anchor.op.role is not Role.MATMUL:
            continue
        codes = multiplies_codes(graph, anchor, options.target)
        made = {t: found for t in anchor.inputs if (found := made_of_less(graph, t, anchor, narrowed=codes))}
        moved = [{t: nodes} for t, nodes in made.items() if any(n.kind is Kind.MOVEMENT for n in nodes)]
        taken = [_gathered(quotient, options, backend, anchor, each) for each in moved]
        if codes and len(made) > 1 and not (all(taken) and len(taken) == len(made)):
            _gathered(quotient, options, backend, anchor, made)


def _gathered(
    quotient: Groups, options: Options, backend: Lowering, anchor: Node, made: Mapping[Tensor, Sequence[Node]]
) -> bool:
    """Merges a product with what makes some of its operands; returns whether one kernel takes that.

    What is read at positions that are computed, such as the scale of an element's block where the last block is not
    whole, may be small beside the operand: it is then made before.  What makes several operands has to pay.
    """
    nodes = [n for found in made.values() for n in found]
    large = [n for t, found in made.items() for n in found if n.output.size >= t.size]
    for chosen in (nodes, large) if len(large) < len(nodes) else (nodes,):
        every = {anchor, *chosen}
        if any(n.name in quotient.alone for n in every) or all(not every.isdisjoint(s) for s in quotient.apart):
            continue
        groups = dict.fromkeys(quotient.group_of[n] for n in (anchor, *chosen))
        members = [n for g in groups for n in quotient.members[g]]
        view = GroupView(quotient.graph, members, quotient.order)
        try:
            backend.accept(view, options)
            if len(made) > 1 and not prologue.pays(backend.lower(view, options).choices):
                raise Declined(f"what {anchor.name!r} multiplies takes less time to make in kernels of its own")
        except Declined as reason:
            for pair in ((n, m) for n in chosen for m in every):
                quotient.declined.setdefault(pair, reason.with_traceback(None))
            continue
        quotient.gather(every)
        return True
    return False
