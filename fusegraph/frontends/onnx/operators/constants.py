"""Operators whose results are known while the graph is built: shapes, and functions of numbers alone."""

from __future__ import annotations

import numpy as np

from fusegraph.dtypes import float32, int64
from fusegraph.errors import ModelError
from fusegraph.frontends.onnx.table import Call, operator
from fusegraph.frontends.onnx.tensors import checked_shape
from fusegraph.graph import Tensor


@operator("Constant")
def constant(call: Call) -> Tensor:
    given = [name for name in call.attributes if call[name] is not None]
    if len(given) != 1:
        raise ModelError(f"it has one value, got {len(given)}")
    (name,) = given
    if name not in ("value", "value_int", "value_ints", "value_float", "value_floats"):
        raise call.refuse("sparse tensors" if name == "sparse_value" else "type string")
    dtype = None if name == "value" else int64 if "int" in name else float32
    return call.graph.constant(np.asarray(call[name], None if dtype is None else dtype.numpy))


@operator("Shape")
def shape(call: Call, x: Tensor) -> Tensor:
    start, end = call["start"] or 0, call["end"]
    return call.values.of(x.shape[slice(start, end)])


@operator("Size")
def size(call: Call, x: Tensor) -> Tensor:
    return call.graph.reshape(call.values.of([x.size]), [])


@operator("ConstantOfShape")
def constant_of_shape(call: Call, sizes: Tensor) -> Tensor:
    value = call["value"]
    number = np.float32(0) if value is None else np.asarray(value)
    if number.size != 1:
        raise ModelError(f"its value is one number, got {list(number.shape)}")
    target = checked_shape("its result", call.integers(sizes, "the shape"))
    return call.graph.broadcast(call.graph.constant(number.reshape(())), target)


@operator("Range")
def range_(call: Call, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    """Returns start + i * delta for i below ceil((limit - start) / delta)."""
    first, last, step = (call.number(t, what) for t, what in ((start, "start"), (limit, "limit"), (delta, "delta")))
    step = call.fixed(step, "the step")
    exact = isinstance(first, int) and isinstance(last, int) and isinstance(step, int)
    if step == 0 or not (exact or np.isfinite([first, last, step]).all()):
        raise ModelError(f"a range from {first} to {last} in steps of {step} does not end")
    count = max(-((first - last) // step) if exact else int(np.ceil((last - first) / step)), 0)
    return call.graph.arange(count, first, step, start.dtype)


@operator("EyeLike")
def eye_like(call: Call, x: Tensor) -> Tensor:
    if x.rank != 2:
        raise ModelError(f"its input has two dimensions, got {list(x.shape)}")
    graph, dtype = call.graph, x.dtype if call["dtype"] is None else call.dtype(call["dtype"])
    rows, columns = (graph.gen_index(x, axis) for axis in (0, 1))
    return graph.cast(graph.cmp_eq(graph.add(rows, call["k"]), columns), dtype)
