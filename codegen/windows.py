"""Windows along one dimension: which elements the window at a position holds.

``count`` is the most elements that a window has; tap t, from 0 to count - 1, is one of its elements or nothing.

The windows at ``many`` neighbouring positions, the first a multiple of many, span ``span(many)`` elements, from
``origin`` of the first position plus ``shift``.  The window at the q-th position holds the i-th of these elements if
the offset ``q_step * q + i_step * i + start`` is at least 0, less than ``reach``, and a multiple of ``dilation``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any, TypeAlias

from codegen.sizes import Size, most


@dataclass(frozen=True)
class _Strided:
    """The fields of windows that slide."""

    size: int
    taps: int
    stride: int
    dilation: int
    before: int

    @property
    def reach(self) -> int:
        """Elements from the first to the last of a window, both included."""
        return (self.taps - 1) * self.dilation + 1


@dataclass(frozen=True)
class Sliding(_Strided):
    """Tap t of the window at position p is element p * stride + t * dilation - before, if that is one of ``size``."""

    @property
    def count(self) -> int:
        return self.taps

    @property
    def shift(self) -> int:
        return -self.before

    @property
    def unit(self) -> int:
        """The fewest neighbouring positions that can be taken together: others are multiples of them."""
        return 1

    def span(self, many: int) -> int:
        return (many - 1) * self.stride + self.reach

    def fresh(self, many: int) -> int:
        """Returns how many elements lie between the beginnings of one group of ``many`` positions and of the next."""
        return many * self.stride

    def offset(self) -> tuple[int, int, int]:
        """Returns (q_step, i_step, start)."""
        return -self.stride, 1, 0


@dataclass(frozen=True)
class Covering(_Strided):
    """The inverse of `Sliding`: of ``size`` windows that slide like that, those that hold the element at a position.

    Tap t of position p is window (p + before) / stride - t, rounded down, if there is one and it holds the element.
    """

    @property
    def count(self) -> int:
        return -(-self.reach // self.stride)

    @property
    def shift(self) -> int:
        return self.before // self.stride - self.count + 1

    @property
    def unit(self) -> int:
        """The fewest neighbouring positions that can be taken together: a window begins with each group of them."""
        return self.stride

    def span(self, many: int) -> int:
        return (many - 1 + self.before % self.stride) // self.stride + self.count

    def fresh(self, many: int) -> int:
        """Returns how many windows lie between the beginnings of one group of ``many`` positions and of the next."""
        return many // self.stride

    def offset(self) -> tuple[int, int, int]:
        """Returns (q_step, i_step, start)."""
        return 1, -self.stride, self.before % self.stride + (self.count - 1) * self.stride


@dataclass(frozen=True)
class Adaptive:
    """Windows that share out ``size`` elements among ``positions``: window p is from floor(p size / positions) to
    before ceil((p + 1) size / positions).

    The windows that hold an element are Adaptive with the two numbers exchanged.
    """

    size: int
    positions: int

    def start(self, p: Any) -> Any:
        return p * self.size // self.positions

    def end(self, p: Any) -> Any:
        return ((p + 1) * self.size + self.positions - 1) // self.positions

    @property
    def _counts(self) -> set[int]:
        # The windows repeat after a whole number of elements.
        period = self.positions // gcd(self.size, self.positions)
        return {int(self.end(p) - self.start(p)) for p in range(period)}

    @property
    def _varies(self) -> bool:
        return isinstance(self.size, Size) or isinstance(self.positions, Size)

    @property
    def count(self) -> int:
        if self._varies:
            return most(-(-self.size // self.positions)) + 1
        return max(self._counts)

    @property
    def alike(self) -> bool:
        """Whether all windows have the same number of elements."""
        return not self._varies and len(self._counts) == 1


Window: TypeAlias = Sliding | Covering | Adaptive
