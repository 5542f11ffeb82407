"""The values in an FX graph: the form of every tensor, the value of every number.

For a graph that was traced with symbolic sizes, they belong to one choice of the symbols.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from codegen.sizes import Size, smaller
from fusegraph.dims import Dim
from fusegraph.dtypes import ALL, DType, float8_e8m0
from fusegraph.frontends.torch.table import Form
from fusegraph.runtime.views import torch_dtype, torch_name
from fusegraph.values import integer

_DTYPES: dict[Any, DType] = {
    torch_dtype(torch, dtype): dtype for dtype in (*ALL, float8_e8m0) if hasattr(torch, torch_name(dtype))
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


def is_symbolic(node: Any) -> bool:
    """Tells whether an input was traced with symbols in its sizes or strides, or is one."""
    return COUNTER not in node.meta and any(isinstance(m, SYMBOLIC) for m in measures(node.meta.get("val")))


def symbols(graph: Any, arguments: Sequence[Any]) -> dict[Any, Any]:
    """Returns the values in a call of the symbols, and expressions of them, in a graph's inputs."""
    found: dict[Any, Any] = {}
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for node, argument in zip(placeholders, arguments):
        for measure, number in zip(measures(node.meta.get("val")), measures(argument)):
            if isinstance(measure, SYMBOLIC):
                found.setdefault(measure.node.expr, number)
    return found


_LIFT = "aten.lift_fresh_copy.default"
#: Operators that take a tensor of rank 0 as they would a number.
_AS_NUMBER = frozenset(
    (
        *("aten.copy.default", "aten.where.self", "aten.pow.Tensor_Tensor"),
        *(f"aten.{n}.Tensor" for n in ("add", "sub", "mul", "div", "eq", "ne", "gt", "ge", "lt", "le")),
    )
)
#: What computes constants of constants, beside functions of elements.
_COPIES = (
    *(_LIFT, "aten._to_copy.default", "prims.convert_element_type.default", "aten.clone.default"),
    *("aten.scalar_tensor.default", "aten.true_divide.Tensor"),
)
#: The key in an input's `meta` of its value, if that is to be taken for a constant.
NUMBER = "fusegraph_number"
#: The key in a node's `meta` that tells of an integer that it differs between calls, and is none in a size.
COUNTER = "fusegraph_counter"


def is_number(node: Any) -> bool:
    """Tells whether an input is a tensor of one float on the CPU, as which torch hands over numbers of Python's."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.ndim:
        return False
    return bool(value.dtype.is_floating_point and value.device.type == "cpu")


def _numbers_in(graph: Any) -> dict[Any, Any]:
    """Returns the values of nodes that are used as numbers, though the program wrote them as tensors of rank 0.

    They are what it wrote into its text, inputs that are told to be constants, and functions of these.  They are on the
    CPU whatever the device of the operators that take them.
    """
    constants: dict[Any, Any] = {}
    with _disable_current_modes():  # while torch traces, its modes take real tensors for mistakes
        for node in graph.nodes:
            value = _constant(graph, node, constants)
            if value is not None:
                constants[node] = value
        numbers: dict[Any, Any] = {}
        for node, value in reversed(constants.items()):
            if node.op != "get_attr" and all(
                user in numbers if user in constants else user.op == "output" or str(user.target) in _AS_NUMBER
                for user in node.users
            ):
                numbers[node] = value.item()
    return numbers


def _constant(graph: Any, node: Any, constants: Mapping[Any, Any]) -> Any:
    """Returns the tensor of rank 0 on the CPU that a node is in every call; None if it is not known to be one."""
    form = node.meta.get("val")
    if not isinstance(form, torch.Tensor) or form.device.type != "cpu" or form.ndim or form.is_complex():
        return None
    if node.op == "placeholder":
        return node.meta.get(NUMBER)
    if node.op == "get_attr":
        found = operator.attrgetter(node.target)(graph.owning_module)
        return found if isinstance(found, torch.Tensor) and any(str(u.target) == _LIFT for u in node.users) else None
    if node.op != "call_function" or not all(n in constants for n in node.all_input_nodes):
        return None
    if not node.all_input_nodes and not all(type(a) in (int, float) for a in node.args):
        return None  # a size that varies
    tags = getattr(node.target, "tags", ())
    if str(node.target) not in _COPIES and (
        torch.Tag.pointwise not in tags or torch.Tag.nondeterministic_seeded in tags
    ):
        return None
    given = torch.fx.node.map_arg((node.args, node.kwargs), constants.__getitem__)
    return node.target(*given[0], **given[1])


def forms_of(graph: Any, values: Mapping[Any, Any]) -> Forms:
    """Returns the forms of a graph's nodes for these values of symbols and of expressions of them."""
    known: dict[Any, int | float | bool] = dict(values)
    single = {expression: value for expression, value in values.items() if expression.is_Symbol}
    vary = any(isinstance(value, Size) for value in values.values())

    def number(size: Any) -> Any:
        if not isinstance(size, SYMBOLIC):
            return size
        expression = size.node.expr
        if expression not in known:
            if vary and isinstance(size, torch.SymInt):
                known[expression] = followed(expression, single)
                return known[expression]
            result = expression.subs(single) if hasattr(expression, "subs") else expression
            if getattr(result, "free_symbols", None):
                raise UnknownSizeError(f"{expression} depends on data")
            kind = int if isinstance(size, torch.SymInt) else float if isinstance(size, torch.SymFloat) else bool
            known[expression] = kind(result)
        return known[expression]

    def form(value: Any) -> Form | None:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return None
        shape, strides = (tuple(integer(number(n)) for n in sizes) for sizes in (value.shape, value.stride()))
        return Form(shape, strides, _DTYPES.get(value.dtype), str(value.device))

    forms: dict[Any, tuple[Form | None, ...] | None] = {}
    numbers: dict[Any, int | float | bool] = _numbers_in(graph)
    for node in graph.nodes:
        value = node.meta.get("val")
        try:
            if node in numbers or COUNTER in node.meta:
                continue
            if isinstance(value, (*SYMBOLIC, int, float)):
                numbers[node] = number(value)
            elif isinstance(value, tuple | list):
                forms[node] = tuple(form(v) for v in value)
            elif isinstance(value, torch.Tensor):
                forms[node] = (form(value),)
        except UnknownSizeError:
            forms[node] = None
    return Forms(forms, numbers)


#: Functions of integers in torch's expressions, by their classes' names.
_FUNCTIONS: Mapping[str, Callable[..., int]] = {
    "Add": lambda *parts: sum(parts),
    "Mul": lambda *parts: prod(parts),
    "Pow": pow,
    "PowByNatural": pow,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Min": lambda *parts: reduce(smaller, parts),
    "Max": lambda *parts: reduce(lambda a, b: a + b - smaller(a, b), parts),
}


def followed(expression: Any, values: Mapping[Any, int]) -> int:
    """Returns the value of an expression of torch's for values of its symbols, Sizes among them.

    Raises UnknownSizeError for one that does not follow from them by the arithmetic of Sizes.
    """
    if expression in values:
        return values[expression]
    if expression.is_Integer:
        return int(expression)
    function = _FUNCTIONS.get(type(expression).__name__)
    if function is None or not all(part.is_integer for part in expression.args):
        raise UnknownSizeError(f"the size {expression} does not follow from others by integer arithmetic")
    return function(*(followed(part, values) for part in expression.args))


#: The most that a dimension may have so that all sizes are compiled at once.
MOST_SIZE = 2**16


def dims_of(graph: Any, values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns Dims for the symbols of a graph, by symbol; ``values`` are those of a call.

    They have the names that a program of torch.export gives them, or else the symbols'.

    Raises UnknownSizeError if other numbers than sizes vary, or for a size that is too large to be compiled ahead.
    """
    inputs = (n for n in graph.nodes if n.op == "placeholder" and COUNTER not in n.meta)
    varying = [m for n in inputs for m in measures(n.meta.get("val")) if isinstance(m, SYMBOLIC)]
    if not all(isinstance(m, torch.SymInt) for m in varying):
        raise UnknownSizeError("numbers vary that are not integers")
    environment = varying[0].node.shape_env
    low, high = dict[Any, int](), dict[Any, int]()
    for symbol in {s for m in varying for s in m.node.expr.free_symbols}:
        bounds = environment.var_to_range.get(symbol)
        ends = (bounds.lower, bounds.upper) if bounds is not None else ()
        least, largest = [int(end) if end.is_Integer else None for end in ends] or (None, None)
        low[symbol], high[symbol] = max(least or 2, 2), min(largest or MOST_SIZE, MOST_SIZE)
        if not low[symbol] <= (size := values.get(symbol, 0)) <= high[symbol]:
            raise UnknownSizeError(f"{symbol} is {size}; {low[symbol]} to {high[symbol]} are compiled ahead")
    names = _names_of(high, environment)
    return {symbol: Dim(names[symbol], low[symbol], high[symbol]) for symbol in high}


def _names_of(symbols: Iterable[Any], environment: Any) -> dict[Any, str]:
    """Returns the names of symbols: those of torch.export's Dims that they stand for, where each has another one."""
    given = getattr(environment, "source_name_to_debug_name", {})
    names = dict[Any, str]()
    for symbol in symbols:
        every = environment.var_to_sources.get(symbol, ()) if given else ()
        texts = [name if isinstance(name := source.name, str) else name() for source in every]
        names[symbol] = next((given[text] for text in texts if text in given), str(symbol))
    return names if len({*names.values()}) == len(names) else {symbol: str(symbol) for symbol in names}


def is_projection(node: Any) -> bool:
    """Tells whether a node selects one of the results of another."""
    return node.op == "call_function" and node.target is operator.getitem
