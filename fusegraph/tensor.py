"""Tensors and nodes: the edges and vertices of an operation graph."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from fusegraph.dtypes import DType
from fusegraph.errors import AttributeValueError, GraphError, ShapeError, shown
from fusegraph.operations import Operations
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind, Op, TensorType
from fusegraph.ops.movement import part
from fusegraph.values import Unfit, integer, optional, position

_NAME = re.compile(r"[\w .:/\[\](),+@#-]{1,200}")


def check_name(what: str, name: object) -> str:
    """Returns a name as given.

    Raises GraphError unless it is a text of 1 to 200 letters, digits, spaces and ``_ . : / [ ] ( ) , + @ # -``.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise GraphError(
            f"{what} name {shown(name)} is not allowed: "
            "use 1 to 200 letters, digits, spaces or any of _ . : / [ ] ( ) , + @ # -"
        )
    return name


def _operator(op: str, truth: str | None = None, reflected: bool = False) -> Callable[[Tensor, Any], Tensor]:
    """Returns the method of an operator of two operands; ``truth`` names the op for booleans.

    Passes recognise masks by the logical ops, so that booleans do not take the bitwise ones.
    """

    def method(self: Tensor, other: Any) -> Tensor:
        operands = (other, self) if reflected else (self, other)
        return self._op(truth if truth and all(map(_is_truth, operands)) else op, *operands)

    return method


@dataclass(frozen=True, eq=False)
class Position:
    """A place in memory that is data: element 0 of ``index`` times ``step`` elements further on.

    Where that is not in [0, size), nothing is written.
    """

    index: Tensor
    step: int
    size: int


class Tensor:
    """An edge of the graph: name, logical shape, strides in elements, dtype; virtual unless an input or output.

    Tensors are made by a Graph, compare by identity, and support ``+ - * / @ ** abs``, unary minus, ``> >= < <=``,
    and, bit by bit as in NumPy, ``& | ^ ~`` of integers and booleans and ``<< >>`` of integers.  Other operands may be
    Python numbers or NumPy arrays.  Use ``graph.cmp_eq`` for equality.
    """

    __array_ufunc__ = None  # NumPy arrays on the left of an operator defer to ours

    def __init__(
        self,
        graph: Operations,
        name: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: DType,
        value: np.ndarray[Any, Any] | None = None,
    ) -> None:
        self.graph = graph
        self.name: str = name
        self.shape: tuple[int, ...] = shape
        self.strides: tuple[int, ...] = strides
        self.dtype: DType = dtype
        self.value = value
        #: The tensor in whose memory it lies, and its first element there: itself and 0 unless `passes.views` changes
        #: them.  That pass keeps in own_strides the strides that it would have in memory of its own.
        self.base: Tensor = self
        self.start: int = 0
        self.own_strides: tuple[int, ...] | None = None
        #: Where it begins besides, if only the call tells.  Such tensors are written, not read.
        self.position: Position | None = None

    @property
    def type(self) -> TensorType:
        return TensorType(self.shape, self.dtype)

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, without gaps."""
        return self.dtype.nbytes(self.size)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the elements that differ in their place: one that strides of 0 repeat counts once."""
        return self.dtype.nbytes(math.prod(n for n, step in zip(self.shape, self.strides) if step))

    @property
    def is_constant(self) -> bool:
        return self.value is not None

    def __repr__(self) -> str:
        return f"<Tensor {self.name!r} {self.dtype} {list(self.shape)} strides {list(self.strides)}>"

    def __bool__(self) -> bool:
        raise GraphError(f"tensor {self.name!r} has no truth value while the graph is being built; use binary_select")

    def _op(self, name: str, *operands: Any, **attributes: Any) -> Tensor:
        return self.graph.apply(TABLE[name], operands, attributes)

    __add__ = _operator("add")
    __radd__ = _operator("add", reflected=True)
    __sub__ = _operator("sub")
    __rsub__ = _operator("sub", reflected=True)
    __mul__ = _operator("mul")
    __rmul__ = _operator("mul", reflected=True)
    __truediv__ = _operator("div")
    __rtruediv__ = _operator("div", reflected=True)
    __pow__ = _operator("pow")
    __rpow__ = _operator("pow", reflected=True)
    __matmul__ = _operator("matmul")
    __rmatmul__ = _operator("matmul", reflected=True)
    __gt__ = _operator("cmp_gt")
    __ge__ = _operator("cmp_ge")
    __lt__ = _operator("cmp_lt")
    __le__ = _operator("cmp_le")
    __and__ = _operator("bitwise_and", "logical_and")
    __rand__ = _operator("bitwise_and", "logical_and", reflected=True)
    __or__ = _operator("bitwise_or", "logical_or")
    __ror__ = _operator("bitwise_or", "logical_or", reflected=True)
    __xor__ = _operator("bitwise_xor")
    __rxor__ = _operator("bitwise_xor", reflected=True)
    __lshift__ = _operator("shift_left")
    __rlshift__ = _operator("shift_left", reflected=True)
    __rshift__ = _operator("shift_right")
    __rrshift__ = _operator("shift_right", reflected=True)

    def __neg__(self) -> Tensor:
        return self._op("neg", self)

    def __abs__(self) -> Tensor:
        return self._op("abs", self)

    def __invert__(self) -> Tensor:
        return self._op("logical_not" if _is_truth(self) else "bitwise_not", self)

    __iter__ = None  # else Python would iterate by __getitem__, adding a slice for each element

    def __getitem__(self, key: Any) -> Tensor:
        """Returns what basic indexing selects, as in NumPy: by slices (negative steps too), integers, ``...`` and None.

        One of the indices may be a tensor of integers: `Graph.gather` along this axis.  Raises AttributeValueError for
        other keys, ShapeError for integers out of range and for too many indices.
        """
        return _index(self, key)

    def reshape(self, *shape: Any) -> Tensor:
        """Returns `Graph.reshape` of this tensor; the shape is one argument, or an argument for each size."""
        given = shape[0] if len(shape) == 1 and hasattr(type(shape[0]), "__iter__") else shape
        return self._op("reshape", self, shape=given)

    def transpose(self, *perm: Any) -> Tensor:
        """Returns `Graph.transpose` of this tensor; the permutation is one argument, or several; default: reversed."""
        given = perm[0] if len(perm) == 1 and hasattr(type(perm[0]), "__iter__") else perm or None
        return self._op("transpose", self, perm=given)

    @property
    def T(self) -> Tensor:
        """This tensor with its dimensions in reverse order."""
        return self.transpose()


def _index(x: Tensor, key: Any) -> Tensor:
    """Returns what an index selects: a slice of the tensor, reshaped."""
    keys = [_key(x, one) for one in (key if isinstance(key, tuple) else (key,))]
    used = sum(one is not None and one is not Ellipsis for one in keys)
    if used > x.rank:
        raise ShapeError(f"{used} indices for {x.name!r}, which has {x.rank} dimensions {list(x.shape)}")
    if sum(one is Ellipsis for one in keys) > 1:
        raise AttributeValueError(f"{x.name!r} is indexed with several '...'")
    if Ellipsis not in keys:
        keys.append(Ellipsis)
    place = keys.index(Ellipsis)
    keys[place : place + 1] = [slice(None)] * (x.rank - used)
    if sum(isinstance(one, Tensor) for one in keys) > 1:
        raise AttributeValueError(f"{x.name!r} is indexed with several tensors; one takes elements along one axis")
    bounds: list[slice] = []
    shape: list[int] = []
    taken: tuple[Tensor, int] | None = None
    for one in keys:
        if one is None:
            shape.append(1)
            continue
        size = x.shape[len(bounds)]
        if isinstance(one, Tensor):
            taken, one = (one, len(shape)), slice(None)
        if isinstance(one, slice):
            if one.step == 0:
                raise AttributeValueError(f"{x.name!r} is sliced with a step of 0")
            bounds.append(one)
            shape.append(part(size, one.start, one.stop, one.step)[1])
        else:
            if not -size <= one < size:
                raise ShapeError(
                    f"index {one} is out of range for dimension {len(bounds)} of {x.name!r} {list(x.shape)}"
                )
            one = one + size if one < 0 else one
            bounds.append(slice(one, one + 1))
    if any(part(size, one.start, one.stop, one.step) != (0, size, 1) for one, size in zip(bounds, x.shape)):
        x = x.graph.slice(x, *([getattr(one, key) for one in bounds] for key in ("start", "stop", "step")))
    x = x if x.shape == tuple(shape) else x.graph.reshape(x, shape)
    return x if taken is None else x.graph.gather(x, taken[0], axis=taken[1])


def _key(x: Tensor, one: Any) -> Any:
    """Returns an index as None, ``...``, an int or a slice of ints."""
    try:
        if isinstance(one, slice):
            return slice(*(optional(position)(end) for end in (one.start, one.stop, one.step)))
        if isinstance(one, Tensor) and one.dtype.is_int:
            return one
        return one if one is None or one is Ellipsis else integer(one)
    except Unfit:
        raise AttributeValueError(
            f"{x.name!r} is indexed by integers, slices, ..., None and a tensor of integers, got {shown(one)}"
        ) from None


def _is_truth(operand: Any) -> bool:
    """Returns true if an operand of an operator is boolean."""
    if isinstance(operand, Tensor):
        return operand.dtype.is_bool
    return isinstance(operand, bool | np.bool_) or (isinstance(operand, np.ndarray) and operand.dtype == np.bool_)


class Node:
    """An op of the table applied to tensors.  Named after its result, the first where there are several."""

    __slots__ = ("attributes", "inputs", "kind", "op", "output", "outputs")

    def __init__(self, op: Op, inputs: tuple[Tensor, ...], attributes: Mapping[str, Any], *outputs: Tensor) -> None:
        self.op: Op = op
        self.inputs: tuple[Tensor, ...] = inputs
        self.attributes: Mapping[str, Any] = MappingProxyType(dict(attributes))
        self.outputs: tuple[Tensor, ...] = outputs
        #: The first result: for all but some composites the only one.
        self.output: Tensor = outputs[0]
        self.kind: Kind = op.kind

    @property
    def name(self) -> str:
        return self.output.name

    @property
    def values(self) -> tuple[Tensor, ...]:
        """The operands on whose values the results depend, rather than on their shapes alone."""
        keys = self.op.names(len(self.inputs))
        return tuple(t for key, t in zip(keys, self.inputs) if key not in self.op.shapes)

    def __repr__(self) -> str:
        return f"<Node {self.name!r} = {self.op.name}({', '.join(t.name for t in self.inputs)})>"
