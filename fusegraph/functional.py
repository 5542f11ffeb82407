"""Convolution, matrix products and pooling as plain functions on arrays of any framework.

    y = fusegraph.functional.conv2d(x, w, stride=2, padding=1, bias=b, activation="relu")

The arrays' own shapes, strides, dtypes and device say what to build: NCHW and channels_last arrays, and views with
gaps, are read where they lie.  Arrays on the CPU run on the cpu engine, arrays on a GPU on the cuda engine and on their
framework's current stream.  The result is a new array of the same framework.  What was built is kept for the next call
with arrays of the same form, the last `CACHE_SIZE` of them.

Nothing is recorded for automatic differentiation: torch tensors that want a gradient are refused.  `conv2d_input` and
`conv2d_weight` are the gradients of `conv2d`, to be called by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fusegraph.dtypes import DType
from fusegraph.engines import compile as compile_graph
from fusegraph.engines.base import Executable
from fusegraph.errors import ArgumentError, AttributeValueError, DTypeError, ShapeError, shown
from fusegraph.graph import Graph, Tensor
from fusegraph.ops.attributes import of_kind
from fusegraph.ops.convolution import smallest_sizes, spread
from fusegraph.runtime.arrays import Device, DeviceArray, as_stream, refuse_gradient, view
from fusegraph.values import Unfit, flag, integer, one_or_several

#: Compiled calls that are kept, least recently used first out.
CACHE_SIZE = 256

#: What `activation` may name.
ACTIVATIONS = (
    "relu",
    "elu",
    "gelu",
    "gelu_approx_tanh",
    "hardsigmoid",
    "hardswish",
    "mish",
    "sigmoid",
    "softplus",
    "swish",
    "tanh",
)


class Form(NamedTuple):
    """All that matters of an array before its values: shape, strides in elements, dtype."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType


Forms = tuple[tuple[str, Form], ...]
Attributes = tuple[tuple[str, Any], ...]
#: (graph, its inputs and attributes by name) -> the graph, now complete.
Builder = Callable[..., Graph]


def conv2d(
    x: Any,
    w: Any,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[Any] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    bias: Any = None,
    activation: str | None = None,
    stream: Any = None,
) -> Any:
    """Returns the convolution activation(x * w + bias): an array (N, K, P, Q).

    x (N, C, H, W) is cross-correlated with w (K, C / groups, R, S); bias is (K,).

    stride, dilation  an integer, or one for the height and one for the width.
    padding           zeros around x: an integer, two, pairs ((top, bottom), (left, right)), "valid" for none, or "same"
                      for as many rows and columns as x has (stride 1; an odd one goes to the end, as in torch).
    activation        one of `ACTIVATIONS`: "relu", "gelu", "sigmoid", ...
    stream            a CUDA stream; default: the current one of x's framework.

    The result lies in memory as x does: NCHW, or channels_last.  Its dtype is the promoted one of x and w, int32 for
    8-bit integers, float32 for fp8; sums are in float32 (float64 for float64, int32 and int64 for integers).

    Raises ArgumentError for what is not an array or wants a gradient, ShapeError, DTypeError, AttributeValueError,
    DeviceError for arrays on different devices, ToolchainError if there is no compiler.
    """
    attributes = _conv_attributes("conv2d", stride, padding, dilation, groups) + _activation("conv2d", activation)
    return _call(_conv2d, _conv_arrays("conv2d", x, w, bias), attributes, stream)


def conv2d_graph(
    x: Any,
    w: Any,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[Any] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    bias: Any = None,
    activation: str | None = None,
) -> Graph:
    """Returns the graph that `conv2d` runs for these arrays, to look at its kernels.  Raises as `conv2d` does."""
    forms, _ = _forms(_conv_arrays("conv2d", x, w, bias), 0)
    attributes = _conv_attributes("conv2d", stride, padding, dilation, groups) + _activation("conv2d", activation)
    return _graph(_conv2d, forms, attributes)


def conv_transpose2d(
    x: Any,
    w: Any,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[Any] = 0,
    output_padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    bias: Any = None,
    activation: str | None = None,
    stream: Any = None,
) -> Any:
    """Returns the transposed convolution activation(x * w + bias): an array (N, K, P, Q).

    x is (N, C, H, W), w (C, K / groups, R, S), bias (K,).  P is (H - 1) * stride + (R - 1) * dilation + 1 - padding
    before and after + output_padding, and Q likewise.  output_padding is smaller than the stride; padding, given as in
    `conv2d`, shrinks the result.  Arguments, dtypes and errors are otherwise those of `conv2d`.
    """
    name = "conv_transpose2d"
    attributes = _conv_attributes(name, stride, _integers(name, "padding", padding), dilation, groups)
    attributes += _activation(name, activation)
    attributes += (("output_padding", _integers(name, "output_padding", output_padding)),)
    return _call(_conv_transpose2d, _conv_arrays(name, x, w, bias), attributes, stream)


def conv2d_input(
    size: int | Sequence[int],
    w: Any,
    loss: Any,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[Any] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    stream: Any = None,
) -> Any:
    """Returns the gradient of `conv2d` by x: an array (N, C, H, W), size being (H, W) or one number for both.

    loss (N, K, P, Q) is the gradient by conv2d's result, w (K, C / groups, R, S) its filter.  Arguments, dtypes and
    errors are otherwise those of `conv2d`.
    """
    name = "conv2d_input"
    attributes = _conv_attributes(name, stride, _integers(name, "padding", padding), dilation, groups)
    attributes += (("size", _integers(name, "size", size)),)
    return _call(_conv2d_input, {"loss": loss, "w": w}, attributes, stream)


def conv2d_weight(
    x: Any,
    taps: int | Sequence[int],
    loss: Any,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[Any] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    stream: Any = None,
) -> Any:
    """Returns the gradient of `conv2d` by w: an array (K, C / groups, R, S), taps being (R, S) or one number for both.

    loss (N, K, P, Q) is the gradient by conv2d's result.  Arguments, dtypes and errors are otherwise those of `conv2d`.
    """
    name = "conv2d_weight"
    attributes = _conv_attributes(name, stride, _integers(name, "padding", padding), dilation, groups)
    attributes += (("taps", _integers(name, "taps", taps)),)
    return _call(_conv2d_weight, {"x": x, "loss": loss}, attributes, stream)


def matmul(a: Any, b: Any, *, bias: Any = None, activation: str | None = None, stream: Any = None) -> Any:
    """Returns activation(a (..., M, K) @ b (..., K, N) + bias (N,)): an array (..., M, N).

    Batch dimensions broadcast as in NumPy.  Arguments, dtypes and errors are otherwise those of `conv2d`.
    """
    arrays = {"a": a, "b": b} | ({} if bias is None else {"bias": bias})
    return _call(_matmul, arrays, _activation("matmul", activation), stream)


def linear(x: Any, w: Any, bias: Any = None, *, activation: str | None = None, stream: Any = None) -> Any:
    """Returns activation(x @ transposed w + bias): an array (..., M, N), as torch.nn.functional.linear.

    x is (..., M, K), w (N, K), bias (N,).  Arguments, dtypes and errors are otherwise those of `conv2d`.
    """
    if len(view(w, name="w").shape) != 2:
        raise ShapeError(f"linear takes w (N, K), got {list(view(w, name='w').shape)}")
    refuse_gradient(w, "w")
    arrays = {"x": x, "w": _transposed(w)} | ({} if bias is None else {"bias": bias})
    return _call(_linear, arrays, _activation("linear", activation), stream)


def max_pool2d(
    x: Any,
    window: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[Any] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    *,
    stream: Any = None,
) -> Any:
    """Returns the largest element of every window of x (N, C, H, W): an array (N, C, P, Q) of x's dtype and layout.

    Arguments are those of `Graph.max_pool`: padding, which never wins, may be an integer, two, or pairs ((top, bottom),
    (left, right)); stride is by default the window's size.  stream and errors as of `conv2d`.
    """
    attributes = _pool_attributes("max_pool2d", window, stride, padding, ceil_mode)
    attributes += (("dilation", _integers("max_pool2d", "dilation", dilation)),)
    return _call(_max_pool2d, {"x": x}, attributes, stream)


def avg_pool2d(
    x: Any,
    window: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[Any] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    *,
    stream: Any = None,
) -> Any:
    """Returns the mean of every window of x (N, C, H, W): an array (N, C, P, Q) of x's dtype and layout.

    count_include_pad says whether the padding counts, as zeros.  Arguments are otherwise those of `max_pool2d`.
    """
    attributes = _pool_attributes("avg_pool2d", window, stride, padding, ceil_mode)
    counted = of_kind("avg_pool2d: count_include_pad", flag, count_include_pad)
    return _call(_avg_pool2d, {"x": x}, (*attributes, ("count_include_pad", counted)), stream)


def clear_cache() -> None:
    """Forgets everything that was built, and the device memory it holds."""
    _executable.cache_clear()


# ---- graphs


def _graph(build: Builder, forms: Forms, attributes: Attributes) -> Graph:
    graph = Graph(build.__name__.strip("_"))
    tensors = {name: graph.tensor(name, f.shape, f.dtype, strides=f.strides) for name, f in forms}
    return build(graph, **tensors, **dict(attributes))


def _finish(graph: Graph, result: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Graph:
    """Adds bias and activation.  The result keeps its dtype; rounding to it comes last."""
    dtype = result.dtype
    if bias is not None:
        if bias.rank == 3 and bias.shape != (result.shape[1], 1, 1):
            raise ShapeError(
                f"{graph.name}: bias has one element for each of the {result.shape[1]} channels, got {bias.size}"
            )
        if bias.dtype.is_float != dtype.is_float:
            raise DTypeError(f"{graph.name}: bias is {bias.dtype}, the sums are {dtype}; cast one of them")
        result = graph.add(result, bias)
    if activation is not None:
        result = getattr(graph, activation)(result)
    graph.output(result, name="y", dtype=dtype)
    return graph


def _check_images(graph: Graph, wanted: str, *tensors: Tensor) -> None:
    """Raises ShapeError unless all tensors have 4 dimensions."""
    if any(x.rank != 4 for x in tensors):
        shapes = [f"{x.name} {list(x.shape)}" for x in tensors] if len(tensors) > 1 else [str(list(tensors[0].shape))]
        raise ShapeError(f"{graph.name} takes {wanted}, got {' and '.join(shapes)}")


def _conv2d(graph: Graph, x: Tensor, w: Tensor, bias: Tensor | None = None, *, activation: Any, **how: Any) -> Graph:
    _check_images(graph, "x (N, C, H, W) and w (K, C / groups, R, S)", x, w)
    if how["padding"] == "valid":
        how["padding"] = 0
    elif how["padding"] == "same":
        how["padding"] = _same_padding(w.shape[2:], how["stride"], how["dilation"])
    return _finish(graph, graph.conv_fprop(x, w, **how), bias, activation)


def _conv_transpose2d(
    graph: Graph, x: Tensor, w: Tensor, bias: Tensor | None = None, *, activation: Any, output_padding: Any, **how: Any
) -> Graph:
    _check_images(graph, "x (N, C, H, W) and w (C, K / groups, R, S)", x, w)
    smallest = smallest_sizes(x.shape[2:], w.shape[2:], how["stride"], how["padding"], how["dilation"])
    size = [a + b for a, b in zip(smallest, spread(output_padding, 2, "output_padding", 0))]
    result = graph.conv_dgrad(x, w, size=size if min(size) >= 0 else None, **how)
    return _finish(graph, result, bias, activation)


def _conv2d_input(graph: Graph, loss: Tensor, w: Tensor, **how: Any) -> Graph:
    _check_images(graph, "loss (N, K, P, Q)", loss)
    return _finish(graph, graph.conv_dgrad(loss, w, **how))


def _conv2d_weight(graph: Graph, x: Tensor, loss: Tensor, **how: Any) -> Graph:
    _check_images(graph, "x (N, C, H, W)", x)
    return _finish(graph, graph.conv_wgrad(x, loss, **how))


def _max_pool2d(graph: Graph, x: Tensor, **how: Any) -> Graph:
    _check_images(graph, "x (N, C, H, W)", x)
    return _finish(graph, graph.max_pool(x, **how))


def _avg_pool2d(graph: Graph, x: Tensor, **how: Any) -> Graph:
    _check_images(graph, "x (N, C, H, W)", x)
    return _finish(graph, graph.avg_pool(x, **how))


def _matmul(graph: Graph, a: Tensor, b: Tensor, bias: Tensor | None = None, *, activation: str | None) -> Graph:
    if bias is not None and b.rank >= 2 and bias.shape != b.shape[-1:]:
        raise ShapeError(f"{graph.name}: bias has shape {list(bias.shape)}, the result has {b.shape[-1]} columns")
    return _finish(graph, graph.matmul(a, b), bias, activation)


def _linear(graph: Graph, x: Tensor, w: Tensor, bias: Tensor | None = None, *, activation: str | None) -> Graph:
    return _matmul(graph, x, w, bias, activation=activation)


def _same_padding(taps: Sequence[int], stride: Any, dilation: Any) -> tuple[tuple[int, int], ...]:
    """Returns the padding with which a result of stride 1 has the size of x.  Raises AttributeValueError."""
    if stride not in (1, (1, 1)):
        raise AttributeValueError(f"conv2d: padding 'same' goes with stride 1, got stride {stride}")
    steps = dilation if isinstance(dilation, tuple) else (dilation,) * len(taps)
    reach = [step * (count - 1) for step, count in zip(steps, taps)]
    return tuple((total // 2, total - total // 2) for total in reach)


# ---- arrays and attributes


def _conv_arrays(function: str, x: Any, w: Any, bias: Any) -> dict[str, Any]:
    if bias is None:
        return {"x": x, "w": w}
    if len(view(bias, name="bias").shape) != 1:
        raise ShapeError(f"{function}: bias has one dimension (K,), got {list(view(bias, name='bias').shape)}")
    refuse_gradient(bias, "bias")
    return {"x": x, "w": w, "bias": _column(bias)}


def _column(bias: Any) -> Any:
    """Returns a bias (K,) as (K, 1, 1), which broadcasts along the channels of an image; not copied."""
    if isinstance(bias, DeviceArray):
        shape, strides = (bias.shape[0], 1, 1), (bias.strides[0], 1, 1)
        return DeviceArray(bias.pointer, shape, strides, bias.dtype, bias.device, bias, bias.stream)
    if not hasattr(bias, "reshape"):
        raise ArgumentError(f"bias is a {type(bias).__name__}, which has no reshape; pass a NumPy, torch or CuPy array")
    return bias.reshape((-1, 1, 1))


def _transposed(w: Any) -> Any:
    """Returns a matrix with its dimensions swapped; not copied."""
    if isinstance(w, DeviceArray):
        return DeviceArray(w.pointer, w.shape[::-1], w.strides[::-1], w.dtype, w.device, w, w.stream)
    if not hasattr(w, "T"):
        raise ArgumentError(f"w is a {type(w).__name__}, which has no T; pass a NumPy, torch or CuPy array")
    return w.T


def _forms(arrays: Mapping[str, Any], stream: int) -> tuple[Forms, Device]:
    """Returns what to build for: the form of each array, and the device of the first."""
    views = {name: view(array, name=name, stream=stream) for name, array in arrays.items()}
    for name, array in arrays.items():
        refuse_gradient(array, name)
    forms = tuple((name, Form(tuple(v.shape), tuple(v.strides), v.dtype)) for name, v in views.items())
    return forms, next(iter(views.values())).device


def _call(build: Builder, arrays: Mapping[str, Any], attributes: Attributes, stream: Any) -> Any:
    forms, device = _forms(arrays, 0 if stream is None else as_stream(stream))
    return _executable(build, forms, attributes, device)(*arrays.values(), stream=stream)


@lru_cache(maxsize=CACHE_SIZE)
def _executable(build: Builder, forms: Forms, attributes: Attributes, device: Device) -> Executable:
    graph = _graph(build, forms, attributes)
    return compile_graph(graph, "cuda", device=device.index) if device.is_cuda else compile_graph(graph, "cpu")


def _conv_attributes(function: str, stride: Any, padding: Any, dilation: Any, groups: Any) -> Attributes:
    """Returns the attributes in a hashable form, as the cache wants: integers, tuples and the names of paddings."""
    if isinstance(padding, str):
        if padding not in ("same", "valid"):
            raise AttributeValueError(f"{function}: padding is integers, 'same' or 'valid', got {shown(padding)}")
    else:
        padding = _integers(function, "padding", padding)
    return (
        ("stride", _integers(function, "stride", stride)),
        ("padding", padding),
        ("dilation", _integers(function, "dilation", dilation)),
        ("groups", _integers(function, "groups", groups)),
    )


def _pool_attributes(function: str, window: Any, stride: Any, padding: Any, ceil_mode: Any) -> Attributes:
    """Returns the attributes of windows in a hashable form, as the cache wants."""
    return (
        ("window", _integers(function, "window", window)),
        ("stride", None if stride is None else _integers(function, "stride", stride)),
        ("padding", _integers(function, "padding", padding)),
        ("ceil_mode", of_kind(f"{function}: ceil_mode", flag, ceil_mode)),
    )


def _integers(function: str, what: str, value: Any) -> Any:
    """Returns an integer, or a tuple of integers or of tuples of them; the op checks their number and range."""
    try:
        return one_or_several(one_or_several(integer))(value)
    except Unfit:
        hint = "; a bias is given by name: bias=..." if isinstance(value, np.ndarray) or value is None else ""
        raise AttributeValueError(
            f"{function}: {what} is an integer or a sequence of integers, got {type(value).__name__}{hint}"
        ) from None


def _activation(function: str, name: Any) -> Attributes:
    if name is None or (isinstance(name, str) and name in ACTIVATIONS):
        return (("activation", name),)
    raise AttributeValueError(f"{function}: activation is None or one of {', '.join(ACTIVATIONS)}, got {shown(name)}")
