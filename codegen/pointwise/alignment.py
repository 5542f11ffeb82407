"""Where rows begin in memory: which operands are aligned together, and how the others are read.

Vectors are aligned in the memory of one operand, an output called the *lead*.  If a row of it begins ``skew`` elements
past the beginning of a vector, that vector is the row's first one: column ``col`` of the row is ``col + skew`` elements
into its vectors.  Operands whose rows have the same skew are aligned where the lead is.  Any other operand's vector is
made by shifting the words around it into place.
"""

from __future__ import annotations

from codegen.expr import Operand
from codegen.iteration import Point, product
from codegen.pointwise.body import plus

#: Fewest bytes of a vector that can be shifted.
LEAST = 4


def known(operand: Operand, vector: int) -> bool:
    """Tells whether an operand's first vector is known to be aligned."""
    return operand.alignment % min(16, vector * operand.dtype.itemsize) == 0


def congruent(operand: Operand, lead: Operand, vector: int) -> bool:
    """Tells whether both begin with a vector, and rows of both differ by whole ones: they are aligned together."""
    steps = zip(operand.strides[:-1], lead.strides[:-1])
    return (
        operand.strides[-1] == 1
        and known(operand, vector)
        and known(lead, vector)
        and all((a - b) % vector == 0 for a, b in steps)
    )


def access(operand: Operand, lead: Operand, vector: int) -> str | None:
    """Returns how a thread reads a vector that is aligned in the lead; None if it cannot.

    It is "scalar" (one value for all), "uniform" (one value), "vector" (as it lies) or "unaligned" (shifted words).
    """
    if not any(operand.strides):
        return "scalar"
    if not operand.strides[-1]:
        return "uniform"
    if congruent(operand, lead, vector):
        return "vector"
    return "unaligned" if operand.strides[-1] == 1 and vector * operand.dtype.itemsize >= LEAST else None


def is_skewed(lead: Operand, vector: int) -> bool:
    """Tells whether rows of the lead may begin between its vectors."""
    return not known(lead, vector) or any(step % vector for step in lead.strides[:-1])


def period(lead: Operand, vector: int) -> int:
    """Returns the distance, in elements, between aligned places in the lead: the skew is less."""
    return vector if known(lead, vector) else min(vector, 16 // lead.dtype.itemsize)


def row(point: Point, operand: Operand) -> str:
    """Returns the C expression of the offset of the first element of a point's row."""
    return point.offset((*operand.strides[:-1], 0))


def skew(lead: Operand, pointer: str, point: Point, vector: int) -> str:
    """Returns the C expression of the skew of a point's row."""
    begin = row(point, lead)
    if not known(lead, vector):
        return f"past_boundary<{vector}>({plus(pointer, begin)})"
    if begin == "0":
        return begin
    return f"{begin if product(begin) else f'({begin})'} % {vector}"
