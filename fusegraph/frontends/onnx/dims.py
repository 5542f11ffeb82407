"""Sizes that a model leaves open: Dims for them, and a check that a graph follows from these.

An importer is Python, which may make plain numbers of sizes.  So a model is read at three choices of sizes: if the
graphs differ in more than these, or shapes are others than the ops make, nothing is known of sizes between.  Such a
model is read for each choice of sizes when it comes.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import zip_longest

from onnx import ValueInfoProto

from codegen.sizes import Bounds, Size, at
from fusegraph.dims import Dim, bounds_of, corner
from fusegraph.errors import ModelError
from fusegraph.graph import Graph
from fusegraph.sized_graphs import check_shapes

#: Sizes of dimensions by name, or shapes of inputs by name.
Given = Mapping[str, int | tuple[int, ...]]
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


def with_dims(inputs: Iterable[ValueInfoProto], given: Given) -> dict[str, int | tuple[int, ...]]:
    """Returns sizes with a Dim for every named dimension of inputs that has none, and shapes for those with others.

    A dimension may be named after a sum, difference, product or quotient of others ("past + length").  Dims are named
    after the dimensions, those without a name after the input and the dimension's number.
    """
    found = dict(given)
    names = _Names(found.values())
    declared = [v for v in inputs if v.name not in given and v.type.tensor_type.HasField("shape")]
    open_ = {
        dim.dim_param: None
        for value in declared
        for dim in value.type.tensor_type.shape.dim
        if dim.dim_param and dim.dim_param not in given
    }
    for simple in (True, False):
        for text in open_:
            if _is_name(text) == simple:
                size = None if simple else _calculated(text, found)
                found[text] = names.dim(text) if size is None else size
    for value in declared:
        dims = value.type.tensor_type.shape.dim
        if any(not dim.dim_param and not dim.HasField("dim_value") for dim in dims):
            shape = []
            for number, dim in enumerate(dims):
                own = dim.dim_value if dim.HasField("dim_value") else found.get(dim.dim_param)
                shape.append(own if isinstance(own, int) else names.dim(f"{value.name}_{number}"))
            found[value.name] = tuple(shape)
    return found


def shape_of(value: ValueInfoProto, sizes: Given) -> tuple[int, ...]:
    """Returns the shape of an input, given sizes for all of its dimensions.  Raises ModelError for a list of sizes."""
    given = sizes.get(value.name)
    if given is not None:
        return (given,) if isinstance(given, int) else given
    found = []
    for dim in value.type.tensor_type.shape.dim:
        size = dim.dim_value if dim.HasField("dim_value") else sizes[dim.dim_param]
        if not isinstance(size, int):
            raise ModelError(f"dimension {dim.dim_param[:80]!r} has one size, the one given is {list(size)}")
        found.append(size)
    return tuple(found)


class _Names:
    """Makes Dims with names of their own."""

    def __init__(self, given: Iterable[int | tuple[int, ...]]) -> None:
        self._taken = {name.lower() for size in _sizes(given) if isinstance(size, Size) for name in size.dims}

    def dim(self, text: str) -> Dim:
        stem = name = re.sub(r"\W+", "_", text, flags=re.ASCII).lstrip("_0123456789")[:24].rstrip("_") or "n"
        count = 1
        while name.lower() in self._taken:
            count += 1
            name = f"{stem}_{count}"
        self._taken.add(name.lower())
        return Dim(name)


def _is_name(text: str) -> bool:
    return re.fullmatch(r"\w+", text) is not None


def _calculated(text: str, sizes: Given) -> int | None:
    """Returns the value of an expression of sizes by name; None for what is none."""

    def value(part: ast.expr) -> int:
        if isinstance(part, ast.BinOp):
            return _OPERATORS[type(part.op)](value(part.left), value(part.right))
        if isinstance(part, ast.Constant) and type(part.value) is int:
            return part.value
        found = sizes[part.id] if isinstance(part, ast.Name) else None
        if not isinstance(found, int):
            raise LookupError(part)
        return found

    try:
        return value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, LookupError, ArithmeticError, RecursionError):
        return None


def _sizes(given: Iterable[int | tuple[int, ...]]) -> Iterator[int]:
    for size in given:
        yield from size if isinstance(size, tuple) else (size,)


def vary(given: Given) -> bool:
    """Tells whether Sizes are among sizes."""
    return any(isinstance(size, Size) for size in _sizes(given.values()))


def difference(build: Callable[[Given], Graph], given: Given, graph: Graph) -> str:
    """Returns why a graph does not follow from its Dims; empty if it does.  Raises what building it may raise."""
    bounds = bounds_of(_sizes(given.values()))
    for end in ("min", "max"):  # one of them may be what the graph was built at
        other = build(at(dict(given), corner(bounds, end), vary=True))
        for one, another in zip_longest(_facts(graph), _facts(other), fillvalue=("the number of nodes", "")):
            if one != another:
                return f"{one[0]} follows from sizes by more than their arithmetic"
        check_shapes(graph, corner(bounds, end))
    return ""


def _facts(graph: Graph) -> Iterator[tuple[str, str]]:
    """Yields what a graph consists of, with a name; Sizes are their expressions."""
    for tensor in graph.tensors.values():
        yield tensor.name, f"{tensor.dtype} {tensor.shape} {None if tensor.value is None else tensor.value.tobytes()!r}"
    for node in graph.nodes:
        attributes = sorted(node.attributes.items())
        yield node.name, f"{node.op.name} {[t.name for t in (*node.inputs, *node.outputs)]} {attributes}"


def some_sizes(given: Given) -> Iterator[dict[str, int]]:
    """Yields sizes of the Dims, by symbol, at which a model may be read: different ones, equal ones, the smallest."""
    bounds = bounds_of(_sizes(given.values()))
    yield {name: _near(7 + 2 * number, b) for number, (name, b) in enumerate(bounds.items())}
    yield {name: _near(8, b) for name, b in bounds.items()}
    yield {name: b.min for name, b in bounds.items()}


def _near(number: int, bounds: Bounds) -> int:
    return min(max(number, bounds.min), bounds.max)
