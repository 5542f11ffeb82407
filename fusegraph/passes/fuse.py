"""Fusion: groups the nodes of a graph into as few kernels as are legal and profitable.

Pairs of neighbouring groups are merged in order of the bytes they save, what follows a contraction first (its epilogue
grows before anything else) and what comes before one last of the producers (a prologue is evaluated repeatedly).  A
merge is legal if the graph of groups (`fusegraph.passes.quotient`) stays acyclic and a lowering accepts the merged
group.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence, Set

from codegen.declined import Declined
from fusegraph import lowering
from fusegraph.errors import GraphError
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering import attention
from fusegraph.lowering.base import GroupView, Lowered, Lowering, Options, TooLarge
from fusegraph.lowering.choices import Choice, Outweighed, unique
from fusegraph.ops.base import Kind
from fusegraph.passes.gathered import gather_operands
from fusegraph.passes.joins import planned_joins
from fusegraph.passes.overwriting import placed
from fusegraph.passes.partition import Decision, Group, Partition, edges
from fusegraph.passes.quotient import Quotient
from fusegraph.passes.speculation import NoKernel
from fusegraph.passes.views import is_moved, place_views


class _Refused:
    """The pairs of groups that cannot be merged as they are, and why."""

    def __init__(self, quotient: Quotient) -> None:
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
        quotient = Quotient(graph, options.left_out, joins, placed(graph))
        quotient.apart = apart
        for nodes in together:
            quotient.gather(nodes)
        if together and len(quotient.topological()) < len(quotient.members):
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


def _merge_all(quotient: Quotient, options: Options, backend: Lowering, refused: _Refused) -> list[Decision]:
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


def _side_by_side(quotient: Quotient, a: int, b: int) -> Decision:
    """Returns the decision for two groups that have no edge between them but one kernel."""
    view_a, view_b = quotient.view(a), quotient.view(b)
    first, second = view_a.nodes[0].name, view_b.nodes[0].name
    both = max(set(view_a.reads) & set(view_b.reads), key=lambda t: (t.nbytes, t.name), default=None)
    if both is None:
        return Decision(first, second, True, "both reduce results of one kernel along the same axes: one launch")
    reason = f"both read {both.name!r} over the same space: one kernel reads it once"
    return Decision(first, second, True, reason, both.nbytes, both.name)


_ANCHORS = frozenset({Kind.CONTRACTION, Kind.TRANSFORM})


def _score(quotient: Quotient, a: int, b: int, sibling: Tensor | object | None) -> tuple[int, int]:
    """Returns (tier, bytes saved) of a pair.

    Tier 0 is what follows a contraction; 1 other producers and consumers; 2 casts to wider types after a contraction,
    which had better be with their readers, what comes before a contraction, which is computed repeatedly, and movement,
    which may cost nothing by itself; 3 groups side by side.
    """
    if sibling is not None:
        return 3, quotient.bytes_of(sibling) if isinstance(sibling, Tensor) else 0
    some, others = quotient.view(a).kinds, quotient.view(b).kinds
    tier = 2 if Kind.MOVEMENT in some or Kind.MOVEMENT in others else 1
    if not (_ANCHORS.isdisjoint(some) and _ANCHORS.isdisjoint(others)):
        # What moves in the contraction's own group is in front of it.
        moves = any(Kind.MOVEMENT in kinds and _ANCHORS.isdisjoint(kinds) for kinds in (some, others))
        later = moves or quotient.is_prologue(a, b) or any(map(quotient.only_widens, (a, b)))
        tier = 2 if later else 0
    return tier, quotient.saved(a, b)


def refusal(quotient: Quotient, a: int, b: int, options: Options, backend: Lowering) -> Declined | None:
    """Returns why two groups cannot be merged, None if they can."""
    if (alone := quotient.by_itself(a, b)) is not None:
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


def _choices(quotient: Quotient, refused: _Refused, groups: Iterable[Group]) -> tuple[Choice, ...]:
    """Returns the choices that made groups, and those that kept neighbours apart."""
    found = [choice for group in groups for choice in group.lowered.choices]
    for producer, consumer, _ in edges(quotient.graph):
        a, b = quotient.group_of[producer], quotient.group_of[consumer]
        why = quotient.declined.get((producer, consumer)) or refused.get(a, b)
        if a != b and isinstance(because := why, Outweighed):
            found.append(because.choice)
    return unique(found)


def _attention_behind(quotient: Quotient, node: Node, free: frozenset[Node]) -> tuple[Node, Tensor] | None:
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
    quotient: Quotient, enabled: bool, refused: _Refused, free: frozenset[Node], options: Options
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
