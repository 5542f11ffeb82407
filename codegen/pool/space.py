"""The space of a pool kernel: its result's dimensions in memory order, and the windows along them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from codegen.expr import Load, Operand, Program, Value
from codegen.iteration import aligned, extent, restrided, signed_index_type, widest_vector
from codegen.records import once
from codegen.spec import PoolSpec
from codegen.windows import Adaptive, Covering, Sliding, Window


@dataclass(frozen=True)
class Space:
    """A spec in memory order, with neighbouring dimensions without windows merged, and windows of one element dropped.

    outer    sizes of the result's dimensions, slowest in memory first.
    windows  (dimension, window), in the order of the spec.
    program  its strides are over the outer dimensions, then the elements along each window.
    """

    outer: tuple[int, ...]
    windows: tuple[tuple[int, Window], ...]
    program: Program

    @property
    def rank(self) -> int:
        return len(self.outer)

    @once
    def folded(self) -> frozenset[Value]:
        """The values that are computed for every element of a window."""
        ends = (v for r in self.program.reductions for v in (r.value, r.at) if v is not None)
        return frozenset(self.program.needed(ends))

    @once
    def final(self) -> frozenset[Value]:
        """The values that are computed for every window once it is folded."""
        return frozenset(self.program.needed(s.value for s in self.program.stores))

    @once
    def taps(self) -> tuple[int, ...]:
        """The loads that differ from element to element of a window, or that each window has elements of its own of."""
        every = [k for k, op in enumerate(self.program.loads) if any(op.strides[self.rank :]) or self._own(op)]
        return tuple(n for n in every if Load(n) in self.folded)

    def _own(self, operand: Operand) -> bool:
        return any(operand.strides[d] for d, _ in self.windows)

    @once
    def apart(self) -> bool:
        """Whether each window reads elements of its own, though others lie over the same: none are read together."""
        return any(self._own(self.program.loads[n]) for n in self.taps)

    @property
    def inner(self) -> bool:
        """Whether neighbours in memory are in different windows of the same form: no window is along them."""
        return all(d != self.rank - 1 for d, _ in self.windows)


def normalize(spec: PoolSpec) -> Space:
    """Returns the space that a kernel walks."""
    rank, program = len(spec.outer), spec.program
    columns = [list(s) for s in program.strides]
    windows = [(d, _simpler(window, spec.outer[d])) for d, window in spec.windows]
    # Along a window of one element whose number is its position, elements are positions.
    alike = [k for k, (d, w) in enumerate(windows) if w == Sliding(spec.outer[d], 1, 1, 1, 0)]
    for strides in columns:
        for k in alike:
            strides[windows[k][0]] += strides[rank + k]
    kept = [k for k in range(len(windows)) if k not in alike]
    along = {windows[k][0]: rank + k for k in kept}
    # What is read under the windows says how the image lies in memory.
    loads = columns[: len(program.loads)]
    leader = max(loads or columns, key=lambda s: (any(s[rank + k] for k in kept), sum(x > 0 for x in s)))
    steps = leader[:rank]
    for d, k in along.items():
        window = windows[k - rank][1]
        steps[d] = leader[k] + leader[d] * (window.stride if isinstance(window, Covering) else 1)
    order = sorted(range(rank), key=lambda d: (-steps[d], d))
    order = [d for d in order if spec.outer[d] != 1 or d in along]
    sizes: list[int] = []
    merged: list[list[int]] = []  # one list of strides for each dimension
    place: dict[int, int] = {}
    for n, d in enumerate(order):
        column = [s[d] for s in columns]
        free = n > 0 and not {d, order[n - 1]} & set(along)
        if free and all(outside == inside * spec.outer[d] for outside, inside in zip(merged[-1], column)):
            sizes[-1] *= spec.outer[d]
            merged[-1] = column
        else:
            sizes.append(spec.outer[d])
            merged.append(column)
        place[d] = len(sizes) - 1
    if not sizes:
        sizes, merged = [1], [[0] * len(columns)]
    merged += [[s[rank + k] for s in columns] for k in kept]
    every = [tuple(column[k] for column in merged) for k in range(len(columns))]
    windows = [(place[windows[k][0]], windows[k][1]) for k in kept]
    return Space(tuple(sizes), tuple(windows), restrided(program, every))


def _simpler(window: Window, positions: int) -> Window:
    """Returns a window in simpler terms: adaptive windows of equal sizes slide, or cover."""
    if isinstance(window, Adaptive) and window.size % positions == 0:
        each = window.size // positions
        return Sliding(window.size, each, each, 1, 0)
    if isinstance(window, Adaptive) and positions % window.size == 0:
        each = positions // window.size
        return Covering(window.size, each, each, 1, 0)
    return window


def width(window: Window, positions: int) -> int:
    """Returns how many elements the windows at ``positions`` neighbouring positions span."""
    return window.count if positions == 1 or isinstance(window, Adaptive) else window.span(positions)


def steps(space: Space, patch: list[int]) -> tuple[int, int]:
    """Returns how many elements a thread adds to its windows, and how many if it first folds the elements along the
    last window, for several windows below each other at once.

    ``patch`` has the numbers of its windows along each.
    """
    widths = [width(window, many) for (_, window), many in zip(space.windows, patch)]
    held = [many * window.count for (_, window), many in zip(space.windows, patch)]
    return prod(held), prod(widths[:-1]) * held[-1] + prod(held[:-1]) * patch[-1] if held else 1


def patches(space: Space, back: int, wanted: Iterable[int]) -> list[int]:
    """Returns those of some numbers of positions along a window, counted from the last, that can be taken together."""
    if space.apart or len(space.windows) < back or any(isinstance(w, Adaptive) for _, w in space.windows[-back:]):
        return [1]
    d, window = space.windows[-back]
    assert not isinstance(window, Adaptive)
    return [n for n in wanted if n == 1 or (n < 2 * space.outer[d] and n % window.unit == 0)]


def widest(space: Space) -> int:
    """Returns the widest vector that suits all operands that are contiguous along the last dimension."""
    if not space.inner or not space.outer:
        return 1
    last = space.rank - 1
    contiguous = [op for op in space.program.operands if op.strides[last] == 1]
    taps = [space.program.loads[n] for n in space.taps]
    if not contiguous:
        return 1

    def suits(vector: int) -> bool:
        small = all(vector * op.dtype.itemsize <= 16 for op in taps)
        return small and space.outer[last] % vector == 0 and all(aligned(op, vector, last) for op in contiguous)

    return widest_vector(16 // min(op.dtype.itemsize for op in contiguous), suits)


def index_type(space: Space) -> str:
    """Returns int32 if every offset, and that of the elements just outside of the image, fits it; else int64."""
    shape = (*space.outer, *(w.size for _, w in space.windows))
    reach = 1
    for op in space.program.operands:
        beside = sum(t * w.count * 8 for t, (_, w) in zip(op.strides[space.rank :], space.windows))
        reach = max(reach, op.start + extent(shape, op.strides) + beside)
    positions = max((w.size * (space.outer[d] + 1) for d, w in space.windows), default=0)
    return signed_index_type(reach, prod(space.outer), positions)
