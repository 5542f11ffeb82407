"""The table of ATen operators: each name with a handler of a few calls of the builder.

A handler is called as the operator is, its tensors being those of the graph, after a `Call` that has the graph and the
types of the operator's results as torch infers them.  It returns the result, or a tuple of several (None where a result
is never used).  It raises NotSupportedError, or whatever the builder raises, for arguments it does not take: torch
computes that node then.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from inspect import signature
from typing import Any

import numpy as np
import torch

from fusegraph.dtypes import DType, float32, int64, uint32, uint64
from fusegraph.frontends.torch.vectors import Layer, Line
from fusegraph.graph import Graph, Tensor


@dataclass(frozen=True)
class Form:
    """A tensor as torch describes it; ``dtype`` is None where fusegraph has none of the kind, ``device`` as torch
    writes it ("cuda:0").
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType | None
    device: str


@dataclass(frozen=True)
class Precision:
    """Whether matrix products and convolutions may round float32 operands to tf32, as torch's settings say."""

    matmul: bool = False
    convolution: bool = False


Handler = Callable[..., Any]

#: Operators that compute: each becomes nodes of one piece.
HANDLERS: dict[str, Handler] = {}
#: Operators whose results are views, or known without computing: they are made wherever they are needed.
FREE: dict[str, Handler] = {}
#: Operators -> the positions of arguments that handlers do not look at, seeds without dropout, say: they get None.
IGNORED: dict[str, frozenset[int]] = {}


def _full_name(name: str) -> str:
    return name if name.startswith("prims.") else f"aten.{name}"


def aten(*names: str) -> Callable[[Handler], Handler]:
    """Enters a handler for operators of ATen, named with their overloads ("add.Tensor"), or of prims."""

    def enter(handler: Handler) -> Handler:
        HANDLERS.update((_full_name(name), handler) for name in names)
        return handler

    return enter


def aten_by_name(*names: str) -> Callable[[Handler], Handler]:
    """Enters a handler for operators of ATen of different signatures: it is given those of their arguments that it has
    parameters for, by torch's names.  Operators that this torch has not are left out.
    """

    def enter(handler: Handler) -> Handler:
        known = signature(handler).parameters
        for name in names:
            operator = reduce(lambda owner, part: getattr(owner, part, None), name.split("."), torch.ops.aten)
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
    """One use of an operator: the graph it goes to, the forms of its results, torch's precision, which of several
    results something takes, the factors and terms of batch normalisation that are there already, and the forms in torch
    of its positional arguments (ours may lie otherwise in memory).
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
        """Returns x in a dtype, by default that of the first result; 8-bit floats overflow as torch's do."""
        wanted = dtype or self.dtype
        return x if x.dtype == wanted else self.graph.cast(x, wanted, saturate=saturates(wanted))

    def converted(self, x: Tensor) -> Tensor:
        """Returns x in the dtype of the first result as torch converts: what is not 0 is true, and floats wrap
        around in integers narrower than a processor converts to, and negative ones in unsigned ones, where ours
        saturate.
        """
        if self.dtype.is_bool and not x.dtype.is_bool:
            return self.graph.cmp_neq(x, 0)
        if x.dtype.is_float and self.dtype.is_int and (self.dtype.bits < 32 or self.dtype == uint32):
            x = self.graph.cast(x, int64)
        if x.dtype.is_float and self.dtype == uint64:
            return self.graph.binary_select(self.cast(self.graph.cast(x, int64)), self.cast(x), x < 0)
        return self.cast(x)

    def spread(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Returns x broadcast to a shape, x itself if it has that."""
        return x if x.shape == tuple(shape) else self.graph.broadcast(x, shape)

    def zeros(self, shape: Sequence[int]) -> Tensor:
        """Returns zeros of the dtype of the first result."""
        return self.graph.broadcast(self.graph.constant(0, dtype=self.dtype), shape)

    def number(self, value: bool | int | float, like: DType) -> Tensor:
        """Returns a number beside tensors of a dtype.  ATen computes 16-bit floats in float32, with float32 numbers:
        those that the dtype does not hold exactly are float32 here too.
        """
        dtype = like
        if like.is_float:
            with np.errstate(all="ignore"):
                exact = float(np.asarray(float(value)).astype(like.numpy)) == value
            dtype = like if exact or like.itemsize > 4 else float32
        elif isinstance(value, float):
            dtype = float32
        return self.graph.constant(float(value) if dtype.is_float else value, dtype=dtype)

    def operand(self, x: Any, dtype: DType) -> Tensor:
        """Returns a tensor or number as operand of an op whose result has a dtype: of the same kind, no wider."""
        if not isinstance(x, Tensor):
            return self.number(x, dtype)
        narrower = x.dtype.is_float and dtype.is_float and x.dtype.itemsize <= dtype.itemsize
        return x if narrower else self.cast(x, dtype)

    def apply(self, op: str, *operands: Any, **attributes: Any) -> Tensor:
        """Returns an op of the table on operands of the result's kind; the result has the dtype that torch says."""
        given = [self.operand(x, self.dtype) for x in operands]
        return self.cast(getattr(self.graph, op)(*given, **attributes))


@cache
def saturates(dtype: DType) -> bool:
    """Returns true if infinity becomes the largest number in torch's casts to a dtype, which depends on torch's
    version.
    """
    if not dtype.saturates:
        return False
    kind = getattr(torch, dtype.numpy.name)
    return bool(torch.tensor(float("inf")).to(kind).to(torch.float32).isfinite())


def axes(x: Tensor, dim: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Returns the axes that a ``dim`` means: None, and none at all, are all of them."""
    if dim is None or x.rank == 0:
        return None
    given = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(d % x.rank for d in given) or None


def turned(x: Tensor, order: Sequence[int]) -> Tensor:
    """Returns x with its axes in an order, x itself if that is theirs."""
    return x if tuple(order) == tuple(range(x.rank)) else x.transpose(order)


def pair(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    """Returns one number a spatial dimension, of one for all or a list."""
    given = (value,) if isinstance(value, int) else tuple(value)
    return given * count if len(given) == 1 else given
