"""Bit fields of one tensor that are joined: programs unpack two numbers of 4 bits a byte like this.

    stack([x & 15, x >> 4], -1).reshape(n, 2 * k)

Every field is the same bits further up, so that all of them are one expression of a number of the field, whose operand
is a view of x.  Unlike a concatenation, any kernel computes that where it is needed: weights stay as they are packed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from typing import TypeAlias

from codegen.sizes import varies
from fusegraph.dtypes import DType
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind, Role
from fusegraph.passes.rewrite import Rewrite, Rewritten, named, replaced
from fusegraph.pattern import Found, Is, Made, op

#: No more parts are joined by one: those of a word of 64 bits, bit by bit.
MOST_PARTS = 64
#: Parts are compared by so many nodes one behind the other.
MOST_NODES = 12


@dataclass(frozen=True)
class _Field:
    """Bits of a tensor's elements: ((x << left) >> right) & mask, and all bits without a mask."""

    x: Tensor
    left: int = 0
    right: int = 0
    mask: int | None = None


@dataclass(frozen=True)
class _Fields:
    """A field of each part; the numbers of bits grow by as many from part to part."""

    first: _Field
    left: int
    right: int
    dtype: DType


@dataclass(frozen=True)
class _Applied:
    """A pointwise node of each part, alike but for their operands."""

    node: Node
    operands: tuple[_Parts, ...]


#: What the parts are: fields, the results of nodes alike, or all the same tensor.
_Parts: TypeAlias = "_Fields | _Applied | Tensor"


@dataclass(frozen=True)
class _Joined:
    """What is joined: the parts, which have one shape, along a new dimension in front of one of theirs."""

    parts: _Parts
    count: int
    shape: tuple[int, ...]
    axis: int


def join_fields(graph: Graph, _: Options = DEFAULTS) -> Rewritten:
    """Computes bit fields of one tensor that are joined by one expression of the number of the field."""
    pieces: dict[Tensor, _Pieces] = {}
    for node in graph.nodes:
        if (found := _pieces(node, pieces)) is not None and len(found[1]) <= MOST_PARTS:
            pieces[node.output] = found
    return replaced(graph, lambda node: _joined(graph, node, pieces), _write)


#: The axis along which a tensor is joined, and what it is joined of.
_Pieces: TypeAlias = tuple[int, tuple[Tensor, ...]]


def _pieces(node: Node, known: Mapping[Tensor, _Pieces]) -> _Pieces | None:
    """Returns what a concatenation, or a slice of one, is joined of: programs fill a tensor piece by piece, too."""
    if node.op.role is Role.CONCATENATE:
        axis = node.attributes["axis"]
        inner = [known.get(t, (axis, (t,))) for t in node.inputs]
        return axis, tuple(p for t, (a, parts) in zip(node.inputs, inner) for p in (parts if a == axis else (t,)))
    if node.op.role is not Role.SLICE or node.inputs[0] not in known:
        return None
    axis, parts = known[node.inputs[0]]
    cut = [d for d, (size, n) in enumerate(zip(node.inputs[0].shape, node.output.shape)) if size != n]
    if cut != [axis] or any(step != 1 for step in node.attributes["steps"]):
        return None
    ends = list(accumulate((t.shape[axis] for t in parts), initial=0))
    first, stop = node.attributes["starts"][axis], node.attributes["stops"][axis]
    if first not in ends or stop not in ends:
        return None
    return axis, parts[ends.index(first) : ends.index(stop)]


def _joined(graph: Graph, node: Node, pieces: Mapping[Tensor, _Pieces]) -> _Joined | None:
    """Returns the parts of a concatenation; None if they are not fields of one tensor, or made of such."""
    if node.op.role is not Role.CONCATENATE or not node.output.size or varies(node.output.shape):
        return None
    axis, parts = pieces.get(node.output, (0, ()))
    outer = prod(node.output.shape[:axis])
    if len(parts) < 2 or len({t.shape for t in parts}) > 1:
        return None
    while len(inner := _reshaped(graph, parts)) == len(parts) and len({t.shape for t in inner}) == 1:
        parts = inner
    shape = parts[0].shape
    at = next((d for d in range(len(shape) + 1) if prod(shape[:d]) == outer), None)
    found = None if at is None else _parts(graph, parts, shape, MOST_NODES)
    return None if at is None or found is None or isinstance(found, Tensor) else _Joined(found, len(parts), shape, at)


def _reshaped(graph: Graph, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns what tensors are reshapes of, without those that are none."""
    nodes = (graph.producer(t) for t in tensors)
    return tuple(n.inputs[0] for n in nodes if n is not None and n.op.role is Role.RESHAPE)


def _parts(graph: Graph, tensors: Sequence[Tensor], shape: tuple[int, ...], depth: int) -> _Parts | None:
    """Returns what tensors of one shape, or that broadcast to it, are; None if they are nothing alike."""
    first = tensors[0]
    if all(t is first for t in tensors):
        return first
    if first.size == 1 and len({(t.dtype, t.shape, _bytes(t)) for t in tensors}) == 1 and first.is_constant:
        return first
    fields = _fields([_field(graph, t, MOST_NODES) for t in tensors], first.dtype)
    if fields is not None:
        return fields if fields.first.x.shape == shape else None
    nodes = [graph.producer(t) for t in tensors]
    model = nodes[0]
    if not depth or model is None or model.kind is not Kind.POINTWISE or model.op.random or not model.op.reads_values:
        return None
    if not all(_is_alike(n, model) for n in nodes):
        return None
    operands = [_parts(graph, each, shape, depth // 2) for each in zip(*(n.inputs for n in nodes if n is not None))]
    known = tuple(p for p in operands if p is not None)
    if len(known) < len(operands) or all(isinstance(p, Tensor) for p in known):
        return None
    return _Applied(model, known)


def _bytes(tensor: Tensor) -> bytes | None:
    """Returns the value of a small constant, with the sign of a zero."""
    return tensor.value.tobytes() if tensor.value is not None and tensor.size == 1 else None


def _is_alike(node: Node | None, model: Node) -> bool:
    """Tells whether a node does with its operands what another one does."""
    if node is None or node.op is not model.op or dict(node.attributes) != dict(model.attributes):
        return False
    types = [[t.dtype for t in (*n.inputs, n.output)] for n in (node, model)]
    return types[0] == types[1]


# ---- one field


def _is_number(tensor: Tensor) -> bool:
    return tensor.value is not None and tensor.size == 1


_NUMBER = Is("number", _is_number)
_AND, _RIGHT, _LEFT = (make("x", _NUMBER) for make in (op.bitwise_and, op.shift_right, op.shift_left))


def _field(graph: Graph, tensor: Tensor, depth: int) -> _Field | None:
    """Returns the bits that a tensor is; None unless it has integers, and its own dtype's number of bits."""
    if not tensor.dtype.is_int:
        return None
    found = _shifted(graph, tensor, depth - 1) if depth else None
    return _Field(tensor) if found is None else found


def _shifted(graph: Graph, tensor: Tensor, depth: int) -> _Field | None:
    """Returns the bits of a tensor that a node selects; None if it does not."""
    bits = tensor.dtype.bits
    if (match := _match(_AND, graph, tensor, depth)) is not None:
        inner, number = match
        mask = number if inner.mask is None else inner.mask & number
        return replace(inner, mask=mask) if _fits(mask, tensor.dtype) else None
    if (match := _match(_RIGHT, graph, tensor, depth)) is not None:
        inner, number = match
        if number < 0 or inner.right + number >= bits:
            return None
        return replace(inner, right=inner.right + number, mask=None if inner.mask is None else inner.mask >> number)
    if (match := _match(_LEFT, graph, tensor, depth)) is not None:
        inner, number = match
        plain = not inner.right and inner.mask is None and number >= 0 and inner.left + number < bits
        return replace(inner, left=inner.left + number) if plain else None
    return None


def _match(pattern: Made, graph: Graph, tensor: Tensor, depth: int) -> tuple[_Field, int] | None:
    """Returns the operand of a node that shifts or masks it by a number, as a field, and that number."""
    node = graph.producer(tensor)
    if node is None:
        return None
    for found in pattern.of(Found(graph), node):
        x, number = found["x"], found["number"].value
        inner = _field(graph, x, depth) if x.dtype == tensor.dtype and x.shape == tensor.shape else None
        if inner is not None and number is not None and found["number"].dtype.is_int:
            return inner, int(number.reshape(-1)[0])
    return None


def _fits(number: int, dtype: DType) -> bool:
    return int(dtype.min) <= number <= int(dtype.max)


# ---- fields of all parts


def _fields(found: Sequence[_Field | None], dtype: DType) -> _Fields | None:
    """Returns fields of one tensor that differ in where they begin alone; None if they are others."""
    every = [_normal(f, dtype) for f in found if f is not None and f.x.dtype == dtype]
    if len(every) < len(found) or any(f.x is not every[0].x or f.mask != every[0].mask for f in every):
        return None
    steps = [{b - a for a, b in pairwise(each)} for each in ([f.left for f in every], [f.right for f in every])]
    if any(len(s) > 1 for s in steps) or steps == [{0}, {0}]:
        return None
    (left,), (right,) = steps
    return _Fields(every[0], left, right, dtype)


def _normal(field: _Field, dtype: DType) -> _Field:
    """Returns a field with a mask where it has as few bits as that says: all that a shift leaves of no sign."""
    if dtype.min < 0 or field.left:
        return field
    left = int(dtype.max) >> field.right
    return replace(field, mask=left if field.mask is None else field.mask & left)


# ---- writing


def _write(rewrite: Rewrite, node: Node, joined: _Joined) -> None:
    graph, out = rewrite.graph, node.output
    found = _Writer(rewrite, node.name, joined).write(joined.parts)
    graph.add_node(Node(TABLE["reshape"], (found,), {"shape": out.shape}, rewrite.result(out)))


class _Writer:
    """Writes parts over one more dimension."""

    def __init__(self, rewrite: Rewrite, name: str, joined: _Joined) -> None:
        self._rewrite, self._name, self._axis, self._shape = rewrite, name, joined.axis, joined.shape
        self._wide = (*self._shape[: self._axis], joined.count, *self._shape[self._axis :])

    def write(self, parts: _Parts) -> Tensor:
        """Returns the parts over one more dimension."""
        if isinstance(parts, Tensor):
            return self._spread(parts)
        if isinstance(parts, _Fields):
            return self._fields(parts)
        node = parts.node
        made = self._rewrite.graph.apply(node.op, tuple(map(self.write, parts.operands)), dict(node.attributes))
        if made.dtype != node.output.dtype:
            made = self._apply("identity", made, dtype=node.output.dtype)
        return named(made, node.output.name, "of each")

    def _apply(self, name: str, *operands: Tensor | int, **attributes: object) -> Tensor:
        return named(self._rewrite.graph.apply(TABLE[name], operands, attributes), self._name, "field")

    def _spread(self, tensor: Tensor) -> Tensor:
        """Returns a tensor that is the same for all parts, so that it broadcasts to them."""
        x, behind = self._rewrite.new[tensor], len(self._shape) - self._axis
        if tensor.rank < behind or tensor.size == 1:
            return x
        at = tensor.rank - behind
        return self._apply("reshape", x, shape=(*tensor.shape[:at], 1, *tensor.shape[at:]))

    def _fields(self, fields: _Fields) -> Tensor:
        first = fields.first
        x = self._apply("broadcast", self._spread(first.x), shape=self._wide)
        places = self._apply("gen_index", x, axis=self._axis)
        if places.dtype != fields.dtype:
            places = self._apply("identity", places, dtype=fields.dtype)
        for name, start, step in (("shift_left", first.left, fields.left), ("shift_right", first.right, fields.right)):
            if start or step:
                x = self._apply(name, x, self._bits(places, start, step))
        return x if first.mask is None else self._apply("bitwise_and", x, first.mask)

    def _bits(self, places: Tensor, start: int, step: int) -> Tensor | int:
        """Returns start + step times the number of the part; nothing in it is negative."""
        if not step:
            return start
        grown = places if abs(step) == 1 else self._apply("mul", places, abs(step))
        if not start:
            return grown
        return self._apply("add", grown, start) if step > 0 else self._apply("sub", start, grown)
