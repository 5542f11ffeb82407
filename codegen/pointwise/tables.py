"""Tables of pointwise kernels: which can be read a vector at a time, and what is the same for all of its elements.

The elements of a vector are neighbours in a table if their positions are computed from the same values for all of them,
except for an index that counts them, and if either all of them are read or none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from codegen.expr import Index, Literal, Load, Operand, Pointer, Program, Result, TableRead, Value
from codegen.iteration import restrided, widest_vector


@dataclass(frozen=True)
class Ahead:
    """What is done for a vector before all else.

    reads   the instructions that read a vector of a table.
    shared  the instructions that these depend on, with the same result for all elements.
    single  the instructions that read an element of a table, and depend on no other such read.
    """

    reads: tuple[int, ...] = ()
    shared: frozenset[int] = frozenset()
    single: tuple[int, ...] = ()


def ahead(program: Program, shape: tuple[int, ...], vector: int) -> Ahead:
    """Returns what can be done first for a vector of ``vector`` elements along the last dimension."""
    if vector == 1 or shape[-1] % vector or not program.tables:
        return Ahead(single=_alone(program, ()))
    uniform: list[bool] = []

    def same(value: Value) -> bool:
        if isinstance(value, Load):
            return program.loads[value.operand].strides[-1] == 0
        if isinstance(value, Index):
            return program.indices[value.index][-1] == 0
        if isinstance(value, Result):
            return uniform[value.instruction]
        return isinstance(value, (Literal, Pointer))

    def counts(value: Value) -> bool:
        """Tells whether an index counts the elements of a vector, and is a multiple of its length for the first."""
        if not isinstance(value, Index):
            return False
        *outer, last = program.indices[value.index]
        return last == 1 and not any(step % vector for step in outer)

    for instruction in program.instructions:
        whole = bool(instruction.thresholds) and not any(t % vector for t in instruction.thresholds)
        uniform.append(all(same(v) or (whole and counts(v)) for v in instruction.args))

    def wide(read: TableRead) -> bool:
        tables = program.read_by(read)
        if not read.indexed or not isinstance(read.args[1], Index):
            return False
        *outer, last = program.indices[read.args[1].index]
        size = tables[0].dtype.itemsize
        steps = gcd(*(step * size for step in (*outer, *read.multiples)), *(table.alignment for table in tables))
        return last == 1 and steps % min(16, vector * size) == 0 and all(map(same, (read.args[0], *read.args[2:])))

    reads = [k for k, i in enumerate(program.instructions) if isinstance(i, TableRead) and wide(i)]
    above = program.needed(v for k in reads for v in program.instructions[k].args)
    return Ahead(tuple(reads), frozenset(v.instruction for v in above if isinstance(v, Result)), _alone(program, reads))


def _alone(program: Program, others: Sequence[int]) -> tuple[int, ...]:
    """Returns the instructions that read a table and depend on no table, besides ``others``."""
    every = {Result(k) for k, i in enumerate(program.instructions) if isinstance(i, TableRead)}
    return tuple(
        v.instruction
        for v in sorted(every, key=lambda v: v.instruction)
        if v.instruction not in others and program.needed([v]) & every == {v}
    )


def table_bytes(program: Program, done: Ahead) -> tuple[int, int]:
    """Returns the largest element's bytes of tables that are read in vectors, and of those that are not; 0 if none."""
    sizes: tuple[list[int], list[int]] = ([0], [0])
    for k, instruction in enumerate(program.instructions):
        if isinstance(instruction, TableRead):
            sizes[k not in done.reads].append(program.read_by(instruction)[0].dtype.itemsize)
    return max(sizes[0]), max(sizes[1])


def placed(program: Program) -> dict[int, Operand]:
    """Returns the reads of tables at places that follow from an element's coordinates: what they read, as an operand.

    Its strides are as if a place that is computed grew with every index that it follows from, as in shifted rows; of
    what is chosen among several tables they are those that all have in common.
    """
    found = {}
    for k in _alone(program, ()):
        read = program.instructions[k]
        assert isinstance(read, TableRead)
        if any(isinstance(v, Load) for v in program.needed(read.args)):
            continue
        first = 1 + read.indexed
        steps = [(1, v) for v in read.args[1:first]]
        if isinstance(read.args[0], Pointer):
            computed = zip(read.multiples[1:], read.args[first : len(read.args) - read.guarded])
            steps += [(times, v) for times, value in computed for v in program.needed([value])]
        strides = [0] * len(program.indices[0]) if program.indices else []
        for times, v in steps:
            if isinstance(v, Index):
                strides = [abs(times) * step + total for step, total in zip(program.indices[v.index], strides)]
        table = program.read_by(read)[0]
        if any(strides):
            found[k] = Operand(table.name, table.dtype, tuple(strides))
    return found


def read_vector(program: Program, k: int, shape: tuple[int, ...], dim: int, rows: int) -> int:
    """Returns how many neighbours along a dimension a read of a table can have at once, of ``rows`` or of all."""
    order = [*(d for d in range(len(shape)) if d != dim), dim]
    turned = restrided(program, [tuple(strides[d] for d in order) for strides in program.strides])
    size = placed(program)[k].dtype.itemsize

    def suits(vector: int) -> bool:
        return rows % vector == 0 and k in ahead(turned, (*(shape[d] for d in order),), vector).reads

    return widest_vector(16 // size, suits)
