"""Tensors and nodes: the edges and vertices of an operation graph."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from fusegraph import indexing
from fusegraph.dtypes import DType
from fusegraph.errors import GraphError, shown
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind, Op, TensorType

if TYPE_CHECKING:
    from fusegraph.graph import Graph

_NAME = re.compile(r"[\w .:/\[\](),+@#-]{1,200}")


def check_name(what: str, name: object) -> str:
    """A name as given.  Raises GraphError unless it is a short text of letters, digits and ``_ . : / [ ] ( ) , + @ #
    -``.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise GraphError(
            f"{what} name {shown(name)} is not allowed: "
            "use 1 to 200 letters, digits, spaces or any of _ . : / [ ] ( ) , + @ # -"
        )
    return name


class Tensor:
    """An edge of the graph: name, logical shape, strides in elements, dtype; virtual unless an input or output.

    Tensors are made by a Graph, compare by identity, and support ``+ - * / @ ** abs``, unary minus, ``> >= < <=``,
    and, bit by bit as in NumPy, ``& | ^ ~`` of integers and booleans and ``<< >>`` of integers.  Other operands may be
    Python numbers or NumPy arrays.  Use ``graph.cmp_eq`` for equality.
    """

    __array_ufunc__ = None  # NumPy arrays on the left of an operator defer to ours

    def __init__(
        self,
        graph: Graph,
        name: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: DType,
        value: np.ndarray[Any, Any] | None = None,
    ) -> None:
        self.graph = graph
        self.name = name
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.value = value
        #: Whose memory it lies in, and how many elements after that one's first: its own, unless `passes.views` says
        #: otherwise, which leaves here the strides that it would have in its own.
        self.base: Tensor = self
        self.start = 0
        self.own_strides: tuple[int, ...] | None = None

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
    def is_constant(self) -> bool:
        return self.value is not None

    def __repr__(self) -> str:
        return f"<Tensor {self.name!r} {self.dtype} {list(self.shape)} strides {list(self.strides)}>"

    def __bool__(self) -> bool:
        raise GraphError(f"tensor {self.name!r} has no truth value while the graph is being built; use binary_select")

    def _op(self, name: str, *operands: Any) -> Tensor:
        return self.graph.apply(TABLE[name], operands, {})

    def __add__(self, other: Any) -> Tensor:
        return self._op("add", self, other)

    def __radd__(self, other: Any) -> Tensor:
        return self._op("add", other, self)

    def __sub__(self, other: Any) -> Tensor:
        return self._op("sub", self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return self._op("sub", other, self)

    def __mul__(self, other: Any) -> Tensor:
        return self._op("mul", self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return self._op("mul", other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return self._op("div", self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return self._op("div", other, self)

    def __pow__(self, other: Any) -> Tensor:
        return self._op("pow", self, other)

    def __rpow__(self, other: Any) -> Tensor:
        return self._op("pow", other, self)

    def __matmul__(self, other: Any) -> Tensor:
        return self._op("matmul", self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        return self._op("matmul", other, self)

    def __neg__(self) -> Tensor:
        return self._op("neg", self)

    def __abs__(self) -> Tensor:
        return self._op("abs", self)

    def __gt__(self, other: Any) -> Tensor:
        return self._op("cmp_gt", self, other)

    def __ge__(self, other: Any) -> Tensor:
        return self._op("cmp_ge", self, other)

    def __lt__(self, other: Any) -> Tensor:
        return self._op("cmp_lt", self, other)

    def __le__(self, other: Any) -> Tensor:
        return self._op("cmp_le", self, other)

    def _bits(self, logical: str, bitwise: str, *operands: Any) -> Tensor:
        """Booleans are combined by the op of truth values, which masks are recognised by; integers bit by bit."""
        return self._op(logical if all(map(_is_truth, operands)) else bitwise, *operands)

    def __and__(self, other: Any) -> Tensor:
        return self._bits("logical_and", "bitwise_and", self, other)

    def __rand__(self, other: Any) -> Tensor:
        return self._bits("logical_and", "bitwise_and", other, self)

    def __or__(self, other: Any) -> Tensor:
        return self._bits("logical_or", "bitwise_or", self, other)

    def __ror__(self, other: Any) -> Tensor:
        return self._bits("logical_or", "bitwise_or", other, self)

    def __xor__(self, other: Any) -> Tensor:
        return self._op("bitwise_xor", self, other)

    def __rxor__(self, other: Any) -> Tensor:
        return self._op("bitwise_xor", other, self)

    def __lshift__(self, other: Any) -> Tensor:
        return self._op("shift_left", self, other)

    def __rlshift__(self, other: Any) -> Tensor:
        return self._op("shift_left", other, self)

    def __rshift__(self, other: Any) -> Tensor:
        return self._op("shift_right", self, other)

    def __rrshift__(self, other: Any) -> Tensor:
        return self._op("shift_right", other, self)

    def __invert__(self) -> Tensor:
        return self._bits("logical_not", "bitwise_not", self)

    __iter__ = None  # indexing would make one, of a slice an element

    def __getitem__(self, key: Any) -> Tensor:
        """Basic indexing as in NumPy: slices (negative steps too), integers, ``...`` and None; not with arrays (see
        `Graph.gather`).  Raises AttributeValueError.
        """
        return indexing.index(self, key)

    def reshape(self, *shape: Any) -> Tensor:
        """`Graph.reshape`, of a shape or of so many sizes."""
        given = shape[0] if len(shape) == 1 and hasattr(type(shape[0]), "__iter__") else shape
        return self.graph.apply(TABLE["reshape"], (self,), {"shape": given})

    def transpose(self, *perm: Any) -> Tensor:
        """`Graph.transpose`, of a permutation or of so many dimensions; without any the dimensions are reversed."""
        given = perm[0] if len(perm) == 1 and hasattr(type(perm[0]), "__iter__") else perm or None
        return self.graph.apply(TABLE["transpose"], (self,), {"perm": given})

    @property
    def T(self) -> Tensor:
        """The dimensions in reverse."""
        return self.transpose()


def _is_truth(operand: Any) -> bool:
    """Whether an operand of an operator is boolean."""
    if isinstance(operand, Tensor):
        return operand.dtype.is_bool
    return isinstance(operand, bool | np.bool_) or (isinstance(operand, np.ndarray) and operand.dtype == np.bool_)


class Node:
    """An op of the table applied to tensors.  Named after its result, the first where there are several."""

    __slots__ = ("attributes", "inputs", "op", "outputs")

    def __init__(self, op: Op, inputs: tuple[Tensor, ...], attributes: Mapping[str, Any], *outputs: Tensor) -> None:
        self.op = op
        self.inputs = inputs
        self.attributes = MappingProxyType(dict(attributes))
        self.outputs = outputs

    @property
    def output(self) -> Tensor:
        """The first result: for all but some composites the only one."""
        return self.outputs[0]

    @property
    def name(self) -> str:
        return self.output.name

    @property
    def values(self) -> tuple[Tensor, ...]:
        """The operands on whose values the results depend, rather than on their shapes alone."""
        keys = self.op.names(len(self.inputs))
        return tuple(t for key, t in zip(keys, self.inputs) if key not in self.op.shapes)

    @property
    def kind(self) -> Kind:
        return self.op.kind

    def __repr__(self) -> str:
        return f"<Node {self.name!r} = {self.op.name}({', '.join(t.name for t in self.inputs)})>"
