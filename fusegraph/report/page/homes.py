"""Where the nodes that users wrote are computed: in which kernel, or why in none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusegraph.graph import Node, Tensor
from fusegraph.plan import Plan

#: What becomes of a node: a kernel computes it; it is part of another node after a rewrite; it moves elements that are
#: read where they are; it is computed once, of parameters; nothing needs it any more.
COMPUTED, MERGED, VIEW, PACKED, REMOVED = "computed", "merged", "view", "packed", "removed"


@dataclass(frozen=True)
class Home:
    """The position of a node's kernel in the plan, None where it has none, and what becomes of the node."""

    kernel: int | None
    state: str


def homes(plan: Plan) -> dict[Node, Home]:
    """Returns the home of every node of the plan's graph as it was built."""
    kernels = {n: at for at, kernel in enumerate(plan.kernels) for n in kernel.group.nodes}
    found = {node: _home(plan, node, kernels) for node in plan.graph.nodes}
    for node in reversed(plan.graph.nodes):  # what has no kernel is where its result is taken
        home = found[node]
        if home.kernel is None and home.state in (REMOVED, VIEW):
            readers = [found[r] for t in node.outputs for r in plan.graph.consumers(t)]
            places = sorted({r.kernel for r in readers if r.kernel is not None})
            if places:
                found[node] = Home(places[0], VIEW if home.state == VIEW else MERGED)
            elif any(r.state == PACKED for r in readers):
                found[node] = Home(None, PACKED)
    return found


def _home(plan: Plan, node: Node, kernels: Mapping[Node, int]) -> Home:
    """Returns a node's home as far as its own counterpart tells."""
    made = next((plan.counterparts[t] for t in node.outputs if t in plan.counterparts), None)
    if made is None:
        return Home(None, REMOVED)
    maker = plan.simplified.producer(made)
    if maker is None:
        return Home(None, PACKED if made in plan.simplified.packed else REMOVED)
    if maker in kernels:
        return Home(kernels[maker], COMPUTED)
    return Home(_before(plan, made, kernels), VIEW)


def _before(plan: Plan, tensor: Tensor, kernels: Mapping[Node, int]) -> int | None:
    """Returns the position of the kernel that wrote what a view shows, None for a view of an input."""
    maker = plan.simplified.producer(tensor)
    while maker is not None and maker not in kernels:
        maker = plan.simplified.producer(maker.inputs[0])
    return None if maker is None else kernels[maker]


def views(plan: Plan) -> dict[Node, int]:
    """Returns the nodes that are no kernel -> the position of the kernel that wrote what they show."""
    kernels = {n: at for at, kernel in enumerate(plan.kernels) for n in kernel.group.nodes}
    shown = (n for group in plan.partition.groups if group.family == "view" for n in group.nodes)
    return {n: at for n in shown if (at := _before(plan, n.output, kernels)) is not None}
