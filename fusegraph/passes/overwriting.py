"""What overwrites what: assignments, who writes their values, and what has to be done before.

An assignment is a node like any other: its result is a new tensor.  That this lies in the memory of the old one means
that all that reads the old one comes first.  This order follows from the graph alone, so no pass can lose it.
"""

from __future__ import annotations

from collections.abc import Iterator

from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.views import WRITTEN_THROUGH
from fusegraph.ops.base import Kind, Role

#: Movement whose result may be read where its operand lies.
_SEEN_THROUGH = frozenset({Role.TRANSPOSE, Role.RESHAPE, Role.BROADCAST, Role.SLICE})


def assignments(graph: Graph) -> list[Node]:
    """Returns a graph's assignments in order."""
    return [n for n in graph.nodes if n.kind is Kind.ASSIGN]


def by_position(node: Node) -> bool:
    """Returns true if an assignment has an index of one element, along one axis: its values lie together."""
    return len(node.inputs) > 2 and node.inputs[2].size == 1 == len(node.attributes["axes"])


def orders(graph: Graph) -> Iterator[tuple[Node, Node]]:
    """Yields (before, after) for nodes whose order does not follow from what they take, but from what they overwrite.

    What reads the old value of an input comes before what writes the new one, and so does what wrote the old one.
    """
    for node in assignments(graph):
        first = overwritten_after(graph, node)
        for writer in writers_of(graph, node):
            yield from ((n, writer) for n in first if n is not writer)


def laid(graph: Graph, tensor: Tensor) -> list[Tensor]:
    """Returns a tensor, and those that are written in it if it is written where it belongs."""
    found = [tensor]
    for t in found:
        node = graph.producer(t)
        if node is not None and node.op.role in WRITTEN_THROUGH:
            found += [x for x in node.inputs if x not in found]
    return found


def written_in_place(graph: Graph) -> set[Tensor]:
    """Returns the tensors that what makes them can write where assignments put them, without a kernel of their own."""
    together = (n for n in assignments(graph) if len(n.inputs) == 2 or by_position(n))
    return {t for node in together for t in laid(graph, node.inputs[1])}


def writers_of(graph: Graph, node: Node, placed: bool | None = None) -> list[Node]:
    """Returns the nodes that write what an assignment assigns: itself, or those that make its values."""
    if not (node.attributes["placed"] if placed is None else placed):
        return [node]
    made = (graph.producer(t) for t in laid(graph, node.inputs[1]))
    return [n for n in made if n is not None]


def readers(graph: Graph, tensor: Tensor) -> Iterator[Node]:
    """Yields the nodes that may read a tensor's memory: those that take it, or views of it."""
    for node in graph.consumers(tensor):
        yield node
        if node.op.role in _SEEN_THROUGH and node.kind is Kind.MOVEMENT:
            yield from readers(graph, node.output)


def overwritten_after(graph: Graph, node: Node, written: bool | None = None) -> list[Node]:
    """Returns the nodes that come before what an assignment writes.

    ``written`` says whether the values of the assignment before it lie in the input, as ``placed`` does.
    """
    old = node.inputs[0]
    found = [n for n in readers(graph, old) if n is not node]
    last = graph.producer(old)
    if last is not None:
        found.append(last)
    if last is not None and (last.attributes["placed"] if written is None else written):
        found += [n for t in laid(graph, last.inputs[1]) for n in readers(graph, t) if n is not last]
    if by_position(node) and (index := graph.producer(node.inputs[2])) is not None:
        found.append(index)
    return list(dict.fromkeys(found))


def placed(graph: Graph) -> frozenset[Node]:
    """Returns the assignments that need no kernel."""
    return frozenset(n for n in assignments(graph) if n.attributes["placed"])
