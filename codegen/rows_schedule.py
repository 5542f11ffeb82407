"""Schedules of the rows family: how many threads share a row, how wide they read, and where the row stays meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from codegen.arch import Arch
from codegen.expr import Index, Load, Operand, Program, Reduced, Result, Store, Value
from codegen.iteration import bounds, collapse, index_type, memory_order
from codegen.spec import RowsSpec

#: Elements of each row that one thread keeps in registers, so that neither they nor what is made of them spills.
KEPT_ELEMENTS = 16
#: Threads of a block whose rows are too short for all of them.
SHORT_THREADS = 128
MAX_THREADS = 1024
#: Neighbouring rows of a block that reads across them: a warp's lanes read neighbouring elements.
ACROSS_ROWS = 32
#: Widest vector of the widest operand, in bytes: two accesses.
MAX_VECTOR_BYTES = 32


@dataclass(frozen=True)
class RowsSchedule:
    """How a rows kernel is mapped to threads.

    form    where a row is between its passes: "registers", "shared" (dynamic shared memory), or "memory" (read again).
    across  threads side by side are in neighbouring rows, not at neighbouring elements of one.
    vector  neighbouring elements of a row that a thread reads at once.
    lanes   threads of a row, a power of two.
    rows    rows of a block, a power of two.
    itype   C type of positions and offsets.
    """

    form: str
    across: bool
    vector: int
    lanes: int
    rows: int
    itype: str

    @property
    def threads(self) -> int:
        return self.lanes * self.rows


@dataclass(frozen=True)
class Space:
    """A spec with neighbouring dimensions merged, the outer ones and those of the row each in memory order."""

    outer: tuple[int, ...]
    row: tuple[int, ...]
    program: Program
    chunk: int | None = None

    def along(self, operand: Operand) -> tuple[int, ...]:
        """An operand's strides within the row."""
        return operand.strides[len(self.outer) :]

    def varies(self, operand: Operand) -> bool:
        """Whether an operand has more than one element a row."""
        return any(self.along(operand))

    @property
    def total(self) -> int:
        """Elements along all that is reduced."""
        return prod(self.row)

    @property
    def length(self) -> int:
        """Elements of a row: of a part, if they are reduced in parts (the last one may have fewer)."""
        return self.total if self.chunk is None else min(self.chunk, self.total)


def normalize(spec: RowsSpec) -> Space:
    """The space that a kernel walks.  The order of a row's elements is free: sums may be made in any."""
    program, n = spec.program, len(spec.outer)
    parts = 0 if spec.chunk is None else 1  # the outer dimension that must stay by itself
    every = [op.strides for op in program.operands] + list(program.indices)
    shape = (*spec.outer, *spec.row)
    leader = max(
        program.operands, key=lambda op: (sum(s > 1 and t != 0 for s, t in zip(shape, op.strides)), op.dtype.itemsize)
    )
    kept = spec.outer[parts:]
    outer, outside = collapse(kept, [s[parts:n] for s in every], memory_order(kept, leader.strides[parts:n]))
    outer = (*spec.outer[:parts], *outer)
    row, inside = collapse(spec.row, [s[n:] for s in every], memory_order(spec.row, leader.strides[n:]))
    strides = [(*s[:parts], *a, *b) for s, a, b in zip(every, outside, inside)]
    loads, stores = len(program.loads), len(program.stores)
    return Space(
        outer,
        row,
        replace(
            program,
            loads=tuple(replace(op, strides=s) for op, s in zip(program.loads, strides)),
            stores=tuple(
                Store(replace(store.operand, strides=s), store.value)
                for store, s in zip(program.stores, strides[loads:])
            ),
            indices=tuple(strides[loads + stores :]),
        ),
        spec.chunk,
    )


class Stages:
    """When the values of a program are known: stage 0 needs no reduction, stage n + 1 those of values of stage n."""

    def __init__(self, space: Space) -> None:
        self._space, program = space, space.program
        self._stage: list[int] = []
        self._varies: list[bool] = []
        for instruction in program.instructions:
            self._stage.append(max((self.stage(v) for v in instruction.args), default=0))
            self._varies.append(any(self.varies(v) for v in instruction.args))
        self.last = max((self.stage(v) for v in self._ends()), default=0)

    def _ends(self) -> list[Value]:
        return [s.value for s in self._space.program.stores]

    def stage(self, value: Value) -> int:
        """The first stage in which a value is known."""
        if isinstance(value, Result):
            return self._stage[value.instruction]
        if isinstance(value, Reduced):
            return self.stage(self._space.program.reductions[value.reduction].value) + 1
        return 0

    def varies(self, value: Value) -> bool:
        """Whether a value differs from element to element of a row."""
        if isinstance(value, Result):
            return self._varies[value.instruction]
        if isinstance(value, Load):
            return self._space.varies(self._space.program.loads[value.operand])
        if isinstance(value, Index):
            return any(self._space.program.indices[value.index][len(self._space.outer) :])
        return False

    def ends(self, stage: int) -> list[Value]:
        """The values that the loop over the row of a stage is for: what is reduced, and what is stored for each
        element.
        """
        program = self._space.program
        reduced = [r.value for r in program.reductions if self.stage(r.value) == stage]
        stored = [s.value for s in program.stores if self._space.varies(s.operand) and self.stage(s.value) == stage]
        return reduced + stored

    def needed(self, stage: int) -> set[Value]:
        """All varying values that the loop of a stage computes or reads."""
        needed: set[Value] = set()
        stack = self.ends(stage)
        while stack:
            value = stack.pop()
            if value not in needed and self.varies(value):
                needed.add(value)
                if isinstance(value, Result):
                    stack += self._space.program.instructions[value.instruction].args
        return needed

    def kept(self) -> list[int]:
        """The loads that more than one stage needs."""
        uses = [self.needed(stage) for stage in range(self.last + 1)]
        loads = range(len(self._space.program.loads))
        return [n for n in loads if sum(Load(n) in needed for needed in uses) > 1]


def widest(space: Space) -> int:
    """The widest vector that suits all operands that are contiguous along the row."""
    varying = [op for op in space.program.operands if space.varies(op)]
    contiguous = [op for op in varying if op.strides[-1] == 1]
    if not contiguous or space.length == 0:
        return 1
    vector = 16 // min(op.dtype.itemsize for op in contiguous)
    while vector > 1:
        small = all(vector * op.dtype.itemsize <= MAX_VECTOR_BYTES for op in varying)
        whole = space.row[-1] % vector == 0 and space.length % vector == 0
        if small and whole and all(_aligned(op, vector) for op in contiguous):
            break
        vector //= 2
    return vector


def _aligned(operand: Operand, vector: int) -> bool:
    """Whether every vector of an operand may be read as one: the rows begin at multiples of it."""
    needed = min(16, vector * operand.dtype.itemsize)
    starts = operand.strides[:-1]
    return operand.alignment % needed == 0 and all(s * operand.dtype.itemsize % needed == 0 for s in starts)


def reads_across(space: Space) -> bool:
    """Whether most bytes have their neighbours in the next row, not in the same."""
    along = beside = 0
    for operand in space.program.operands:
        if space.varies(operand):
            along += operand.dtype.itemsize * (operand.strides[-1] == 1 and space.row[-1] > 1)
            beside += operand.dtype.itemsize * (operand.strides[len(space.outer) - 1] == 1 and space.outer[-1] > 1)
    return beside > along


def schedules(spec: RowsSpec, arch: Arch) -> Iterator[RowsSchedule]:
    """Schedules worth trying, best guess first."""
    space = normalize(spec)
    stages = Stages(space)
    itype = index_type(*bounds(space.program.operands, (*space.outer, *space.row)))
    if reads_across(space):
        parts = _power(min(32, max(1, -(-space.length // 4))))
        yield RowsSchedule("memory", True, 1, parts, ACROSS_ROWS, itype)
        for other in (8, 16, 32):
            yield RowsSchedule("memory", True, 1, other, ACROSS_ROWS, itype)
        return
    vector = widest(space)
    vectors = max(1, -(-space.length // vector))
    each = max(1, KEPT_ELEMENTS // vector)
    lanes = _power(-(-vectors // each))
    kept = sum(space.program.loads[n].dtype.itemsize for n in stages.kept()) * space.length
    if lanes <= MAX_THREADS and space.length:
        yield _shaped("registers", vector, lanes, itype)
        for other in (lanes * 2, lanes // 2):
            if 1 <= other <= min(MAX_THREADS, _power(vectors)):
                yield _shaped("registers", vector, other, itype)
    lanes = min(MAX_THREADS, lanes)
    # 8 KiB are left for what the threads exchange.
    if 0 < kept <= arch.shared_bytes_per_block - 8 * 1024 and lanes >= 32 and space.chunk is None:
        yield RowsSchedule("shared", False, vector, lanes, 1, itype)
    yield _shaped("memory", vector, lanes, itype)


def _shaped(form: str, vector: int, lanes: int, itype: str) -> RowsSchedule:
    rows = 1 if lanes > 32 else SHORT_THREADS // lanes
    return RowsSchedule(form, False, vector, lanes, rows, itype)


def _power(number: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << max(0, number - 1).bit_length()
