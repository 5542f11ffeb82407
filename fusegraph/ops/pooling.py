"""Pooling: the maximum or the mean of the windows that slide over an image, and the gradients.

A window is along some axes of an image, by default the spatial ones of (N, C, spatial...).  Along each it is one of
`codegen.windows`: which elements the window at a position holds.  Windows of maxima and sums are separable: those of an
image are folded along one axis after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any

import numpy as np

from codegen.combiners import ADD, MAX
from codegen.sizes import most
from codegen.windows import Adaptive, Covering, Sliding, Window
from fusegraph.dtypes import DType, as_dtype, int32, int64
from fusegraph.errors import AttributeValueError, DTypeError, ShapeError
from fusegraph.ops.base import REQUIRED, Array, Attributes, Kind, Op, TensorType, Types, register
from fusegraph.ops.convolution import spread, spread_padding
from fusegraph.ops.reduction import normal_axes
from fusegraph.ops.reverse import Reverse, Rule

#: The window along each axis that has one.
Windows = dict[int, Window]

#: Elements of a window along an axis: each of them is looked at, though it may be padding.
MAX_WINDOW = 1 << 20

SLIDING: dict[str, Any] = {"window": REQUIRED, "stride": None, "padding": 0, "dilation": 1, "ceil_mode": False}
_AVERAGE = {k: v for k, v in SLIDING.items() if k != "dilation"} | {"count_include_pad": True}


# ---- attributes


def _axes(x: TensorType, axes: Any) -> tuple[int, ...]:
    """Returns the axes of the windows: those given, or the spatial ones of an image."""
    rank = len(x.shape)
    if axes is None:
        if rank not in (3, 4, 5):
            raise ShapeError("an image (N, C, spatial...) has 3, 4 or 5 dimensions; of others name the axes")
        return tuple(range(2, rank))
    result = normal_axes(axes, rank)
    if not result:
        raise AttributeValueError("axes name at least one axis")
    return result


def normal(x: TensorType, values: Attributes) -> dict[str, Any]:
    """Returns attributes in canonical form: for each axis one number, or one pair of paddings."""
    result = dict(values)
    axes = result["axes"] = _axes(x, values["axes"])
    rank = len(axes)
    if "window" in values:
        result["window"] = check_window(spread(values["window"], rank, "window", 1))
        stride = values["stride"]
        result["stride"] = result["window"] if stride is None else spread(stride, rank, "stride", 1)
        result["padding"] = spread_padding(values["padding"], rank)
        if "dilation" in values:
            result["dilation"] = spread(values["dilation"], rank, "dilation", 1)
    if "size" in values:
        result["size"] = spread(values["size"], rank, "size", 1)
    if "dtype" in values:
        result["dtype"] = as_dtype(values["dtype"])
        if result["dtype"] not in (int32, int64):
            raise DTypeError(f"positions are int32 or int64, not {result['dtype']}")
    return result


def check_window(window: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a window as given.  Raises AttributeValueError for one larger than `MAX_WINDOW`."""
    if max(window) > MAX_WINDOW:
        raise AttributeValueError(f"window is an integer of at most {MAX_WINDOW} along an axis, got {max(window)}")
    return window


def _sliding(axis: int, size: int, values: Attributes) -> tuple[Sliding, int]:
    """Returns the window along the n-th of the axes over so many elements, and its number of positions."""
    taps, stride, (before, after) = values["window"][axis], values["stride"][axis], values["padding"][axis]
    window = Sliding(size, taps, stride, values.get("dilation", (1,) * (axis + 1))[axis], before)
    room = size + before + after - window.reach
    if most(room) < 0:
        raise ShapeError(
            f"a window that reaches over {window.reach} elements does not fit {size} with a padding of {before} and "
            f"{after}"
        )
    positions = room // stride + 1
    # In ceil mode a last window may hang over the end, if it starts before it.
    if values["ceil_mode"] and after < window.reach:
        overhanging = stride <= window.reach - after  # that starts before the end, whatever the size
        positions = -(-room // stride) + 1 if overhanging else -(-(size + before) // stride)
    return window, positions


def forward_windows(shape: Sequence[int], values: Attributes) -> tuple[Windows, tuple[int, ...]]:
    """Returns the windows over an image of a shape, and the shape of what they are folded to.  Raises ShapeError."""
    windows: Windows = {}
    result = list(shape)
    for number, axis in enumerate(values["axes"]):
        if shape[axis] == 0:
            raise ShapeError(f"axis {axis} has no elements to pool")
        if "window" in values:
            windows[axis], result[axis] = _sliding(number, shape[axis], values)
        else:
            out = result[axis] = values["size"][number]
            windows[axis] = Adaptive(shape[axis], out)
    return windows, tuple(result)


def forward_of(loss: Sequence[int], values: Attributes) -> tuple[tuple[int, ...], Windows, tuple[int, ...]]:
    """Returns the shape of the image that a loss belongs to, its windows and the shape of what they are folded to."""
    image = list(loss)
    for axis, size in zip(values["axes"], values["size"]):
        image[axis] = size
    if "window" in values:
        return (tuple(image), *forward_windows(image, values))
    return tuple(image), {a: Adaptive(image[a], loss[a]) for a in values["axes"]}, tuple(loss)


def gradient_windows(loss: Sequence[int], values: Attributes) -> tuple[Windows, tuple[int, ...]]:
    """Returns, for every element of an image, the windows that hold it, and the image's shape.

    Raises ShapeError if a loss of this shape does not belong to that image.
    """
    image, forward, pooled = forward_of(loss, values)
    if pooled != tuple(loss) or 0 in (loss[a] for a in values["axes"]):
        raise ShapeError(f"the loss of an image {list(image)} is {list(pooled)}, got {list(loss)}")
    covering: Windows = {}
    for axis, window in forward.items():
        if isinstance(window, Sliding):
            covering[axis] = Covering(loss[axis], window.taps, window.stride, window.dilation, window.before)
        else:
            # The windows that hold an element are found as the elements of a window are.
            covering[axis] = Adaptive(loss[axis], image[axis])
    return covering, image


def counts(window: Window, positions: int, padded: int | None) -> Array:
    """Returns the number of elements that a mean divides by, at each position.

    ``padded`` is the end of the padding behind the image if the padding counts, else None.
    """
    p = np.arange(positions)
    if isinstance(window, Adaptive):
        return np.asarray(window.end(p) - window.start(p))
    assert isinstance(window, Sliding)
    start = p * window.stride - window.before
    end = start + window.taps
    if padded is not None:
        return np.asarray(np.minimum(end, padded) - start)
    return np.asarray(np.maximum(np.minimum(end, window.size) - np.maximum(start, 0), 0))


def padded_ends(shape: Sequence[int], values: Attributes) -> dict[int, int | None]:
    """Returns, for every axis, the end of the padding if it counts, else None."""
    if not values.get("count_include_pad"):
        return dict.fromkeys(values["axes"])
    return {a: shape[a] + after for a, (_, after) in zip(values["axes"], values["padding"])}


# ---- references


def _places(window: Window, positions: int) -> tuple[Array, Array]:
    """Returns (elements, whether they exist): a row a position, a column a tap."""
    p, t = np.arange(positions)[:, None], np.arange(window.count)[None, :]
    if isinstance(window, Adaptive):
        at = window.start(p) + t
        exists = at < window.end(p)
    else:
        assert isinstance(window, Sliding)
        at = p * window.stride + t * window.dilation - window.before
        exists = (at >= 0) & (at < window.size)
    return np.clip(at, 0, window.size - 1), exists


def _column(values: Array, axis: int, rank: int) -> Array:
    return values.reshape([-1 if d == axis else 1 for d in range(rank)])


def _lowest(x: Array) -> Any:
    return -inf if x.dtype.kind == "f" else np.iinfo(x.dtype).min


def _folded(x: Array, windows: Windows, shape: Sequence[int], combine: np.ufunc, start: Any) -> Array:
    """Returns the elements of windows combined, along one axis after the other."""
    for axis, window in windows.items():
        at, exists = _places(window, shape[axis])
        found: Array = np.full((*x.shape[:axis], shape[axis], *x.shape[axis + 1 :]), start, x.dtype)
        for t in range(window.count):
            inside = _column(exists[:, t], axis, x.ndim)
            found = np.where(inside, combine(found, np.take(x, at[:, t], axis)), found)
        x = found
    return x


def _max_reference(x: Array, **values: Any) -> Array:
    return _folded(x, *forward_windows(x.shape, values), np.maximum, _lowest(x))


def _index_reference(x: Array, *, dtype: DType, **values: Any) -> Array:
    """Goes from the last axis to the first: finds the maximum in a row of maxima, and where that one was in its row."""
    windows, shape = forward_windows(x.shape, values)
    step = 1
    index = np.zeros(x.shape, np.int64)
    for axis in reversed(values["axes"]):
        window = windows[axis]
        at, exists = _places(window, shape[axis])
        form = (*x.shape[:axis], shape[axis], *x.shape[axis + 1 :])
        best: Array = np.full(form, _lowest(x), x.dtype)
        found: Array = np.full(form, -1, np.int64)
        for t in range(window.count):
            value, inner = np.take(x, at[:, t], axis), np.take(index, at[:, t], axis)
            better = (found < 0) | (value > best) | (value != value)
            better &= _column(exists[:, t], axis, x.ndim) & (inner >= 0)
            best = np.where(better, value, best)
            found = np.where(better, inner + _column(at[:, t], axis, x.ndim) * step, found)
        step *= x.shape[axis]
        x, index = best, found
    return index.astype(dtype.numpy)


def _divisor(windows: Windows, image: Sequence[int], pooled: Sequence[int], values: Attributes) -> Array:
    """Returns the number of elements of each window's mean, for every position of the pooled image."""
    ends = padded_ends(image, values)
    total: Array = np.ones((1,) * len(pooled))
    for axis, window in windows.items():
        total = total * _column(counts(window, pooled[axis], ends[axis]), axis, len(pooled))
    return total


def _mean_reference(x: Array, **values: Any) -> Array:
    windows, shape = forward_windows(x.shape, values)
    with np.errstate(all="ignore"):
        return np.asarray(_folded(x, windows, shape, np.add, 0.0) / _divisor(windows, x.shape, shape, values))


def _mean_backward_reference(loss: Array, **values: Any) -> Array:
    image, windows, pooled = forward_of(loss.shape, values)
    with np.errstate(all="ignore"):
        total = loss / _divisor(windows, image, pooled, values)
    for axis, window in windows.items():
        at, exists = _places(window, pooled[axis])
        moved = np.moveaxis(total, axis, 0)
        given = np.zeros((image[axis], *moved.shape[1:]))
        for t in range(window.count):
            np.add.at(given, at[exists[:, t], t], moved[exists[:, t]])
        total = np.moveaxis(given, 0, axis)
    return total


def _chosen_reference(loss: Array, index: Array, **values: Any) -> Array:
    """Adds every loss where its index says, if its window holds that element."""
    axes = values["axes"]
    image, windows, pooled = forward_of(loss.shape, values)
    sizes = tuple(image[a] for a in axes)
    count = prod(sizes)
    at = index.astype(np.int64)
    inside = (at >= 0) & (at < count)
    places = np.unravel_index(np.where(inside, at, 0), sizes)
    for axis, place in zip(axes, places):
        window = windows[axis]
        p = _column(np.arange(pooled[axis]), axis, loss.ndim)
        if isinstance(window, Adaptive):
            inside &= (place >= window.start(p)) & (place < window.end(p))
        else:
            assert isinstance(window, Sliding)
            offset = place - (p * window.stride - window.before)
            inside &= (offset >= 0) & (offset < window.reach) & (offset % window.dilation == 0)
    rest = tuple(d for d in range(loss.ndim) if d not in axes)
    last = (*rest, *axes)
    outer = tuple(loss.shape[d] for d in rest)
    rows = prod(outer)
    total = np.zeros(rows * count)
    at, inside, loss = (np.transpose(x, last).reshape(rows, prod(pooled[a] for a in axes)) for x in (at, inside, loss))
    flat = np.arange(rows)[:, None] * count + at
    np.add.at(total, flat[inside], loss[inside])
    return np.transpose(total.reshape(*outer, *sizes), np.argsort(last))


# ---- gradients


def _by_chosen(at: Reverse, x: Any, **attributes: Any) -> Any:
    """The gradient of maxima by ``<name>_backward(loss, x)``; how many windows there are, the loss's shape says."""
    attributes.pop("size", None)
    return getattr(at.graph, f"{at.name}_backward")(at.loss, x, **attributes)


def _by_shares(at: Reverse, x: Any, **attributes: Any) -> Any:
    attributes["size"] = tuple(x.shape[a] for a in attributes["axes"])
    return getattr(at.graph, f"{at.name}_backward")(at.loss, **attributes)


def _by_means(at: Reverse, loss: Any, size: Any, **attributes: Any) -> Any:
    """Shares of means are linear: the means of what comes back."""
    if "window" not in attributes:
        attributes["size"] = tuple(loss.shape[a] for a in attributes["axes"])
    return getattr(at.graph, at.name.removesuffix("_backward"))(at.loss, **attributes)


# ---- the table


def _register(
    name: str,
    fold: str,
    operands: tuple[str, ...],
    attributes: Attributes,
    reference: Callable[..., Array],
    doc: str,
    gradient: Rule | str | None = None,
    *,
    backward: bool = False,
) -> None:
    most = fold in ("max", "index")

    def normalize(types: Types, values: Attributes) -> dict[str, Any]:
        x = types[0]
        if most and x.dtype.is_bool:
            raise DTypeError(f"{name} does not take bool; cast to int8")
        if not most and not x.dtype.is_float:
            raise DTypeError(f"{name} of {x.dtype} is not exact; cast to a float")
        if fold == "chosen" and not types[1].dtype.is_int:
            raise DTypeError(f"{name} takes positions of integers, got {types[1].dtype}")
        return normal(x, values)

    def windows(types: Types, values: Attributes) -> tuple[Windows, tuple[int, ...]]:
        return (gradient_windows if backward else forward_windows)(types[0].shape, values)

    def infer(types: Types, values: Attributes) -> TensorType:
        _, shape = windows(types, values)
        if fold == "chosen" and types[1].shape != types[0].shape:
            raise ShapeError(f"{name} takes an index for each of {list(types[0].shape)}, got {list(types[1].shape)}")
        if fold in ("index", "chosen"):
            image = shape if backward else types[0].shape
            positions = prod(image[a] for a in values["axes"])
            if positions > int32.max:  # the type in which kernels count positions
                raise ShapeError(f"windows are over {int32.max} positions at most, not {positions}")
        return TensorType(shape, values.get("dtype", types[0].dtype))

    register(
        Op(
            name=name,
            kind=Kind.POOLING,
            operands=operands,
            integers=("index",) if fold == "chosen" else (),
            attributes={**attributes, "axes": None},
            normalize=normalize,
            infer=infer,
            windows=windows,
            fold=fold,
            combiner=MAX if most else ADD,
            reference=reference,
            gradient=gradient,
            keeps_layout=True,
            doc=doc,
        )
    )


_PLAIN_DOC = """

        window is an integer or one for each of the axes; so is stride (default: the window's size).  padding is an
        integer, one an axis, or pairs (before, after).  Along n elements there are (n + before + after - window) //
        stride + 1 windows; ceil_mode adds one where elements are left that no window holds, if it starts inside the
        image or its padding.  axes are those of the window, by default the spatial ones of x (N, C, spatial...)."""
WINDOW_DOC = f"""{_PLAIN_DOC}
        The elements of a window are dilation apart (an integer or one an axis): it reaches over (window - 1) * dilation
        + 1 of them."""
ADAPTIVE_DOC = """

        size is the result's, an integer or one for each of the axes (default: the spatial ones of x (N, C,
        spatial...)).  As in torch, of n elements window p of m holds those from floor(p n / m) to before
        ceil((p + 1) n / m)."""
_MAX_DOC = "Padding never wins; a window of nothing else gives minus infinity, or the dtype's least integer.  NaN wins."
_INDEX_DOC = """The first of equal elements counts, the last of those that are NaN, as in torch; -1 for a
        window of nothing but padding.  dtype is int32 or int64."""

_register(
    "max_pool", "max", ("x",), SLIDING, _max_reference,
    f"""The largest element of every window.

        {_MAX_DOC}{WINDOW_DOC}""",
    _by_chosen,
)  # fmt: skip
_register(
    "max_pool_index", "index", ("x",), {**SLIDING, "dtype": int32}, _index_reference,
    f"""Where the largest element of every window is: its position in the image, flattened over the axes.

        {_INDEX_DOC}{WINDOW_DOC}""",
)  # fmt: skip
_register(
    "avg_pool", "mean", ("x",), _AVERAGE, _mean_reference,
    f"""The mean of every window.

        With count_include_pad the padding counts as zeros (what hangs over it in ceil mode does not); else the mean is
        of the window's elements alone, NaN if it has none.  Floats only.{_PLAIN_DOC}""",
    _by_shares,
)  # fmt: skip
_register(
    "adaptive_max_pool", "max", ("x",), {"size": REQUIRED}, _max_reference,
    f"""The largest element of windows that share out the image to a result of a given size.{ADAPTIVE_DOC}""",
    _by_chosen,
)  # fmt: skip
_register(
    "adaptive_max_pool_index", "index", ("x",), {"size": REQUIRED, "dtype": int32}, _index_reference,
    f"""Where the elements are that adaptive_max_pool takes: positions in the image, flattened over the axes.

        {_INDEX_DOC}{ADAPTIVE_DOC}""",
)  # fmt: skip
_register(
    "adaptive_avg_pool", "mean", ("x",), {"size": REQUIRED}, _mean_reference,
    f"""The mean of windows that share out the image to a result of a given size.{ADAPTIVE_DOC}""",
    _by_shares,
)  # fmt: skip
_INDEX_REASON = "the op that finds the maxima itself has one, as its positions are in their windows"
_GRADIENT_DOC = "size is that of the image along the axes; the other attributes are those of the forward op."
_register(
    "max_pool_backward_index", "chosen", ("loss", "index"), {"size": REQUIRED, **SLIDING}, _chosen_reference,
    f"""Gradient of max_pool, given the result of max_pool_index: every element of the image sums the losses of the
        windows that chose it, in a fixed order.  An index outside of its window counts nowhere.

        {_GRADIENT_DOC}""",
    _INDEX_REASON,
    backward=True,
)  # fmt: skip
_register(
    "avg_pool_backward", "shares", ("loss",), {"size": REQUIRED, **_AVERAGE}, _mean_backward_reference,
    f"""Gradient of avg_pool: every element of the image sums its share of the losses of the windows that hold it.

        {_GRADIENT_DOC}""",
    _by_means,
    backward=True,
)  # fmt: skip
_register(
    "adaptive_max_pool_backward_index", "chosen", ("loss", "index"), {"size": REQUIRED}, _chosen_reference,
    f"""Gradient of adaptive_max_pool, given the result of adaptive_max_pool_index, as max_pool_backward_index.

        {_GRADIENT_DOC}""",
    _INDEX_REASON,
    backward=True,
)  # fmt: skip
_register(
    "adaptive_avg_pool_backward", "shares", ("loss",), {"size": REQUIRED}, _mean_backward_reference,
    f"""Gradient of adaptive_avg_pool.  {_GRADIENT_DOC}""",
    _by_means,
    backward=True,
)  # fmt: skip
