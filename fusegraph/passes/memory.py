"""Memory planning: intermediates between kernels share one workspace.

Every intermediate gets an offset such that tensors alive at the same time do not overlap.  Largest first, each at the
lowest free offset: the greedy-by-size heuristic of Pisarchyk and Lee, "Efficient Memory Management for Deep Neural
Net Inference", 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fusegraph.graph import Tensor
from fusegraph.layout import extent
from fusegraph.lowering.base import INNER_ALIGNMENT
from fusegraph.passes.partition import Partition

#: Bytes every intermediate is aligned to; what the kernels assume of them.
ALIGNMENT = INNER_ALIGNMENT


@dataclass(frozen=True)
class MemoryPlan:
    """offsets: intermediate -> bytes from the start of the workspace, which has ``size`` bytes."""

    size: int
    offsets: Mapping[Tensor, int]


def plan_memory(partition: Partition) -> MemoryPlan:
    """Places every tensor that is written by one kernel and read by another but does not leave the graph.

    Views lie in the memory of their base, which lives until the last of them has been read.
    """
    outputs = set(partition.graph.outputs)
    born: dict[Tensor, int] = {}
    dies: dict[Tensor, int] = {}
    for step, group in enumerate(partition.groups):
        for base in (t.base for t in group.writes):
            if base not in outputs and partition.graph.producer(base) is not None:
                born.setdefault(base, step)
                dies[base] = step
        for base in (t.base for t in (*group.reads, *group.positions)):
            if base in born:
                dies[base] = step
    sizes = {t: _aligned(extent(t.shape, t.strides) * t.dtype.itemsize) for t in born}
    offsets: dict[Tensor, int] = {}
    for tensor in sorted(born, key=lambda t: (-sizes[t], born[t])):
        alive = sorted(
            (offsets[other], offsets[other] + sizes[other])
            for other in offsets
            if born[other] <= dies[tensor] and born[tensor] <= dies[other]
        )
        at = 0
        for start, end in alive:
            if at + sizes[tensor] <= start:
                break
            at = max(at, end)
        offsets[tensor] = at
    size = max((offsets[t] + sizes[t] for t in offsets), default=0)
    return MemoryPlan(size, offsets)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
