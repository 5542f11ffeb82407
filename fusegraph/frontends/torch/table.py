"""The table of ATen operators: each name has a handler, which writes the operator with methods of `Graph`.

A handler takes a `Call`, which has the graph and the forms of the operator's results as torch infers them, and then the
operator's arguments, with tensors of the graph in place of torch's.  It returns the result, or a tuple of several (None
for a result that is never used).  For arguments that it does not support it raises NotSupportedError, or what `Graph`
raises; torch then computes that node.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from inspect import signature
from typing import Any

import numpy as np
import torch

from codegen.sizes import Size
from fusegraph.dtypes import DType, float8_e8m0, float32, int64, uint32, uint64
from fusegraph.frontends.torch.vectors import Layer, Line
from fusegraph.graph import Graph, Tensor


@dataclass(frozen=True)
class Form:
    """A tensor in torch: strides in elements, ``dtype`` None if fusegraph lacks it, ``device`` such as "cuda:0"."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType | None
    device: str


@dataclass(frozen=True)
class Precision:
    """Whether torch's settings allow float32 operands of matrix products and convolutions to be rounded to tf32."""

    matmul: bool = False
    convolution: bool = False


Handler = Callable[..., Any]

#: Operators that compute: each becomes nodes of one piece.
HANDLERS: dict[str, Handler] = {}
#: Operators whose results are views or constants: they are made wherever they are needed.
FREE: dict[str, Handler] = {}
#: Operators -> the positions of arguments that handlers do not read, such as seeds without dropout: they get None.
IGNORED: dict[str, frozenset[int]] = {}


def _full_name(name: str) -> str:
    return name if name.startswith(("prims.", "fusegraph.", "semi_structured.")) else f"aten.{name}"


def aten(*names: str) -> Callable[[Handler], Handler]:
    """Enters a handler for operators of ATen, named with their overloads ("add.Tensor"), or of prims."""

    def enter(handler: Handler) -> Handler:
        HANDLERS.update((_full_name(name), handler) for name in names)
        return handler

    return enter


def aten_by_name(*names: str) -> Callable[[Handler], Handler]:
    """Enters a handler for operators of ATen with different signatures.

    It gets those of their arguments, by torch's names, for which it has parameters.  Operators that this torch lacks
    are left out.
    """

    def enter(handler: Handler) -> Handler:
        known = signature(handler).parameters
        for name in names:
            operator = reduce(lambda owner, part: getattr(owner, part, None), _full_name(name).split("."), torch.ops)
            if operator is not None:
                order = [argument.name.rstrip("_") for argument in operator._schema.arguments]
                IGNORED[_full_name(name)] = frozenset(n for n, key in enumerate(order) if key not in known)
                HANDLERS[_full_name(name)] = _by_name(handler, order, known)
        return handler

    return enter


def _by_name(handler: Handler, order: Sequence[str], known: Container[str]) -> Handler:
    def called(c: Call, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(order, args)) | kwargs
        return handler(c, **{key: value for key, value in given.items() if key in known})

    return called


def free(*names: str) -> Callable[[Handler], Handler]:
    """Enters a handler for ATen operators that make views or constants."""

    def enter(handler: Handler) -> Handler:
        FREE.update((_full_name(name), handler) for name in names)
        return handler

    return enter


@dataclass(frozen=True)
class Call:
    """One use of an operator.

    graph      the graph that it is written to.
    forms      the forms of its results in torch.
    precision  torch's settings.
    used       which of several results are used.
    lines      the factors and terms of batch normalization that exist already.
    given      the forms in torch of its positional arguments, whose strides may differ here.
    """

    graph: Graph
    forms: tuple[Form | None, ...]
    precision: Precision
    used: frozenset[int] = frozenset((0,))
    lines: Mapping[Layer, Line] = field(default_factory=dict)
    given: tuple[Form | None, ...] = ()

    @property
    def form(self) -> Form:
        """The form of the first result."""
        first = self.forms[0]
        assert first is not None
        return first

    @property
    def dtype(self) -> DType:
        """The dtype of the first result."""
        assert self.form.dtype is not None
        return self.form.dtype

    def cast(self, x: Tensor, dtype: DType | None = None) -> Tensor:
        """Casts x to a dtype, by default that of the first result; 8-bit floats overflow as in torch."""
        wanted = dtype or self.dtype
        if x.dtype == wanted:
            return x
        return self.graph.cast(self._magnitude(x) if wanted == float8_e8m0 else x, wanted, saturate=saturates(wanted))

    def _magnitude(self, x: Tensor) -> Tensor:
        """Returns the magnitude of x, of which torch makes a power of 2: 0 is 2^-127, more than that 2^-126 or more."""
        size = self.graph.abs(self.graph.cast(x, float32))
        return self.graph.binary_select(2.0**-127, self.graph.max(size, 2.0**-126), self.graph.cmp_le(size, 2.0**-127))

    def converted(self, x: Tensor) -> Tensor:
        """Casts x to the dtype of the first result as torch does.

        Numbers other than 0 become true.  Floats wrap around in narrow integers, and negative ones in unsigned
        integers, where the op saturates.
        """
        if self.dtype.is_bool and not x.dtype.is_bool:
            return self.graph.cmp_neq(x, 0)
        if x.dtype.is_float and self.dtype.is_int and (self.dtype.bits < 32 or self.dtype == uint32):
            x = self.graph.cast(x, int64)
        if x.dtype.is_float and self.dtype == uint64:
            return self.graph.binary_select(self.cast(self.graph.cast(x, int64)), self.cast(x), x < 0)
        return self.cast(x)

    def spread(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Broadcasts x to a shape; returns x itself if it has that shape."""
        return x if x.shape == tuple(shape) else self.graph.broadcast(x, shape)

    def zeros(self, shape: Sequence[int]) -> Tensor:
        """Returns zeros of the dtype of the first result."""
        return self.graph.broadcast(self.graph.constant(0, dtype=self.dtype), shape)

    def number(self, value: bool | int | float, like: DType) -> Tensor:
        """Returns a number as an operand beside tensors of dtype ``like``.

        ATen computes 16-bit floats in float32, with numbers in float32.  So a number that is not exact in the dtype is
        a float32 constant here too.
        """
        dtype = like
        if isinstance(value, Size):
            return self.graph.constant(value, dtype=float32 if like.is_float and like.itemsize < 4 else like)
        if like.is_float:
            with np.errstate(all="ignore"):
                exact = float(np.asarray(float(value)).astype(like.numpy)) == value
            dtype = like if exact or like.itemsize > 4 else float32
        elif isinstance(value, float):
            dtype = float32
        return self.graph.constant(float(value) if dtype.is_float else value, dtype=dtype)

    def operand(self, x: Any, dtype: DType) -> Tensor:
        """Returns a tensor or number as an operand of an op whose result has ``dtype``: of the same kind, not wider."""
        if not isinstance(x, Tensor):
            return self.number(x, dtype)
        narrower = x.dtype.is_float and dtype.is_float and x.dtype.itemsize <= dtype.itemsize
        return x if narrower else self.cast(x, dtype)

    def apply(self, op: str, *operands: Any, **attributes: Any) -> Tensor:
        """Applies an op of the table to operands of the result's kind; the result has torch's dtype.

        What was computed in float32, as beside a number, is rounded like all results: where it is stored.
        """
        given = [self.operand(x, self.dtype) for x in operands]
        made = getattr(self.graph, op)(*given, **attributes)
        narrower = made.dtype.is_float and self.dtype.is_float and self.dtype.itemsize == 2 < made.dtype.itemsize
        return self.graph.narrow(made, self.dtype) if narrower else self.cast(made)


@cache
def saturates(dtype: DType) -> bool:
    """Tells whether torch's casts to a dtype turn infinity into the largest number, which depends on its version."""
    if not dtype.saturates:
        return False
    kind = getattr(torch, dtype.numpy.name)
    return bool(torch.tensor(float("inf")).to(kind).to(torch.float32).isfinite())


def axes(x: Tensor, dim: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Returns the axes meant by ``dim``, counted from 0; None, which means all, for None or an empty sequence."""
    if dim is None or x.rank == 0:
        return None
    given = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(d % x.rank for d in given) or None


def turned(x: Tensor, order: Sequence[int]) -> Tensor:
    """Transposes x to an order of axes; returns x itself if it has that order."""
    return x if tuple(order) == tuple(range(x.rank)) else x.transpose(order)


def pair(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Returns one number per spatial dimension, from one for all or a list."""
    given = (value,) if isinstance(value, int) else tuple(value)
    return given * count if len(given) == 1 else given
