"""Fusion: groups the nodes of a graph into as few kernels as are legal and profitable.

Pairs of neighbouring groups are merged in order of the bytes they save, what follows a contraction first (its epilogue
grows before anything else) and what comes before one last of the producers (a prologue is evaluated repeatedly).  A
merge is legal if the quotient graph stays acyclic and a lowering accepts the merged group. Reachability between groups
is kept as Python integers used as bitsets and updated with every merge, because merges that are legal one by one can
form a cycle together.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence, Set

import networkx as nx

from codegen.declined import Declined
from fusegraph import lowering
from fusegraph.errors import GraphError
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering import attention
from fusegraph.lowering.base import GroupView, LeftOut, Lowered, Lowering, Options, TooLarge
from fusegraph.lowering.choices import Choice, Outweighed, unique
from fusegraph.ops.base import Kind, Role
from fusegraph.passes.gathered import additions, gather_operands
from fusegraph.passes.joins import planned_joins
from fusegraph.passes.overwriting import orders, placed
from fusegraph.passes.partition import Decision, Group, Partition, edges
from fusegraph.passes.speculation import FUSION, NoKernel
from fusegraph.passes.views import is_moved, place_views

#: Two groups that may merge, in the order in which they would run; and what both read if they are side by side.
_Pair = tuple[int, int, Tensor | object | None]

#: Readers of one tensor are merged side by side only with so many before and behind them, in the order in which they
#: were built: thousands of readers would make too many pairs.
NEAREST = 16
#: Stands for the input that neighbours share where they share none.
_LAUNCH = object()


def _nearest(groups: Sequence[int], group: int) -> list[int]:
    """Returns the `NEAREST` of sorted groups before and behind one of them."""
    at = bisect_left(groups, group)
    return [*groups[max(at - NEAREST, 0) : at], *groups[at + 1 : at + 1 + NEAREST]]


def _worth_sharing(nodes: Iterable[Node]) -> set[Tensor]:
    """Returns the tensors that nodes take, except those of one element."""
    return {t for n in nodes for t in n.inputs if t.size > 1}


class _Quotient:
    """The graph of groups: the nodes and neighbours of each, and a bitset of the groups that it reaches.

    ``bit`` has each group's bit; bits of groups that have been merged may be left in the bitsets.
    """

    def __init__(
        self, graph: Graph, left_out: LeftOut, joins: Set[Node] = frozenset(), assigns: Set[Node] = frozenset()
    ) -> None:
        """joins, assigns: the concatenations and the assignments that are to need no kernel."""
        self.graph = graph
        self.alone = {name: reason for (what, name), reason in left_out.items() if what == FUSION}
        self.alone |= {node.name: "what makes its parts writes them in their places" for node in joins}
        self.alone |= {node.name: "what makes its values writes them where they belong" for node in assigns}
        #: why what makes an operand is no part of the product's kernel, by two of the nodes
        self.declined: dict[tuple[Node, Node], Declined] = {}
        self.apart: tuple[Set[Node], Set[Node]] = (frozenset(), frozenset())
        self.order = {node: k for k, node in enumerate(graph.nodes)}
        self.group_of = dict(self.order)
        self.members: dict[int, list[Node]] = {k: [node] for node, k in self.order.items()}
        self.reducing = {k for node, k in self.order.items() if node.kind is Kind.REDUCTION}
        self.successors: dict[int, set[int]] = {k: set() for k in self.members}
        self.predecessors: dict[int, set[int]] = {k: set() for k in self.members}
        network = nx.DiGraph()
        network.add_nodes_from(self.order)
        network.add_edges_from((producer, consumer) for producer, consumer, _ in edges(graph))
        network.add_edges_from(orders(graph))
        for producer, consumer in network.edges():
            self.successors[self.order[producer]].add(self.order[consumer])
            self.predecessors[self.order[consumer]].add(self.order[producer])
        self.bit = {k: k for k in self.members}
        self.reach: dict[int, int] = {}
        for node in reversed(list(nx.topological_sort(network))):
            k = self.order[node]
            bits = 0
            for s in self.successors[k]:
                bits |= self.reach[s] | 1 << s
            self.reach[k] = bits
        self.consumers: dict[Tensor, list[Node]] = {}
        for _, consumer, tensor in edges(graph):
            self.consumers.setdefault(tensor, []).append(consumer)
        self._readers: dict[Tensor, list[int]] = {}  # the groups that take a tensor of several elements, sorted
        for node, k in self.order.items():
            for tensor in _worth_sharing([node]):
                self._readers.setdefault(tensor, []).append(k)
        self.adds = additions(graph, self.order)
        self._views: dict[int, GroupView] = {}
        self._joined: dict[tuple[int, int], GroupView] = {}  # the last that was asked for

    def path_outside(self, a: int, b: int) -> Node | None:
        """Returns a node on a path between two groups that leaves both: merging them would make it a cycle."""
        for first, last in ((a, b), (b, a)):
            for s in self.successors[first]:
                if s != last and self.reach[s] >> self.bit[last] & 1:
                    return self.members[s][0]
        return None

    def keeps_apart(self, a: int, b: int) -> bool:
        """Returns true if two groups have nodes that do not come into one kernel."""
        first, second = self.apart
        pairs = ((a, b), (b, a)) if first else ()
        return any(not first.isdisjoint(self.members[x]) and not second.isdisjoint(self.members[y]) for x, y in pairs)

    def is_prologue(self, a: int, b: int) -> bool:
        """Returns true if group a makes what a contraction in group b multiplies."""
        stack = [n for n in self.members[b] if n.kind in (Kind.CONTRACTION, Kind.TRANSFORM)]
        while stack:
            for tensor in stack.pop().inputs:
                producer = self.graph.producer(tensor)
                if producer is not None and self.group_of[producer] == a:
                    return True
                if producer is not None and self.group_of[producer] == b:
                    stack.append(producer)
        return False

    def only_widens(self, group: int) -> bool:
        """Returns true if a group does nothing but cast to wider types.

        Such casts belong to the kernel that reads them: the smaller operands are then what is handed over.
        """
        casts = self.members[group]
        return all(n.op.role is Role.CAST and n.output.nbytes > n.inputs[0].nbytes for n in casts)

    def view(self, group: int) -> GroupView:
        if group not in self._views:
            self._views[group] = GroupView(self.graph, self.members[group], self.order)
        return self._views[group]

    def joined(self, a: int, b: int) -> GroupView:
        """Returns what merging two groups would make."""
        if (a, b) not in self._joined:
            self._joined = {(a, b): GroupView(self.graph, self.members[a] + self.members[b], self.order)}
        return self._joined[a, b]

    def neighbours(self, group: int) -> Iterator[_Pair]:
        """Yields the pairs in which a group may merge: with its consumers, its producers, and readers of the same."""
        for s in self.successors[group]:
            yield group, s, None
        for p in self.predecessors[group]:
            yield p, group, None
        for tensor in self.view(group).reads:
            for other in _nearest(self._readers.get(tensor, ()), group):
                if not self.adjacent(group, other):
                    yield min(group, other), max(group, other), tensor
        # Reductions of different results of one kernel: nothing is read once instead of twice, but a launch is saved.
        for maker in self.predecessors[group] if group in self.reducing else ():
            for other in _nearest(sorted(self.reducing & self.successors[maker]), group):
                if not self.adjacent(group, other):
                    yield min(group, other), max(group, other), _LAUNCH

    def adjacent(self, a: int, b: int) -> bool:
        """Returns true if one group takes what the other makes."""
        return b in self.successors[a] or b in self.predecessors[a]

    def saved(self, a: int, b: int) -> int:
        """Returns the bytes that are not moved if two groups become one.

        What both read is read once.  What one makes and the other reads is not read, and is only written if others need
        it.
        """
        view_a, view_b = self.view(a), self.view(b)
        moved = list(set(view_a.reads).intersection(view_b.reads))
        for maker, reader in ((view_a, view_b), (view_b, view_a)):
            moved += set(reader.reads).intersection(maker.writes)
            moved += [t for t in maker.writes if not self._needed_beyond(t, a, b)]
        return sum(t.nbytes for t in moved)

    def _needed_beyond(self, tensor: Tensor, a: int, b: int) -> bool:
        takers = self.consumers.get(tensor, ())
        return tensor in self.graph.output_numbers or any(self.group_of[n] not in (a, b) for n in takers)

    def merge(self, a: int, b: int) -> set[int]:
        """Merges group b into a; returns the groups that have other neighbours now."""
        changed = {a} | min((self.reducing & self.successors[k] for k in (a, b)), key=len) - {b}
        # Whatever reaches one of two groups reaches the one that takes the other's results: its bit stands for both.
        bits = 1 << self.bit[a] | 1 << self.bit[b]
        bit = self.bit.pop(b)
        if b in self.successors[a]:
            self.bit[a] = bit
        self._views.pop(b, None)
        self._views[a] = self.joined(a, b)
        self._joined = {}
        for node in self.members[b]:
            self.group_of[node] = a
        for tensor in _worth_sharing(self.members[b]):
            readers = self._readers[tensor]
            del readers[bisect_left(readers, b)]
            if a not in readers[(at := bisect_left(readers, a)) : at + 1]:
                readers.insert(at, a)
        self.members[a] += self.members.pop(b)
        if b in self.reducing:
            self.reducing.discard(b)
            self.reducing.add(a)
        for forward, backward in ((self.successors, self.predecessors), (self.predecessors, self.successors)):
            gone = forward.pop(b)
            for k in gone:
                backward[k].discard(b)
                backward[k].add(a)
            forward[a] |= gone
        for neighbours in (self.successors, self.predecessors):
            neighbours[a] -= {a, b}
        self.reach[a] = (self.reach[a] | self.reach.pop(b)) & ~bits
        # Whatever reaches a group that has all these bits already has them, too.  One left behind harms nobody.
        joined = self.reach[a] | 1 << self.bit[a]
        pending = list(self.predecessors[a])
        while pending:
            k = pending.pop()
            if joined & ~self.reach[k]:
                self.reach[k] |= joined
                pending += self.predecessors[k]
        return changed

    def gather(self, nodes: Set[Node]) -> None:
        """Merges the groups of some nodes."""
        first, *others = sorted({self.group_of[node] for node in nodes})
        for other in others:
            self.merge(first, other)

    def topological(self) -> list[int]:
        """Returns the groups in an order in which they can run, ties in the order their first nodes were built."""
        first = {g: min(self.order[n] for n in nodes) for g, nodes in self.members.items()}
        return list(nx.lexicographical_topological_sort(self.network(), key=first.__getitem__))

    def network(self) -> nx.DiGraph:
        """Returns the groups, with an edge from each to those that come after it."""
        network = nx.DiGraph()
        network.add_nodes_from(self.members)
        network.add_edges_from((a, b) for a, successors in self.successors.items() for b in successors)
        return network


class _Refused:
    """The pairs of groups that cannot be merged as they are, and why."""

    def __init__(self, quotient: _Quotient) -> None:
        self._quotient = quotient
        self._reasons: dict[int, dict[int, Declined]] = {g: {} for g in quotient.members}

    def get(self, a: int, b: int) -> Declined | None:
        return self._reasons[a].get(b)

    def add(self, a: int, b: int, reason: Declined) -> None:
        self._reasons[a][b] = self._reasons[b][a] = reason

    def merge(self, a: int, b: int, beside: bool) -> None:
        """Forgets the refusals that may no longer hold, as group b is part of a.

        If the two were side by side, groups beside them stay refused that were too large together with one of them.
        """
        found = {**self._reasons[a], **self._reasons.pop(b)}
        self._reasons[a] = {}
        for other, reason in found.items():
            self._reasons[other].pop(a, None)
            self._reasons[other].pop(b, None)
            if beside and isinstance(reason, TooLarge) and not self._quotient.adjacent(a, other):
                self.add(a, other, reason)


def fuse(
    graph: Graph,
    options: Options | None = None,
    *,
    enabled: bool = True,
    backend: Lowering = lowering.KERNELS,
    together: Sequence[Set[Node]] = (),
    apart: tuple[Set[Node], Set[Node]] = (frozenset(), frozenset()),
) -> Partition:
    """Returns the partition of a graph into groups that a backend takes (default: the kernel families).

    With ``enabled=False`` every node is a kernel of its own (to compare against), as are those left out.  The nodes of
    each set of ``together`` are one kernel whatever that saves; these sets are convex.  Nodes of the first set of
    ``apart`` do not come into a kernel with nodes of the second.

    Raises NoKernel if the backend does not even take a single node, or one of the sets that are to be together;
    Declined if these would wait for each other.
    """
    options = options or Options()
    joins = planned_joins(graph) if enabled and backend is lowering.KERNELS else frozenset()
    lowered: dict[GroupView, Lowered] = {}
    while True:
        quotient = _Quotient(graph, options.left_out, joins, placed(graph))
        quotient.apart = apart
        for nodes in together:
            quotient.gather(nodes)
        if together and not nx.is_directed_acyclic_graph(quotient.network()):
            raise Declined("what is to be together would wait for itself")
        refused = _Refused(quotient)
        if enabled and backend is lowering.KERNELS:
            gather_operands(quotient, options, backend)
        siblings = _merge_all(quotient, options, backend, refused) if enabled else []
        views = [quotient.view(g) for g in quotient.topological()]
        free: frozenset[Node] = frozenset()
        if backend is lowering.KERNELS and (enabled or graph.updates):
            free = place_views(graph, views, lambda view: _takes(backend, view, options, lowered), moving=enabled)
        if joins <= free:
            break
        joins &= free
    groups: list[Group] = []
    without: list[tuple[Sequence[Node], str]] = []
    for view in views:
        if view.nodes[0] in free:
            groups.append(Group(view.nodes, Lowered("view", None, view.reads, view.writes)))
            continue
        try:
            known = lowered.get(view) if is_moved(view) else None  # others may have been moved for a while
            groups.append(Group(view.nodes, known or backend.lower(view, options)))
        except Declined as reason:
            without.append((view.nodes, str(reason)))
    if without:
        raise NoKernel(without)
    decisions = _decisions(quotient, enabled, refused, free, options)
    choices = _choices(quotient, refused, groups)
    partition = Partition(graph, tuple(groups), tuple(decisions) + tuple(siblings), choices)
    partition.check()
    return partition


def _takes(backend: Lowering, view: GroupView, options: Options, lowered: dict[GroupView, Lowered]) -> bool:
    """Returns true if a group is one kernel with its tensors where they lie now, and notes which in ``lowered``.

    For attention, only `lower` tells.
    """
    lowered.pop(view, None)
    try:
        lowered[view] = backend.lower(view, options)
    except Declined:
        return False
    return True


def _merge_all(quotient: _Quotient, options: Options, backend: Lowering, refused: _Refused) -> list[Decision]:
    """Merges pairs until none is legal, and notes in ``refused`` why; returns the decisions for side-by-side merges."""
    heap: list[tuple[int, int, int, int, int, int]] = []
    version = dict.fromkeys(quotient.members, 0)
    siblings: list[Decision] = []

    def push(a: int, b: int, sibling: Tensor | object | None) -> None:
        tier, saved = _score(quotient, a, b, sibling)
        heapq.heappush(heap, (tier, -saved, a, b, version[a], version[b]))

    for g in list(quotient.members):
        for a, b, shared in quotient.neighbours(g):
            if g == a:
                push(a, b, shared)
    while heap:
        _, _, a, b, version_a, version_b = heapq.heappop(heap)
        if version.get(a) != version_a or version.get(b) != version_b:
            continue
        if refused.get(a, b) is not None:
            continue
        reason = refusal(quotient, a, b, options, backend)
        if reason is not None:
            refused.add(a, b, reason)
            continue
        beside = not quotient.adjacent(a, b)
        if beside:
            siblings.append(_side_by_side(quotient, a, b))
        changed = quotient.merge(a, b)
        refused.merge(a, b, beside)
        del version[b]
        version[a] += 1
        for g in changed:
            for x, y, shared in quotient.neighbours(g):
                push(x, y, shared)
    return siblings


def _side_by_side(quotient: _Quotient, a: int, b: int) -> Decision:
    """Returns the decision for two groups that have no edge between them but one kernel."""
    view_a, view_b = quotient.view(a), quotient.view(b)
    first, second = view_a.nodes[0].name, view_b.nodes[0].name
    both = max(set(view_a.reads) & set(view_b.reads), key=lambda t: (t.nbytes, t.name), default=None)
    if both is None:
        return Decision(first, second, True, "both reduce results of one kernel along the same axes: one launch")
    reason = f"both read {both.name!r} over the same space: one kernel reads it once"
    return Decision(first, second, True, reason, both.nbytes, both.name)


def _score(quotient: _Quotient, a: int, b: int, sibling: Tensor | object | None) -> tuple[int, int]:
    """Returns (tier, bytes saved) of a pair.

    Tier 0 is what follows a contraction; 1 other producers and consumers; 2 casts to wider types after a contraction,
    which had better be with their readers, what comes before a contraction, which is computed repeatedly, and movement,
    which may cost nothing by itself; 3 groups side by side.
    """
    if sibling is not None:
        return 3, sibling.nbytes if isinstance(sibling, Tensor) else 0
    kinds = quotient.view(a).kinds | quotient.view(b).kinds
    tier = 2 if Kind.MOVEMENT in kinds else 1
    if kinds & {Kind.CONTRACTION, Kind.TRANSFORM}:
        later = tier == 2 or quotient.is_prologue(a, b) or any(map(quotient.only_widens, (a, b)))
        tier = 2 if later else 0
    return tier, quotient.saved(a, b)


def refusal(quotient: _Quotient, a: int, b: int, options: Options, backend: Lowering) -> Declined | None:
    """Returns why two groups cannot be merged, None if they can."""
    alone = next((n for g in (a, b) for n in quotient.members[g] if n.name in quotient.alone), None)
    if alone is not None:
        return Declined(f"{alone.name!r} is a kernel of its own: {quotient.alone[alone.name]}")
    if quotient.keeps_apart(a, b):
        return Declined("the backward pass computes again what the forward pass does not keep for it")
    through = quotient.path_outside(a, b)
    if through is not None:
        return Declined(f"would form a cycle: a path between them leaves through {through.name!r}")
    both = quotient.joined(a, b)
    for node in both.nodes if quotient.adds and both.anchors else ():
        last = quotient.adds.get(node)
        if last is not None and quotient.group_of[last] not in (a, b):
            return Declined(f"the kernel of {last.name!r} makes {node.name!r}, which adds up products one by one")
    try:
        backend.accept(both, options)
    except Declined as reason:
        return reason.with_traceback(None)
    return None


def _choices(quotient: _Quotient, refused: _Refused, groups: Iterable[Group]) -> tuple[Choice, ...]:
    """Returns the choices that made groups, and those that kept neighbours apart."""
    found = [choice for group in groups for choice in group.lowered.choices]
    for producer, consumer, _ in edges(quotient.graph):
        a, b = quotient.group_of[producer], quotient.group_of[consumer]
        why = quotient.declined.get((producer, consumer)) or refused.get(a, b)
        if a != b and isinstance(because := why, Outweighed):
            found.append(because.choice)
    return unique(found)


def _attention_behind(quotient: _Quotient, node: Node, free: frozenset[Node]) -> tuple[Node, Tensor] | None:
    """Returns the attention that reads a result by way of views, and the operand that it reads; None without one."""
    while node in free:
        readers = quotient.consumers.get(node.output, [])
        found = next((n for n in readers if n.kind is Kind.ATTENTION), None)
        if found is not None:
            return found, node.output
        if len(readers) != 1:
            return None
        (node,) = readers
    return None


def _decisions(
    quotient: _Quotient, enabled: bool, refused: _Refused, free: frozenset[Node], options: Options
) -> Iterator[Decision]:
    """Yields why each edge is inside of a kernel or not, with reasons from before views were placed."""
    for producer, consumer, tensor in edges(quotient.graph):
        a, b = quotient.group_of[producer], quotient.group_of[consumer]
        if a == b:
            kept = tensor in quotient.view(a).writes
            reason = (
                "consumer reads it from registers; it is still written, being needed elsewhere"
                if kept
                else "stays in registers: neither written nor read back"
            )
            yield Decision(producer.name, consumer.name, True, reason, tensor.nbytes * (1 if kept else 2))
            continue
        if producer in free or consumer in free:
            moved = producer if producer in free else consumer
            reason = (
                f"{moved.op.name} {moved.name!r} needs no kernel: its elements are read, or written, where they lie"
            )
            reader = _attention_behind(quotient, consumer, free) if producer not in free else None
            if reader is not None:
                reason += f"; {attention.from_memory(*reader, tensor, options.target.planned)}"
            yield Decision(producer.name, consumer.name, True, reason, tensor.nbytes)
            continue
        if not enabled:
            yield Decision(producer.name, consumer.name, False, "fusion is switched off")
            continue
        because = quotient.declined.get((producer, consumer)) or refused.get(a, b)
        if because is None:
            raise GraphError(f"{producer.name!r} and {consumer.name!r} could be fused but were not")
        yield Decision(producer.name, consumer.name, False, str(because))
