"""ATen's reductions, softmax and sums along an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusegraph.dtypes import float32, int32, int64
from fusegraph.frontends.torch.table import HANDLERS, Call, aten, axes
from fusegraph.graph import Tensor

Dims = int | Sequence[int] | None


def _reduce(c: Call, x: Tensor, mode: Any, dim: Dims, keepdim: bool, **more: Any) -> Tensor:
    if x.dtype.is_bool:
        mode = {"max": "any", "min": "all"}.get(mode, mode)
    if x.dtype.is_bool and mode in ("argmax", "argmin"):
        x = c.graph.cast(x, int32)
    if x.rank == 0:
        x, dim, keepdim = x.reshape(1), 0, False
    return c.graph.reduction(x, mode=mode, axes=axes(x, dim), keepdims=keepdim, **more)


def _sum(mode: str) -> Any:
    def handler(c: Call, x: Tensor, dim: Dims = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
        wide = x.dtype.is_float and c.dtype.is_float and c.dtype.itemsize >= x.dtype.itemsize
        x = x if wide else c.cast(x)
        return c.cast(_reduce(c, x, mode, dim, keepdim, dtype=c.dtype))

    return handler


HANDLERS["aten.sum.dim_IntList"] = HANDLERS["aten.sum.default"] = _sum("add")
HANDLERS["aten.mean.dim"] = HANDLERS["aten.mean.default"] = _sum("avg")
HANDLERS["aten.prod.dim_int"] = HANDLERS["aten.prod.default"] = _sum("mul")

#: Order of a vector norm -> mode of the reduction.
_NORMS = {1: "norm1", 2: "norm2", float("inf"): "amax"}


@aten("linalg_vector_norm.default")
def _vector_norm(
    c: Call, x: Tensor, order: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    x = x if x.dtype.itemsize >= c.dtype.itemsize else c.cast(x)
    if order in _NORMS:
        return c.cast(_reduce(c, x, _NORMS[order], dim, keepdim))
    if order == -float("inf"):
        return c.cast(_reduce(c, c.graph.abs(x), "min", dim, keepdim))
    if order == 0:
        return c.cast(_reduce(c, c.graph.cast(c.graph.cmp_neq(x, 0), x.dtype), "add", dim, keepdim))
    wide = c.graph.cast(x, float32) if x.dtype.itemsize < 4 else x
    powers = c.graph.pow(c.graph.abs(wide), c.number(order, wide.dtype))
    total = _reduce(c, powers, "add", dim, keepdim)
    return c.cast(c.graph.pow(total, c.number(1 / order, wide.dtype)))


def _mode(mode: str) -> Any:
    return lambda c, x, dim=None, keepdim=False: _reduce(c, x, mode, dim, keepdim)


for _mode_name, _operators in {
    "max": ("max.default", "amax.default"),
    "min": ("min.default", "amin.default"),
    "any": ("any.dim", "any.dims", "any.default"),
    "all": ("all.dim", "all.dims", "all.default"),
    "argmax": ("argmax.default",),
    "argmin": ("argmin.default",),
}.items():
    aten(*_operators)(_mode(_mode_name))


def _extreme(mode: str) -> Any:
    """Returns the handler for the largest or smallest element and its position."""
    return lambda c, x, dim, keepdim=False: tuple(_reduce(c, x, m, dim, keepdim) for m in (mode, f"arg{mode}"))


HANDLERS["aten.max.dim"] = _extreme("max")
HANDLERS["aten.min.dim"] = _extreme("min")


@aten("var.correction")
def _var(c: Call, x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return _reduce(c, x, "var", dim, keepdim, correction=1 if correction is None else correction)


@aten("var_mean.correction")
def _var_mean(
    c: Call, x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    return _var(c, x, dim, correction=correction, keepdim=keepdim), _reduce(c, x, "avg", dim, keepdim)


def _running(op: str) -> Any:
    """Returns the handler for a running sum or product, computed in the result's dtype, or int32 if that is smaller."""

    def handler(c: Call, x: Tensor, dim: int, dtype: Any = None) -> Tensor:
        own = int32 if c.dtype.is_int and c.dtype.itemsize < 4 else c.dtype
        x = c.cast(x, int64) if not x.dtype.is_float else x
        return c.cast(getattr(c.graph, op)(c.cast(x, own), axis=dim))

    return handler


HANDLERS["aten.cumsum.default"] = _running("cumsum")
HANDLERS["aten.cumprod.default"] = _running("cumprod")


@aten("logcumsumexp.default")
def _logcumsumexp(c: Call, x: Tensor, dim: int) -> Tensor:
    return c.graph.logcumsumexp(x, axis=dim)


def _extreme_so_far(op: str) -> Any:
    """Returns the handler for the largest or smallest element so far, and the position of the last such element."""

    def handler(c: Call, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        numbers = c.cast(x, int32) if x.dtype.is_bool else x
        index = getattr(c.graph, f"{op}_index")(numbers, axis=dim)
        return c.converted(getattr(c.graph, op)(numbers, axis=dim)), index

    return handler


HANDLERS["aten.cummax.default"] = _extreme_so_far("cummax")
HANDLERS["aten.cummin.default"] = _extreme_so_far("cummin")


def _along(op: str) -> Any:
    """Returns the handler for softmax or log_softmax."""

    def handler(c: Call, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        return c.cast(getattr(c.graph, op)(c.cast(x), axis=dim))

    return handler


def _along_backward(op: str) -> Any:
    def handler(c: Call, loss: Tensor, y: Tensor, dim: int, dtype: Any) -> Tensor:
        return c.cast(getattr(c.graph, f"{op}_backward")(loss, y, axis=dim))

    return handler


for _op in ("softmax", "log_softmax"):
    HANDLERS[f"aten._{_op}.default"] = _along(_op)
    HANDLERS[f"aten._{_op}_backward_data.default"] = _along_backward(_op)
