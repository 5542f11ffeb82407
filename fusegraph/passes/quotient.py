"""The graph of groups of nodes that fusion merges: which groups are neighbours, which reach which, and what a merge
saves.

Reachability between groups is kept as Python integers used as bitsets and updated with every merge, because merges that
are legal one by one can form a cycle together.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence, Set
from math import prod

from codegen.declined import Declined
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import GroupView, LeftOut
from fusegraph.ops.base import Kind, Role
from fusegraph.passes.gathered import additions
from fusegraph.passes.overwriting import orders
from fusegraph.passes.partition import edges
from fusegraph.passes.speculation import FUSION

#: Two groups that may merge, in the order in which they would run; and what both read if they are side by side.
Pair = tuple[int, int, Tensor | object | None]

#: Readers of one tensor are merged side by side only with so many before and behind them, in the order in which they
#: were built: thousands of readers would make too many pairs.
NEAREST = 16
#: Stands for the input that neighbours share where they share none.
LAUNCH = object()


def _nearest(groups: Sequence[int], group: int) -> list[int]:
    """Returns the `NEAREST` of sorted groups before and behind one of them."""
    at = bisect_left(groups, group)
    return [*groups[max(at - NEAREST, 0) : at], *groups[at + 1 : at + 1 + NEAREST]]


def _worth_sharing(nodes: Iterable[Node]) -> set[Tensor]:
    """Returns the tensors that nodes take, except those of one element."""
    return {t for n in nodes for t in n.inputs if t.size > 1}


class Quotient:
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
        self._alone = {node for node in graph.nodes if node.name in self.alone}
        #: why what makes an operand is no part of the product's kernel, by two of the nodes
        self.declined: dict[tuple[Node, Node], Declined] = {}
        self.apart: tuple[Set[Node], Set[Node]] = (frozenset(), frozenset())
        self.order = {node: k for k, node in enumerate(graph.nodes)}
        self.group_of = dict(self.order)
        self.members: dict[int, list[Node]] = {k: [node] for node, k in self.order.items()}
        self.reducing = {k for node, k in self.order.items() if node.kind is Kind.REDUCTION}
        self.successors: dict[int, set[int]] = {k: set() for k in self.members}
        self.predecessors: dict[int, set[int]] = {k: set() for k in self.members}
        for producer, consumer in (*((p, c) for p, c, _ in edges(graph)), *orders(graph)):
            self.successors[self.order[producer]].add(self.order[consumer])
            self.predecessors[self.order[consumer]].add(self.order[producer])
        self.bit = {k: k for k in self.members}
        self.reach: dict[int, int] = {}
        for k in reversed(self.topological()):
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
        self._outputs = graph.output_numbers
        self._bytes: dict[Tensor, int] = {}
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

    def by_itself(self, a: int, b: int) -> Node | None:
        """Returns a node of two groups that is to be a kernel of its own; None if there is none."""
        if self._alone.isdisjoint(self.members[a]) and self._alone.isdisjoint(self.members[b]):
            return None
        return next(node for node in (*self.members[a], *self.members[b]) if node in self._alone)

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
        if (found := self._views.get(group)) is None:
            found = self._views[group] = GroupView(self.graph, self.members[group], self.order)
        return found

    def joined(self, a: int, b: int) -> GroupView:
        """Returns what merging two groups would make."""
        if (a, b) not in self._joined:
            self._joined = {(a, b): GroupView(self.graph, self.members[a] + self.members[b], self.order)}
        return self._joined[a, b]

    def neighbours(self, group: int) -> Iterator[Pair]:
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
                    yield min(group, other), max(group, other), LAUNCH

    def adjacent(self, a: int, b: int) -> bool:
        """Returns true if one group takes what the other makes."""
        return b in self.successors[a] or b in self.predecessors[a]

    def saved(self, a: int, b: int) -> int:
        """Returns the bytes that are not moved if two groups become one.

        What both read is read once.  What one makes and the other reads is not read, and is only written if others need
        it.
        """
        view_a, view_b = self.view(a), self.view(b)
        saved, also_a, also_b = 0, view_a.entering, view_b.entering
        for tensor in view_a.reads:
            if tensor in also_b:
                saved += self.bytes_of(tensor)
        for maker, entering in ((view_a, also_b), (view_b, also_a)):
            for tensor in maker.writes:
                if tensor in entering:
                    saved += self.bytes_of(tensor) * (1 if self._needed_beyond(tensor, a, b) else 2)
        return saved

    def bytes_of(self, tensor: Tensor) -> int:
        """Returns the bytes of a tensor at the sizes that it has: to compare them needs no expressions."""
        if (nbytes := self._bytes.get(tensor)) is None:
            nbytes = self._bytes[tensor] = tensor.dtype.nbytes(prod(map(int, tensor.shape)))
        return nbytes

    def _needed_beyond(self, tensor: Tensor, a: int, b: int) -> bool:
        takers = self.consumers.get(tensor, ())
        return tensor in self._outputs or any(self.group_of[node] not in (a, b) for node in takers)

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
        """Returns the groups in an order in which they can run, ties in the order their first nodes were built.

        Those that wait for each other are left out, and what comes after them.
        """
        first = {g: min(self.order[n] for n in nodes) for g, nodes in self.members.items()}
        waiting = {g: len(before) for g, before in self.predecessors.items()}
        ready = [(first[g], g) for g, count in waiting.items() if not count]
        heapq.heapify(ready)
        found: list[int] = []
        while ready:
            _, group = heapq.heappop(ready)
            found.append(group)
            for after in self.successors[group]:
                waiting[after] -= 1
                if not waiting[after]:
                    heapq.heappush(ready, (first[after], after))
        return found
