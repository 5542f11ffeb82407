"""Operators that combine elements along axes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

from codegen.combiners import MAX, MIN, Combiner
from fusegraph.dtypes import int32, int64
from fusegraph.frontends.onnx.table import Call, operator
from fusegraph.graph import Graph, Tensor
from fusegraph.ops.reduction import normal_axes

#: (call, operand, axes, whether these stay as dimensions of size 1) -> result.
Write = Callable[[Call, Tensor, tuple[int, ...], bool], Tensor]


def axes_of(call: Call, x: Tensor, given: Tensor | None) -> tuple[int, ...]:
    """Returns the axes, an attribute in older versions; if none are given, all, or none with noop_with_empty_axes."""
    axes = call["axes"] if given is None else call.integers(given, "axes")
    if axes:
        return normal_axes(axes, x.rank)
    return () if call["noop_with_empty_axes"] else tuple(range(x.rank))


def _reduction(write: Write, call: Call, x: Tensor, axes: Tensor | None = None) -> Tensor:
    return write(call, x, axes_of(call, x, axes), bool(call["keepdims"]))


def _mode(mode: Any) -> Write:
    def write(call: Call, x: Tensor, axes: tuple[int, ...], keepdims: bool) -> Tensor:
        return call.graph.cast(call.graph.reduction(x, mode, axes, keepdims), x.dtype)

    return write


def _mean(call: Call, x: Tensor, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    """Returns means; those of integers are rounded towards zero."""
    if x.dtype.is_float:
        return _mode("avg")(call, x, axes, keepdims)
    total = call.graph.reduction(x, "add", axes, keepdims)
    return call.graph.cast(call.graph.quotient(total, prod(x.shape[d] for d in axes)), x.dtype)


def _of_floats(write: Write) -> Write:
    """Returns a function that computes integers by way of float64."""

    def written(call: Call, x: Tensor, axes: tuple[int, ...], keepdims: bool) -> Tensor:
        if x.dtype.is_float:
            return write(call, x, axes, keepdims)
        return call.graph.cast(write(call, call.graph.cast(x, "float64"), axes, keepdims), x.dtype)

    return written


def _extreme(combiner: Combiner, truth: Any) -> Write:
    """Returns a function for maxima or minima; of no elements, it gives the combiner's neutral number."""
    mode: Any = combiner.name

    def write(call: Call, x: Tensor, axes: tuple[int, ...], keepdims: bool) -> Tensor:
        graph = call.graph
        if x.dtype.is_bool:
            return graph.reduction(x, truth, axes, keepdims)
        if any(x.shape[d] == 0 for d in axes):
            shape = [1 if d in axes else n for d, n in enumerate(x.shape) if keepdims or d not in axes]
            none = combiner.start("float64" if x.dtype.is_float else x.dtype.numpy)
            return graph.broadcast(graph.constant(none, dtype=x.dtype), shape)
        return graph.reduction(x, mode, axes, keepdims)

    return write


def _sum_square(call: Call, x: Tensor, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    return _mode("add")(call, call.graph.mul(x, x), axes, keepdims)


def _log_sum(call: Call, x: Tensor, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    return call.graph.log(_mode("add")(call, x, axes, keepdims))


def _log_sum_exp(call: Call, x: Tensor, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    if any(x.shape[d] == 0 for d in axes):
        return _log_sum(call, x, axes, keepdims)
    return call.graph.logsumexp(x, axes, keepdims)


for _name, _write in {
    "ReduceL1": _mode("norm1"),
    "ReduceL2": _of_floats(_mode("norm2")),
    "ReduceLogSum": _of_floats(_log_sum),
    "ReduceLogSumExp": _of_floats(_log_sum_exp),
    "ReduceMax": _extreme(MAX, "any"),
    "ReduceMean": _mean,
    "ReduceMin": _extreme(MIN, "all"),
    "ReduceProd": _mode("mul"),
    "ReduceSum": _mode("add"),
    "ReduceSumSquare": _sum_square,
}.items():
    operator(_name)(partial(_reduction, _write))


def _position(mode: Any, call: Call, x: Tensor) -> Tensor:
    """Returns the position of the first extreme, or of the last with select_last_index."""
    (axis,) = normal_axes(call["axis"], x.rank)
    if not call["select_last_index"]:
        return call.graph.reduction(x, mode, axis, bool(call["keepdims"]), dtype=int64)
    found = call.graph.reduction(call.graph.flip(x, axis), mode, axis, bool(call["keepdims"]), dtype=int64)
    return call.graph.sub(x.shape[axis] - 1, found)


operator("ArgMax")(partial(_position, "argmax"))
operator("ArgMin")(partial(_position, "argmin"))


def _along(write: Callable[[Graph, Tensor, int], Tensor], call: Call, x: Tensor) -> Tensor:
    """Applies a function along an axis; before version 13, along this and all later axes as one."""
    (axis,) = normal_axes(call["axis"], x.rank)
    if 0 in x.shape:
        return x
    if call.version >= 13:
        return write(call.graph, x, axis)
    rows = call.graph.reshape(x, [prod(x.shape[:axis]), prod(x.shape[axis:])])
    return call.graph.reshape(write(call.graph, rows, 1), x.shape)


def _hardmax(graph: Graph, x: Tensor, axis: int) -> Tensor:
    """Returns 1 where the first of the largest elements is, else 0."""
    first = graph.reduction(x, "argmax", axis, dtype=int32)
    return graph.cast(graph.cmp_eq(graph.gen_index(x, axis), first), x.dtype)


operator("Softmax")(partial(_along, lambda graph, x, axis: graph.softmax(x, axis)))
operator("LogSoftmax")(partial(_along, lambda graph, x, axis: graph.log_softmax(x, axis)))
operator("Hardmax")(partial(_along, _hardmax))


def _running(op: str, neutral: int, call: Call, x: Tensor, axis: Tensor) -> Tensor:
    """Returns a running sum or product.

    An exclusive one leaves out the element itself: elements are shifted by one position, and a neutral one is added.
    """
    (along,) = normal_axes(int(call.number(axis, "axis")), x.rank)
    reverse = bool(call["reverse"])
    if call["exclusive"] and x.shape[along]:
        others = x[(slice(None),) * along + (slice(1, None) if reverse else slice(-1),)]
        padding = [(0, 0)] * x.rank
        padding[along] = (0, 1) if reverse else (1, 0)
        x = call.graph.pad(others, padding, value=neutral)
    return getattr(call.graph, op)(x, along, reverse, dtype=x.dtype)


operator("CumSum")(partial(_running, "cumsum", 0))
operator("CumProd")(partial(_running, "cumprod", 1))
