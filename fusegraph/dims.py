"""Dimensions whose sizes vary from call to call."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import gcd, isqrt
from typing import Any

from codegen.sizes import Bounds, Size, dimension
from fusegraph.errors import ShapeError, shown
from fusegraph.values import Unfit, integer

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,30}")
#: The largest size that a dimension has unless it says otherwise.
LARGEST = 2**20


class Dim(Size):
    """A dimension of tensors whose size is known when the graph runs.

    name         letters, digits and underscores; a graph's dimensions of one name are the same dimension.
    min, max     bounds of the size, both included.
    multiple_of  what every size is a multiple of.

    Shapes, strides and attributes of a graph may hold Dims, and their sums, products and quotients.  Raises ShapeError
    for a name or bounds that are not allowed.
    """

    name: str
    min: int
    max: int
    multiple_of: int

    def __new__(cls, name: str, min: int = 1, max: int = LARGEST, multiple_of: int = 1) -> Dim:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ShapeError(f"a Dim's name is a letter, then up to 30 letters, digits and _, got {shown(name)}")
        try:
            low, high, unit = integer(min), integer(max), integer(multiple_of)
        except Unfit as wanted:
            raise ShapeError(f"Dim {name!r}: min, max and multiple_of are each {wanted}") from None
        if unit < 1 or low < 0:
            raise ShapeError(f"Dim {name!r}: multiple_of is at least 1 and min at least 0, got {unit} and {low}")
        low, high = -(-low // unit), high // unit
        if low > high:
            raise ShapeError(f"Dim {name!r}: no multiple of {unit} is in {min} to {max}")
        # Where nothing else is known a graph is described at a size that is divided by nothing and is in the middle.
        base = dimension(name, generic(isqrt(low * high), low, high), Bounds(low, high))
        whole = base * unit
        assert isinstance(whole, Size)
        self = int.__new__(cls, int(whole))
        self.expression, self.dims = whole.expression, whole.dims
        self.name, self.min, self.max, self.multiple_of = name, low * unit, high * unit, unit
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Dim, (self.name, self.min, self.max, self.multiple_of)


def generic(near: int, low: int, high: int) -> int:
    """Returns an odd prime within bounds, as near as possible; without one an odd number, and else what is given."""
    near = sorted((low, near, high))[1]
    for apart in range(64):
        for found in (near + apart, near - apart):
            if low <= found <= high and found > 2 and all(found % d for d in range(2, isqrt(found) + 1)):
                return found
    return next((n for n in (near, near + 1, near - 1) if low <= n <= high and n % 2), near)


def corner(bounds: Mapping[str, Bounds], end: str) -> dict[str, int]:
    """Returns numbers at an end ("min" or "max") of bounds, or as near as primes are, each another one if possible.

    Those at one end have no divisor with those at the other, unless there is but one.
    """
    made: tuple[dict[str, int], dict[str, int]] = {}, {}
    for name, (low, high) in bounds.items():
        ends = [generic(low, low, high), generic(high, low, high)]
        if low < high and (ends[0] == ends[1] or gcd(*ends) > 1):
            ends = _without_divisor(low, high)
        for side, step in ((0, 1), (1, -1)):
            while ends[side] in made[side].values() and (found := _next(ends[side], step, *ends)) not in ends:
                ends[side] = found
            made[side][name] = ends[side]
    return made[end == "max"]


def _without_divisor(low: int, high: int) -> list[int]:
    """Returns two numbers within bounds that no number divides, odd ones if possible, as far apart as possible."""
    last = high if high % 2 or high - low < 2 else high - 1
    odd = [n for n in range(low, last) if n % 2 and gcd(n, last) == 1]
    return [odd[0], last] if odd and last % 2 else [last - 1, last]


def _next(number: int, step: int, low: int, high: int) -> int:
    """Returns the next prime, or one of the bounds."""
    found = number + step
    while low < found < high and any(found % d == 0 for d in range(2, isqrt(found) + 1)):
        found += step
    return found


def bounds_of(sizes: Iterable[int]) -> dict[str, Bounds]:
    """Returns the bounds of the symbols in sizes.  Raises ShapeError if two dimensions of one name differ."""
    found: dict[str, Bounds] = {}
    for size in sizes:
        for name, bounds in size.dims.items() if isinstance(size, Size) else ():
            if found.setdefault(name, bounds) != bounds:
                raise ShapeError(f"two Dims are named {name!r}, of bounds {tuple(found[name])} and {tuple(bounds)}")
    return found
