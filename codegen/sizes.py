"""Sizes that vary: integers that know how they follow from dimensions whose sizes are given when a kernel runs.

A `Size` is an int, its value at one choice of sizes, and an expression of these sizes.  Arithmetic keeps the
expression, so shapes, strides, grids and tensor maps follow from the dimensions by themselves; a kernel that prints a
Size takes it as a parameter.  What Python makes of its value alone (a loop that is written out, a logarithm) is a plain
number: it is the same in the kernels of two choices of sizes only if it does not depend on them, which
`fusegraph.ranges` checks.

Two Sizes are equal if their expressions and values are, so that what is remembered of one is not taken for another end
of a range; a Size equals no number, and counts as true.  So a size that varies is no multiple of 8 unless
it always is one.  Order is that of the values.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, lru_cache
from itertools import product
from math import gcd
from typing import Any, NamedTuple, TypeAlias

from codegen.records import changed
from codegen.size_expressions import (
    by_remainders,
    cases,
    combined,
    limits_of,
    parts_of,
    readable,
    replaced,
    symbol,
    value,
    written,
)


class Bounds(NamedTuple):
    """The least and the largest number that a symbol stands for."""

    min: int
    max: int


_NO_DIMS: Mapping[str, Bounds] = {}
_Operator: TypeAlias = Callable[[int, int], int]


def _operator(operation: str, compute: _Operator) -> tuple[_Operator, _Operator]:
    """Returns the methods for an operator of Size, Size in front and behind."""

    def method(a: int, b: int) -> int:
        if not isinstance(a, int) or not isinstance(b, int):
            return NotImplemented
        left, dims = (a.expression, a.dims) if isinstance(a, Size) else (int(a), _NO_DIMS)
        right, others = (b.expression, b.dims) if isinstance(b, Size) else (int(b), dims)
        made = combined(operation, left, right)
        if made.is_Integer:
            return int(made)
        found = Size(compute(int(a), int(b)), made, _together(dims, others))
        return int(found) if operation == "quotient" and _is_single(found) else found

    return method, lambda a, b: method(b, a)


class Size(int):
    """An integer that depends on dimensions.

    expression  a sympy expression.  A symbol with the name of a dimension is that one's size, divided by what it is
                always a multiple of.
    dims        bounds of the symbols by name.
    """

    expression: Any
    dims: Mapping[str, Bounds]

    def __new__(cls, value: int, expression: Any, dims: Mapping[str, Bounds]) -> Size:
        self = int.__new__(cls, value)
        self.expression, self.dims = expression, dims
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Size, (int(self), self.expression, dict(self.dims))

    def __repr__(self) -> str:
        return _identifier(self)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    @property
    def written(self) -> str:
        """The expression as text, of which `expression` makes it again."""
        return written(self.expression)

    def __hash__(self) -> int:
        return hash(self.expression)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Size) and self.expression == other.expression and int(self) == int(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return True

    __add__, __radd__ = _operator("add", int.__add__)
    __sub__, __rsub__ = _operator("sub", int.__sub__)
    __mul__, __rmul__ = _operator("mul", int.__mul__)
    __floordiv__, __rfloordiv__ = _operator("quotient", int.__floordiv__)
    __mod__, __rmod__ = _operator("remainder", int.__mod__)

    def __divmod__(self, other: int) -> tuple[int, int]:
        return self // other, self % other

    def __rdivmod__(self, other: int) -> tuple[int, int]:
        return other // self, other % self

    def __lshift__(self, other: int) -> int:
        return self * (1 << other)

    def __rshift__(self, other: int) -> int:
        return self // (1 << other)

    def __pow__(self, other: int, modulo: None = None) -> int:  # type: ignore[override]
        made: int = 1
        for _ in range(other):
            made *= self
        return made

    def __neg__(self) -> int:
        return 0 - self

    def __pos__(self) -> int:
        return self

    def __abs__(self) -> int:
        return self if int(self) >= 0 else -self


def dimension(name: str, value: int, bounds: Bounds) -> Size:
    """Returns what a symbol stands for."""
    return Size(value, symbol(name), {name: bounds})


def _is_single(size: Size) -> bool:
    """Tells whether a size is the same number at all choices of sizes, as n // 64 is of n below 64."""
    try:
        low, high = limits(size)
    except ArithmeticError:  # it divides by what may be 0
        return False
    return low == high


def _together(some: Mapping[str, Bounds], others: Mapping[str, Bounds]) -> Mapping[str, Bounds]:
    """Returns the bounds of both, as one of the mappings that are there if they are the same."""
    return some if some is others or some == others else {**some, **others} if some else others


#: Every identifier that stands for an expression, and a Size with this expression.
_NAMED: dict[str, Size] = {}
#: What the identifiers of expressions begin with.
PREFIX = "size_"
#: Such an identifier.
MARK = re.compile(rf"\b{PREFIX}\w+")


def _identifier(size: Size) -> str:
    """Returns the C identifier that stands for a Size's expression in kernels."""
    name = _spelled(size.expression)
    _NAMED[name] = size
    return name


@cache
def _spelled(expression: Any) -> str:
    text = str(expression).replace("quotient", "div").replace("remainder", "mod").replace("-", "minus ")
    stem = name = PREFIX + re.sub(r"\W+", "_", text).strip("_")[:60]
    count = 1
    while _SPELLED.setdefault(name, expression) != expression:
        count += 1
        name = f"{stem}_{count}"
    return name


#: The expression of every identifier.
_SPELLED: dict[str, Any] = {}


def named(text: str) -> list[Size]:
    """Returns Sizes for which identifiers in a text stand, in the order in which they are first named."""
    return [_NAMED[name] for name in dict.fromkeys(MARK.findall(text)) if name in _NAMED]


def in_words(text: str) -> str:
    """Returns a text with the expressions themselves in place of identifiers that stand for them."""
    return MARK.sub(lambda m: readable(_NAMED[m[0]].expression) if m[0] in _NAMED else m[0], text)


def most(size: int) -> int:
    """Returns a number that a size is at most within the bounds of its symbols (`limits`).

    What a kernel has room for, in registers or shared memory, is counted so.
    """
    return limits(size)[1] if isinstance(size, Size) else size


def least(size: int) -> int:
    """Returns a number that a size is at least within the bounds of its symbols (`limits`)."""
    return limits(size)[0]


def below(a: int, b: int) -> bool:
    """Tells whether one size is less than another at all choices of sizes."""
    return most(a - b) < 0


def smaller(a: int, b: int) -> int:
    """Returns the smaller of two sizes, at all choices of sizes."""
    if not isinstance(a, Size) and not isinstance(b, Size):
        return a if a <= b else b
    if most(a - b) <= 0:
        return a
    return b if most(b - a) <= 0 else _smaller_of(a, b)


def larger(a: int, b: int) -> int:
    """Returns the larger of two sizes, at all choices of sizes."""
    return -smaller(-a, -b)


_smaller_of, _ = _operator("smaller", min)


def dividing(size: int, most: int) -> int:
    """Returns the largest power of two up to ``most``, which is one, that divides a size at all choices of sizes."""
    while size % most != 0:
        most //= 2
    return most


def aligned(most: int, *steps: int) -> int:
    """Returns the largest power of two up to ``most``, which is one, that divides steps at all choices of sizes."""
    for step in steps:
        most = dividing(step, most) if isinstance(step, Size) else gcd(most, step)
    return most


def limits(size: int) -> tuple[int, int]:
    """Returns two numbers between which a size is at all sizes of its symbols.  They may be further apart than needed.

    Raises ArithmeticError for a divisor that may be 0 or negative.
    """
    if not isinstance(size, Size):
        return size, size
    return _narrowed(size.expression, tuple(size.dims.items()))


@lru_cache(1 << 16)
def _narrowed(expression: Any, bounds: tuple[tuple[str, Bounds], ...]) -> tuple[int, int]:
    dims = dict(bounds)
    low, high = limits_of(expression, dims)
    while (other := by_remainders(expression)) != expression:
        expression, (least, most) = other, limits_of(other, dims)
        low, high = max(low, least), min(high, most)
    for is_smaller, *both in cases(expression):
        of_both, ends = min if is_smaller else max, [_narrowed(case, bounds) for case in both]
        low, high = max(low, of_both(least for least, _ in ends)), min(high, of_both(most for _, most in ends))
    return low, high


def at(
    part: Any,
    sizes: Mapping[str, int],
    *,
    vary: bool = False,
    fixed: Collection[str] = (),
    within: Mapping[str, Bounds] | None = None,
) -> Any:
    """Returns tuples, lists, dicts and data classes with other values of the Sizes in them, at these sizes by symbol.

    They are plain integers; with ``vary`` Sizes still, but for those that depend on no symbol but the ``fixed`` ones,
    and with bounds ``within`` others, if given.
    """

    return _changed(part, _moved(sizes, vary, fixed, within))


def moving(part: Any) -> Callable[..., Any]:
    """Returns the function that `at` is for these tuples, lists, dicts and data classes: it has looked for Sizes."""
    path = _path(part)
    if path is None:
        return lambda sizes, **how: part
    return lambda sizes, *, vary=False, within=None: path(_moved(sizes, vary, (), within))


def _moved(
    sizes: Mapping[str, int], vary: bool, fixed: Collection[str], within: Mapping[str, Bounds] | None
) -> Callable[[Size], int]:
    """Returns the function that `at` applies to Sizes."""

    def moved(size: Size) -> int:
        found = value(size.expression, sizes)
        if not vary:
            return found
        expression, dims = size.expression, size.dims
        if within is not None:
            dims = {name: within[name] for name in dims}
        if not dims.keys().isdisjoint(fixed):
            expression = replaced(expression, tuple((name, sizes[name]) for name in dims if name in fixed))
            dims = {name: bounds for name, bounds in dims.items() if name not in fixed}
        return found if expression.is_Integer else Size(found, expression, dims)

    return moved


def in_units(part: Any, units: Mapping[str, int]) -> Any:
    """Returns the same with symbols replaced by multiples of others, which count in units: n by 8 * n_by_8."""

    def counted(size: Size) -> int:
        if size.dims.keys().isdisjoint(units):
            return size
        known = {n: (f"{n}_by_{k}", k) for n, k in units.items() if n in size.dims}
        expression = replaced(size.expression, tuple((n, k * symbol(new)) for n, (new, k) in known.items()))
        dims = {
            known[n][0] if n in known else n: Bounds(-(-b.min // units[n]), b.max // units[n]) if n in known else b
            for n, b in size.dims.items()
        }
        return Size(int(size), expression, dims)

    return _changed(part, counted)


def varies(part: Any) -> bool:
    """Tells whether a Size is in tuples, lists, dicts and data classes."""
    return bool(sizes_in(part))


def corners(part: Any) -> Iterator[dict[str, int]]:
    """Yields the smallest and the largest numbers of the symbols in tuples, lists, dicts and data classes, by name."""
    dims = {name: bounds for size in sizes_in(part) for name, bounds in size.dims.items()}
    for ends in product(*dims.values()):
        yield dict(zip(dims, ends))


def has_sums(part: Any) -> bool:
    """Tells whether a Size in tuples, lists, dicts and data classes is a sum, such as n + 1."""
    return any(e.is_Add for size in sizes_in(part) for e in parts_of(size.expression))


def sizes_in(part: Any) -> list[Size]:
    """Returns the Sizes in tuples, lists, dicts and data classes."""
    found: list[Size] = []

    def look(size: Size) -> int:
        found.append(size)
        return size

    _changed(part, look)
    return found


def values(part: Any) -> Any:
    """Returns tuples, lists, dicts and data classes with plain integers in place of the Sizes in them."""
    return _changed(part, int)


def _changed(part: Any, change: Callable[[Size], int]) -> Any:
    kind = type(part)
    if kind in _WITHOUT_PARTS:
        return part
    if isinstance(part, Size):
        return change(part)
    if isinstance(part, tuple | list):
        made = [p if type(p) in _WITHOUT_PARTS else _changed(p, change) for p in part]
        if all(map(operator.is_, made, part)):
            return part
        return kind(*made) if hasattr(part, "_fields") else kind(made)
    if isinstance(part, dict):
        return {key: _changed(p, change) for key, p in part.items()}
    others = {}
    for name in _fields_of(kind):
        old = getattr(part, name)
        if type(old) not in _WITHOUT_PARTS and (new := _changed(old, change)) is not old:
            others[name] = new
    return changed(part, **others) if others else part


def _path(part: Any) -> Callable[[Callable[[Size], int]], Any] | None:
    """Returns the function that applies one to the Sizes in a part, and makes the part of what comes of them; None if
    there are none.
    """
    if type(part) in _WITHOUT_PARTS:
        return None
    if isinstance(part, Size):
        return lambda change: change(part)
    kind, parts = type(part), part
    if isinstance(part, tuple | list):
        parts = dict(enumerate(part))
    elif not isinstance(part, dict):
        parts = {name: getattr(part, name) for name in _fields_of(kind)}
    paths = {key: path for key, p in parts.items() if (path := _path(p)) is not None}
    if not paths:
        return None

    def made(change: Callable[[Size], int]) -> Any:
        new = {key: path(change) for key, path in paths.items()}
        if not isinstance(part, tuple | list):
            return {**part, **new} if isinstance(part, dict) else changed(part, **new)
        every = [new.get(n, p) for n, p in parts.items()]
        return kind(*every) if hasattr(part, "_fields") else kind(every)

    return made


def _fields_of(kind: type) -> tuple[str, ...]:
    """Returns the names of the fields of a data class; none of another class."""
    if (names := _FIELDS.get(kind)) is None:
        names = _FIELDS[kind] = tuple(f.name for f in fields(kind)) if is_dataclass(kind) else ()
    return names


_WITHOUT_PARTS = frozenset({int, str, float, bool, type(None)})
#: The fields of classes that were met, none of those that are no data classes: to ask a class takes longer.
_FIELDS: dict[type, tuple[str, ...]] = {}


def ctype(expression: Any, dims: Mapping[str, Bounds]) -> str:
    """Returns the C type that holds an expression at all sizes."""
    return _ctype(expression, tuple(dims.items()))


@lru_cache(1 << 16)
def _ctype(expression: Any, bounds: tuple[tuple[str, Bounds], ...]) -> str:
    return "int32" if max(map(abs, limits_of(expression, dict(bounds)))) < 2**31 else "int64"
