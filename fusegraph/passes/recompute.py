"""Recomputing: a pointwise value that one kernel has and another needs is computed again where that moves fewer bytes.

A tensor that crosses kernels is written once and read by each of its readers.  If it follows, by pointwise nodes alone,
from tensors that such a reader reads anyway or that are smaller, the reader is given copies of these nodes: a float32
copy of a bfloat16 tensor, or the normalized rows that both the rows and the columns of a norm's gradient are summed of,
then stay in registers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from codegen.declined import Declined
from codegen.target import Target
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import Options
from fusegraph.lowering.choices import weigh
from fusegraph.ops.base import Kind
from fusegraph.passes.fuse import fuse
from fusegraph.passes.partition import Group, Partition, edges
from fusegraph.passes.rewrite import Rewrite, Rewritten, intermediate, same
from fusegraph.passes.saved import FROM_REGISTERS, Again, Crossing, Saved, saved
from fusegraph.passes.speculation import NoKernel

#: What is chosen.
NAME, AGAIN, READ = "cheap values", "computed again", "read from memory"
#: The note of what is kept for a backward pass.
SAVED = "saved"
#: How much more a byte that is kept counts than one that is moved, tried in turn, if too many are kept.
WEIGHTS = (1, 16, 256)
#: More nodes than these are not computed twice.
MAX_NODES = 16


def recompute(partition: Partition, options: Options, forward: Set[Node] = frozenset()) -> tuple[Rewritten, Partition]:
    """Computes cheap values again in kernels that need them, if that moves fewer bytes; else nothing changes.

    What kernels of a backward pass compute again of ``forward``, the nodes of the forward pass, a minimum cut decides
    (`passes.saved`); they keep no more than the limit, if that can be.  The note "copies" has, for a tensor of the new
    graph, the tensors that are copies of it; the note "saved" what is kept for the backward pass.
    """
    crossing = Crossing(partition, forward)
    best = _by_cut(crossing, partition, options, 1)
    if best is None or not best.is_better:
        best = _attempt(crossing, partition, {}, options)
    if not best.is_better:
        best = _Attempt(same(partition.graph), partition, forward, False)
    if options.memory is not None:
        for weight in WEIGHTS:
            if best.kept <= options.memory:
                break
            other = _by_cut(crossing, partition, options, weight, all_free=True)
            best = best if other is None else min(best, other, key=lambda a: a.kept)
    return replace(best.made, notes={**best.made.notes, SAVED: best.saved}), best.partition


def _by_cut(
    crossing: Crossing, partition: Partition, options: Options, weight: float, *, all_free: bool = False
) -> _Attempt | None:
    """Returns what a minimum cut makes of the backward pass; None if nothing is computed again by it.

    Consumers whose kernels do not take what is computed again read it from memory.  So do all if kernels would wait for
    each other, as some overwrite inputs that others begin with.
    """
    crossing.bound, crossing.fixed_inputs = set(), False
    while cut := crossing.cut(weight, all_free=all_free):
        try:
            return _attempt(crossing, partition, cut, options)
        except NoKernel as refusal:
            names = {node.name for nodes, _ in refusal.groups for node in nodes}
            bound = {consumer for consumer in cut if consumer.name in names}
            if not bound:
                return None
            crossing.bound |= bound
        except Declined:
            if crossing.fixed_inputs:
                return None
            crossing.fixed_inputs = True
    return None


@dataclass(frozen=True)
class _Attempt:
    """A graph in which more is computed again, its partition, the nodes of its forward pass, and whether to take it."""

    made: Rewritten
    partition: Partition
    forward: Set[Node]
    is_better: bool

    @cached_property
    def saved(self) -> tuple[Saved, ...]:
        return saved(self.partition, self.forward)

    @property
    def kept(self) -> int:
        """Bytes that are kept for the backward pass."""
        return sum(s.nbytes for s in self.saved)


def _attempt(crossing: Crossing, partition: Partition, cut: Again, options: Options) -> _Attempt:
    """Returns what comes of a cut, and of what other kernels had better compute again."""
    graph, target = partition.graph, options.target.planned
    unchanged = _Attempt(same(graph), partition, crossing.forward, False)
    wanted = _wanted(crossing, partition, cut)
    if not wanted:
        return unchanged
    rewriting = _Rewriting(graph, wanted, crossing.group_of)
    rewritten = rewriting.run()
    stays = {rewritten.counterparts[t] for n in crossing.forward for t in n.outputs if t in rewritten.counterparts}
    forward = frozenset(n for n in rewritten.graph.nodes if not stays.isdisjoint(n.outputs))
    if cut:
        together, copies = rewriting.groups(partition, rewritten)
        again = fuse(rewritten.graph, options, together=together, apart=(copies, forward))
    else:
        again = fuse(rewritten.graph, options)
    cycles = {AGAIN: _cycles(again, target), READ: _cycles(partition, target)}
    is_better = cycles[AGAIN] < cycles[READ]
    choice = weigh(NAME, graph.outputs[0].name, cycles, AGAIN, options.settled)
    if is_better and choice.taken == READ:
        return replace(unchanged, made=replace(same(graph), choices=(choice,)), is_better=True)
    living = rewriting.living(rewritten.graph)
    counterpart = {**{old: copies[0] for old, copies in living.items()}, **rewritten.counterparts}
    notes = {"copies": {counterpart[old]: tuple(copies) for old, copies in living.items()}}
    return _Attempt(Rewritten(again.graph, counterpart, choices=(choice,), notes=notes), again, forward, is_better)


def _wanted(crossing: Crossing, partition: Partition, cut: Again) -> Again:
    """Returns what is computed again: as a cut says, if there is one, else as moves the fewest bytes for a kernel."""
    graph, group_of = partition.graph, crossing.group_of
    written = {t for g in partition.groups for t in g.writes}
    made = (t for g in partition.groups if g.family != "view" for n in g.nodes for t in n.outputs)
    kept_inside = frozenset(made) - written
    decided = set(crossing.apart()) if cut else set()
    entering: dict[Group, dict[Tensor, list[Node]]] = defaultdict(lambda: defaultdict(list))
    for producer, consumer, tensor in edges(graph):
        if group_of[producer] is not group_of[consumer] and (consumer, tensor) not in decided:
            entering[group_of[consumer]][tensor].append(consumer)
    order = {t: n for n, t in enumerate(graph.tensors.values())}
    wanted: Again = defaultdict(dict, {consumer: dict(tensors) for consumer, tensors in cut.items()})
    for group, tensors in entering.items():
        reads = {*group.reads}  # what the group reads once tensors before are computed again
        for tensor in sorted(tensors, key=order.__getitem__):
            if found := _again(graph, tensor, group, reads - {tensor}, kept_inside):
                begins, nodes = found
                reads = (reads - {tensor}) | begins
                for consumer in tensors[tensor]:
                    wanted[consumer][tensor] = nodes
    return wanted


def _cycles(partition: Partition, target: Target) -> float:
    """Returns the cycles that the kernels take to read and write memory, and to start."""
    kernels = [g for g in partition.groups if g.family != "view"]
    moved = sum(t.nbytes for g in kernels for t in {*g.reads, *g.writes})
    return moved / target.bytes_per_cycle + len(kernels) * target.launch_cycles


def _again(
    graph: Graph, tensor: Tensor, group: Group, reads: Set[Tensor], kept_inside: Set[Tensor]
) -> tuple[frozenset[Tensor], frozenset[Node]] | None:
    """Returns the pointwise nodes that a group had better compute again than read a tensor, and what these begin with.

    None if it had better read it.  What they begin with is read, unless the group ``reads`` it anyway, and is written
    first if it is ``kept_inside`` a kernel now.  A view reads nothing.
    """
    if group.family == "view" or any(n.kind not in FROM_REGISTERS for n in group.nodes):
        return None
    own = {t.base for t in group.writes}  # which it overwrites itself
    overwritten = {t for t in graph.updates.values() if t not in reads and t not in own}  # by then, perhaps
    known: dict[Tensor, tuple[frozenset[Tensor], frozenset[Node]]] = {}

    def moved(begins: Iterable[Tensor]) -> float:
        fresh = [t for t in begins if t not in reads]
        if any(t.base in overwritten for t in fresh):
            return inf
        return sum(t.nbytes * (2 if t in kept_inside else 1) for t in fresh)

    def cheapest(t: Tensor, deep: int) -> tuple[frozenset[Tensor], frozenset[Node]]:
        """Returns what a group that needs t reads, and computes again."""
        node = graph.producer(t)
        if t not in known:
            known[t] = frozenset({t}), frozenset()
            again = t is tensor or (t not in graph.output_numbers and deep < MAX_NODES)
            if again and node is not None and node.kind is Kind.POINTWISE:
                parts = [cheapest(x, deep + 1) for x in node.inputs]
                begins = frozenset[Tensor]().union(*(b for b, _ in parts))
                nodes = frozenset({node}).union(*(n for _, n in parts))
                if t is tensor or (len(nodes) < MAX_NODES and moved(begins) < moved({t})):
                    known[t] = begins, nodes
        return known[t]

    begins, nodes = cheapest(tensor, 0)
    saves = moved(begins) < tensor.nbytes * (1 if tensor in graph.output_numbers else 2)
    return (begins, nodes) if nodes and saves and len(nodes) <= MAX_NODES else None


class _Rewriting:
    """A copy of a graph in which some nodes take copies of what they took."""

    def __init__(
        self, graph: Graph, wanted: Mapping[Node, Mapping[Tensor, frozenset[Node]]], group_of: Mapping[Node, Group]
    ) -> None:
        self._old, self._wanted, self._group_of = graph, wanted, group_of
        self._rewrite = Rewrite(graph, {t: t.own_strides for t in graph.tensors.values() if t.own_strides is not None})
        self._copies: dict[tuple[int, Tensor], Tensor] = {}
        #: What a kernel has computed again for any of its nodes is there for what it computes again besides.
        self._of_group = {(id(group_of[c]), t): nodes for c, found in wanted.items() for t, nodes in found.items()}
        self._inside: set[Tensor] = set()  # the copies that the kernel that wants them computes itself

    def run(self) -> Rewritten:
        for node in self._old.nodes:
            wanted = self._wanted.get(node, {})
            self._rewrite.take_over(
                node, [self._copy(t, node, wanted[t]) if t in wanted else self._rewrite.new[t] for t in node.inputs]
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

    def groups(self, partition: Partition, rewritten: Rewritten) -> tuple[list[Set[Node]], Set[Node]]:
        """Returns the nodes of each kernel there was, with what it computes again itself, and all that is again."""
        graph, new = rewritten.graph, rewritten.counterparts

        def makers(tensors: Iterable[Tensor]) -> set[Node]:
            return {node for t in tensors if (node := graph.producer(t)) is not None}

        found: list[Set[Node]] = []
        for group in partition.groups:
            if group.family != "view":
                own = [new[t] for n in group.nodes for t in n.outputs if t in new]
                inside = [t for (g, _), t in self._copies.items() if g == id(group) and t in self._inside]
                found.append(makers([*own, *inside]))
        return [nodes for nodes in found if nodes], makers(self._copies.values())

    def _copy(self, tensor: Tensor, consumer: Node, nodes: frozenset[Node]) -> Tensor:
        """Returns a tensor computed again by some nodes for a group: once, however many of its nodes take it."""
        group = id(self._group_of[consumer])
        key = group, tensor
        if key not in self._copies:
            node = self._old.producer(tensor)
            assert node is not None
            inputs = []
            for t in node.inputs:
                inner = nodes if self._old.producer(t) in nodes else self._of_group.get((group, t))
                inputs.append(self._copy(t, consumer, inner) if inner else self._rewrite.new[t])
            graph, strides = self._rewrite.graph, tensor.own_strides or tensor.strides
            copy = intermediate(graph, tensor.name, "again", tensor.shape, strides, tensor.dtype)
            self._copies[key] = graph.add_node(Node(node.op, tuple(inputs), node.attributes, copy)).output
        if consumer.kind in FROM_REGISTERS:
            self._inside.add(self._copies[key])
        return self._copies[key]
