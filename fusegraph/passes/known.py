"""What is known of a tensor before a graph runs: a range, and whether its elements are linear in their positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from codegen import sizes
from fusegraph.dtypes import DType
from fusegraph.graph import Tensor

#: The most conditions of one bool that are followed.
MOST_CONDITIONS = 6


@dataclass(frozen=True)
class Linear:
    """start + sum over dimensions of step * position; the step of a dimension of size 1 is 0."""

    start: int
    steps: tuple[int, ...]

    def plus(self, other: Linear, sign: int = 1) -> Linear:
        return Linear(self.start + sign * other.start, tuple(a + sign * b for a, b in zip(self.steps, other.steps)))

    def times(self, factor: int, more: int = 0) -> Linear:
        return Linear(self.start * factor + more, tuple(step * factor for step in self.steps))

    def extremes(self, shape: Sequence[int]) -> tuple[int, int]:
        """Returns the least and the largest value over a shape that is not empty, at all sizes that it may have."""
        low = high = self.start
        for end in (step * (size - 1) for step, size in zip(self.steps, shape)):
            least, most = sizes.limits(end)
            low += end if most <= 0 else min(least, 0)
            high += end if least >= 0 else max(most, 0)
        return sizes.least(low), sizes.most(high)


@dataclass(frozen=True)
class Known:
    """What is known of a tensor; bools are 0 and 1.

    least, most  the range of its elements at all sizes that vary; of floats, which are known only where they are one
                 number, that number.
    linear       how they follow from the position; None if that is not known.
    conditions   of bools: an element is true exactly if none of these is negative; None if there are no such.
    """

    least: Any
    most: Any
    linear: Linear | None = None
    conditions: tuple[Linear, ...] | None = None

    @property
    def value(self) -> Any:
        """The value of all elements, a Size if it varies; None if they may differ."""
        if self.least == self.most:
            return self.least
        return self.linear.start if self.linear is not None and not any(self.linear.steps) else None

    @property
    def truth(self) -> bool | None:
        """Whether all elements count as true, or none does; None if that is not known."""
        if self.least > 0 or self.most < 0:
            return True
        return False if self.value == 0 else None


TRUE, FALSE, EITHER = Known(1, 1), Known(0, 0), Known(0, 1)


def limits(dtype: DType) -> tuple[int, int]:
    """Returns the least and the largest value of a dtype of integers or bools."""
    if dtype.is_bool:
        return 0, 1
    signed = not dtype.name.startswith("u")
    return (-(1 << dtype.bits - 1), (1 << dtype.bits - 1) - 1) if signed else (0, (1 << dtype.bits) - 1)


def fitting(known: Known | None, tensor: Tensor) -> Known:
    """Returns what is known of a tensor, with the narrowest range; nothing but its dtype if it may wrap around."""
    least, most = limits(tensor.dtype)
    if known is None:
        return Known(least, most)
    if known.linear is not None:
        known = Known(*known.linear.extremes(tensor.shape), known.linear)
    if known.conditions is not None:
        known = all_of(known.conditions, tensor.shape)
    if known.least < least or known.most > most:
        return Known(least, most)
    return known if known.value is None else Known(known.least, known.most, constant(known.value, tensor.rank))


def constant(value: int, rank: int) -> Linear:
    return Linear(value, (0,) * rank)


def all_of(conditions: Sequence[Linear], shape: Sequence[int]) -> Known:
    """Returns the bool that is true where none of the conditions is negative."""
    open_: list[Linear] = []
    for condition in dict.fromkeys(conditions):
        least, most = condition.extremes(shape)
        if most < 0:
            return FALSE
        if least < 0:
            open_.append(condition)
    return Known(0, 1, None, tuple(open_)) if 0 < len(open_) <= MOST_CONDITIONS else EITHER if open_ else TRUE
