"""The nodes that users wrote, of those that kernels compute."""

from __future__ import annotations

from fusegraph.graph import Graph, Node
from fusegraph.plan import Plan


def owners(plan: Plan) -> dict[Node, Node]:
    """Returns the node of the graph as built that a node of a kernel stands for, or is a part of.

    The parts of a composite are known by their names, which begin with the composite's.
    """
    stands = {t: node for node in plan.graph.nodes for t in node.outputs}
    found: dict[Node, Node] = {}
    for old, new in plan.counterparts.items():
        maker = plan.simplified.producer(new)
        if maker is not None and old in stands:
            found[maker] = stands[old]
    named = {node.name: node for node in plan.graph.nodes}
    for node in plan.simplified.nodes:
        words = node.name.split(" ")
        stems = (" ".join(words[:n]) for n in range(len(words), 0, -1))
        if node not in found and (owner := next((named[s] for s in stems if s in named), None)) is not None:
            found[node] = owner
    return found


def labels(plan: Plan) -> list[tuple[str, ...]]:
    """Returns for each kernel what it computes as the user calls it: nodes by name, those of models by module and op.

    What passes made is called by its own name.
    """
    owned = owners(plan)
    return [
        tuple(dict.fromkeys(_label(plan.graph, owned.get(n, n)) for n in kernel.group.nodes)) for kernel in plan.kernels
    ]


def _label(graph: Graph, node: Node) -> str:
    origin = graph.origins.get(node)
    return f"{origin.scope} {origin.op or node.op.name}" if origin is not None and origin.scope else node.name
