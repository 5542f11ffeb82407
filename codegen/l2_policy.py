"""Loads of data that a kernel reads once (`streams`), and whether the L2 cache is to evict it last.

What is read once takes no place in the L1 cache (``L1::no_allocate``): kernels that write little, as sums of rows do,
read up to 15 % faster then.  The L2 cache may evict it last (``L2::evict_last``): after what is written meanwhile.

On Hopper, this makes a kernel 2 to 4 % faster that streams more than the cache holds and writes about as much as it
reads: row kernels reach the time of a device copy, and copies become faster than that.  What all blocks read is in the
cache anyway, and is loaded as usual.

Lines that are to be evicted last stay for a while after the kernel, too: passes over 40 MB, which the cache holds
otherwise, took up to 7 % longer for the next half millisecond, passes over 24 MB, copies and products no longer than
before.  So only kernels that move well over the size of the cache do this (`LEAST`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from codegen.expr import Operand, Program
from codegen.family import Schedule
from codegen.target import Target

#: Least bytes that such a kernel reads and writes, relative to the size of the L2 cache.
LEAST = 8 / 5
#: Such a kernel writes at least one part in so many of what it reads.
LEAST_SHARE = 4


def streams(program: Program, shape: Sequence[int]) -> frozenset[int]:
    """Returns the loads that read each of their elements once over a space."""
    return frozenset(n for n, operand in enumerate(program.loads) if _once(operand, shape))


def worth_evict_last(program: Program, shape: Sequence[int], target: Target) -> bool:
    """Tells whether the data that a kernel streams should be evicted last."""
    if target.arch.major != 9:
        return False
    elements = prod(shape)
    read = elements * sum(program.loads[n].dtype.itemsize for n in streams(program, shape))
    stored = [store.operand for store in program.stores]
    written = elements * sum(operand.dtype.itemsize for operand in stored if _once(operand, shape))
    return read + written >= target.l2_share(LEAST) and written * LEAST_SHARE >= read > 0


def without_evict_last(schedule: Schedule) -> Schedule:
    """Returns the schedule for the same kernel with ordinary loads."""
    return replace(schedule, **{"evict_last": False}) if getattr(schedule, "evict_last", False) else schedule


def _once(operand: Operand, shape: Sequence[int]) -> bool:
    return all(stride or size == 1 for stride, size in zip(operand.strides, shape))
