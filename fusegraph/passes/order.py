"""The order in which kernels walk through memory, and how early their blocks may begin.

A kernel that reads a large tensor which the kernel before has just read or written begins with the last part of it,
which is still in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from codegen.families import form_of
from codegen.family import Schedule
from codegen.target import Target
from fusegraph.graph import Graph, Tensor
from fusegraph.passes.partition import Group, Partition

#: Shares of the L2 cache: of a tensor as large as the first, only the last part stays there; a kernel that moves less
#: than the second leaves in the cache what it finds there.
LARGE, FEW = 2 / 5, 2 / 15
#: Shared memory of a multiprocessor that has room for what kernels bring before others end.
LEAST_SHARED = 160 << 10
#: The families whose blocks go through memory in the order of their numbers, and do not wait for each other.
FAMILIES = frozenset({"pointwise", "members", "rows"})


def from_the_end(partition: Partition, target: Target) -> frozenset[Group]:
    """Returns the groups whose kernels had better begin at the end of memory."""
    found: set[Group] = set()
    large = target.l2_share(LARGE)
    #: what the last kernel that moved many bytes has read or written, how much of it, and whether it began at the end
    recent: dict[Tensor, int] = {}
    backwards = False
    for group in partition.groups:
        if group.family == "view":
            continue
        moved = {t.base: t.nbytes for t in (*group.reads, *group.writes)}
        known = any(min(t.nbytes, recent.get(t.base, -1)) >= large for t in group.reads)
        if known and _in_order(group) and not backwards:
            found.add(group)
        if sum(moved.values()) >= target.l2_share(FEW):
            recent, backwards = moved, group in found
    return frozenset(found)


def found_in_cache(partition: Partition, turned: Set[Group], target: Target) -> frozenset[Group]:
    """Returns the groups whose results a ``turned`` kernel begins with.

    Their kernels had better leave these results in the cache, not what they have read.
    """
    found: set[Group] = set()
    last: Group | None = None
    for group in partition.groups:
        if group.family == "view":
            continue
        read = {t.base for t in group.reads}
        if last is not None and group in turned and any(t.base in read for t in last.writes):
            found.add(last)
        if sum({t.base: t.nbytes for t in (*group.reads, *group.writes)}.values()) >= target.l2_share(FEW):
            last = group
    return frozenset(found)


def may_come_in_early(group: Group, schedule: Schedule) -> bool:
    """Returns true if a kernel's blocks may begin while those of the kernel before end, where these leave room.

    They are then spread unevenly over the GPU.  That costs nothing where they wait for memory, and as much as a second
    wave where each of them computes, or walks, for as long as the kernel takes; `Form.early` knows which kernels do.
    """
    return _in_order(group) or form_of(schedule).early(group.lowered.spec, schedule)


def read_early(graph: Graph, schedules: Mapping[Group, Schedule], target: Target) -> dict[Group, Schedule]:
    """Returns the groups whose kernels read operands before those in front of them end, with their schedules for that:
    the operands are inputs of the graph that it does not assign to.

    Kernels that write over the memory of another input come behind its last reader, so that they are not among these.
    """
    found: dict[Group, Schedule] = {}
    if not target.arch.has_pdl or target.arch.shared_bytes_per_sm < LEAST_SHARED:
        return found
    unchanged = set(graph.inputs) - set(graph.updates.values())
    for group, schedule in schedules.items():
        behind = form_of(schedule).behind(group.lowered.spec, schedule)
        if behind is not None and unchanged.issuperset(group.reads[number].base for number in behind[1]):
            found[group] = behind[0]
    return found


def _in_order(group: Group) -> bool:
    """Returns true if a kernel's blocks go through memory in the order of their numbers: not those that walk."""
    return group.family in FAMILIES and getattr(group.lowered.spec, "walk", None) is None
