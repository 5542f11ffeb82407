"""The pool family: windows folded to one value each (a maximum, where it is, a sum), pointwise work before and after.

Where no window lies along the innermost dimension (channels of NHWC images), a thread takes a few neighbouring windows
for a vector of neighbours in memory.  Where windows do (NCHW), it takes a row of neighbouring windows.  It reads all
elements under its windows, each once, before it uses any, so that enough bytes are in flight.  Elements that windows of
different threads share come from the L1 and L2 caches.  Large windows are read in loops.

Where rows begin between two vectors, where windows share much, or where results lie otherwise in memory than the image,
a block brings the elements under a tile of windows to shared memory first (`codegen.pool.staged`).

Where windows of different sizes lie along the innermost dimension, a block takes a few planes and first folds their
columns, which are neighbours in memory (`codegen.pool.planes`).

Where there are few large windows, several threads share each of them (`codegen.pool.lanes`).
"""

from __future__ import annotations

from codegen.family import Family, Form
from codegen.pool import lanes, planes, staged, staged_schedule
from codegen.pool.apart import ApartRenderer
from codegen.pool.boxes import StagedSchedule
from codegen.pool.renderer import PoolRenderer
from codegen.pool.schedule import PoolSchedule, schedules
from codegen.spec import KernelSource, PoolSpec


def render(spec: PoolSpec, schedule: PoolSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C."""
    if schedule.planes:
        return planes.render(spec, schedule)
    if schedule.each:
        return ApartRenderer(spec, schedule).render()
    return (lanes.LanesRenderer if schedule.lanes > 1 else PoolRenderer)(spec, schedule).render()


FAMILY = Family(
    "pool",
    PoolSpec,
    (
        Form("staged", StagedSchedule, staged_schedule.schedules, staged.render, cost=staged_schedule.cost),
        Form("pool", PoolSchedule, schedules, render),
    ),
)
