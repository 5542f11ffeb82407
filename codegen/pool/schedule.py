"""Schedules of the pool family: how many neighbours a thread folds at once, and which threads are neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from codegen.arch import Arch
from codegen.expr import Index, Load, Operand, Program, Reduced, Result, Store, Value
from codegen.iteration import extent
from codegen.spec import PoolSpec
from codegen.windows import Adaptive, Covering, Sliding, Window

THREADS = 256
#: Bytes of the elements under a thread's windows that it keeps in registers, so that all of them are in flight at once.
HELD_BYTES = 256
#: Bytes of sums and maxima that a thread keeps.
KEPT_BYTES = 128
#: Threads that keep every multiprocessor of a large GPU busy.
ENOUGH_THREADS = 1 << 17


@dataclass(frozen=True)
class PoolSchedule:
    """How a pool kernel is mapped to threads.

    vector  neighbours in memory, outside of all windows, that a thread folds at once.
    rows    positions of the last window but one, and
    cols    of the last, that a thread takes: elements in several of their windows are read once.
    down    positions of the last window but one that are next to each other in a block, so that what their windows
            share comes from the L1 cache.
    itype   C type of coordinates and offsets, signed.
    """

    vector: int
    rows: int
    cols: int
    down: int
    itype: str


@dataclass(frozen=True)
class Space:
    """A spec in memory order, neighbouring dimensions without windows merged, windows of one element gone.

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

    def under(self, strides: tuple[int, ...]) -> bool:
        """Whether strides tell the elements of a window apart."""
        return any(strides[self.rank :])

    @cached_property
    def folded(self) -> frozenset[Value]:
        """The values that are computed for every element of a window."""
        return self._needed([v for r in self.program.reductions for v in (r.value, r.at) if v is not None])

    @cached_property
    def final(self) -> frozenset[Value]:
        """The values that are computed for every window once it is folded."""
        return self._needed([s.value for s in self.program.stores])

    def _needed(self, ends: list[Value]) -> frozenset[Value]:
        found: set[Value] = set()
        while ends:
            value = ends.pop()
            if value not in found:
                found.add(value)
                if isinstance(value, Result):
                    ends += self.program.instructions[value.instruction].args
        return frozenset(found)

    @cached_property
    def taps(self) -> tuple[int, ...]:
        """The loads that have an element for each of a window."""
        loads = self.program.loads
        return tuple(n for n in range(len(loads)) if Load(n) in self.folded and self.under(loads[n].strides))

    @property
    def inner(self) -> bool:
        """Whether neighbours in memory are in different windows of the same form: no window is along them."""
        return all(d != self.rank - 1 for d, _ in self.windows)


def normalize(spec: PoolSpec) -> Space:
    """The space that a kernel walks."""
    rank, program = len(spec.outer), spec.program
    columns = [list(op.strides) for op in program.operands] + [list(s) for s in program.indices]
    windows = [(d, _simpler(window, spec.outer[d])) for d, window in spec.windows]
    # Along a window of one element that has the number of its position, elements are positions.
    alike = [k for k, (d, w) in enumerate(windows) if w == Sliding(spec.outer[d], 1, 1, 1, 0)]
    for strides in columns:
        for k in alike:
            strides[windows[k][0]] += strides[rank + k]
    kept = [k for k in range(len(windows)) if k not in alike]
    along = {windows[k][0]: rank + k for k in kept}
    leader = max(columns[: len(program.loads)] or columns, key=lambda s: sum(x > 0 for x in s))
    steps = leader[:rank]
    for d, k in along.items():
        steps[d] = leader[k]
    order = sorted(range(rank), key=lambda d: (-steps[d], d))
    order = [d for d in order if spec.outer[d] != 1 or d in along]
    sizes: list[int] = []
    merged: list[list[int]] = []  # a list of strides a dimension
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
    loads, stores = len(program.loads), len(program.stores)
    return Space(
        tuple(sizes),
        tuple((place[windows[k][0]], windows[k][1]) for k in kept),
        replace(
            program,
            loads=tuple(replace(op, strides=s) for op, s in zip(program.loads, every)),
            stores=tuple(Store(replace(s.operand, strides=t), s.value) for s, t in zip(program.stores, every[loads:])),
            indices=tuple(every[loads + stores :]),
        ),
    )


def _simpler(window: Window, positions: int) -> Window:
    """Windows that share elements out evenly slide."""
    if isinstance(window, Adaptive) and window.size % positions == 0:
        each = window.size // positions
        return Sliding(window.size, each, each, 1, 0)
    if isinstance(window, Adaptive) and positions % window.size == 0:
        each = positions // window.size
        return Covering(window.size, each, each, 1, 0)
    return window


def width(window: Window, positions: int) -> int:
    """The elements that the windows at so many neighbouring positions span."""
    return window.count if positions == 1 or isinstance(window, Adaptive) else window.span(positions)


def patch(space: Space, s: PoolSchedule) -> list[int]:
    """The positions of a thread along each window."""
    n = len(space.windows)
    return [s.cols if k == n - 1 else s.rows if k == n - 2 else 1 for k in range(n)]


def is_strip(space: Space, s: PoolSchedule, n: int) -> bool:
    """Whether the elements of a load under a thread's last windows can be read as one vector and its neighbours: they
    are contiguous, and the vector is inside of the image or outside.
    """
    operand = space.program.loads[n]
    if not space.windows or space.inner or s.cols == 1:
        return False
    window = space.windows[-1][1]
    if isinstance(window, Adaptive) or operand.strides[-1] != 1 or window.shift > 0:
        return False
    each = window.fresh(s.cols)
    width_bytes = each * operand.dtype.itemsize
    aligned = all(t * operand.dtype.itemsize % width_bytes == 0 for t in operand.strides[:-1])
    power = each & (each - 1) == 0 and each > 1 and width_bytes <= 16
    return power and window.size % each == 0 and aligned and operand.alignment % width_bytes == 0


def held_from(space: Space, s: PoolSchedule) -> int:
    """The first window from which on all elements under a thread's windows are read before any is used; the number of
    windows if not even those along the last are.
    """
    sizes = [width(window, many) for (_, window), many in zip(space.windows, patch(space, s))]
    bytes_each = sum(max(4, s.vector * space.program.loads[n].dtype.itemsize) for n in space.taps)
    first = len(sizes)
    while first > 0:
        total = prod(sizes[first - 1 :]) * bytes_each
        if total > HELD_BYTES:
            break
        first -= 1
    return first


def widest(space: Space) -> int:
    """The widest vector that suits all operands that are contiguous along the last dimension."""
    if not space.inner or not space.outer:
        return 1
    last = space.rank - 1
    contiguous = [op for op in space.program.operands if op.strides[last] == 1]
    taps = [space.program.loads[n] for n in space.taps]
    if not contiguous:
        return 1
    vector = 16 // min(op.dtype.itemsize for op in contiguous)
    while vector > 1:
        whole = space.outer[last] % vector == 0
        if (
            whole
            and all(vector * op.dtype.itemsize <= 16 for op in taps)
            and all(is_aligned(op, vector, last) for op in contiguous)
        ):
            break
        vector //= 2
    return vector


def is_aligned(operand: Operand, vector: int, last: int) -> bool:
    """Whether every vector of an operand along a dimension may be read as one."""
    needed = min(16, vector * operand.dtype.itemsize)
    starts = [t for d, t in enumerate(operand.strides) if d != last]
    return operand.alignment % needed == 0 and all(t * operand.dtype.itemsize % needed == 0 for t in starts)


def schedules(spec: PoolSpec, arch: Arch) -> Iterator[PoolSchedule]:
    """Schedules worth trying, best guess first: the fewest elements read for a result, if there are enough threads."""
    space = normalize(spec)
    itype = _itype(space)
    vector = widest(space)
    kinds = [window for _, window in space.windows]
    columns = _patches(space, 1, 16)
    rows = _patches(space, 2, 4)
    # Where the largest element is takes that element too.
    kept = vector * sum(8 if r.combine == "index" else 4 for r in spec.program.reductions)
    found = []
    for c in columns:
        for r in rows:
            s = PoolSchedule(vector, r, c, 1, itype)
            first = held_from(space, s)
            # What a patch is for is to read what its windows share once, and to hold it.
            held = len(kinds) - first >= (2 if r > 1 else 1 if c > 1 else 0)
            if (r, c) != (1, 1) and (kept * r * c > KEPT_BYTES or not held):
                continue
            found.append((_cost(space, s, first), s))
    found.sort(key=lambda item: item[0])
    for _, s in found[:4]:
        many = down(space, s)
        yield replace(s, down=many)
        if many > 1:
            yield s
        elif len(kinds) > 1 and space.inner:
            yield replace(s, down=2)


def _patches(space: Space, back: int, most: int) -> list[int]:
    """Numbers of positions along a window, counted from the last, that a thread may take."""
    if len(space.windows) < back or any(isinstance(w, Adaptive) for _, w in space.windows[-back:]):
        return [1]
    d, window = space.windows[-back]
    assert not isinstance(window, Adaptive)
    unit = window.stride if isinstance(window, Covering) else 1
    found = [unit * k for k in (1, 2, 4, 8, 16)]
    return [1, *(n for n in found if 1 < n <= most and n < 2 * space.outer[d] and window.patches(n))]


def down(space: Space, s: PoolSchedule) -> int:
    """Positions below each other in a block: where windows overlap along the last dimension but one of theirs."""
    if len(space.windows) < 2 or not space.inner:
        return 1
    dim, window = space.windows[-2]
    if isinstance(window, Adaptive):  # they overlap: those that share elements out evenly slide
        return 2 if space.outer[dim] >= 2 else 1
    if window.reach > window.stride and space.outer[dim] >= 4 * s.rows:
        return 4
    return 1


def _cost(space: Space, s: PoolSchedule, first: int) -> tuple[float, ...]:
    """What a thread reads for each result, in accesses; more if threads are too few."""
    many = patch(space, s)
    accesses = 0.0
    for n in space.taps or (0,):
        lines = [width(window, m) for (_, window), m in zip(space.windows, many)]
        if space.taps and is_strip(space, s, n):
            window = space.windows[-1][1]
            assert not isinstance(window, Adaptive)
            lines[-1] = 1 + max(lines[-1] - window.fresh(s.cols), 0)
        accesses += prod(lines)
    each = prod(many)
    dims = {d: m for (d, _), m in zip(space.windows, many)}
    threads = prod(-(-size // dims.get(d, 1)) for d, size in enumerate(space.outer)) / s.vector
    wasted = prod(-(-space.outer[d] // m) * m / max(space.outer[d], 1) for d, m in dims.items())
    few = max(1.0, ENOUGH_THREADS / max(threads, 1.0)) if each > 1 else 1.0
    waits = 1.5 if first else 1.0  # not all is read before the first is used
    return (accesses / each * wasted * few * waits, each)


def _itype(space: Space) -> str:
    """int32 if every offset, and that of the elements just outside of the image, fits it."""
    shape = (*space.outer, *(w.size for _, w in space.windows))
    reach = 1
    for op in space.program.operands:
        beside = sum(t * w.count * 8 for t, (_, w) in zip(op.strides[space.rank :], space.windows))
        reach = max(reach, extent(shape, op.strides) + beside)
    positions = max((w.size * (space.outer[d] + 1) for d, w in space.windows), default=0)
    return "int32" if max(reach, prod(space.outer), positions) < 2**31 - 2**20 else "int64"


__all__ = ["Index", "PoolSchedule", "Reduced", "Space", "normalize", "schedules"]
