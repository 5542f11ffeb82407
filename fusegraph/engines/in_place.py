"""In-place results: which kernels of a plan may write a result into the memory of an input.

Such a kernel overwrites the input.  This is safe if all other kernels that read the input come before it (one kernel
begins when those before it have ended, see `codegen.kernel.in_sequence`), and if the kernel itself may write over what
it reads (`fusegraph.passes.crossing`).
"""

from __future__ import annotations

from dataclasses import replace

from codegen.kernel import sharing
from fusegraph.passes.crossing import crossing
from fusegraph.plan import Plan

#: Pairs (number of an input, number of the output that lies in its memory).
Pairs = frozenset[tuple[int, int]]


def refusal(plan: Plan, pairs: Pairs) -> str | None:
    """Returns why these outputs of a plan cannot lie in the memory of these inputs; None if they can.

    Each pair is known to have the same shape, strides and dtype.
    """
    for number, result in sorted(pairs):
        source, target = plan.simplified.inputs[number], plan.simplified.made[result]
        if source in plan.simplified.parameters:
            return f"{source.name!r} is a parameter, which calls do not change"
        if source in plan.simplified.donated:
            return f"{source.name!r} is donated: intermediates may lie in its memory"
        written = ""
        for kernel in plan.kernels:
            if 0 in kernel.source.grid:
                continue
            reads = any(t.base is source for t in kernel.group.reads)
            writes = any(t.base is target for t in kernel.group.writes)
            if reads and written:
                return f"kernel {kernel.name!r} reads {source.name!r} after kernel {written!r} has written over it"
            if (
                reads
                and writes
                and (reason := crossing(kernel.group, kernel.choice.schedule, source, target)) is not None
            ):
                return f"kernel {kernel.name!r} {reason}"
            if writes:
                written = kernel.name
    return None


def shared(plan: Plan, pairs: Pairs) -> Plan:
    """Returns the plan with kernels that allow these outputs in the memory of inputs."""
    every = [(plan.simplified.inputs[i], plan.simplified.made[o]) for i, o in pairs]
    names = {k.name for k in plan.kernels for i, o in every if {i, o} <= {t.base for t in k.arguments}}
    kernels = [replace(k, source=sharing(k.source)) if k.name in names else k for k in plan.kernels]
    return replace(plan, kernels=tuple(kernels))
