"""Kernels that write over what they read.

Such a kernel has to read each element in the thread that writes that element, before the write.  Whether it does
follows from how the kernel families access memory:

- *pointwise*: a thread (or the block of a tile, between two barriers) reads everything before it writes.
- *rows*: the same threads have the same elements of a row in every loop over it.  A later loop may not read an element
  that has been written, as happens where a row is read again from memory.  A value that exists once per row is read by
  all threads of the row before the first reduction, and written by one of them after a reduction that waited for all.
- *contraction*: the epilogue's inputs are read element by element, by the block that writes the same tile.  Operands A
  and B are read by many blocks.

Other families are refused, and so are reads at other coordinates than those written.  A kernel that works in place may
not promise by ``__restrict__`` that its pointers lead to different memory: `codegen.kernel.sharing` removes that
promise, so that the compiler neither moves a read behind a write nor reads by ``ld.global.nc``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from codegen import Schedule, render
from codegen.declined import Declined
from codegen.expr import Load
from codegen.kernel import at_position
from codegen.rows.schedule import RowsSchedule
from codegen.rows.space import normalize
from codegen.rows.stages import Stages, stages_along
from codegen.spec import KernelSource, RowsSpec
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import extent, same_strides
from fusegraph.ops.base import Kind
from fusegraph.passes.assignments import copy_name, position_name
from fusegraph.passes.overwriting import assignments, laid
from fusegraph.passes.partition import Group, Partition
from fusegraph.passes.speculation import ASSIGNMENTS, FUSION, NotAccepted

#: Bytes from which on it matters whether an intermediate is written over another one.
LEAST_BYTES = 4 << 20


def crossing(group: Group, schedule: Schedule, source: Tensor, target: Tensor) -> str | None:
    """Returns why a group's kernel cannot write ``target`` over ``source``, which it reads; None if it can.

    Both may be the same memory, of which the kernel reads and writes parts.
    """
    reads = [(n, t) for n, t in enumerate(group.reads) if t.base is source]
    writes = [(n, t) for n, t in enumerate(group.writes) if t.base is target]
    if source is target and all(_apart(read, written) for _, read in reads for _, written in writes):
        return None
    spec = group.lowered.spec
    if spec.own_points is None:
        return f"({group.family}) reads {source.name!r} in other threads than write {target.name!r}"
    (space, first), program = spec.own_points, spec.program
    other = f"reads elements of {source.name!r} in other threads than write those of {target.name!r}"
    # The operands of a program are kernel arguments in order; after the loads come tables, which are read anywhere.
    for load, tensor in ((n - first, t) for n, t in reads):
        if not 0 <= load < len(program.loads) or program.loads[load].begin is not None:
            return other
        for store, result in writes:
            strides = program.loads[load].strides, program.stores[store].operand.strides
            if tensor.start != result.start or result.position is not None or not same_strides(space, *strides):
                return other
            if isinstance(schedule, RowsSchedule) and _read_again(spec, schedule, load, store):
                return f"reads rows of {source.name!r} again after it has written those of {target.name!r}"
    return None


def _read_again(spec: RowsSpec, schedule: RowsSchedule, load: int, store: int) -> bool:
    """Tells whether a loop over a row reads ``load`` from memory after an earlier loop has written ``store``."""
    space = normalize(spec)
    if not space.varies(space.program.loads[load]):
        return False
    across = schedule.across
    stages = Stages(space) if across else stages_along(space, schedule.form, schedule.vector)
    if schedule.form != "memory" and load in stages.kept(schedule.form):
        return False
    written = stages.stage(space.program.stores[store].value)
    return any(Load(load) in stages.needed[stage] for stage in range(written + 1, stages.last + 1))


def _apart(read: Tensor, written: Tensor) -> bool:
    """Returns true if parts of one tensor's memory are in ranges of addresses that do not meet."""
    ends = [(t.start, t.start + extent(t.shape, t.strides)) for t in (read, written)]
    (first, last), (begin, end) = ends
    return written.position is None and (last <= begin or end <= first)


def writes_over(group: Group, over: Mapping[Tensor, Tensor]) -> bool:
    """Returns true if a group's kernel reads and writes memory of one tensor; results ``over`` others lie in these."""
    return not {t.base for t in group.reads}.isdisjoint(over.get(t.base, t.base) for t in group.writes)


def written_over(partition: Partition, kernels: Sequence[tuple[Group, Schedule]]) -> dict[Tensor, Tensor]:
    """Returns large intermediates that may lie where another one does: result -> what its kernel is the last to read.

    Sums that grow from kernel to kernel are in memory once.
    """
    graph = partition.graph
    own = {t for group in partition.groups for t in group.writes if t is t.base and t.nbytes >= LEAST_BYTES}
    own -= {*graph.outputs, *graph.updates.values()}
    last = {t.base: group for group in partition.groups for t in (*group.reads, *group.positions)}
    found: dict[Tensor, Tensor] = {}
    for group, schedule in kernels:
        reads, writes = ([t for t in every if t is t.base and t in own] for every in (group.reads, group.writes))
        for result in writes:
            for tensor in reads:
                same = (tensor.shape, tensor.strides, tensor.dtype) == (result.shape, result.strides, result.dtype)
                free = last[tensor] is group and tensor not in found.values()
                if same and free and crossing(group, schedule, tensor, result) is None:
                    found[result] = tensor
                    break
    return found


def positions(group: Group) -> tuple[object, ...]:
    """Returns what is known of the positions at which a group's kernel writes, whatever the tensors are called."""
    found = [(n, t.position) for n, t in enumerate(group.writes) if t.position is not None]
    return tuple((n, p.index.dtype.name, p.step, p.size) for n, p in found)


def moved_to(source: KernelSource, group: Group) -> KernelSource:
    """Returns a group's kernel with what it writes at a position.  Raises Declined if it cannot."""
    found = [t.position for t in group.writes]
    first = next((at for at in found if at is not None), None)
    if first is None:
        return source
    steps = {}
    for n, at in enumerate(found):
        if at is None or (at.index, at.size) != (first.index, first.size):
            raise Declined("it writes other tensors as well, wherever the position is")
        steps[len(group.reads) + n] = at.step
    return at_position(source, steps, first.index.dtype.ctype, first.size, last=len(group.reads) + len(group.writes))


def check_overwriting(graph: Graph, kernels: Sequence[tuple[Group, Schedule]]) -> None:
    """Raises NotAccepted, which names assignments, if kernels cannot write their values where they belong."""
    undo: dict[tuple[str, str], str] = {}
    for group, schedule in kernels if graph.updates else ():
        for tensor in group.writes:
            x = tensor.base
            if x not in graph.updates.values():
                continue
            node = _assignment(graph, group, tensor)
            if (reason := crossing(group, schedule, x, x)) is not None:
                text = f"the kernel {reason}"
                undo |= {(ASSIGNMENTS, node.name): text, (FUSION, copy_name(node)): text}
            if tensor.position is not None:
                try:
                    moved_to(render(group.lowered.spec, schedule), group)
                except Declined as refused:
                    undo[ASSIGNMENTS, position_name(node)] = str(refused)
    if undo:
        raise NotAccepted(next(iter(undo.values())), undo)


def _assignment(graph: Graph, group: Group, tensor: Tensor) -> Node:
    """Returns the assignment that a group writes values of."""
    own = (n for n in group.nodes if n.kind is Kind.ASSIGN)
    return next(own, None) or next(n for n in assignments(graph) if tensor in laid(graph, n.inputs[1]))
