"""Groups, decisions and partitions: what the fusion pass produces and everything after it consumes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Any

from fusegraph.errors import GraphError
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import Lowered
from fusegraph.lowering.choices import Choice
from fusegraph.ops.base import Kind
from fusegraph.passes.overwriting import orders


@dataclass(frozen=True)
class Decision:
    """What was decided for one edge: whether producer and consumer share a kernel, and why.

    bytes_saved counts what the pair no longer moves through device memory because of it.  ``shared_input`` names the
    tensor when the pair has no edge but reads the same input (two readers fused side by side).
    """

    producer: str
    consumer: str
    fused: bool
    reason: str
    bytes_saved: int = 0
    shared_input: str | None = None


@dataclass(frozen=True)
class Group:
    """A convex set of nodes that is one kernel.  reads and writes are the tensors it moves through device memory.

    Of the family "view" it is no kernel: what it writes lies where it reads it.
    """

    nodes: tuple[Node, ...]
    lowered: Lowered

    @property
    def family(self) -> str:
        return self.lowered.family

    @property
    def reads(self) -> tuple[Tensor, ...]:
        return self.lowered.reads

    @property
    def writes(self) -> tuple[Tensor, ...]:
        return self.lowered.writes

    @property
    def positions(self) -> tuple[Tensor, ...]:
        """The tensors that say where its kernel writes, beside what the kernel's program reads."""
        return tuple(dict.fromkeys(t.position.index for t in self.writes if t.position is not None))

    @property
    def bytes_saved(self) -> int:
        """Bytes of device-memory traffic saved against a kernel for each node, which moves each of its tensors once."""
        alone = sum(t.nbytes for n in self.nodes for t in (*n.outputs, *set(n.inputs)))
        if self.family == "view":
            return alone
        return alone - sum(t.nbytes for t in {*self.reads, *self.writes})


@dataclass(frozen=True)
class Partition:
    """Groups in an order in which they can run, covering every node exactly once, and the decision for every edge.

    ``choices`` are those that made groups, or kept them apart.
    """

    graph: Graph
    groups: tuple[Group, ...]
    decisions: tuple[Decision, ...]
    choices: tuple[Choice, ...] = ()

    @property
    def materialized(self) -> Set[Tensor]:
        """Tensors that some group writes to memory, those among them of which it writes a region."""
        assigned = {n.output for group in self.groups for n in group.nodes if n.kind is Kind.ASSIGN}
        return assigned.union(*(group.writes for group in self.groups))

    def nodes_of(self, kernels: Callable[[Any], bool]) -> set[str]:
        """Returns the names of the nodes in those kernels for whose specification ``kernels`` holds."""
        return {n.name for g in self.groups if kernels(g.lowered.spec) for n in g.nodes}

    def check(self) -> None:
        """Verifies the partition.

        Every node is in exactly one group, the groups can run in the given order (so each is convex), and a tensor that
        crosses groups or leaves the graph is written by its group.  What overwrites memory comes after what reads what
        was there.  Raises GraphError naming what is wrong.
        (Not every tensor that enters a group need be read: gen_index asks for a shape only.)
        """
        place: dict[Node, int] = {}
        for number, group in enumerate(self.groups):
            for node in group.nodes:
                if node in place:
                    raise GraphError(f"node {node.name!r} is in two groups")
                place[node] = number
        for node in self.graph.nodes:
            if node not in place:
                raise GraphError(f"node {node.name!r} is in no group")
        for producer, consumer, tensor in edges(self.graph):
            if place[producer] > place[consumer]:
                raise GraphError(f"{consumer.name!r} would run before {producer.name!r}, whose result it takes")
            kept = producer.kind is not Kind.ASSIGN and tensor not in self.groups[place[producer]].writes
            if place[producer] != place[consumer] and kept:
                raise GraphError(f"tensor {tensor.name!r} crosses kernels but is not written to memory")
        written = self.materialized
        for before, after in orders(self.graph):
            if place[before] > place[after]:
                raise GraphError(f"{after.name!r} would overwrite memory before {before.name!r} has read it")
        for tensor in self.graph.outputs:
            if tensor not in written:
                raise GraphError(f"output {tensor.name!r} is written by no kernel")


def edges(graph: Graph) -> Iterable[tuple[Node, Node, Tensor]]:
    """Yields (producer, consumer, tensor) for every edge, each tensor once a pair, in the consumers' order."""
    for consumer in graph.nodes:
        seen = set()
        for tensor in consumer.inputs:
            producer = graph.producer(tensor)
            if producer is not None and tensor not in seen:
                seen.add(tensor)
                yield producer, consumer, tensor
