"""GELU that a model writes out, as the call of torch that it means.

Written out, torch differentiates it step by step: a dozen steps and roundings each way.  As one call its gradient is
one operator.  An expression of one tensor x is followed as a polynomial of x and of t, the tanh or erf in it: GELU is
x / 2 + x t / 2, with t of x / sqrt(2), or of sqrt(2 / pi) (x + 0.044715 x^3).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from math import isclose, pi, sqrt
from typing import Any

import torch

from fusegraph.frontends.torch.whole_heads import traced_value

#: The operator's name; GELU that an option leaves to torch stays as it is.
NAME = "gelu"
#: The powers of x and of t -> their coefficient.
_Polynomial = Mapping[tuple[int, int], float]
_GELU: _Polynomial = {(1, 0): 0.5, (1, 1): 0.5}
#: The function of x -> what gelu takes for `approximate`, and the function's argument.
_INNER: dict[str, tuple[str, _Polynomial]] = {
    "erf": ("none", {(1, 0): sqrt(0.5)}),
    "tanh": ("tanh", {(1, 0): sqrt(2 / pi), (3, 0): 0.044715 * sqrt(2 / pi)}),
}
#: Coefficients are as exact as models write them; no power is higher than so much; of so many steps are expressions.
_TOLERANCE, _MOST_POWER, _MOST_STEPS = 1e-5, 3, 8


def keep_gelu_whole(module: Any) -> None:
    """Makes GELU that is written out a call of it, in a graph from torch's tracer and in the graphs inside it."""
    for part in module.modules():
        graph = getattr(part, "graph", None)
        if not isinstance(graph, torch.fx.Graph):
            continue
        found = [made for node in graph.nodes if _function(node) in _INNER and (made := _found(node)) is not None]
        for last, x, approximate in found:
            _replace(graph, last, x, approximate)
        if found:
            part.recompile()


def _found(node: Any) -> tuple[Any, Any, str] | None:
    """Returns the result of the GELU of which a node is the tanh or erf, its operand, and how it is approximated."""
    approximate, wanted = _INNER[_function(node)]
    for x in _ancestors(node):
        if _near(_polynomial(node.args[0], x, None), wanted):
            last = next((n for n in _results(node) if _near(_polynomial(n, x, node), _GELU)), None)
            if last is None or not hasattr(traced_value(x), "dtype"):
                continue
            if not any(_writes(user) for n in (*_ancestors(last), *_ancestors(node)) for user in n.users):
                return last, x, approximate
    return None


def _ancestors(node: Any) -> Iterator[Any]:
    """Yields the nodes that a node is computed from in a few steps of arithmetic, the nearest first."""
    waiting = [node]
    for _ in range(2 * _MOST_STEPS):
        waiting = list(dict.fromkeys(x for n in waiting if n is node or _function(n) for x in n.all_input_nodes))
        yield from waiting


def _results(node: Any) -> Iterator[Any]:
    """Yields the nodes that follow from a node in a few steps."""
    waiting = [node]
    for _ in range(_MOST_STEPS // 2):
        waiting = list(dict.fromkeys(user for n in waiting for user in n.users))
        yield from waiting


def _polynomial(node: Any, x: Any, t: Any, steps: int = _MOST_STEPS) -> _Polynomial | None:
    """Returns a value as a polynomial of x and t; None if it is none, or one of too many steps."""
    if node is x:
        return {(1, 0): 1.0}
    if node is t and t is not None:
        return {(0, 1): 1.0}
    if isinstance(node, int | float) and not isinstance(node, bool):
        return {(0, 0): float(node)}
    if not isinstance(node, torch.fx.Node) or node.kwargs or (combine := _ARITHMETIC.get(_function(node))) is None:
        return None
    given = [_polynomial(a, x, t, steps - 1) if steps else None for a in node.args]
    made = combine(*(a for a in given if a is not None)) if len(given) == 2 and None not in given else None
    return made if made is None or max(i + j for i, j in made) <= _MOST_POWER else None


def _sum(a: _Polynomial, b: _Polynomial) -> _Polynomial:
    return {key: a.get(key, 0.0) + b.get(key, 0.0) for key in {**a, **b}}


def _product(a: _Polynomial, b: _Polynomial) -> _Polynomial:
    found: dict[tuple[int, int], float] = {}
    for (i, j), first in a.items():
        for (k, m), second in b.items():
            found[i + k, j + m] = found.get((i + k, j + m), 0.0) + first * second
    return found


def _quotient(a: _Polynomial, b: _Polynomial) -> _Polynomial | None:
    return _product(a, {(0, 0): 1 / b[0, 0]}) if [*b] == [(0, 0)] and b[0, 0] else None


def _power(a: _Polynomial, b: _Polynomial) -> _Polynomial | None:
    exponent = b.get((0, 0))
    if [*b] != [(0, 0)] or exponent not in (1, 2, 3):
        return None
    return a if exponent == 1 else _product(a, _power(a, {(0, 0): exponent - 1}) or {})


_ARITHMETIC: dict[str, Callable[[_Polynomial, _Polynomial], _Polynomial | None]] = {
    "add": _sum,
    "mul": _product,
    "truediv": _quotient,
    "div": _quotient,
    "pow": _power,
}
_FUNCTIONS: dict[Any, str] = {
    **{getattr(operator, name): name for name in ("add", "mul", "truediv", "pow")},
    **{getattr(torch, name): name for name in ("add", "mul", "div", "pow", "tanh", "erf")},
}


def _function(node: Any) -> str:
    """Returns the name of the arithmetic or function that a node is, empty for others."""
    if node.op == "call_method" and node.target in (*_ARITHMETIC, *_INNER):
        return str(node.target)
    return _FUNCTIONS.get(node.target, "") if node.op == "call_function" else ""


def _near(found: _Polynomial | None, wanted: _Polynomial) -> bool:
    """Tells whether a polynomial is another one, but for the digits of its coefficients."""
    keys = {key for key, value in (found or {}).items() if value}
    return keys == {*wanted} and all(isclose((found or {})[k], v, rel_tol=_TOLERANCE) for k, v in wanted.items())


def _replace(graph: Any, last: Any, x: Any, approximate: str) -> None:
    """Writes the call in place of a result; it has the dtype that autocast gave that."""
    with graph.inserting_before(last):
        if (dtype := getattr(traced_value(last), "dtype", None)) not in (None, traced_value(x).dtype):
            x = graph.call_method("to", (x, dtype))
        made = graph.call_function(torch.nn.functional.gelu, (x,), {"approximate": approximate})
    made.meta = dict(last.meta)
    last.replace_all_uses_with(made)
    left = [last]
    while left:
        node = left.pop()
        if not node.users and _function(node):
            left += node.all_input_nodes
            graph.erase_node(node)


def _writes(node: Any) -> bool:
    """Tells whether a node may change its operand in place."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.startswith("i") and hasattr(operator, f"__{name}__")
    return "out" in node.kwargs or name.endswith("_") or in_place
