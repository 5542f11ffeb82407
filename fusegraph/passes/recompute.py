"""Recomputing: a pointwise value that one kernel has and another needs is computed again where that moves fewer bytes.

A tensor that crosses kernels is written once and read by each of its readers.  If it follows, by pointwise nodes alone,
from tensors that such a reader reads anyway or that are smaller, the reader is given copies of these nodes: a float32
copy of a bfloat16 input, or the normalized rows that both the rows and the columns of a norm's gradient are summed of,
then stay in registers.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import Options
from fusegraph.lowering.choices import weigh
from fusegraph.ops.base import Kind
from fusegraph.passes.fuse import fuse
from fusegraph.passes.partition import Group, Partition, edges
from fusegraph.passes.rewrite import Rewrite, Rewritten, intermediate, same

#: What is chosen.
NAME, AGAIN, READ = "cheap values", "computed again", "read from memory"
#: More nodes than these are not computed twice.
MAX_NODES = 16
_KINDS = frozenset({Kind.POINTWISE, Kind.MOVEMENT, Kind.REDUCTION, Kind.POOLING})


def recompute(partition: Partition, options: Options) -> tuple[Rewritten, Partition]:
    """Computes cheap values again in kernels that need them, if that moves fewer bytes; else nothing changes.

    The note "copies" has, for a tensor of the new graph, the tensors that are copies of it.
    """
    graph = partition.graph
    unchanged = same(graph), partition
    group_of = {n: g for g in partition.groups for n in g.nodes}
    written = {t for g in partition.groups for t in g.writes}
    made = (t for g in partition.groups if g.family != "view" for n in g.nodes for t in n.outputs)
    kept_inside = frozenset(made) - written
    wanted: dict[Node, set[Tensor]] = {}
    for producer, consumer, tensor in edges(graph):
        group = group_of[consumer]
        if group_of[producer] is not group and _saves(graph, tensor, group, kept_inside):
            wanted.setdefault(consumer, set()).add(tensor)
    if not wanted:
        return unchanged
    rewriting = _Rewriting(graph, wanted, group_of)
    rewritten = rewriting.run()
    again = fuse(rewritten.graph, options)
    if _moved(again) >= _moved(partition) or len(again.groups) > len(partition.groups):
        return unchanged
    rate = options.target.planned.bytes_per_cycle
    cycles = {AGAIN: _moved(again) / rate, READ: _moved(partition) / rate}
    choice = weigh(NAME, graph.outputs[0].name, cycles, AGAIN, options.settled)
    if choice.taken == READ:
        return replace(same(graph), choices=(choice,)), partition
    living = rewriting.living(rewritten.graph)
    counterpart = {**{old: copies[0] for old, copies in living.items()}, **rewritten.counterparts}
    notes = {"copies": {counterpart[old]: tuple(copies) for old, copies in living.items()}}
    return Rewritten(again.graph, counterpart, choices=(choice,), notes=notes), again


def _moved(partition: Partition) -> int:
    """Returns the bytes that the kernels read and write."""
    return sum(t.nbytes for g in partition.groups if g.family != "view" for t in {*g.reads, *g.writes})


def _cone(graph: Graph, tensor: Tensor) -> tuple[list[Node], set[Tensor]]:
    """Returns the pointwise nodes that a tensor follows from, itself first, and the tensors that these begin with."""
    nodes: list[Node] = []
    begins: set[Tensor] = set()
    stack = [tensor]
    while stack and len(nodes) <= MAX_NODES:
        current = stack.pop()
        node = graph.producer(current)
        stays = (
            node is None
            or node.kind is not Kind.POINTWISE
            or (current in graph.output_numbers and current is not tensor)
        )
        if stays:
            begins.add(current)
        elif node is not None and node not in nodes:
            nodes.append(node)
            stack += node.inputs
    return nodes, begins


def _saves(graph: Graph, tensor: Tensor, group: Group, kept_inside: Set[Tensor]) -> bool:
    """Returns true if a group had better compute a tensor again than read it.  A view does not: it reads nothing.

    The tensors that it then begins with are read, and are written first if they are ``kept_inside`` a kernel now.
    """
    if group.family == "view" or any(n.kind not in _KINDS for n in group.nodes):
        return False
    nodes, begins = _cone(graph, tensor)
    if not nodes or len(nodes) > MAX_NODES:
        return False
    if any(t.base in graph.updates.values() and t not in group.reads for t in begins):
        return False  # it may be overwritten by then
    more = sum(t.nbytes * (2 if t in kept_inside else 1) for t in begins if t not in group.reads)
    return more < tensor.nbytes * (1 if tensor in graph.output_numbers else 2)


class _Rewriting:
    """A copy of a graph in which some nodes take copies of what they took."""

    def __init__(self, graph: Graph, wanted: Mapping[Node, set[Tensor]], group_of: Mapping[Node, Group]) -> None:
        self._old, self._wanted, self._group_of = graph, wanted, group_of
        self._rewrite = Rewrite(graph, {t: t.own_strides for t in graph.tensors.values() if t.own_strides is not None})
        self._copies: dict[tuple[int, Tensor], Tensor] = {}

    def run(self) -> Rewritten:
        for node in self._old.nodes:
            wanted = self._wanted.get(node, set())
            self._rewrite.take_over(
                node, [self._copy(t, node) if t in wanted else self._rewrite.new[t] for t in node.inputs]
            )
        return self._rewrite.done()

    def living(self, graph: Graph) -> dict[Tensor, list[Tensor]]:
        """Returns the copies of each tensor that are left in the new graph."""
        alive = set(graph.tensors.values())
        result: dict[Tensor, list[Tensor]] = {}
        for (_, old), copy in self._copies.items():
            if copy in alive:
                result.setdefault(old, []).append(copy)
        return result

    def _copy(self, tensor: Tensor, consumer: Node) -> Tensor:
        """Returns a tensor computed again for a group: once, however many of its nodes take it."""
        key = id(self._group_of[consumer]), tensor
        if key not in self._copies:
            nodes, _ = _cone(self._old, tensor)
            node = self._old.producer(tensor)
            assert node is not None
            inputs = tuple(
                self._copy(t, consumer) if self._old.producer(t) in nodes else self._rewrite.new[t] for t in node.inputs
            )
            graph, strides = self._rewrite.graph, tensor.own_strides or tensor.strides
            copy = intermediate(graph, tensor.name, "again", tensor.shape, strides, tensor.dtype)
            self._copies[key] = graph.add_node(Node(node.op, inputs, node.attributes, copy)).output
        return self._copies[key]
