"""The values in an FX graph: the form of every tensor, the value of every number.

For a graph that was traced with symbolic sizes, they belong to one choice of the symbols.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fusegraph.dtypes import ALL, DType
from fusegraph.frontends.torch.table import Form

_DTYPES: dict[Any, DType] = {
    getattr(torch, name): dtype
    for dtype in ALL
    if hasattr(torch, name := {"float8_e4m3": "float8_e4m3fn"}.get(dtype.name, dtype.name))
}


class UnknownSizeError(Exception):
    """Raised for a size that depends on the data."""


@dataclass(frozen=True)
class Forms:
    """What is known of a graph's nodes.

    forms    the forms of each node's results; None if sizes depend on data, or for a result that is not a tensor.
    numbers  the values of nodes that are numbers.
    """

    forms: Mapping[Any, tuple[Form | None, ...] | None]
    numbers: Mapping[Any, int | float | bool]

    def of(self, node: Any) -> Form | None:
        """Returns the form of a node that is one tensor; None for others."""
        known = self.forms.get(node)
        return known[0] if known is not None and len(known) == 1 else None


#: torch's types of numbers that differ between calls.
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def measures(value: Any) -> tuple[Any, ...]:
    """Returns the numbers that may be symbolic in a value: a tensor's sizes and strides, or a number itself.

    Other values, such as the tokens that order effects (None in a call), have none.
    """
    if isinstance(value, torch.Tensor):
        return (*value.shape, *(value.stride() if value.layout is torch.strided else ()))
    return (value,) if isinstance(value, (*SYMBOLIC, int, float)) else ()


def is_symbolic(graph: Any) -> bool:
    """Tells whether a graph was traced with symbols in its inputs' sizes, strides or numbers."""
    inputs = (n.meta.get("val") for n in graph.nodes if n.op == "placeholder")
    return any(isinstance(measure, SYMBOLIC) for value in inputs for measure in measures(value))


def symbols(graph: Any, arguments: Sequence[Any]) -> dict[Any, Any]:
    """Returns the values in a call of the symbols, and expressions of them, in a graph's inputs."""
    found: dict[Any, Any] = {}
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for node, argument in zip(placeholders, arguments):
        for measure, number in zip(measures(node.meta.get("val")), measures(argument)):
            if isinstance(measure, SYMBOLIC):
                found.setdefault(measure.node.expr, number)
    return found


#: Operators that take a tensor of rank 0 as they would a number.
_LIFT = "aten.lift_fresh_copy.default"
_AS_NUMBER = (_LIFT, "aten.copy.default", "aten.where.self")


def _number_in(graph: Any, node: Any, numbers: Mapping[Any, Any]) -> Any:
    """Returns the number in a tensor of rank 0 that the program wrote into its text, if it is used as one; else None.

    It is on the CPU whatever the device of the operators that take it.
    """
    if str(node.target) != _LIFT or any(str(user.target) not in _AS_NUMBER for user in node.users):
        return None
    if node.args[0].op != "get_attr":
        return numbers.get(node.args[0])
    value = operator.attrgetter(node.args[0].target)(graph.owning_module)
    plain = isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.ndim == 0
    if not plain or value.is_complex():
        return None
    with _disable_current_modes():  # while torch traces, its modes take real tensors for mistakes
        return value.item()


def forms_of(graph: Any, values: Mapping[Any, Any]) -> Forms:
    """Returns the forms of a graph's nodes for these values of symbols and of expressions of them."""
    known: dict[Any, int | float | bool] = dict(values)
    single = {expression: value for expression, value in values.items() if expression.is_Symbol}

    def number(size: Any) -> Any:
        if not isinstance(size, SYMBOLIC):
            return size
        expression = size.node.expr
        if expression not in known:
            result = expression.subs(single) if hasattr(expression, "subs") else expression
            if getattr(result, "free_symbols", None):
                raise UnknownSizeError
            kind = int if isinstance(size, torch.SymInt) else float if isinstance(size, torch.SymFloat) else bool
            known[expression] = kind(result)
        return known[expression]

    def form(value: Any) -> Form | None:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return None
        shape, strides = (tuple(int(number(n)) for n in sizes) for sizes in (value.shape, value.stride()))
        return Form(shape, strides, _DTYPES.get(value.dtype), str(value.device))

    forms: dict[Any, tuple[Form | None, ...] | None] = {}
    numbers: dict[Any, int | float | bool] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        try:
            written = _number_in(graph, node, numbers)
            if written is not None:
                numbers[node] = written
            elif isinstance(value, (*SYMBOLIC, int, float)):
                numbers[node] = number(value)
            elif isinstance(value, tuple | list):
                forms[node] = tuple(form(v) for v in value)
            elif isinstance(value, torch.Tensor):
                forms[node] = (form(value),)
        except UnknownSizeError:
            forms[node] = None
    return Forms(forms, numbers)


def is_projection(node: Any) -> bool:
    """Tells whether a node selects one of the results of another."""
    return node.op == "call_function" and node.target is operator.getitem
