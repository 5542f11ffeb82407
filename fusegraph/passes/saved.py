"""What a backward pass takes from the forward pass: what is kept in memory for it, and what it computes again.

What kernels of the backward pass need of the forward pass follows, by pointwise nodes, from tensors that are not
computed again (inputs, sums, products).  A cut between these and those kernels is a set of tensors that is enough.  A
tensor of the cut is read by each kernel that needs it, and written once if nobody else wants it in memory: the minimum
cut moves the fewest bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import TypeAlias

from fusegraph import networks as nx
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.ops.base import Kind
from fusegraph.passes.partition import Partition, edges
from fusegraph.pattern import made_of

#: Kinds of nodes that may get an operand in registers; the others take theirs from memory.
FROM_REGISTERS = frozenset({Kind.POINTWISE, Kind.MOVEMENT, Kind.REDUCTION, Kind.POOLING})
#: Ends of a network, beside ("in", tensor) and ("out", tensor).
_SOURCE, _SINK = "source", "sink"


def forward_of(given: Graph, graph: Graph, counterparts: Mapping[Tensor, Tensor]) -> frozenset[Node]:
    """Returns the nodes of a graph that stand for what losses of the graph as given follow from."""
    before = {*given.losses, *(t for node in made_of(given, given.losses) for t in node.inputs)}
    return frozenset(made_of(graph, [counterparts[t] for t in before if t in counterparts]))


#: What is computed again: consumer -> tensor that it takes -> the nodes that compute it, for this consumer's kernel.
Again: TypeAlias = dict[Node, dict[Tensor, frozenset[Node]]]


class Crossing:
    """The edges from the forward pass to the backward pass."""

    def __init__(self, partition: Partition, forward: Set[Node]) -> None:
        self.graph, self.forward = partition.graph, forward
        #: Consumers that take what they need from memory, as no kernel computes it again for them.
        self.bound: set[Node] = set()
        #: Whether nothing begins with inputs that are overwritten.
        self.fixed_inputs = False
        self.group_of = {n: g for g in partition.groups for n in g.nodes}
        self.edges = [
            (consumer, tensor)
            for producer, consumer, tensor in edges(self.graph)
            if producer in forward and consumer not in forward
        ]

    def apart(self) -> Iterator[tuple[Node, Tensor]]:
        """Yields the edges between two kernels."""
        for consumer, tensor in self.edges:
            producer = self.graph.producer(tensor)
            if producer is not None and self.group_of[producer] is not self.group_of[consumer]:
                yield consumer, tensor

    def is_free(self, consumer: Node, all_free: bool = False) -> bool:
        """Returns true if a consumer may get an operand in registers; all_free: or from a kernel of its own."""
        if consumer in self.bound:
            return False
        return all_free or (consumer.kind in FROM_REGISTERS and self.group_of[consumer].family != "view")

    def reader(self, consumer: Node) -> Node:
        """Returns the first node that reads what a consumer takes: itself, or one behind the view that it is."""
        while self.group_of[consumer].family == "view" and (behind := self.graph.consumers(consumer.output)):
            consumer = behind[0]
        return consumer

    def again(self, tensor: Tensor) -> bool:
        """Returns true if a tensor can be computed again."""
        node = self.graph.producer(tensor)
        return node is not None and node in self.forward and node.kind is Kind.POINTWISE

    def is_written(self, tensor: Tensor, fixed: Mapping[Tensor, set[int]]) -> bool:
        """Returns true if a tensor is in memory whatever the backward pass reads."""
        node, graph = self.graph.producer(tensor), self.graph
        if node is None or tensor in graph.output_numbers or tensor in fixed or self.group_of[node].family == "view":
            return True
        return any(c in self.forward and self.group_of[c] is not self.group_of[node] for c in graph.consumers(tensor))

    def cut(self, weight: float, *, all_free: bool = False) -> Again:
        """Returns what the minimum cut has computed again; bytes written for it alone count ``weight`` times.

        all_free: operands of products, too, may be computed again, by kernels of their own.
        """
        needed: dict[Tensor, set[int]] = {}
        fixed: dict[Tensor, set[int]] = {}
        for consumer, tensor in self.apart():
            where = needed if self.is_free(consumer, all_free) else fixed
            where.setdefault(tensor, set()).add(id(self.group_of[consumer]))
        if not needed:
            return {}
        network, begins = self._network(needed, fixed, weight, deep=all_free)
        kept: set[Tensor] = set()
        for part in list(nx.weakly_connected_components(network)):
            kept |= _minimum(network.subgraph(part).copy(), needed.keys(), begins)
        wanted: Again = {}
        for consumer, tensor in self.apart():
            if self.is_free(consumer, all_free) and (nodes := self._made_of(tensor, kept)):
                wanted.setdefault(consumer, {})[tensor] = nodes
        return wanted

    def _made_of(self, tensor: Tensor, kept: Set[Tensor]) -> frozenset[Node]:
        """Returns the nodes that compute a tensor from what is kept, and from what cannot be computed again."""
        found: set[Node] = set()
        stack = [tensor]
        while stack:
            current = stack.pop()
            node = self.graph.producer(current)
            if node is not None and node not in found and current not in kept and self.again(current):
                found.add(node)
                stack += node.values
        return frozenset(found)

    def _least(self) -> dict[Tensor, frozenset[Tensor]]:
        """Returns, for what can be computed again, what of the fewest bytes its operands can be computed from."""
        found: dict[Tensor, frozenset[Tensor]] = {}
        for node in self.graph.nodes:
            if self.again(y := node.output):
                parts = (found[x] if x in found and _nbytes(found[x]) < x.nbytes else {x} for x in node.values)
                found[y] = frozenset[Tensor]().union(*parts)
        return found

    def _network(
        self, needed: Mapping[Tensor, set[int]], fixed: Mapping[Tensor, set[int]], weight: float, *, deep: bool
    ) -> tuple[nx.DiGraph, set[Tensor]]:
        """Returns the network of tensors and what they are computed from, and those that it begins with.

        It begins with what cannot be computed again, and, unless it is ``deep``, with tensors that are written anyway
        and take no more bytes to read than what they follow from, but for that which their readers read anyway: else
        each reader of a sum in a residual network would read all that was added up.
        """
        readers: dict[Tensor, set[int]] = {t: set(groups) for t, groups in needed.items()}
        network, least = nx.DiGraph(), self._least()
        made = dict.fromkeys(needed)
        begins = {t for t in needed if not self.again(t)}
        for node in reversed(self.graph.nodes):
            y = node.output
            if node not in self.forward or y not in readers or not self.again(y):
                continue
            written = self.is_written(y, fixed)
            if written and not deep:
                anyway = {t for t in least[y] if readers[y] <= needed.get(t, set()) | fixed.get(t, set())}
                if _nbytes(least[y] - anyway) >= y.nbytes:
                    begins.add(y)
                    continue
            for x in dict.fromkeys(node.values):
                readers.setdefault(x, set()).update({id(node)} if written else readers[y])
                network.add_edge(("out", x), ("in", y))
                made[x] = None
                if not self.again(x):
                    begins.add(x)
        for tensor in made:
            reads = len(readers[tensor] - fixed.get(tensor, set()))
            writes = 0.0 if self.is_written(tensor, fixed) else weight
            endless = self.fixed_inputs and tensor.base in self.graph.updates.values()
            capacity = {} if endless else {"capacity": _nbytes({tensor}) * (reads + writes)}
            network.add_edge(("in", tensor), ("out", tensor), **capacity)
        return network, begins


def _nbytes(tensors: Set[Tensor]) -> int:
    """Returns the bytes to read tensors; constants are part of the code or small."""
    return sum(t.nbytes for t in tensors if not t.is_constant)


def _minimum(network: nx.DiGraph, needed: Set[Tensor], begins: Set[Tensor]) -> set[Tensor]:
    """Returns the tensors of the minimum cut of one part of a network."""
    for end, tensor in list(network.nodes):
        if end == "in" and tensor in begins:
            network.add_edge(_SOURCE, (end, tensor))
        if end == "out" and tensor in needed:
            network.add_edge((end, tensor), _SINK)
    if _SOURCE not in network or _SINK not in network:
        return set()
    _, (begin, _) = nx.minimum_cut(network, _SOURCE, _SINK)
    tensors = {t for _, t in network.nodes - {_SOURCE, _SINK}}
    return {t for t in tensors if ("in", t) in begin and ("out", t) not in begin}


# ---- what is kept


@dataclass(frozen=True)
class Saved:
    """A tensor that stays in memory for the backward pass, and why it is not computed again."""

    name: str
    nbytes: int
    reason: str


def saved(partition: Partition, forward: Set[Node]) -> tuple[Saved, ...]:
    """Returns what kernels of the backward pass read of the forward pass's results, the largest first."""
    crossing = Crossing(partition, forward)
    readers: dict[Tensor, list[Node]] = {}
    for consumer, tensor in crossing.apart():
        if crossing.graph.producer(tensor.base) is not None:
            readers.setdefault(tensor.base, []).append(consumer)
    found = [Saved(t.name, t.nbytes, _reason(crossing, t, nodes)) for t, nodes in readers.items()]
    return tuple(sorted(found, key=lambda s: -s.nbytes))


def _reason(crossing: Crossing, tensor: Tensor, readers: list[Node]) -> str:
    node = crossing.graph.producer(tensor)
    assert node is not None
    if tensor in crossing.graph.output_numbers:
        return "it is a result of the graph"
    if not crossing.again(tensor):
        return f"{node.op.name} is not computed again"
    taken = next((c for c in map(crossing.reader, readers) if not crossing.is_free(c)), None)
    if taken is not None:
        return f"{taken.op.name} takes it from memory"
    return "computing it again would not move fewer bytes"
