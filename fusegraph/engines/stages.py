"""Stages of a call: results get memory shortly before they are written, and what is given back goes after its last use.

Kernels are queued in stages.  Before each, the results that it begins are allocated; after it, the arrays that no later
stage touches are dropped.  Memory that is reused in the order of a stream, as torch's, then serves later stages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusegraph.graph import Tensor
from fusegraph.passes.memory import period_ends
from fusegraph.plan import Plan


@dataclass(frozen=True)
class Stage:
    """Kernels that are queued at once.

    makes  the numbers of the results whose memory is taken before.
    drops  the numbers of the inputs that are not touched behind it.
    opens  the numbers of the workspace's parts that it is the first to use; ``closes``: the last.
    """

    kernels: range
    makes: tuple[int, ...]
    drops: tuple[int, ...]
    opens: tuple[int, ...]
    closes: tuple[int, ...]


def stages(plan: Plan) -> tuple[Stage, ...]:
    """Returns the stages of a plan: one, unless inputs are donated that are large enough."""
    kernels, memory = plan.kernels, plan.memory
    first: dict[Tensor | int, int] = {}
    last: dict[Tensor | int, int] = {}
    for step, kernel in enumerate(kernels):
        for base in (t.base for t in kernel.arguments):
            host = memory.hosted[base][0] if base in memory.hosted else base
            place = memory.part(base) if base in memory.offsets else host
            first.setdefault(place, step)
            last[place] = step
    given_back = [0] * len(kernels)
    for tensor in plan.simplified.donated & last.keys():
        given_back[last[tensor]] += tensor.nbytes
    ends = period_ends(given_back)

    def in_stages(touched: Mapping[Tensor | int, int], places: Sequence[Tensor | int]) -> list[tuple[int, ...]]:
        """Returns for each stage the numbers of what is touched in it."""
        found = [bisect_right(ends, touched.get(place, 0)) for place in places]
        return [tuple(n for n, stage in enumerate(found) if stage == k) for k in range(len(ends) + 1)]

    parts = range(len(memory.parts))
    kernels_of = map(range, (0, *ends), (*ends, len(kernels)))
    made, dropped = in_stages(first, plan.simplified.made), in_stages(last, plan.simplified.inputs)
    return tuple(map(Stage, kernels_of, made, dropped, in_stages(first, parts), in_stages(last, parts)))
