"""Operands that are 8-bit floats times factors which blocks of the sum have in common.

Where an operand is a code times a factor, and the factor is the same for all terms of a stage, the tensor cores
multiply the codes as they lie in memory, and the sums of a stage are multiplied by the factors of their rows and
columns.  What is a code and what a factor follows from the operand's program, however it is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from math import gcd, prod

from codegen.declined import Declined
from codegen.dtypes import BY_NAME
from codegen.expr import Index, Instruction, Load, Operand, Program, Result, Store, Value
from codegen.operands import ROW_BYTES, MappedOperand, OperandTiles
from codegen.sizes import varies
from codegen.spec import ContractionSpec, Gather
from codegen.tiles import operand_tiles

#: The types of codes.
CODES = frozenset(("float8_e4m3", "float8_e5m2"))
#: Columns of a tile that may have one factor are at least so many: a thread has its sums of 8 columns side by side.
LEAST_SHARED = 8


@dataclass(frozen=True)
class Factors:
    """What the codes of an operand are multiplied by.

    gather     over batch, rows (or columns) and reduction; its program computes the factor.
    arguments  the numbers of its tensors among the kernel's arguments.
    sizes      of the dimensions of the reduction in which blocks lie; ``stages`` of a block: its factors are the same.
    shared     rows (or columns) that have factors in common; those of all blocks begin at multiples of it.
    """

    gather: Gather
    arguments: tuple[int, ...]
    sizes: tuple[int, ...]
    stages: int
    shared: int

    def together(self, size: int) -> int:
        """Returns how many columns of a tile of so many have one factor: 1, or a multiple of `LEAST_SHARED`."""
        both = gcd(self.shared, size)
        return both if both % LEAST_SHARED == 0 else 1


@dataclass(frozen=True, kw_only=True)
class ScaledOperand(MappedOperand):
    """Codes that TMA brings: ``gather`` says where they lie, ``factors`` what they are multiplied by, if anything."""

    gather: Gather
    factors: Factors | None


def scaled(spec: ContractionSpec) -> OperandTiles:
    """Returns the operands of a contraction that are codes with factors.  Raises Declined if they are not."""
    if not spec.factored:
        raise Declined("the operands are multiplied as they are, not as codes whose sums are scaled")
    if spec.terms or spec.results or spec.others or spec.a.image is not None:
        raise Declined("codes with factors are multiplied in matrix products of two operands")
    found = [_split(gather) for gather in (spec.a, spec.b)]
    if all(factor is None for _, factor in found):
        raise Declined("both operands are multiplied as they lie in memory")
    (a, _), (b, _) = found
    parts = operand_tiles(replace(spec, a=a.gather, b=b.gather))
    if prod(parts.batch) != prod(spec.batch):
        raise Declined("rows of codes do not lie at equal distances")
    in_order = sorted(range(len(spec.k)), key=lambda d: (-abs(a.gather.inner[d]), d)) == [*range(len(spec.k))]
    if prod(parts.reduction.taps) > 1 or not in_order:
        raise Declined("codes do not lie at equal distances along the reduction")
    sides, first = [], 0
    for side, sizes, gather, (code, factor) in zip((parts.a, parts.b), (spec.m, spec.n), (spec.a, spec.b), found):
        assert isinstance(side, MappedOperand)
        kept = {f.name: getattr(side, f.name) for f in fields(MappedOperand)}
        kept["map"] = replace(side.map, argument=first + code.number)
        factors = None if factor is None else _factors(spec, factor, sizes, first)
        sides.append(ScaledOperand(**kept, gather=code.gather, factors=factors))
        first += len(gather.operands)
    return replace(parts, a=sides[0], b=sides[1])


@dataclass(frozen=True)
class _Code:
    """A tensor of codes: its number among those of the operand, and where its elements lie."""

    number: int
    gather: Gather


@dataclass(frozen=True)
class _Factor:
    """The program of a factor, as an operand, and the numbers of its tensors among those of the codes' operand."""

    gather: Gather
    numbers: tuple[int, ...]


def _split(gather: Gather) -> tuple[_Code, _Factor | None]:
    """Returns the codes of an operand and their factor, None for an operand of codes alone."""
    program, name = gather.program, gather.operand.name
    if gather.limits or gather.image is not None:
        raise Declined(f"{name!r} is padded")
    if program is None:
        if gather.operand.dtype.name not in CODES:
            raise Declined(f"{name!r} has no codes: it is {gather.operand.dtype.name}")
        return _Code(0, gather), None
    if program.tables or program.itype != "int32" or program.real != "float":
        raise Declined(f"{name!r} is computed of elements at computed positions, or in float64")
    for n, load in enumerate(program.loads):
        others = _peeled(program, program.stores[0].value, Load(n)) if load.dtype.name in CODES else None
        if others is not None and gather.steps()[2][1 + n][-1:] != (0,):
            return _Code(n, _at(gather, n, load)), _factor(gather, others) if others else None
    raise Declined(f"{name!r} is no 8-bit float times a factor")


def _at(gather: Gather, number: int, load: Operand) -> Gather:
    """Returns where the elements of one of an operand's tensors lie."""
    batch, outer, inner = (each[1 + number] for each in gather.steps())
    return Gather(load, batch, outer, inner, gather.starts[number])


def _peeled(program: Program, value: Value, code: Load) -> list[Value] | None:
    """Returns the factors of a product that has a code as one of them; None for what is no such product."""
    if value == code:
        return []
    found = program.instructions[value.instruction] if isinstance(value, Result) else None
    if found is None or found.template != "{0} * {1}" or found.ctype != "float":
        return None
    with_code = [code in program.needed([v]) for v in found.args]
    if sum(with_code) != 1:
        return None
    own, other = found.args if with_code[0] else found.args[::-1]
    inner = _peeled(program, own, code)
    return None if inner is None else [*inner, other]


def _factor(gather: Gather, values: Sequence[Value]) -> _Factor:
    """Returns the product of some values of an operand's program as an operand of its own."""
    program = gather.program
    assert program is not None
    needed = program.needed(values)
    loads = [n for n in range(len(program.loads)) if Load(n) in needed]
    kept = [n for n in range(len(program.instructions)) if Result(n) in needed]
    new: dict[Value, Value] = {Load(n): Load(k) for k, n in enumerate(loads)}
    new |= {Result(n): Result(k) for k, n in enumerate(kept)}

    def renamed(value: Value) -> Value:
        return new.get(value, value)

    every = [program.instructions[n] for n in kept]
    instructions = [replace(i, args=tuple(renamed(v) for v in i.args)) for i in every]
    total = renamed(values[0])
    for value in values[1:]:
        instructions.append(Instruction("scale", "{0} * {1}", (total, renamed(value)), "float"))
        total = Result(len(instructions) - 1)
    target = Operand(f"{gather.operand.name}_scale", BY_NAME["float32"], ())
    own = Program(
        tuple(program.loads[n] for n in loads),
        program.indices,
        tuple(instructions),
        (Store(target, total),),
        exact=True,
    )
    places = [*loads, *range(len(program.loads), len(gather.starts))]
    batch, outer, inner = ([each[1 + n] for n in places] for each in gather.steps())
    starts = tuple(gather.starts[n] for n in places)
    nothing = Gather(target, (0,) * len(gather.batch), (0,) * len(gather.outer), (0,) * len(gather.inner))
    found = replace(nothing, program=own, starts=starts)
    if loads:
        found = replace(found, batch=batch[0], outer=outer[0], inner=inner[0], start=starts[0])
    return _Factor(found, tuple(loads))


def _factors(spec: ContractionSpec, factor: _Factor, sizes: Sequence[int], first: int) -> Factors:
    """Returns the factors of an operand with so many rows or columns.  Raises Declined unless stages have one each."""
    gather, program = factor.gather, factor.gather.program
    assert program is not None
    needed = program.needed(store.value for store in program.stores)
    read = [n for n in range(len(program.loads)) if Load(n) in needed]
    read += [len(program.loads) + n for n in range(len(program.indices)) if Index(n) in needed]
    _, outer, inner = gather.steps()
    kept, block = _blocks(spec.k, [inner[1 + n] for n in read])
    if kept and (varies(block) or block % ROW_BYTES):
        raise Declined(f"{gather.operand.name!r} is the same for {block} terms of the sum, not for {ROW_BYTES}")
    apart, shared = _blocks(sizes, [outer[1 + n] for n in read])
    # gcd(0, n) is n: what does not vary is the same for all of a tile.
    shared = 0 if not apart else 1 if varies(shared) else shared
    arguments = tuple(first + n for n in factor.numbers)
    return Factors(gather, arguments, spec.k[:kept], block // ROW_BYTES if kept else 1, shared)


def _blocks(sizes: Sequence[int], every: Iterable[Sequence[int]]) -> tuple[int, int]:
    """Returns how many dimensions, up to the last in which some steps are not 0, tell blocks apart, and their size."""
    steps = list(every)
    kept = max((d + 1 for d, size in enumerate(sizes) if size > 1 and any(s[d] for s in steps)), default=0)
    return kept, prod(sizes[kept:])
