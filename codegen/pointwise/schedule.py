"""How a pointwise kernel reaches its operands: one choice of form, vector length and unrolling for the whole kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd, prod

from codegen.expr import Operand, Program
from codegen.family import Schedule
from codegen.iteration import bounds, far, index_type, memory_order, packed, rebase
from codegen.pointwise.tables import ahead, table_bytes
from codegen.sizes import Size
from codegen.spec import PointwiseSpec
from codegen.target import PORTABLE, Target

THREADS = 256
#: Blocks per multiprocessor that keep a GPU busy; smaller problems get fewer vectors in flight, and shorter ones.
ENOUGH_BLOCKS = 2
MAX_VECTOR_BYTES = 64
#: Bytes of repeating rows that a thread may read from the L1 cache for each byte that memory delivers or takes.
REPEATED_BYTES = 2

#: Kinds of access to as much as a vector needs at once.
WIDE = ("vector", "uniform", "spread")


@dataclass(frozen=True)
class PointwiseSchedule(Schedule):
    """vector: elements of one access; unroll: vectors in flight per thread; form: flat, rows, cycles or unaligned.

    rows needs rows that are a whole number of vectors; cycles, a space with more than one row; unaligned, operands that
    are contiguous along the rows (`pointwise.unaligned`).  evict_last: the L2 cache evicts what is read once after what
    is written (`codegen.l2_policy`).
    """

    vector: int
    unroll: int
    form: str
    itype: str
    evict_last: bool = False


def normalize(spec: PointwiseSpec) -> tuple[tuple[int, ...], Program]:
    """Returns the space in memory order of the first output with merged dimensions, and the program over it."""
    strides = spec.program.stores[0].operand.strides
    return rebase(spec.program, spec.shape, memory_order(spec.shape, strides))


def aligned(operand: Operand, width: int, steps: tuple[int, ...]) -> bool:
    """Tells whether an operand's addresses at sums of multiples of ``steps`` are multiples of ``width`` bytes."""
    return operand.alignment % width == 0 and all(s * operand.dtype.itemsize % width == 0 for s in steps)


def access(strides: tuple[int, ...], shape: tuple[int, ...], vector: int, operand: Operand | None) -> str:
    """Returns how a thread reads or writes the ``vector`` consecutive elements of the space at a multiple of
    ``vector``.  An operand of None has no memory (an index).

    scalar   one value for the whole kernel
    vector   one wide access
    uniform  one value for the vector
    spread   one access, each of whose elements is repeated along the last dimension
    strided  one access an element, at even distances
    pair     the vector may lie in two rows: one value in each
    split    the vector may lie in two rows: one access an element, at even distances in each
    element  one access an element, each with coordinates of its own
    """
    if not any(strides):
        return "scalar"
    if vector == 1:
        return "element"
    whole = shape[-1] % vector == 0
    if operand is not None:
        width = min(16, vector * operand.dtype.itemsize)
        if strides == packed(shape) and aligned(operand, width, ()):
            return "vector"
        if whole and strides[-1] == 1 and aligned(operand, width, strides[:-1]):
            return "vector"
        if _spreads(operand, strides, shape, vector):
            return "spread"
    if whole or len(shape) == 1:
        return "strided" if strides[-1] else "uniform"
    if shape[-1] < vector:
        return "element"
    # A row is at least as long as the vector, which therefore reaches at most into the next row.
    return "split" if strides[-1] else "pair"


def _spreads(operand: Operand, strides: tuple[int, ...], shape: tuple[int, ...], vector: int) -> bool:
    """Tells whether a vector is neighbours in an operand, each of them repeated along the whole last dimension."""
    if len(shape) == 1 or strides[-1] or strides[-2] != 1 or isinstance(shape[-1], Size):
        return False
    if not shape[-1] or vector % shape[-1]:
        return False
    each = vector // shape[-1]
    return each > 1 and shape[-2] % each == 0 and aligned(operand, min(16, each * operand.dtype.itemsize), strides[:-2])


def traffic(operand: Operand, shape: tuple[int, ...]) -> int:
    """Returns how many bytes an operand has, each counted once."""
    return operand.dtype.itemsize * prod(size for size, stride in zip(shape, operand.strides) if stride)


def cycle(shape: tuple[int, ...], vector: int) -> int:
    """Returns after how many elements vectors have the same columns again: at least a block's width."""
    once = shape[-1] * vector // gcd(shape[-1], vector)
    return once * max(1, -(-THREADS * vector // once))


def repeats(operand: Operand) -> bool:
    """Tells whether an operand is the same in every row, but not the same for all elements."""
    return operand.strides[-1] != 0 and not any(operand.strides[:-1])


def best_schedule(spec: PointwiseSpec, target: Target = PORTABLE) -> PointwiseSchedule:
    """Returns the schedule used when nothing was tuned."""
    shape, program = normalize(spec)
    operands = program.operands
    itype = index_type(*bounds(operands, shape), *far(program))
    total = prod(shape)
    full = [op for op in operands if any(op.strides)]
    smallest = min(op.dtype.itemsize for op in (*operands, *program.tables))
    vector = 16 // smallest
    while vector > 1:
        kinds = [access(op.strides, shape, vector, op) for op in full]
        wide = sum(traffic(op, shape) for op, kind in zip(full, kinds) if kind in WIDE)
        narrow = sum(traffic(op, shape) for op, kind in zip(full, kinds) if kind not in (*WIDE, "pair"))
        by_vector, by_element = table_bytes(program, ahead(program, shape, vector))
        wide, narrow = wide + total * by_vector, narrow + total * by_element
        small = vector * max(op.dtype.itemsize for op in operands) <= MAX_VECTOR_BYTES
        enough = total >= vector * THREADS
        if small and wide > narrow and enough:
            break
        if by_element and enough and vector * smallest <= 4:  # neighbouring lanes read whole words of what they share
            break
        vector //= 2
    # Many threads with one wide access each hide the latency better than fewer with several.
    wide_access = vector * max((op.dtype.itemsize for op in operands if op.strides[-1]), default=1) >= 16
    scattered = any(access(op.strides, shape, vector, op) == "element" for op in program.loads)
    unroll, form = (1, "flat") if wide_access and not scattered else (4, _form(program, shape, vector))
    shared = _form(program, shape, vector)
    if form == "flat" and unroll == 1 and shared != "flat":
        # Where several operands repeat, the L1 cache would be the limit: as many rows share them as it takes.  In
        # cycles each of their elements is an access.
        again = sum(op.dtype.itemsize for op in full if repeats(op)) * (vector if shared == "cycles" else 1)
        once = sum(op.dtype.itemsize for op in full if not repeats(op))
        while unroll < 4 and again > REPEATED_BYTES * once * unroll:
            unroll, form = 2 * unroll, shared
    if form == "rows":
        unroll = min(unroll, shape[-2])
    if form == "cycles":
        unroll = max(1, min(unroll, total // cycle(shape, vector)))
    while unroll > 1 and total < ENOUGH_BLOCKS * target.sms * THREADS * vector * unroll:
        unroll //= 2
    if form == "cycles" and unroll == 1:
        form = "flat"
    return PointwiseSchedule(vector, unroll, form, itype)


def narrow(spec: PointwiseSpec, schedule: PointwiseSchedule, width: int) -> bool:
    """Tells whether a quarter or more of the bytes a schedule moves goes in accesses of fewer than ``width`` bytes."""
    shape, program = normalize(spec)
    moved = [(traffic(op, shape), _access_bytes(op, shape, schedule.vector)) for op in program.operands]
    return 4 * sum(size for size, access in moved if access < width) >= sum(size for size, _ in moved)


def _access_bytes(operand: Operand, shape: tuple[int, ...], vector: int) -> int:
    """Returns how many bytes one access has; 16 if it serves a whole vector."""
    kind = access(operand.strides, shape, vector, operand)
    wide = kind in ("scalar", "uniform", "spread", "pair")
    return 16 if wide else operand.dtype.itemsize * (vector if kind == "vector" else 1)


def _form(program: Program, shape: tuple[int, ...], vector: int) -> str:
    """Returns the form that keeps an operand in registers that repeats from row to row, else the flat one."""
    if len(shape) > 1:
        kinds = [(op, access(op.strides, shape, vector, op)) for op in program.loads]
        if any(kind == "vector" and op.strides[-2] == 0 for op, kind in kinds):
            return "rows"
        if any(kind in ("split", "element") and repeats(op) for op, kind in kinds) and vector > 1:
            return "cycles"
    return "flat"


def schedules(spec: PointwiseSpec, target: Target = PORTABLE) -> Iterator[PointwiseSchedule]:
    """Yields schedules worth trying, best guess first."""
    best = best_schedule(spec, target)
    yield best
    shape, program = normalize(spec)
    form = _form(program, shape, best.vector)
    for unroll in (2, 4, 1):
        if form == "flat" or unroll == 1:
            yield replace(best, form="flat", unroll=unroll)
        else:
            yield replace(best, form=form, unroll=min(unroll, shape[-2]) if form == "rows" else unroll)
    if best.vector > 1:
        yield replace(best, vector=best.vector // 2, form="flat")
        yield replace(best, vector=best.vector // 2, form="flat", unroll=2)
