"""Memory planning: intermediates between kernels share one workspace, and inputs that are donated.

Every intermediate gets an offset such that tensors alive at the same time do not overlap.  Largest first, each at the
lowest free offset: the greedy-by-size heuristic of Pisarchyk and Lee, "Efficient Memory Management for Deep Neural
Net Inference", 2020.  It lies in the smallest donated input that has been read by then and has room for it; in the
workspace if there is none.  Where much is donated, steps fall into periods by the bytes that become free, and the
workspace has parts by periods: engines that give back what is donated may take and give back the parts one by one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from fusegraph.graph import Tensor
from fusegraph.layout import extent
from fusegraph.passes.partition import Partition

#: Bytes every intermediate is aligned to.
ALIGNMENT = 256
#: The most periods, and the bytes that are given back in one at least.
PERIODS, LEAST = 8, 32 << 20


#: A donated input; or a part of the workspace, by the periods in which what lies there is made and last read.
Room: TypeAlias = Tensor | tuple[int, int]


@dataclass(frozen=True)
class MemoryPlan:
    """Where intermediates lie.

    offsets  intermediate -> bytes from the start of the workspace, which has ``size`` bytes.
    hosted   intermediate -> the donated input in whose memory it lies, and bytes from its start.
    parts    where the parts of the workspace start.
    """

    size: int
    offsets: Mapping[Tensor, int]
    hosted: Mapping[Tensor, tuple[Tensor, int]] = field(default_factory=dict)
    parts: tuple[int, ...] = ()

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """The bytes of each part."""
        return tuple(end - start for start, end in zip(self.parts, (*self.parts[1:], self.size)))

    def part(self, tensor: Tensor) -> int:
        """Returns the number of the part in which an intermediate lies."""
        return bisect_right(self.parts, self.offsets[tensor]) - 1


def plan_memory(partition: Partition, over: Mapping[Tensor, Tensor] | None = None) -> MemoryPlan:
    """Places every tensor that is written by one kernel and read by another but does not leave the graph.

    Views lie in the memory of their base, which lives until the last of them has been read; results that are written
    ``over`` other tensors (`fusegraph.passes.crossing.written_over`) lie where these do.
    """
    graph, over = partition.graph, over or {}
    donated = {t for t in graph.donated.difference(graph.updates.values()) if not t.dtype.is_packed}
    born, dies = _lives(partition, donated)
    first: dict[Tensor, Tensor] = {}
    for result, tensor in over.items():  # in the order in which they are written
        first[result] = first.get(tensor, tensor)
        dies[first[result]] = dies.pop(result)
        del born[result]
    taken = {t: _bytes(t) for t in (*born, *donated)}
    sizes = {t: _aligned(taken[t]) for t in born}
    given_back = [0] * len(partition.groups)
    for tensor in donated:
        given_back[max(dies[tensor], 0)] += tensor.nbytes
    ends = period_ends(given_back)
    # Rooms are donated inputs, which are free once they have been read, the smallest first; and for each pair of
    # periods a part of the workspace, for what is made in the one and read for the last time in the other.
    hosts: list[Room] = [*sorted(donated, key=taken.__getitem__)]
    inside: dict[Room, list[Tensor]] = defaultdict(list)
    places: dict[Tensor, tuple[Room, int]] = {}
    for tensor in sorted(born, key=lambda t: (-sizes[t], born[t])):
        own = bisect_right(ends, born[tensor]), bisect_right(ends, dies[tensor])
        for room in (*hosts, own):
            if isinstance(room, Tensor) and (taken[room] < taken[tensor] or dies[room] >= born[tensor]):
                continue
            alive = [t for t in inside[room] if born[t] <= dies[tensor] and born[tensor] <= dies[t]]
            at = _lowest(sizes[tensor], sorted((places[t][1], places[t][1] + sizes[t]) for t in alive))
            if not isinstance(room, Tensor) or at + taken[tensor] <= taken[room]:
                break
        places[tensor] = room, at
        inside[room].append(tensor)
    places |= {result: places[tensor] for result, tensor in first.items()}
    size, starts = 0, {}
    for part in sorted({room for room, _ in places.values() if not isinstance(room, Tensor)}):
        starts[part] = size
        size += max(places[t][1] + sizes[t] for t in inside[part])
    offsets = {t: starts[room] + at for t, (room, at) in places.items() if not isinstance(room, Tensor)}
    hosted = {t: (room, at) for t, (room, at) in places.items() if isinstance(room, Tensor)}
    return MemoryPlan(size, offsets, hosted, tuple(starts.values()))


def _lives(partition: Partition, donated: Collection[Tensor]) -> tuple[dict[Tensor, int], dict[Tensor, int]]:
    """Returns the steps in which intermediates are made, and those in which they and donated inputs are last read."""
    graph = partition.graph
    outputs = set(graph.outputs)
    born: dict[Tensor, int] = {}
    dies = dict.fromkeys(donated, -1)
    for step, group in enumerate(partition.groups):
        for base in (t.base for t in group.writes):
            if base not in outputs and graph.producer(base) is not None:
                born.setdefault(base, step)
                dies[base] = step
        for base in (t.base for t in (*group.reads, *group.positions)):
            if base in dies:
                dies[base] = step
    return born, dies


def _lowest(size: int, taken: Sequence[tuple[int, int]]) -> int:
    """Returns the lowest offset at which so many bytes are free between ranges (start, end), in their order."""
    at = 0
    for start, end in taken:
        if at + size <= start:
            break
        at = max(at, end)
    return at


def period_ends(given_back: Sequence[int]) -> list[int]:
    """Returns the steps before which a period begins, all but the first, by the bytes that each step gives back."""
    share = max(sum(given_back) / PERIODS, LEAST)
    ends, collected = [], 0
    for step, nbytes in enumerate(given_back[:-1], start=1):
        collected += nbytes
        if collected >= share:
            ends.append(step)
            collected = 0
    return ends


def _bytes(tensor: Tensor) -> int:
    return extent(tensor.shape, tensor.strides) * tensor.dtype.itemsize


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
