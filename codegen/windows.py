"""Windows along one dimension: which elements the window at a position holds.

``count`` is the most elements that a window has; tap t, from 0 to count - 1, is an element of it or nothing.

The windows at ``many`` neighbouring positions, the first a multiple of many, span ``span(many)`` elements, from
``origin`` of the first position plus ``shift``; the window at the q-th of them holds the i-th of these if offset
``q_step * q + i_step * i + start`` of its own is from 0 to before ``reach``, and a multiple of ``dilation``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any, TypeAlias


@dataclass(frozen=True)
class _Strided:
    """What windows that slide are told by."""

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

    def patches(self, many: int) -> bool:
        """Returns true if so many neighbouring positions can be taken together."""
        return many >= 1

    def span(self, many: int) -> int:
        return (many - 1) * self.stride + self.reach

    def fresh(self, many: int) -> int:
        """Returns the elements from one group of so many positions to the next."""
        return many * self.stride

    def offset(self) -> tuple[int, int, int]:
        """Returns (q_step, i_step, start)."""
        return -self.stride, 1, 0


@dataclass(frozen=True)
class Covering(_Strided):
    """The other way round: the windows, of ``size`` that slide as `Sliding` says, which hold the element at a position.

    Tap t of position p is window (p + before) / stride - t, rounded down, if there is one and it holds the element.
    """

    @property
    def count(self) -> int:
        return -(-self.reach // self.stride)

    @property
    def shift(self) -> int:
        return self.before // self.stride - self.count + 1

    def patches(self, many: int) -> bool:
        """Returns true if so many neighbouring positions can be taken together: windows begin at the first of each
        group.
        """
        return many % self.stride == 0

    def span(self, many: int) -> int:
        return (many - 1 + self.before % self.stride) // self.stride + self.count

    def fresh(self, many: int) -> int:
        """Returns the windows from one group of so many positions to the next."""
        return many // self.stride

    def offset(self) -> tuple[int, int, int]:
        """Returns (q_step, i_step, start)."""
        return 1, -self.stride, self.before % self.stride + (self.count - 1) * self.stride


@dataclass(frozen=True)
class Adaptive:
    """Windows that share out ``size`` elements among ``positions``: from floor(p size / positions) to before ceil((p +
    1) size / positions).

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
        # One window is as good as another that is a whole number of elements further on.
        period = self.positions // gcd(self.size, self.positions)
        return {int(self.end(p) - self.start(p)) for p in range(period)}

    @property
    def count(self) -> int:
        return max(self._counts)

    @property
    def alike(self) -> bool:
        """Whether all windows have as many elements."""
        return len(self._counts) == 1


Window: TypeAlias = Sliding | Covering | Adaptive
