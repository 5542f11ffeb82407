"""Loads of what the L2 cache is to evict last (``L2::evict_last``): after what is written meanwhile.

A kernel that streams more through the cache than that holds, and writes about as much as it reads, is 2 to 4 % faster
for it on Hopper: row kernels reach the time of a device copy, copies are faster than that.  What all blocks read is in
the cache anyway, and loaded as ever.

Lines that are to be evicted last stay for a while after the kernel, too: passes over 40 MB, which the cache holds
otherwise, took up to 7 % longer for the next half millisecond, passes over 24 MB, copies and products no longer
than before.  So it is done by kernels only that move more than half as much again as the cache holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from codegen.expr import Operand, Program
from codegen.family import Schedule
from codegen.target import Target

#: Bytes that a kernel reads and writes at least, in sizes of the L2 cache.
LEAST = 8 / 5
#: Of what it reads it writes at least one part in so many.
LEAST_SHARE = 4


def streams(program: Program, shape: Sequence[int]) -> frozenset[int]:
    """Returns the loads that read each of their elements once in a space."""
    return frozenset(n for n, operand in enumerate(program.loads) if _once(operand, shape))


def worth_evict_last(program: Program, shape: Sequence[int], target: Target) -> bool:
    """Returns true if a kernel's streams had better be evicted last."""
    if target.arch.major != 9:
        return False
    elements = prod(shape)
    read = elements * sum(program.loads[n].dtype.itemsize for n in streams(program, shape))
    stored = [store.operand for store in program.stores]
    written = elements * sum(operand.dtype.itemsize for operand in stored if _once(operand, shape))
    return read + written >= target.l2_share(LEAST) and written * LEAST_SHARE >= read > 0


def without_evict_last(schedule: Schedule) -> Schedule:
    """Returns the schedule of a kernel whose streams are evicted like all else."""
    return replace(schedule, **{"evict_last": False}) if getattr(schedule, "evict_last", False) else schedule


def _once(operand: Operand, shape: Sequence[int]) -> bool:
    return all(stride or size == 1 for stride, size in zip(operand.strides, shape))
