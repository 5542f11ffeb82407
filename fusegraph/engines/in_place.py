"""In-place results: which kernels of a plan may write a result into the memory of an input.

Such a kernel overwrites the input.  This is safe under two conditions.  All other kernels that read the input come
before it (one kernel begins when those before it have ended, see `codegen.kernel.in_sequence`).  And the kernel itself
reads each element in the thread that writes that element, before the write.  The second condition follows from how the
kernel families access memory:

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

from dataclasses import replace

from codegen.expr import Load
from codegen.kernel import sharing
from codegen.rows.schedule import RowsSchedule
from codegen.rows.space import normalize
from codegen.rows.stages import Stages, stages_along
from codegen.spec import RowsSpec
from fusegraph.graph import Tensor
from fusegraph.layout import same_strides
from fusegraph.plan import Kernel, Plan

#: Pairs (number of an input, number of the output that lies in its memory).
Pairs = frozenset[tuple[int, int]]


def refusal(plan: Plan, pairs: Pairs) -> str | None:
    """Returns why these outputs of a plan cannot lie in the memory of these inputs; None if they can.

    Each pair is known to have the same shape, strides and dtype.
    """
    for number, result in sorted(pairs):
        source, target = plan.simplified.inputs[number], plan.simplified.outputs[result]
        if source in plan.simplified.parameters:
            return f"{source.name!r} is a parameter, which calls do not change"
        written = ""
        for kernel in plan.kernels:
            if 0 in kernel.source.grid:
                continue
            reads = any(t.base is source for t in kernel.group.reads)
            writes = any(t.base is target for t in kernel.group.writes)
            if reads and written:
                return f"kernel {kernel.name!r} reads {source.name!r} after kernel {written!r} has written over it"
            if reads and writes and (reason := _crossing(kernel, source, target)) is not None:
                return f"kernel {kernel.name!r} {reason}"
            if writes:
                written = kernel.name
    return None


def shared(plan: Plan, pairs: Pairs) -> Plan:
    """Returns the plan with kernels that allow these outputs in the memory of inputs."""
    every = [(plan.simplified.inputs[i], plan.simplified.outputs[o]) for i, o in pairs]
    names = {k.name for k in plan.kernels for i, o in every if {i, o} <= {t.base for t in k.arguments}}
    kernels = [replace(k, source=sharing(k.source)) if k.name in names else k for k in plan.kernels]
    return replace(plan, kernels=tuple(kernels))


def _crossing(kernel: Kernel, source: Tensor, target: Tensor) -> str | None:
    """Returns why a kernel cannot write a result over an input that it reads; None if it can."""
    spec, schedule = kernel.group.lowered.spec, kernel.choice.schedule
    if spec.own_points is None:
        return f"({kernel.group.family}) reads {source.name!r} in other threads than write {target.name!r}"
    (space, first), program = spec.own_points, spec.program
    other = f"reads elements of {source.name!r} in other threads than write those of {target.name!r}"
    # The operands of a program are kernel arguments in order; after the loads come tables, which are read anywhere.
    reads = [(n - first, t) for n, t in enumerate(kernel.group.reads) if t.base is source]
    writes = [(n, t) for n, t in enumerate(kernel.group.writes) if t.base is target]
    for load, tensor in reads:
        if not 0 <= load < len(program.loads) or program.loads[load].begin is not None:
            return other
        for store, result in writes:
            strides = program.loads[load].strides, program.stores[store].operand.strides
            if tensor.start != result.start or not same_strides(space, *strides):
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
