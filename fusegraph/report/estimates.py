"""What cost models say that kernels take, in microseconds, to be compared with what they do take."""

from __future__ import annotations

from codegen import KernelSpec, Schedule
from codegen.canonical import canonical
from codegen.families import form_of
from codegen.target import Target
from fusegraph.plan import Plan


def predicted_us(spec: KernelSpec, schedule: Schedule, nbytes: int, target: Target) -> float:
    """Returns the estimated microseconds of a kernel that moves ``nbytes``, its operands being in memory.

    Where the form of the schedule has no cost model, these are the time of memory alone.
    """
    cost = form_of(schedule).cost
    cycles = 0.0 if cost is None else cost(canonical(spec), schedule, target)
    return max(target.launch_us + cycles / target.clock, memory_us(nbytes, target))


def memory_us(nbytes: int, target: Target) -> float:
    """Returns the microseconds in which a kernel can move so many bytes: with those of a kernel that does nothing."""
    return target.launch_us + nbytes / (target.memory_share * target.memory_rate)


def plan_us(plan: Plan, target: Target) -> float:
    """Returns the estimated microseconds of a plan's kernels, one after the other."""
    return sum(
        predicted_us(k.group.lowered.spec, k.choice.schedule, sum(t.nbytes for t in k.arguments), target)
        for k in plan.kernels
    )
