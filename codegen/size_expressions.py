"""Expressions of sizes: sums, products, quotients and remainders of dimensions, by sympy.

They are written out: equal expressions are equal objects of sympy, and quotients that are whole are no quotients.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from functools import cache, reduce
from typing import Any


@cache
def symbol(name: str) -> Any:
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


#: Every expression that was made, by itself: to find it again is fast where equal ones are one object.
_MADE: dict[Any, Any] = {}


@cache
def combined(operation: str, a: Any, b: Any) -> Any:
    """Returns the expression of an operation: sums are written out, quotients that are whole are no quotients."""
    made = _combined(operation, a, b)
    return _MADE.setdefault(made, made)


def _combined(operation: str, a: Any, b: Any) -> Any:
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
        return rest if rest == 0 or (rest.is_Integer and b.is_Integer) else _remainder()(rest, b)
    if rest == 0:
        return whole
    if rest.is_Integer and b.is_Integer:
        return whole
    nested = [t for t in sympy.Add.make_args(rest) if _is(t, _quotient) and t.args[1].is_Integer]
    if b.is_Integer and len(nested) == 1:  # (n // 4 + 1) // 2 is (n + 4) // 8
        inner, by = nested[0].args
        return sympy.expand(whole) + combined("quotient", sympy.expand(inner + by * (rest - nested[0])), by * b)
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


@cache
def written(expression: Any) -> str:
    return str(expression)


@cache
def readable(expression: Any) -> str:
    """Returns an expression as people write it: n // 2 + 1, min(16, n)."""
    text = str(_printer().doprint(expression))
    return text[1:-1] if _is(expression, _quotient) or _is(expression, _remainder) else text


@cache
def _printer() -> Any:
    from sympy.printing.str import StrPrinter

    class Printer(StrPrinter):  # type: ignore[misc]
        def _print_Function(self, e: Any) -> str:
            parts = [self._print(part) for part in e.args]
            if _is(e, _smaller):
                return f"min({', '.join(parts)})"
            sides = (text if part.is_Atom else f"({text})" for part, text in zip(e.args, parts))
            return f"({(' // ' if _is(e, _quotient) else ' % ').join(sides)})"

    return Printer()


@cache
def expression(written: str, names: tuple[str, ...]) -> Any:
    """Returns the expression of a text, in symbols of these names."""
    import sympy

    known = {
        "quotient": _quotient(),
        "remainder": _remainder(),
        "smaller": _smaller(),
        **{name: symbol(name) for name in names},
    }
    return sympy.sympify(written, locals=known)


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


@cache
def by_remainders(expression: Any) -> Any:
    """Returns an expression with remainders for quotients where that is whole: n - n % 8 for 8 * (n // 8)."""
    import sympy

    terms = []
    for term in sympy.Add.make_args(expression):
        factor, other = term.as_coeff_Mul()
        if _is(other, _quotient) and other.args[1].is_Integer and factor % other.args[1] == 0:
            term = factor / other.args[1] * (other.args[0] - _remainder()(*other.args))
        terms.append(term)
    return sympy.expand(sympy.Add(*terms))


def limits_of(e: Any, dims: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    if e.is_Integer:
        return int(e), int(e)
    if e.is_Symbol:
        return tuple(dims[e.name])  # type: ignore[return-value]
    parts = [limits_of(part, dims) for part in e.args]
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


@cache
def cases(expression: Any) -> tuple[tuple[bool, Any, Any], ...]:
    """Returns two expressions for each smaller of two among the terms of one, which is the smaller (True) of these, or
    the larger.
    """
    import sympy

    found = []
    for term in expression.args if expression.is_Add else (expression,):
        count, atom = term.as_coeff_Mul()
        if _is(atom, _smaller):
            found.append((bool(count > 0), *(sympy.expand(expression - term + count * part) for part in atom.args)))
    return tuple(found)


@cache
def replaced(expression: Any, known: tuple[tuple[str, Any], ...]) -> Any:
    """Returns an expression in which some symbols are numbers or other expressions."""
    made = _replaced(expression, known)
    return _MADE.setdefault(made, made)


def _replaced(expression: Any, known: tuple[tuple[str, Any], ...]) -> Any:
    import sympy

    if expression.is_Symbol:
        return sympy.sympify(dict(known).get(expression.name, expression))
    if expression.is_Integer:
        return expression
    parts = [replaced(part, known) for part in expression.args]
    if _is(expression, _quotient):
        return combined("quotient", *parts)
    if _is(expression, _remainder):
        return combined("remainder", *parts)
    if _is(expression, _smaller):
        return combined("smaller", *parts)
    return sympy.expand(expression.func(*parts))


def parts_of(expression: Any) -> Iterator[Any]:
    yield expression
    for part in expression.args:
        yield from parts_of(part)
