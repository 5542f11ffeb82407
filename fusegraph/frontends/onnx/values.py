"""Values of tensors that are known before the graph runs, as they depend on constants and shapes alone.

Models compute shapes with nodes (Shape, Gather, Concat, Reshape).  A graph's shapes are fixed when it is built, so
these nodes are evaluated then, by the reference of the op table.  Where sizes vary, arrays hold Sizes: nodes that move
elements move those, and integer arithmetic is theirs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from codegen.sizes import Size, limits
from fusegraph.dtypes import int64
from fusegraph.engines.reference import apply_all
from fusegraph.frontends.onnx.tensors import Array
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.ops.base import Kind
from fusegraph.ops.convert import from_reference, to_reference

#: The most elements of a tensor that is evaluated, as larger ones are not shapes, and of all such tensors together.
MAX_KNOWN = 1 << 20
MAX_KNOWN_IN_ALL = 1 << 25
#: Kinds of nodes that are evaluated: their cost is about that of reading operands and writing results.
_CHEAP = (Kind.POINTWISE, Kind.MOVEMENT, Kind.REDUCTION, Kind.SCAN, Kind.SCATTER, Kind.SORT)


class Values:
    """The values known of one graph's tensors; each is evaluated once."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._found: dict[Tensor, Array] = {}
        self._evaluated = 0
        self._numbers: dict[int, Tensor] = {}

    def of(self, numbers: Sequence[int]) -> Tensor:
        """Returns numbers, Sizes among them, as a tensor of int64 and rank 1."""
        if not any(isinstance(n, Size) for n in numbers):
            return self._graph.constant(np.array(numbers, np.int64))
        graph, parts = self._graph, []
        for n in numbers:
            if n not in self._numbers:
                self._numbers[n] = graph.reshape(graph.constant(n, dtype=int64), [1])
            parts.append(self._numbers[n])
        made = graph.concatenate(*parts, axis=0)
        self._found[made] = np.array([*numbers, None], object)[:-1]
        return made

    def settled(self, tensor: Tensor, operands: Sequence[Tensor | None]) -> Tensor:
        """Returns a constant for a tensor that is made of sizes that vary, but does not vary itself; others as is."""
        if not any(x in self._found and self._found[x].dtype == object for x in operands if x is not None):
            return tensor
        value = self.known(tensor)
        return tensor if value is None or tensor.value is not None else self._graph.constant(value)

    def known(self, tensor: Tensor) -> Array | None:
        """Returns a tensor's value; None if it is not known, or varies."""
        found = self.followed(tensor)
        return None if found is None or found.dtype == object else found

    def followed(self, tensor: Tensor) -> Array | None:
        """Returns a tensor's value, an array of objects if Sizes are among its numbers.

        It is None if the value depends on an input, on nodes that are too costly to evaluate, or on sizes that vary by
        more than arithmetic.
        """
        stack = [tensor]
        while stack:
            top = stack[-1]
            if top in self._found:
                stack.pop()
                continue
            if top.value is not None:
                self._found[top] = top.value
                continue
            node = self._graph.producer(top)
            if node is None or node.kind not in _CHEAP or any(_large(t) for t in node.outputs):
                return None
            if self._evaluated > MAX_KNOWN_IN_ALL:
                return None
            missing = [t for t in node.values if t not in self._found]
            if missing:
                stack += missing
            elif any(self._found[t].dtype == object for t in node.values):
                found = _of_sizes(node, [self._found.get(t) for t in node.inputs])
                if found is None:
                    return None
                self._found[top] = found
            else:
                self._evaluate(node)
        return self._found[tensor]

    def _evaluate(self, node: Node) -> None:
        operands = [
            to_reference(self._found[t], t.dtype)
            if t in self._found
            else np.broadcast_to(t.dtype.numpy.type(0), t.shape)
            for t in node.inputs
        ]
        for tensor, value in zip(node.outputs, apply_all(node, operands)):
            self._found[tensor] = from_reference(np.broadcast_to(value, tensor.shape), tensor.dtype)
            self._evaluated += tensor.size

    def roots(self, tensor: Tensor) -> tuple[str, ...]:
        """Returns the names of the inputs of the graph that a tensor's value depends on."""
        seen, stack, found = {tensor}, [tensor], []
        while stack:
            top = stack.pop()
            node = self._graph.producer(top)
            if node is None and not top.is_constant:
                found.append(top.name)
            for operand in node.values if node is not None else ():
                if operand not in seen:
                    seen.add(operand)
                    stack.append(operand)
        return tuple(found)


# ---- Sizes


def _large(tensor: Tensor) -> bool:
    """Tells whether a tensor is too large to be evaluated, or may be."""
    return any(isinstance(n, Size) for n in tensor.shape) or tensor.size > MAX_KNOWN


def _of_sizes(node: Node, operands: Sequence[Array | None]) -> Array | None:
    """Returns what a node makes of integers, Sizes among them; None for what is no arithmetic, or not decided."""
    kind, floats = node.op.kind, any(t.dtype.is_float for t in (*node.inputs, *node.outputs))
    if len(node.outputs) > 1 or floats or any(x is None for x in operands):
        return None
    given = [np.asarray(x) for x in operands]
    if any(x.dtype == object and name in node.op.integers for x, name in zip(given, node.op.names(len(given)))):
        return None  # a position
    if kind is Kind.MOVEMENT:
        made = _moved(node, given)
    elif kind is Kind.POINTWISE and (function := _ARITHMETIC.get(node.op.name)) is not None:
        made = _each(function, given, node.output.shape)
    elif kind is Kind.REDUCTION and (reduce := _REDUCTIONS.get(node.attributes["mode"])) is not None:
        made = reduce.reduce(given[0], axis=tuple(node.attributes["axes"]), keepdims=True)
        made = np.asarray(made, object).reshape(node.output.shape)
    else:
        return None
    if made is None:
        return None
    if any(isinstance(n, Size) for n in made.flat):
        return None if node.output.dtype.is_bool else made
    return made.astype(node.output.dtype.numpy)


def _moved(node: Node, operands: Sequence[Array]) -> Array | None:
    """Returns what movement makes of elements: they are numbered, twice, and what is no number of one is a fill."""
    pool: list[Any] = []
    for x in operands:
        pool += x.flat if x.dtype == object else ()
    ends = []
    for first in (0, len(pool)):
        numbered, begin = list[Array](), first
        for x in operands:
            if x.dtype == object:
                numbered.append(np.arange(begin, begin + x.size).reshape(x.shape))
                begin += x.size
            else:
                numbered.append(x)
        (moved,) = apply_all(node, numbered)
        ends.append(np.broadcast_to(moved, node.output.shape))
    made = np.empty(node.output.shape, object)
    for place in np.ndindex(*node.output.shape):
        low, high = (int(end[place]) for end in ends)
        made[place] = pool[low] if high != low else low
    return made


def _each(function: Callable[..., Any], operands: Sequence[Array], shape: tuple[int, ...]) -> Array | None:
    made = np.empty(shape, object)
    spread = [np.broadcast_to(x, shape) for x in operands]
    for place in np.ndindex(*shape):
        numbers: list[Any] = [x[place] for x in spread]
        try:
            found = function(*(n if isinstance(n, Size) else int(n) for n in numbers))
        except ArithmeticError:
            return None
        if found is None:
            return None
        made[place] = found
    return made


def _decided(holds: Callable[[int, int], bool]) -> Callable[[int, int], bool | None]:
    """Returns a comparison that is None where sizes decide."""

    def compare(a: int, b: int) -> bool | None:
        low, high = limits(a - b)
        found = {holds(n, 0) for n in (low, min(max(low, 0), high), high)}
        return found.pop() if len(found) == 1 else None

    return compare


def _larger(a: int, b: int) -> int | None:
    low, high = limits(a - b)
    return a if low >= 0 else b if high <= 0 else None


def _divided(function: Callable[[int, int], int]) -> Callable[[int, int], int | None]:
    """Returns a division that is None where C and Python differ, or where the divisor may be 0."""
    return lambda a, b: function(a, b) if limits(a)[0] >= 0 and limits(b)[0] > 0 else None


def _smaller(a: int, b: int) -> int | None:
    low, high = limits(a - b)
    return b if low >= 0 else a if high <= 0 else None


#: Ops of integers that follow sizes that vary -> their functions.
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "identity": lambda a: a,
    "neg": operator.neg,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "quotient": _divided(operator.floordiv),
    "mod": _divided(operator.mod),
    "max": _larger,
    "min": _smaller,
    "binary_select": lambda a, b, mask: a if mask else b,
    "logical_not": lambda a: not a,
    "logical_and": lambda a, b: bool(a and b),
    "logical_or": lambda a, b: bool(a or b),
    **{
        f"cmp_{name}": _decided(holds)
        for name, holds in (
            ("eq", operator.eq),
            ("neq", operator.ne),
            ("lt", operator.lt),
            ("le", operator.le),
            ("gt", operator.gt),
            ("ge", operator.ge),
        )
    },
}
_REDUCTIONS: dict[str, Any] = {"add": np.add, "mul": np.multiply}
