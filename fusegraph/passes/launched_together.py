"""Kernels of one program over different tensors become one launch: pointwise ones, and reductions of whole tensors.

An optimiser updates each parameter by itself, and a norm of all gradients is made of the norm of each: hundreds of
kernels, most of which take less time than their launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from codegen.canonical import canonical
from codegen.declined import Declined
from codegen.members import MOST_POINTERS, alike, together
from codegen.pointwise.members import member as pointwise_member
from codegen.rows.members import member as rows_member
from codegen.spec import MembersSpec, PointwiseSpec, RowsSpec
from fusegraph import networks as nx
from fusegraph.graph import Tensor
from fusegraph.lowering.base import Lowered
from fusegraph.passes.memory import plan_memory
from fusegraph.passes.overwriting import orders
from fusegraph.passes.partition import Group, Partition, edges

#: Fewer kernels stay apart.
LEAST = 4
#: Bytes of intermediates that may wait, and elements of a result that is in the cache whenever it is read.
SLACK, SMALL_ELEMENTS = 1 << 20, 16 << 10
#: What specifications of a family are as those of one member.
_MEMBERS: dict[type, Callable[[Any], MembersSpec]] = {PointwiseSpec: pointwise_member, RowsSpec: rows_member}


@dataclass(frozen=True)
class _Member:
    """A group whose kernel may be part of another's, its specification as a member, and what is alike."""

    number: int
    spec: MembersSpec
    alike: str


def launch_together(partition: Partition) -> Partition:
    """Makes one group of those that compute the same of different tensors, and do not need each other.

    Only those whose results leave the graph, or are small: others had better run when their operands are in the cache.
    Where what they wait for would take more memory than before, only those stay together that read what is there from
    the start.
    """
    outside = {*partition.graph.outputs, *partition.graph.inputs}
    found = list(_members(partition, outside))
    before = plan_memory(partition).size
    for ready in (False, True) if len(found) >= LEAST else ():
        made = _together(partition, _ready(partition, found, outside) if ready else found)
        if made is not partition and plan_memory(made).size <= before + SLACK:
            return made
    return partition


def _members(partition: Partition, outside: Set[Tensor]) -> Iterator[_Member]:
    for number, group in enumerate(partition.groups):
        spec = group.lowered.spec
        if type(spec) not in _MEMBERS or group.positions:
            continue
        if not _is_light(group, outside, 1 if isinstance(spec, PointwiseSpec) else SMALL_ELEMENTS):
            continue
        try:
            found = _MEMBERS[type(spec)](spec)
        except Declined:
            continue
        yield _Member(number, found, repr(canonical(alike(found))))


def _is_light(group: Group, outside: Set[Tensor], most: int) -> bool:
    """Returns true if all results of a group leave the graph, or have no more elements."""
    return all(t.base in outside or t.size <= most for t in group.writes)


def _ready(partition: Partition, members: Iterable[_Member], outside: Set[Tensor]) -> list[_Member]:
    """Returns those that read inputs, constants and single elements, or wait for nothing that leaves much in memory."""
    graph, network = partition.graph, _network(partition)
    light: set[int] = set()
    for number, group in enumerate(partition.groups):
        if _is_light(group, outside, SMALL_ELEMENTS) and light.issuperset(network.predecessors(number)):
            light.add(number)

    def reads_what_is_there(group: Group) -> bool:
        return all(graph.producer(t.base) is None or t.size == 1 for t in group.reads)

    groups, behind = partition.groups, network.predecessors
    return [m for m in members if light.issuperset(behind(m.number)) or reads_what_is_there(groups[m.number])]


def _together(partition: Partition, members: Iterable[_Member]) -> Partition:
    """Returns a partition in which members that are alike are one group, as many as one kernel takes."""
    same: dict[str, list[_Member]] = {}
    for member in members:
        same.setdefault(member.alike, []).append(member)
    many = [every for every in same.values() if len(every) >= LEAST]
    if not many:
        return partition
    network = _network(partition)
    merged: dict[int, list[_Member]] = {}
    for every in many:
        for several in _independent(every, network):
            first = several[0].number
            merged[first] = several
            for other in several[1:]:
                nx.contracted_nodes(network, first, other.number, self_loops=False, copy=False)
    if not merged:
        return partition
    groups = partition.groups
    last = {k: several[-1].number for k, several in merged.items()}
    made = [
        _group([(groups[m.number], m.spec) for m in merged[k]]) if k in merged else groups[k]
        for k in nx.lexicographical_topological_sort(network, key=lambda k: last.get(k, k))
    ]
    result = replace(partition, groups=tuple(made))
    result.check()
    return result


def _network(partition: Partition) -> nx.DiGraph:
    """Returns the graph of groups by their numbers: which has to run before which."""
    number = {node: k for k, group in enumerate(partition.groups) for node in group.nodes}
    network = nx.DiGraph()
    network.add_nodes_from(range(len(partition.groups)))
    pairs = [(a, b) for a, b, _ in edges(partition.graph)] + list(orders(partition.graph))
    network.add_edges_from((number[a], number[b]) for a, b in pairs if number[a] != number[b])
    return network


def _independent(members: Sequence[_Member], network: nx.DiGraph) -> Iterator[list[_Member]]:
    """Yields sets of members of which none needs what another one makes, not too many for one kernel."""
    most = MOST_POINTERS // len(members[0].spec.program.operands)
    most = -(-len(members) // -(-len(members) // most))  # as many in each
    left = list(members)
    while len(left) >= LEAST:
        taken: list[_Member] = []
        rest: list[_Member] = []
        after: set[int] = set()
        for member in left:
            if member.number in after or len(taken) == most:
                rest.append(member)
                continue
            behind = nx.descendants(network, member.number)
            if any(other.number in behind for other in taken):
                rest.append(member)
                continue
            taken.append(member)
            after |= behind
        if len(taken) < LEAST:
            return
        yield taken
        left = rest


def _group(members: Sequence[tuple[Group, MembersSpec]]) -> Group:
    """Returns the group of all nodes of some, and its kernel."""
    members = sorted(members, key=lambda m: -max(m[1].chunks, default=0))  # what takes longest begins first
    groups = [group for group, _ in members]
    reads, writes = ([*zip(*columns)] for columns in zip(*((g.reads, g.writes) for g in groups)))
    shared = (*(len(set(each)) == 1 for each in reads), *(False for _ in writes))
    spec = together([spec for _, spec in members], shared)
    read = tuple(t for each, one in zip(reads, shared) for t in (each[:1] if one else each))
    lowered = Lowered("members", spec, read, tuple(t for each in writes for t in each))
    return Group(tuple(n for g in groups for n in g.nodes), lowered)
