"""The pool family: windows folded to one value each (a maximum, where it is, a sum), pointwise work before and after.

A thread takes a few neighbouring windows of a vector of neighbours in memory that no window is along (channels of NHWC
images), or, where the innermost dimension has windows (NCHW), a row of neighbouring windows.  It reads all elements
under its windows, each once, before it uses any, so that enough bytes are in flight; what the windows of different
threads share comes from the L1 and L2 caches.  Large windows are read in loops.

Where windows that differ in size are along the innermost dimension, a block takes a few planes and folds their columns
first, which are neighbours in memory (`codegen.pool.planes`).
"""

from __future__ import annotations

from codegen.family import Family, Form
from codegen.pool.planes import PlanesRenderer
from codegen.pool.renderer import PoolRenderer
from codegen.pool.schedule import PoolSchedule, schedules
from codegen.spec import KernelSource, PoolSpec


def render(spec: PoolSpec, schedule: PoolSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C."""
    return (PlanesRenderer if schedule.planes else PoolRenderer)(spec, schedule).render()


FAMILY = Family("pool", PoolSpec, (Form("pool", PoolSchedule, schedules, render),))
