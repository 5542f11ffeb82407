"""The rows family: reductions over rows, with pointwise work before, between and after them.

The program runs in stages.  A stage is a loop over the row that combines the values of its reductions and stores the
values that are known by then.  After it every thread of the row has the results, and what follows from them alone is
computed once.  Between stages a row stays in registers or in shared memory, or is read again where it is too long for
either.

The threads of a row are neighbours and read vectors of it (`rows.along`).  Where neighbours in memory belong to
neighbouring rows, neighbouring threads have these rows (`rows.across`).  Where columns are combined, too, a block walks
many rows (`rows.walk`); where segments of a row are reduced, each warp has whole ones (`rows.segments`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from codegen.declined import Declined
from codegen.family import Family, Form
from codegen.iteration import index_type
from codegen.l2_policy import worth_evict_last
from codegen.rows import across_schedule
from codegen.rows import schedule as rows_schedule
from codegen.rows import walk_schedule as rows_walk_schedule
from codegen.rows.across import AcrossRenderer
from codegen.rows.along import AlongRenderer
from codegen.rows.schedule import RowsSchedule, check_registers, reads_across
from codegen.rows.segments import SegmentRenderer
from codegen.rows.space import normalize, widest
from codegen.rows.walk import WalkRenderer
from codegen.sizes import Size
from codegen.spec import KernelSource, RowsSpec
from codegen.target import Target


def schedules(spec: RowsSpec, target: Target) -> Iterator[RowsSchedule]:
    """Returns schedules worth trying, best guess first."""
    if spec.walk is not None:
        return rows_walk_schedule.schedules(spec, target)
    space = normalize(spec)
    across = space.segments is None and reads_across(space)
    every = (across_schedule if across else rows_schedule).schedules
    found: Iterator[RowsSchedule] = every(space, target, index_type(*space.bounds()))
    if not worth_evict_last(spec.program, (*spec.outer, *spec.row), target):
        return found
    return (replace(schedule, evict_last=schedule.form != "memory" and not schedule.across) for schedule in found)


def render(spec: RowsSpec, schedule: RowsSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C.

    Raises Declined where sizes vary for vectors that rows do not always have, and for more than registers hold of the
    longest.
    """
    space = normalize(spec)
    if any(isinstance(n, Size) for n in (*space.outer, *space.row)):
        dims = len(space.outer) + (0 if schedule.across else len(space.row))
        if schedule.vector > 1 and widest(space, dims - 1) % schedule.vector:
            raise Declined(f"rows are no whole vectors of {schedule.vector} at all sizes")
        check_registers(space, schedule)
    if spec.walk is not None:
        return WalkRenderer(spec, schedule).render()
    if spec.segments is not None:
        return SegmentRenderer(spec, schedule).render()
    return (AcrossRenderer if schedule.across else AlongRenderer)(spec, schedule).render()


FAMILY = Family("rows", RowsSpec, (Form("rows", RowsSchedule, schedules, render),))
