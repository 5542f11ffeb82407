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
from dataclasses import fields, is_dataclass, replace
from functools import cache, lru_cache, reduce
from itertools import product
from typing import Any, NamedTuple, TypeAlias


class Bounds(NamedTuple):
    """The least and the largest number that a symbol stands for."""

    min: int
    max: int


_Operator: TypeAlias = Callable[[int, int], int]


def _operator(operation: str, compute: _Operator) -> tuple[_Operator, _Operator]:
    """Returns the methods for an operator of Size, Size in front and behind."""

    def method(a: int, b: int) -> int:
        if not isinstance(a, int) or not isinstance(b, int):
            return NotImplemented
        left, right = (x.expression if isinstance(x, Size) else int(x) for x in (a, b))
        made = _expression(operation, left, right)
        if made.is_Integer:
            return int(made)
        found = Size(compute(int(a), int(b)), made, _dims(a) | _dims(b))
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
        return _written(self.expression)

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
    return Size(value, _symbol(name), {name: bounds})


def _is_single(size: Size) -> bool:
    """Tells whether a size is the same number at all choices of sizes, as n // 64 is of n below 64."""
    try:
        low, high = limits(size)
    except ArithmeticError:  # it divides by what may be 0
        return False
    return low == high


def _dims(value: int) -> dict[str, Bounds]:
    return dict(value.dims) if isinstance(value, Size) else {}


# ---- expressions


@cache
def _symbol(name: str) -> Any:
    import sympy

    return sympy.Symbol(name, integer=True, positive=True)


@cache
def _quotient() -> Any:
    """Returns the function of an integer and a divisor that sympy leaves as it is: the quotient, rounded down."""
    import sympy

    return sympy.Function("quotient", integer=True)


@cache
def _remainder() -> Any:
    import sympy

    return sympy.Function("remainder", integer=True)


@cache
def _smaller() -> Any:
    import sympy

    return sympy.Function("smaller", integer=True)


def _is(e: Any, function: Callable[[], Any]) -> bool:
    """Tells whether an expression is one of a function.  Names tell it: sympy takes long to compare functions."""
    return bool(e.func.__name__ == function().__name__)


@cache
def _expression(operation: str, a: Any, b: Any) -> Any:
    """Returns the expression of an operation: sums are written out, quotients that are whole are no quotients."""
    import sympy

    a, b = sympy.sympify(a), sympy.sympify(b)
    if operation in ("add", "sub"):  # of what is written out already: sympy's expand takes far longer
        return a + b if operation == "add" else a + _product(sympy.Integer(-1), b)
    if operation == "mul":
        return _product(a, b)
    if operation == "smaller":
        return sympy.Integer(min(a, b)) if a.is_Integer and b.is_Integer else _smaller()(a, b)
    whole, rest = _divided(a, b)
    if operation == "remainder":
        return rest if rest.is_Integer else _remainder()(rest, b)
    if rest == 0:
        return whole
    if rest.is_Integer and b.is_Integer:
        return whole
    nested = [t for t in sympy.Add.make_args(rest) if _is(t, _quotient) and t.args[1].is_Integer]
    if b.is_Integer and len(nested) == 1:  # (n // 4 + 1) // 2 is (n + 4) // 8
        inner, by = nested[0].args
        return sympy.expand(whole) + _expression("quotient", sympy.expand(inner + by * (rest - nested[0])), by * b)
    if rest.could_extract_minus_sign():  # rounded up: -(-n // 8) is (n + 7) // 8
        return sympy.expand(whole - _quotient()(sympy.expand(b - rest - 1), b))
    return sympy.expand(whole + _quotient()(rest, b))


def _product(a: Any, b: Any) -> Any:
    return (a * b).expand() if a.is_Add or b.is_Add else a * b


def _divided(a: Any, b: Any) -> tuple[Any, Any]:
    """Returns expressions of a quotient and a rest: the terms that a divisor divides, and the others.

    Of a number that is a term, the rest has what is left of it.
    """
    import sympy

    if b.is_Integer:
        whole = rest = sympy.Integer(0)
        for factor, term in (t.as_coeff_Mul() for t in sympy.Add.make_args(a)):
            if term == 1:
                times, left = divmod(int(factor), int(b))
            else:
                times, left = divmod(int(factor), int(b)) if factor % b == 0 else (0, factor)
            whole, rest = whole + times * term, rest + left * term
        return whole, rest
    found = sympy.expand(sympy.cancel(a / b)) if b.is_Add else sympy.Add(*(t / b for t in sympy.Add.make_args(a)))
    return (found, sympy.Integer(0)) if found.is_polynomial() and _integral(found) else (sympy.Integer(0), a)


def _integral(expression: Any) -> bool:
    """Tells whether all coefficients of a polynomial are integers."""
    import sympy

    return all(t.as_coeff_Mul()[0].is_Integer for t in sympy.Add.make_args(sympy.expand(expression)))


#: Every identifier that stands for an expression, and a Size with this expression.
_NAMED: dict[str, Size] = {}
#: What the identifiers of expressions begin with.
PREFIX = "size_"
#: Such an identifier.
MARK = re.compile(rf"\b{PREFIX}\w+")


@cache
def _written(expression: Any) -> str:
    return str(expression)


@cache
def expression(written: str, names: tuple[str, ...]) -> Any:
    """Returns the expression of a text, in symbols of these names."""
    import sympy

    known = {
        "quotient": _quotient(),
        "remainder": _remainder(),
        "smaller": _smaller(),
        **{name: _symbol(name) for name in names},
    }
    return sympy.sympify(written, locals=known)


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


@cache
def _function(expression: Any) -> Callable[[Mapping[str, int]], int]:
    """Returns the function of sizes by name that an expression is."""
    code = compile(f"lambda sizes: {_python(expression)}", "<size>", "eval")
    made: Callable[[Mapping[str, int]], int] = eval(code, {"__builtins__": {}})
    return made


def _python(e: Any) -> str:
    """Returns an expression as Python's."""
    if e.is_Integer:
        return f"({int(e)})"
    if e.is_Symbol:
        return f"sizes[{e.name!r}]"
    parts = [_python(part) for part in e.args]
    if e.is_Add:
        return f"({' + '.join(parts)})"
    if e.is_Mul:
        return f"({' * '.join(parts)})"
    if e.is_Pow:
        return f"({parts[0]} ** {parts[1]})"
    if _is(e, _smaller):
        return f"(({parts[0]}) if ({parts[0]}) < ({parts[1]}) else ({parts[1]}))"
    return f"({parts[0]} {'//' if _is(e, _quotient) else '%'} {parts[1]})"


def value(expression: Any, sizes: Mapping[str, int]) -> int:
    """Returns the value of an expression where dimensions have these sizes, by name."""
    return _function(expression)(sizes)


def most(size: int) -> int:
    """Returns a number that a size is at most within the bounds of its symbols (`limits`).

    What a kernel has room for, in registers or shared memory, is counted so.
    """
    return limits(size)[1]


def least(size: int) -> int:
    """Returns a number that a size is at least within the bounds of its symbols (`limits`)."""
    return limits(size)[0]


def below(a: int, b: int) -> bool:
    """Tells whether one size is less than another at all choices of sizes."""
    return most(a - b) < 0


def smaller(a: int, b: int) -> int:
    """Returns the smaller of two sizes, at all choices of sizes."""
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
    low, high = _limits(expression, dims)
    while (other := _by_remainders(expression)) != expression:
        expression, (least, most) = other, _limits(other, dims)
        low, high = max(low, least), min(high, most)
    return low, high


@cache
def _by_remainders(expression: Any) -> Any:
    """Returns an expression with remainders for quotients where that is whole: n - n % 8 for 8 * (n // 8)."""
    import sympy

    terms = []
    for term in sympy.Add.make_args(expression):
        factor, other = term.as_coeff_Mul()
        if _is(other, _quotient) and other.args[1].is_Integer and factor % other.args[1] == 0:
            term = factor / other.args[1] * (other.args[0] - _remainder()(*other.args))
        terms.append(term)
    return sympy.expand(sympy.Add(*terms))


def _limits(e: Any, dims: Mapping[str, Bounds]) -> tuple[int, int]:
    if e.is_Integer:
        return int(e), int(e)
    if e.is_Symbol:
        return tuple(dims[e.name])  # type: ignore[return-value]
    parts = [_limits(part, dims) for part in e.args]
    if e.is_Add:
        return sum(low for low, _ in parts), sum(high for _, high in parts)
    if e.is_Mul or e.is_Pow:
        combine = operator.mul if e.is_Mul else operator.pow
        ends = reduce(lambda some, more: [combine(a, b) for a in some for b in more], parts[1:], list(parts[0]))
        return min(ends + [0] * (e.is_Pow and parts[0][0] < 0)), max(ends)
    (low, high), (least, most) = parts
    if _is(e, _smaller):
        return min(low, least), min(high, most)
    if least < 1:
        raise ArithmeticError(f"{e} may divide by 0")
    if _is(e, _quotient):
        ends = [a // b for a in (low, high) for b in (least, most)]
        return min(ends), max(ends)
    return (low, high) if low >= 0 and high < least else (0, most - 1)


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

    def moved(size: Size) -> int:
        found = value(size.expression, sizes)
        if not vary:
            return found
        expression, dims = size.expression, size.dims
        if within is not None:
            dims = {name: within[name] for name in dims}
        if not dims.keys().isdisjoint(fixed):
            expression = _with(expression, tuple((name, sizes[name]) for name in dims if name in fixed))
            dims = {name: bounds for name, bounds in dims.items() if name not in fixed}
        return found if expression.is_Integer else Size(found, expression, dims)

    return _changed(part, moved)


def in_units(part: Any, units: Mapping[str, int]) -> Any:
    """Returns the same with symbols replaced by multiples of others, which count in units: n by 8 * n_by_8."""

    def counted(size: Size) -> int:
        if size.dims.keys().isdisjoint(units):
            return size
        known = {n: (f"{n}_by_{k}", k) for n, k in units.items() if n in size.dims}
        expression = _with(size.expression, tuple((n, k * _symbol(new)) for n, (new, k) in known.items()))
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
    return any(e.is_Add for size in sizes_in(part) for e in _parts(size.expression))


def sizes_in(part: Any) -> list[Size]:
    """Returns the Sizes in tuples, lists, dicts and data classes."""
    found: list[Size] = []

    def look(size: Size) -> int:
        found.append(size)
        return size

    _changed(part, look)
    return found


def _parts(expression: Any) -> Iterator[Any]:
    yield expression
    for part in expression.args:
        yield from _parts(part)


def values(part: Any) -> Any:
    """Returns tuples, lists, dicts and data classes with plain integers in place of the Sizes in them."""
    return _changed(part, int)


@cache
def _with(expression: Any, known: tuple[tuple[str, Any], ...]) -> Any:
    """Returns an expression in which some symbols are numbers or other expressions."""
    import sympy

    if expression.is_Symbol:
        return sympy.sympify(dict(known).get(expression.name, expression))
    if expression.is_Integer:
        return expression
    parts = [_with(part, known) for part in expression.args]
    if _is(expression, _quotient):
        return _expression("quotient", *parts)
    if _is(expression, _remainder):
        return _expression("remainder", *parts)
    if _is(expression, _smaller):
        return _expression("smaller", *parts)
    return sympy.expand(expression.func(*parts))


def _changed(part: Any, change: Callable[[Size], int]) -> Any:
    if isinstance(part, Size):
        return change(part)
    if type(part) in (int, str, float, bool) or part is None:
        return part
    if isinstance(part, tuple | list):
        made = [_changed(p, change) for p in part]
        if all(new is old for new, old in zip(made, part)):
            return part
        return type(part)(*made) if hasattr(part, "_fields") else type(part)(made)
    if isinstance(part, dict):
        return {key: _changed(p, change) for key, p in part.items()}
    if is_dataclass(part) and not isinstance(part, type):
        changed = {}
        for field in fields(part):
            old = getattr(part, field.name)
            new = _changed(old, change)
            if new is not old:
                changed[field.name] = new
        return replace(part, **changed) if changed else part
    return part


def ctype(expression: Any, dims: Mapping[str, Bounds]) -> str:
    """Returns the C type that holds an expression at all sizes."""
    return _ctype(expression, tuple(dims.items()))


@lru_cache(1 << 16)
def _ctype(expression: Any, bounds: tuple[tuple[str, Bounds], ...]) -> str:
    return "int32" if max(map(abs, _limits(expression, dict(bounds)))) < 2**31 else "int64"
