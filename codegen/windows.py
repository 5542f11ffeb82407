"""Windows along one dimension: which elements the window at a position holds.

``count`` is the most elements that a window has; tap t, from 0 to count - 1, is an element of it or nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Sliding:
    """Tap t of the window at position p is element p * stride + t * dilation - before, if that is one of ``size``."""

    size: int
    taps: int
    stride: int
    dilation: int
    before: int

    @property
    def count(self) -> int:
        return self.taps

    @property
    def reach(self) -> int:
        """Elements from the first to the last of a window, both included."""
        return (self.taps - 1) * self.dilation + 1


@dataclass(frozen=True)
class Covering:
    """The other way round: the windows, of ``size`` that slide as `Sliding` says, which hold the element at a position.

    Tap t of position p is window (p + before) / stride - t, rounded down, if there is one and it holds the element.
    """

    size: int
    taps: int
    stride: int
    dilation: int
    before: int

    @property
    def count(self) -> int:
        return -(-self.reach // self.stride)

    @property
    def reach(self) -> int:
        """Elements from the first to the last of a window, both included."""
        return (self.taps - 1) * self.dilation + 1


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
    def count(self) -> int:
        # One window is as good as another that is a whole number of elements further on.
        period = self.positions // gcd(self.size, self.positions)
        return max(int(self.end(p) - self.start(p)) for p in range(period))


Window: TypeAlias = Sliding | Covering | Adaptive
