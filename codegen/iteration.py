"""Iteration spaces: permuting and merging dimensions, and turning positions into offsets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from math import prod

from codegen.expr import Operand, Program, Store
from codegen.naming import Writer
from codegen.records import changed
from codegen.sizes import most

Strides = tuple[int, ...]

#: Extents from which on positions have 64 bits, unsigned or signed ones.
FAR, FAR_SIGNED = 2**32 - 2**20, 2**31 - 2**19


def packed(shape: Sequence[int]) -> Strides:
    """Returns row-major strides without gaps."""
    result = []
    step = 1
    for size in reversed(shape):
        result.append(step)
        step *= size
    return tuple(reversed(result))


def memory_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Returns the dimensions from the largest stride to the smallest; ties stay in order."""
    return tuple(sorted(range(len(shape)), key=lambda d: -strides[d]))


def collapse(
    shape: Sequence[int], strides: Sequence[Strides], order: Sequence[int]
) -> tuple[tuple[int, ...], list[Strides]]:
    """Returns the space with dimensions permuted to ``order``, those of size 1 dropped, mergeable neighbours merged.

    Neighbours merge if stride[outer] == stride[inner] * size[inner] in every operand.  At least one dimension is kept.
    """
    kept = [d for d in order if shape[d] != 1]
    sizes: list[int] = []
    columns: list[list[int]] = []  # one list for each kept dimension: its strides in the operands
    for d in kept:
        column = [s[d] for s in strides]
        if sizes and all(outer == inner * shape[d] for outer, inner in zip(columns[-1], column)):
            sizes[-1] *= shape[d]
            columns[-1] = column
        else:
            sizes.append(shape[d])
            columns.append(column)
    if not sizes:
        return (1,), [(0,) for _ in strides]
    return tuple(sizes), [tuple(column[k] for column in columns) for k in range(len(strides))]


def rebase(program: Program, shape: Sequence[int], order: Sequence[int]) -> tuple[tuple[int, ...], Program]:
    """Returns a program over the collapsed space: (shape, program with new strides)."""
    sizes, strides = collapse(shape, program.strides, order)
    return sizes, restrided(program, strides)


def merge_outer(
    program: Program, outer: Sequence[int], extra: Sequence[Strides] = ()
) -> tuple[tuple[int, ...], Program, list[Strides]]:
    """Returns (sizes, program, ``extra`` strides) with outer dimensions, all but the last, merged in memory order."""
    n, every = len(outer), [*program.strides, *extra]
    leading = leader(program).strides[:n]
    sizes, outside = collapse(outer, [s[:n] for s in every], memory_order(outer, leading))
    strides = [(*a, b[n]) for a, b in zip(outside, every)]
    own = len(every) - len(extra)
    return sizes, restrided(program, strides[:own]), strides[own:]


def leader(program: Program) -> Operand:
    """Returns the operand that varies along most dimensions; among equals, the one with the largest elements."""
    return max(program.operands, key=lambda op: (sum(s != 0 for s in op.strides), op.dtype.itemsize))


def restrided(program: Program, strides: Sequence[Strides]) -> Program:
    """Returns a program with other strides: those of its loads, its stores and its indices, in this order."""
    n, m = len(program.loads), len(program.stores)
    return changed(
        program,
        loads=tuple(changed(op, strides=s) for op, s in zip(program.loads, strides)),
        stores=tuple(Store(changed(x.operand, strides=s), x.value) for x, s in zip(program.stores, strides[n:])),
        indices=tuple(strides[n + m :]),
    )


def aligned(operand: Operand, vector: int, along: int) -> bool:
    """Tells whether every vector of an operand along a dimension is aligned for a single access."""
    needed = min(16, vector * operand.dtype.itemsize)
    starts = (operand.start, *(s for d, s in enumerate(operand.strides) if d != along))
    return operand.alignment % needed == 0 and all(s * operand.dtype.itemsize % needed == 0 for s in starts)


def widest_vector(most: int, suits: Callable[[int], bool]) -> int:
    """Returns the largest power of two that suits and is at most ``most``, which is 16 or less; 1 if none does."""
    return next((vector for vector in (16, 8, 4, 2) if vector <= most and suits(vector)), 1)


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns one more than the largest offset reached."""
    return 1 + sum((size - 1) * abs(stride) for size, stride in zip(shape, strides) if size > 1)


def index_type(*extents: int) -> str:
    """Returns uint32 when every offset and position fits it with room for a tile past the end, else uint64."""
    return "uint32" if max(map(most, extents), default=0) < FAR else "uint64"


def signed_index_type(*extents: int) -> str:
    """Returns int32 when every offset and position fits it with room for a tile past the end, else int64."""
    return "int32" if max(map(most, extents), default=0) < FAR_SIGNED else "int64"


def unsigned(itype: str) -> str:
    """Returns the unsigned type of an index type's size: ``unsigned(i) < size`` is 0 <= i < size in one comparison."""
    return {"int32": "uint32", "int64": "uint64"}[itype]


def bounds(operands: Sequence[Operand], shape: Sequence[int]) -> list[int]:
    """Returns the extents of operands over a space, for `index_type`."""
    return [prod(shape), *(extent(shape, op.strides) for op in operands)]


def far(program: Program) -> list[int]:
    """Returns the extents a program's positions require, for `index_type`: numbers below 0 need types of one size."""
    return [2**32] if program.itype == "int64" else []


def coordinate(position: str, shape: Sequence[int], dim: int) -> str:
    """Returns the C expression of one coordinate of a row-major position."""
    inner = prod(shape[dim + 1 :])
    text = position if inner == 1 else f"{position} / {inner}"
    return text if prod(shape[:dim]) == 1 else f"{text} % {shape[dim]}"


def coordinates(
    w: Writer, itype: str, prefix: str, position: str, shape: Sequence[int], dims: Iterable[int] | None = None
) -> list[str]:
    """Writes all or some coordinates of a row-major position as constants ``prefix0``, ...; returns all names."""
    for d in range(len(shape)) if dims is None else dims:
        w.line(f"const {itype} {prefix}{d} = {coordinate(position, shape, d)};")
    return [f"{prefix}{d}" for d in range(len(shape))]


def used(every: Iterable[Sequence[int]]) -> list[int]:
    """Returns the dimensions in which some of these strides are not 0."""
    return sorted({d for strides in every for d, step in enumerate(strides) if step})


def split(
    w: Writer, itype: str, prefix: str, position: str, shape: Sequence[int], every: Iterable[Sequence[int]]
) -> list[str]:
    """Writes the coordinates of a position that some strides need, as `coordinates` does; returns all names.

    The position is a C variable, or what `linear` wrote.  In a space of one dimension it is its own coordinate.
    """
    if len(shape) == 1:
        return [position]
    text = position if position.isidentifier() else f"({position})"
    return coordinates(w, itype, prefix, text, shape, used(every))


def long(shape: Sequence[int]) -> list[int]:
    """Returns the dimensions of more than one element."""
    return [d for d, size in enumerate(shape) if size > 1]


class Coordinates:
    """Coordinates of a row-major position, a C variable: constants ``prefix0``, ..., written when first asked for."""

    def __init__(self, w: Writer, position: str, shape: Sequence[int], itype: str, prefix: str) -> None:
        self.w, self.position, self.shape, self.itype, self.prefix = w, position, tuple(shape), itype, prefix
        self._packed = packed(shape)
        self._known: dict[int, str] = {}

    def __getitem__(self, dim: int) -> str:
        if len(self.shape) == 1:
            return self.position
        if dim not in self._known:
            name = f"{self.prefix}{dim}"
            self.w.line(f"const {self.itype} {name} = {coordinate(self.position, self.shape, dim)};")
            self._known[dim] = name
        return self._known[dim]

    def write(self, every: Iterable[Strides]) -> Coordinates:
        """Writes the coordinates that some strides need here, rather than at first use, which may be within a loop."""
        for d in sorted({d for strides in every for d in range(len(self.shape)) if strides[d]}):
            _ = self[d]
        return self

    def terms(self, strides: Sequence[int]) -> list[tuple[str, int]]:
        """Returns the coordinates where these strides are not 0, with the strides."""
        return [(self[d], stride) for d, stride in enumerate(strides) if stride]

    def along(self, strides: Sequence[int], position: str) -> str:
        """Returns an offset in C; ``position`` is that along one more dimension, the last."""
        return linear([*self.terms(strides[:-1]), (position, strides[-1])])

    def offset(self, strides: Sequence[int]) -> str:
        """Returns the C expression of an operand's offset at this position."""
        return self.position if tuple(strides) == self._packed else linear(self.terms(strides))


class Point:
    """One element of a space: its first dimensions have a coordinate each, others a position for each group of them.

    outer  the coordinates of the first dimensions, as C expressions.
    parts  (position, name, sizes) of every group: the position in C, the name of a constant for it where it is split.
    """

    def __init__(
        self, w: Writer, itype: str, outer: Sequence[str], parts: Sequence[tuple[str, str, Sequence[int]]]
    ) -> None:
        self._w, self._itype, self._outer, self._parts = w, itype, outer, parts
        self._split: dict[str, Coordinates] = {}

    def _coordinate(self, dim: int) -> str:
        if dim < len(self._outer):
            return self._outer[dim]
        dim -= len(self._outer)
        number = 0
        while dim >= len(self._parts[number][2]):
            dim -= len(self._parts[number][2])
            number += 1
        text, name, sizes = self._parts[number]
        if len(sizes) == 1:
            return text
        if name not in self._split:
            position = text if text.isidentifier() else name
            if position == name:
                self._w.line(f"const {self._itype} {name} = {text};")
            self._split[name] = Coordinates(self._w, position, sizes, self._itype, name)
        return self._split[name][dim]

    def offset(self, strides: Sequence[int]) -> str:
        """Returns the C expression of the element's offset in an operand."""
        return linear([(self._coordinate(d), stride) for d, stride in enumerate(strides) if stride])


def at_most(text: str, largest: int, itype: str) -> str:
    """Returns the C expression of the smaller of an expression and a number."""
    return f"min({text if itype == 'uint32' else f'{itype}({text})'}, {itype}({largest}))"


def product(text: str) -> bool:
    """Tells whether a C expression that `linear` made is one term."""
    depth, inner = 0, ""
    for c in text:
        depth += (c == "(") - (c == ")")
        inner += c if depth == 0 else ""
    return " + " not in inner and " - " not in inner


def linear(terms: Sequence[tuple[str, int]], constant: int = 0) -> str:
    """Returns ``a * 3 + b - 5`` from [(a, 3), (b, 1)] and -5."""
    text = ""
    for name, factor in terms:
        if factor == 0 or name == "0":
            continue
        sign = "-" if factor < 0 else "+"
        product = name if abs(factor) == 1 else f"{_factor(name)} * {abs(factor)}"
        text = f"{text} {sign} {product}" if text else ("-" + product if sign == "-" else product)
    if constant or not text:
        text = f"{text} {'-' if constant < 0 else '+'} {abs(constant)}" if text else str(constant)
    return text


def long_enough(text: str, most: int, step: int) -> str:
    """Returns the C expression of an int of at most ``most``, in a type that its product with a step fits."""
    return text if most * abs(step) < 2**31 else f"int64({text})"


def negated(text: str) -> str:
    """Returns the negative of what `linear` wrote."""
    return text[1:] if text.startswith("-") and " " not in text else f"-({text})"


#: A number, a variable, an element of an array.
_TERM = re.compile(r"\w+(?:\[\w+\])*")


def _factor(name: str) -> str:
    whole = name.isidentifier() or (name.startswith(("(", "min(")) and name.endswith(")"))
    return name if whole or _TERM.fullmatch(name) else f"({name})"
