"""Windows over planes, folded in two steps: along the columns of a plane, then along the rows of the result."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from codegen import dtypes
from codegen.expr import Load, Operand, Reduced, Store
from codegen.pool.space import Space, normalize, widest
from codegen.spec import PoolSpec
from codegen.target import Target
from codegen.windows import Adaptive

THREADS = 256
#: Fewest elements of a block that are worth a barrier, and most bytes of their folds in shared memory.
LEAST_ELEMENTS, SHARED_BYTES = 1536, 48 * 1024
#: The dtypes in which folds are kept in between.
_DTYPES = {"float": dtypes.float32, "double": dtypes.float64}


def in_steps(spec: PoolSpec, planes: int) -> tuple[PoolSpec, PoolSpec]:
    """Returns the two steps for ``planes`` planes.

    The first has the windows along the columns, and stores their folds; the second loads these after all else, and
    folds them alike in windows along their rows.
    """
    space = normalize(spec)
    program, rank = space.program, space.rank
    (_, tall), (_, wide) = space.windows
    _, rows, cols = space.outer
    # What is read for an element of a window has no strides along the windows' own dimensions.
    folds = [
        Operand(f"{r.name} of columns", _DTYPES[r.ctype], (rows * wide.size, wide.size, 1)) for r in program.reductions
    ]
    first = replace(
        program,
        loads=tuple(replace(op, strides=(*op.strides[:2], op.strides[4], op.strides[3])) for op in program.loads),
        indices=tuple((*s[:2], s[4], s[3]) for s in program.indices),
        stores=tuple(Store(replace(op, strides=(*op.strides, 0)), Reduced(k)) for k, op in enumerate(folds)),
    )
    plane, row, _ = folds[0].strides
    second = replace(
        program,
        loads=(
            *(replace(op, strides=(*op.strides[:rank], 0)) for op in program.loads),
            *(replace(op, strides=(plane, row, 0, 1)) for op in folds),
        ),
        indices=tuple((*s[:rank], 0) for s in program.indices),
        stores=tuple(replace(s, operand=replace(s.operand, strides=s.operand.strides[:4])) for s in program.stores),
        reductions=tuple(replace(r, value=Load(len(program.loads) + k)) for k, r in enumerate(program.reductions)),
    )
    return (
        PoolSpec(spec.name, (planes, rows, wide.size), ((1, tall),), first),
        PoolSpec(spec.name, (planes, rows, cols), ((2, wide),), second),
    )


def planes_of_block(spec: PoolSpec, target: Target) -> int:
    """Returns how many planes a block folds in steps; 0 where this cannot be, or is no better than window by window.

    In steps, neighbouring threads read neighbouring columns in vectors, not elements far apart, one by one.
    """
    space = normalize(spec)
    if not _separable(space) or not any(isinstance(window, Adaptive) for _, window in space.windows):
        return 0
    count, rows, _ = space.outer
    (_, tall), (_, wide) = space.windows
    columns = rows * wide.size
    nbytes = columns * sum(_DTYPES[r.ctype].itemsize for r in space.program.reductions)
    if nbytes > SHARED_BYTES:
        return 0
    # Where a thread has one vector of columns, all that it reads is in flight at once: a second vector would wait.
    vectors = columns // vector_of_columns(spec)
    planes = min(THREADS // vectors, SHARED_BYTES // nbytes)
    if max(1, planes) * tall.size * wide.size < LEAST_ELEMENTS:
        return 0
    return max(1, min(planes, count // (2 * target.sms)))


def vector_of_columns(spec: PoolSpec) -> int:
    """Returns how many columns a thread folds at once: those of two planes or more, so that each's are aligned."""
    return widest(normalize(in_steps(spec, 2)[0]))


def _separable(space: Space) -> bool:
    """Tells whether windows along the last two dimensions, the last contiguous, can be folded in turn in each plane."""
    program = space.program
    return (
        [d for d, _ in space.windows] == [1, 2]
        and space.rank == 3
        and bool(program.reductions)
        and all(r.at is None and r.ctype in _DTYPES for r in program.reductions)
        and bool(space.taps)
        and all(program.loads[n].strides[-1] == 1 for n in space.taps)
        and all(strides[0] == 0 for strides in program.indices)
        and prod(space.outer) > 0
    )
