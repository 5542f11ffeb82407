"""Assignments to inputs: who writes the values into the input's memory, and what has to be done before.

An assignment is a node like any other: its result is a new tensor.  That this lies in the memory of the old one is
taken care of here.  What makes the values writes them where they belong (the assignment is ``placed``, and needs no
kernel), after everything that reads what was there: this order is that of `orders`.  Where that is impossible, values
are copied, or put aside first; those at the positions of an index are put there by a kernel of the assignment.
"""

from __future__ import annotations

from dataclasses import replace

from fusegraph import networks as nx
from fusegraph.errors import GraphError
from fusegraph.graph import Graph, Node
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind
from fusegraph.passes.overwriting import assignments, by_position, laid, overwritten_after, writers_of
from fusegraph.passes.partition import Decision
from fusegraph.passes.rewrite import Rewrite, Rewritten, intermediate, replaced, same
from fusegraph.passes.speculation import ASSIGNMENTS, REGIONS, NotAccepted
from fusegraph.pattern import followers


def copy_name(node: Node) -> str:
    """Returns the name of the copy of an assignment's values that is written into the input."""
    return f"{node.name[:180]} copied"


def position_name(node: Node) -> str:
    """Returns what is left out if a kernel puts the values at a position, instead of what makes them."""
    return f"{node.name} at a position"


def place_values(graph: Graph, options: Options = DEFAULTS) -> Rewritten:
    """Lets what makes the values of assignments write them into the inputs; copies values where that is impossible.

    Raises GraphError if a node takes the value that an input had before, and one that it has afterwards; NotAccepted if
    that may be so because parts of inputs are assigned.
    """
    if not graph.updates:
        return same(graph)
    left_out = {name: why for (what, name), why in options.left_out.items() if what == ASSIGNMENTS}
    try:
        return _Placing(graph, left_out).run()
    except GraphError as error:
        key, why = (REGIONS, graph.name), str(error)
        if key in options.left_out:
            raise
    raise NotAccepted(why, {key: why})


class _Placing:
    """Decides how the values of each assignment come into the input.

    The network has the nodes, edges of order, and for each assignment whose values are copied two more: where they are
    read (the assignment, False) and where they are written (the assignment, True).
    """

    def __init__(self, graph: Graph, left_out: dict[str, str]) -> None:
        self._graph, self._left_out = graph, left_out
        self._network: nx.DiGraph = nx.DiGraph(graph.network)
        self._copied: dict[Node, bool] = {}  # whether the values are put aside first
        self._placed: set[Node] = set()
        self._decisions: list[Decision] = []
        self._reading: list[tuple[Node, object]] = []  # edges of order that come of what an assignment reads

    def run(self) -> Rewritten:
        every = assignments(self._graph)
        for node in every:
            if node.name in self._left_out:
                self._copy(node, self._left_out[node.name])
            elif not self._is_simple(node):
                self._copy(
                    node, f"{node.inputs[1].name!r} has memory of its own already, or is assigned elsewhere, too"
                )
        for node in every:
            if node not in self._copied and not self._order(node):
                self._copy(node, f"what makes {node.inputs[1].name!r} comes before something that reads the old value")
            if node in self._copied and not self._order(node):
                after = self._reads_both(node)
                raise GraphError(
                    f"{after.name!r} takes what {node.inputs[0].name!r} is before {node.name!r} overwrites it, and "
                    "what follows from the new value: compute one of them in a graph of its own"
                )
        for node in self._copied:
            self._copied[node] = node.name in self._left_out or not self._join(node)
        made = replaced(self._graph, set(every).__contains__, lambda rewrite, node, _: self._write(rewrite, node))
        return replace(made, decisions=tuple(self._decisions))

    def _is_simple(self, node: Node) -> bool:
        """Returns true if values are made by a node that may write them anywhere, and nothing else says where."""
        graph, by = self._graph, by_position(node)
        if len(node.inputs) > 2 and (not by or position_name(node) in self._left_out):
            return True
        for tensor in laid(graph, node.inputs[1]) if by else [node.inputs[1]]:
            producer, takers = graph.producer(tensor), graph.consumers(tensor)
            assigned = sum(n.kind is Kind.ASSIGN for n in takers)
            if producer is None or producer.kind is Kind.ASSIGN or tensor in graph.output_numbers or assigned > 1:
                return by
            if by and len(takers) > 1:
                return True
        self._placed.add(node)
        return True

    def _copy(self, node: Node, why: str) -> None:
        """Adds where the values are read and written, as they are copied."""
        producer = self._graph.producer(node.inputs[1])
        self._decisions.append(Decision(node.inputs[1].name, node.name, False, f"its values are copied: {why}"))
        self._copied[node] = True
        (self._placed.add if len(node.inputs) == 2 else self._placed.discard)(node)
        edges = [((node, False), (node, True)), ((node, True), node)]
        self._network.add_edges_from(edges if producer is None else [(producer, (node, False)), *edges])
        for _, writer in (reading := [edge for edge in self._reading if edge[0] is node]):
            self._network.add_edge((node, False), writer)  # the copy reads, not what writes
        self._network.remove_edges_from(reading)

    def _order(self, node: Node) -> bool:
        """Adds the edges of order of an assignment; False, and none is added, if they would form a cycle."""
        last = self._graph.producer(node.inputs[0])
        first = overwritten_after(self._graph, node, last in self._placed and last not in self._copied)
        before = [(n, False) if n in self._copied and n is not last else n for n in first]
        placed = node in self._placed
        writers = [(node, True)] if placed and node in self._copied else writers_of(self._graph, node, placed)
        network = self._network
        edges = [(n, w) for w in writers for n in before if n is not w and not network.has_edge(n, w)]
        if any(nx.has_path(network, w, n) for n, w in edges):
            return False
        network.add_edges_from(edges)
        self._reading += [(n, w) for n, w in edges if isinstance(n, Node) and n.kind is Kind.ASSIGN and n is not last]
        return True

    def _join(self, node: Node) -> bool:
        """Lets one copy read and write, unless something has to come between."""
        read, written = (node, False), (node, True)
        if node not in self._placed:
            return True
        network = self._network
        if any(nx.has_path(network, n, written) for n in network.successors(read) if n != written):
            return False
        network.add_edges_from((n, read) for n in network.predecessors(written) if n != read)
        network.add_edges_from((read, n) for n in network.successors(written))
        network.remove_node(written)
        return True

    def _reads_both(self, node: Node) -> Node:
        after = {*followers(self._graph, node)}
        return next((n for n in overwritten_after(self._graph, node) if n in after), node)

    def _write(self, rewrite: Rewrite, node: Node) -> None:
        x, values, *index = rewrite.inputs(node)
        if node in self._copied:
            aside = self._copied[node] and node in self._placed
            for part in (["put aside"] if aside else []) + ["copied"]:
                made = intermediate(rewrite.graph, node.name, part, values.shape, values.strides, values.dtype)
                identity = {"dtype": values.dtype, "saturate": True}
                values = rewrite.graph.add_node(Node(TABLE["identity"], (values,), identity, made)).output
        attributes = {**node.attributes, "placed": node in self._placed}
        rewrite.graph.add_node(Node(node.op, (x, values, *index), attributes, rewrite.result(node.output)))
