"""Convolutions: forward, the gradient of their input (also known as transposed convolution), that of their filter.

All three are about the same sums.  With image x (N, C, spatial...), filter w (K, C / groups, taps...) and result or
loss y (N, K, positions...), tap r of the window at position p lies over x at p * stride + r * dilation - padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod
from typing import Any

import numpy as np

from codegen.sizes import most
from fusegraph.errors import AttributeValueError, ShapeError
from fusegraph.ops.base import Array, Attributes, Kind, Op, Role, TensorType, Types, register
from fusegraph.ops.contraction import PRECISIONS, accumulator_result, operand_precision, widen, wrapped
from fusegraph.ops.reduction import summed
from fusegraph.ops.reverse import Reverse, factor
from fusegraph.ops.winograd import TILES, unsuitable

Sizes = tuple[int, ...]
Pads = tuple[tuple[int, int], ...]


def spread(value: Any, rank: int, what: str, lowest: int) -> tuple[int, ...]:
    """Returns one number for every spatial dimension, given one number or a sequence of ``rank``."""
    values = (value,) * rank if isinstance(value, int) else tuple(value or ())
    if len(values) != rank or not all(isinstance(v, int) and v >= lowest for v in values):
        raise AttributeValueError(f"{what} is an integer of at least {lowest}, or {rank} of them, got {value!r}")
    return values


def spread_padding(value: Any, rank: int) -> Pads:
    """Returns ((before, after), ...) for every spatial dimension, given a number, one number a dimension, or pairs."""
    if isinstance(value, Sequence) and len(value) == rank and all(isinstance(v, Sequence) for v in value):
        pairs = [spread(v, 2, "padding (before, after)", 0) for v in value]
        return tuple((before, after) for before, after in pairs)
    return tuple((p, p) for p in spread(value, rank, "padding", 0))


def _normalized(types: Types, attributes: Attributes, first: str) -> dict[str, Any]:
    """Returns the attributes that all convolutions have, in canonical form; ``first`` describes the first operand."""
    rank = len(types[0].shape) - 2
    if rank not in (1, 2, 3):
        raise ShapeError(f"{first} has 3, 4 or 5 dimensions")
    groups = attributes["groups"]
    if groups is None or groups < 1:
        raise AttributeValueError(f"groups is a positive integer, got {groups!r}")
    return {
        **attributes,
        "stride": spread(attributes["stride"], rank, "stride", 1),
        "dilation": spread(attributes["dilation"], rank, "dilation", 1),
        "padding": spread_padding(attributes["padding"], rank),
        "groups": groups,
        "compute_dtype": operand_precision(types, attributes["compute_dtype"]),
    }


def _same_rank(types: Types, names: tuple[str, str]) -> None:
    first, second = (len(t.shape) for t in types)
    if first != second:
        raise ShapeError(f"{names[0]} and {names[1]} have the same number of dimensions, got {first} and {second}")


def _reach(taps: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    """Returns how far a filter reaches over its input in each spatial dimension."""
    return tuple((count - 1) * step + 1 for count, step in zip(taps, dilation))


def _positions(size: int, reach: int, attributes: Attributes, axis: int) -> int:
    """Returns the number of positions of a window over a spatial dimension; 0 where it does not fit."""
    room = size + sum(attributes["padding"][axis]) - reach
    return room // attributes["stride"][axis] + 1 if most(room) >= 0 else 0


def _columns(x: Array) -> Array:
    """Joins the positions behind (images, groups, channels) in one dimension, as a matrix product takes them."""
    return x.reshape(*x.shape[:3], prod(x.shape[3:]))


def _turned(filters: Array, mode: str) -> Array:
    """Returns filters as a cross-correlation has them: flipped in space if the mode is "convolution"."""
    return np.flip(filters, tuple(range(2, filters.ndim))) if mode == "convolution" else filters


_COMMON = {
    "stride": 1,
    "padding": 0,
    "dilation": 1,
    "groups": 1,
    "mode": "cross_correlation",
    "dtype": None,
    "compute_dtype": None,
}

_WORDS = {"mode": ("cross_correlation", "convolution"), "compute_dtype": PRECISIONS}
#: None leaves the choice to `passes.algorithms`.
_ALGORITHMS = (None, "direct", *TILES)


def _check_algorithm(role: Role, types: Types, attributes: Attributes) -> None:
    """Raises AttributeValueError for an algorithm that does not do this convolution."""
    algorithm = attributes["algorithm"]
    if algorithm in TILES and (reason := unsuitable(role, types, attributes)) is not None:
        raise AttributeValueError(f"algorithm {algorithm!r} does not do this convolution: {reason}")


# ---- conv_fprop


def _fprop_normalize(types: Types, attributes: Attributes) -> dict[str, Any]:
    groups, x, w = attributes["groups"], types[0].shape, types[1].shape
    if groups is None:
        groups = max(x[1] // w[1], 1) if len(x) == len(w) > 2 and w[1] else 1
    return _normalized(types, {**attributes, "groups": groups}, "x (N, C, spatial...)")


def _fprop_infer(types: Types, attributes: Attributes) -> TensorType:
    _same_rank(types, ("x", "w"))
    x, w = types[0].shape, types[1].shape
    groups = attributes["groups"]
    _check_algorithm(Role.FPROP, types, attributes)
    if w[1] * groups != x[1]:
        raise ShapeError(f"{x[1]} channels of x are not {groups} groups of the filter's {w[1]} channels")
    if w[0] % groups:
        raise ShapeError(f"{w[0]} filters do not split into {groups} groups")
    spatial = []
    for axis, (size, taps, reach) in enumerate(zip(x[2:], w[2:], _reach(w[2:], attributes["dilation"]))):
        positions = _positions(size, reach, attributes, axis)
        if taps < 1 or not positions:
            before, after = attributes["padding"][axis]
            raise ShapeError(
                f"spatial dimension {axis}: a filter reaching over {reach} does not fit "
                f"{size} + padding {before} + {after}"
            )
        spatial.append(positions)
    return TensorType((x[0], w[0], *spatial), accumulator_result(types, attributes["dtype"]))


def _fprop_reference(
    x: Array,
    w: Array,
    *,
    stride: Sizes,
    padding: Pads,
    dilation: Sizes,
    groups: int,
    mode: str,
    dtype: Any = None,
    **_: Any,
) -> Array:
    rank = x.ndim - 2
    taps = _turned(widen(w), mode)
    padded = np.pad(widen(x), ((0, 0), (0, 0), *padding))
    reach = _reach(w.shape[2:], dilation)
    out = tuple((padded.shape[2 + d] - reach[d]) // stride[d] + 1 for d in range(rank))
    n, k, channels = x.shape[0], w.shape[0], w.shape[1]
    total = np.zeros((n, groups, k // groups, prod(out)), dtype=padded.dtype)
    grouped_x = padded.reshape(n, groups, channels, *padded.shape[2:])
    grouped_w = taps.reshape(groups, k // groups, channels, *w.shape[2:])
    with np.errstate(all="ignore"):
        for tap in np.ndindex(*w.shape[2:]):
            total += np.matmul(grouped_w[(..., *tap)], _columns(grouped_x[_window(tap, out, stride, dilation)]))
    return wrapped(total.reshape(n, k, *out), x, w, dtype)


def _window(tap: Sequence[int], out: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> tuple[Any, ...]:
    """Returns what a tap lies over, at all positions, in a padded image."""
    return (..., *(slice(t * d, t * d + (o - 1) * s + 1, s) for t, d, o, s in zip(tap, dilation, out, stride)))


# ---- gradients: each convolution has the other two as its own

#: Attributes that a convolution and its gradients share.
_SHARED = ("stride", "padding", "dilation", "groups", "mode", "compute_dtype")


def _by_image_and_filter(at: Reverse, x: Any, w: Any, **attributes: Any) -> Any:
    g, loss, how = at.graph, factor(at, x, w), {key: attributes[key] for key in _SHARED}
    return (
        lambda: g.conv_dgrad(loss, w, size=x.shape[2:], dtype=summed(x.dtype), **how),
        lambda: g.conv_wgrad(x, loss, taps=w.shape[2:], dtype=summed(w.dtype), **how),
    )


def _by_loss_and_filter(at: Reverse, loss: Any, w: Any, **attributes: Any) -> Any:
    g, image, how = at.graph, factor(at, loss, w), {key: attributes[key] for key in _SHARED}
    return (
        lambda: g.conv_fprop(image, w, dtype=summed(loss.dtype), **how),
        lambda: g.conv_wgrad(image, loss, taps=w.shape[2:], dtype=summed(w.dtype), **how),
    )


def _by_image_and_loss(at: Reverse, image: Any, loss: Any, **attributes: Any) -> Any:
    g, w, how = at.graph, factor(at, image, loss), {key: attributes[key] for key in _SHARED}
    return (
        lambda: g.conv_dgrad(loss, w, size=image.shape[2:], dtype=summed(image.dtype), **how),
        lambda: g.conv_fprop(image, w, dtype=summed(loss.dtype), **how),
    )


register(
    Op(
        name="conv_fprop",
        kind=Kind.CONTRACTION,
        role=Role.FPROP,
        operands=("x", "w"),
        attributes={**_COMMON, "groups": None, "algorithm": None},
        words={**_WORDS, "algorithm": _ALGORITHMS},
        normalize=_fprop_normalize,
        infer=_fprop_infer,
        reference=_fprop_reference,
        gradient=_by_image_and_filter,
        products=lambda types, _: prod(types[1].shape[1:]),
        cudnn="conv_fprop",
        keeps_layout=True,
        doc="""Convolution of x (N, C, spatial...) with w (K, C / groups, taps...): (N, K, spatial...), 1-D to 3-D.

        stride, dilation: an integer, or one for each spatial dimension.  padding: an integer, one for each dimension,
        or (before, after) pairs; the padding is zero.  groups: by default C divided by the filter's channels.  mode
        "convolution" flips the filter, "cross_correlation" does not.  The result lies in memory as x does (NHWC in,
        NHWC out).  dtype, compute_dtype and the accumulator are as for matmul.

        algorithm: "direct" sums up the products as they are.  "winograd_2x2" and "winograd_4x4" are Winograd's for 3x3
        filters in float32, with a stride and dilation of 1 and one group: 2.25 and 4 times fewer products; errors are
        about half and twice those of the direct sum, and what is not finite may spread to all results of the tiles
        that it reaches.  None, the default, takes one of them where it is estimated to be faster, never in a strict
        graph.""",
    )
)


# ---- conv_dgrad


def _smallest(positions: int, reach: int, attributes: Attributes, axis: int) -> int:
    """Returns the smallest size over which a window has so many positions, negative if there is none."""
    step = attributes["stride"][axis]
    smallest = (positions - 1) * step + reach - sum(attributes["padding"][axis])
    return 0 if -step < smallest < 0 else smallest


def _dgrad_normalize(types: Types, attributes: Attributes) -> dict[str, Any]:
    values = _normalized(types, attributes, "loss (N, K, positions...)")
    loss, w = types[0].shape, types[1].shape
    rank = len(loss) - 2
    if values["size"] is not None:
        values["size"] = spread(values["size"], rank, "size", 0)
    elif len(w) == len(loss):
        values["size"] = smallest_sizes(loss[2:], w[2:], values["stride"], values["padding"], values["dilation"])
    return values


def smallest_sizes(positions: Sequence[int], taps: Sequence[int], stride: Any, padding: Any, dilation: Any) -> Sizes:
    """Returns the smallest spatial sizes over which a window has so many positions; negative where there is none."""
    rank = len(positions)
    how = {"stride": spread(stride, rank, "stride", 1), "padding": spread_padding(padding, rank)}
    reach = _reach(taps, spread(dilation, rank, "dilation", 1))
    return tuple(_smallest(positions[d], reach[d], how, d) for d in range(rank))


def _dgrad_infer(types: Types, attributes: Attributes) -> TensorType:
    _same_rank(types, ("loss", "filter"))
    loss, w = types[0].shape, types[1].shape
    groups, size = attributes["groups"], attributes["size"]
    _check_algorithm(Role.DGRAD, types, attributes)
    if loss[1] != w[0]:
        raise ShapeError(f"loss has {loss[1]} channels, one for each filter, but there are {w[0]} filters")
    if w[0] % groups:
        raise ShapeError(f"{w[0]} filters do not split into {groups} groups")
    for axis, (positions, taps, reach) in enumerate(zip(loss[2:], w[2:], _reach(w[2:], attributes["dilation"]))):
        if taps < 1 or positions < 1:
            raise ShapeError(f"spatial dimension {axis}: {taps} taps and {positions} positions; there are at least 1")
        before, after = attributes["padding"][axis]
        smallest = _smallest(positions, reach, attributes, axis)
        if smallest < 0:
            raise ShapeError(
                f"spatial dimension {axis}: a filter reaching over {reach} has more than {positions} positions over "
                f"padding {before} + {after} alone"
            )
        found = _positions(size[axis], reach, attributes, axis)
        if found != positions:
            largest = positions * attributes["stride"][axis] + reach - before - after - 1
            raise ShapeError(
                f"spatial dimension {axis}: a convolution of size {size[axis]} has {found} positions, the loss "
                f"{positions}; sizes that fit are {smallest} to {largest}"
            )
    return TensorType((loss[0], w[1] * groups, *size), accumulator_result(types, attributes["dtype"]))


def _dgrad_reference(
    loss: Array,
    w: Array,
    *,
    size: Sizes,
    stride: Sizes,
    padding: Pads,
    dilation: Sizes,
    groups: int,
    mode: str,
    dtype: Any = None,
    **_: Any,
) -> Array:
    """Every tap adds to the elements that it lies over at some position, the loss being zero beyond its positions."""
    rank = loss.ndim - 2
    taps = _turned(widen(w), mode)
    n, k, channels = loss.shape[0], w.shape[0], w.shape[1]
    # Wide enough that the positions of all taps over all elements are inside.
    around = [
        (max((reach - 1 - before) // step, 0), max((h - 1 + before) // step + 1 - positions, 0))
        for reach, (before, _), step, h, positions in zip(
            _reach(w.shape[2:], dilation), padding, stride, size, loss.shape[2:]
        )
    ]
    padded = np.pad(widen(loss), ((0, 0), (0, 0), *around))
    grouped_loss = padded.reshape(n, groups, k // groups, *padded.shape[2:])
    grouped_w = taps.reshape(groups, k // groups, channels, *w.shape[2:]).swapaxes(1, 2)
    total = np.zeros((n, groups, channels, *size), dtype=padded.dtype)
    with np.errstate(all="ignore"):
        for tap in np.ndindex(*w.shape[2:]):
            onto: list[Any] = [...]
            under: list[Any] = [...]
            for d in range(rank):
                offset = tap[d] * dilation[d] - padding[d][0]
                first = offset % stride[d]
                count = len(range(first, size[d], stride[d]))
                start = (first - offset) // stride[d] + around[d][0]
                onto.append(slice(first, None, stride[d]))
                under.append(slice(start, start + count))
            part = total[tuple(onto)]
            if part.size:
                product = np.matmul(grouped_w[(..., *tap)], _columns(grouped_loss[tuple(under)]))
                part += product.reshape(part.shape)
    return wrapped(total.reshape(n, groups * channels, *size), loss, w, dtype)


def _dgrad_products(types: Types, attributes: Attributes) -> int:
    """Only every (stride / gcd(stride, dilation))-th tap lies over an element at some position."""
    w, groups = types[1].shape, int(attributes["groups"])
    apart = [int(s // gcd(s, d)) for s, d in zip(attributes["stride"], attributes["dilation"])]
    return w[0] // groups * prod([-(-taps // step) for taps, step in zip(w[2:], apart)])


register(
    Op(
        name="conv_dgrad",
        kind=Kind.CONTRACTION,
        role=Role.DGRAD,
        operands=("loss", "filter"),
        attributes={"size": None, **_COMMON, "algorithm": None},
        words={**_WORDS, "algorithm": _ALGORITHMS},
        normalize=_dgrad_normalize,
        infer=_dgrad_infer,
        reference=_dgrad_reference,
        gradient=_by_loss_and_filter,
        products=_dgrad_products,
        multiplications=lambda types, _: prod(types[0].shape) * prod(types[1].shape[1:]),
        cudnn="conv_dgrad",
        keeps_layout=True,
        doc="""Gradient of a convolution's input, also known as transposed convolution: (N, C, size...), 1-D to 3-D.

        From the loss (N, K, positions...), the gradient of the convolution's result, and its filter (K, C / groups,
        taps...).  size: an integer, or one for each spatial dimension; by default the smallest over which the
        convolution has as many positions as the loss.  stride, padding, dilation, groups and mode are those of the
        convolution; groups is 1 if it is not given.  The loss counts as zero beyond its positions.  The result lies in
        memory as the loss does.  dtype, compute_dtype and the accumulator are as for matmul, algorithm as for
        conv_fprop.""",
    )
)


# ---- conv_wgrad


def _wgrad_normalize(types: Types, attributes: Attributes) -> dict[str, Any]:
    values = _normalized(types, attributes, "image (N, C, spatial...)")
    image, loss = types[0].shape, types[1].shape
    rank = len(image) - 2
    if values["taps"] is not None:
        values["taps"] = spread(values["taps"], rank, "taps", 1)
    elif len(loss) == len(image):
        fitting = [_taps(image[2 + d], loss[2 + d], values, d) for d in range(rank)]
        if all(len(counts) == 1 for counts in fitting):
            values["taps"] = tuple(counts[0] for counts in fitting)
    return values


def _taps(size: int, positions: int, attributes: Attributes, axis: int) -> range:
    """Returns the numbers of taps with which a filter has so many positions over a size."""
    longest = size + sum(attributes["padding"][axis]) - (positions - 1) * attributes["stride"][axis]
    shortest = longest - attributes["stride"][axis] + 1
    step = attributes["dilation"][axis]
    if positions < 1 or longest < 1:
        return range(0)
    return range(-(-(max(shortest, 1) - 1) // step) + 1, (longest - 1) // step + 2)


def _wgrad_infer(types: Types, attributes: Attributes) -> TensorType:
    _same_rank(types, ("image", "loss"))
    image, loss = types[0].shape, types[1].shape
    groups, taps = attributes["groups"], attributes["taps"]
    if image[0] != loss[0]:
        raise ShapeError(f"image has {image[0]} images, loss {loss[0]}")
    for what, count in (("channels of the image", image[1]), ("channels of the loss", loss[1])):
        if count % groups:
            raise ShapeError(f"{count} {what} do not split into {groups} groups")
    for axis, (size, positions) in enumerate(zip(image[2:], loss[2:])):
        fitting = _taps(size, positions, attributes, axis)
        if not fitting:
            before, after = attributes["padding"][axis]
            raise ShapeError(
                f"spatial dimension {axis}: no filter has {positions} positions over {size} + padding {before} + "
                f"{after} with stride {attributes['stride'][axis]} and dilation {attributes['dilation'][axis]}"
            )
        ends = f"{fitting[0]} to {fitting[-1]}" if len(fitting) > 1 else f"{fitting[0]}"
        if taps is not None and taps[axis] not in fitting:
            raise ShapeError(
                f"spatial dimension {axis}: a filter of {taps[axis]} taps has not the {positions} positions of the "
                f"loss over size {size}; {ends} taps fit"
            )
        if taps is None and len(fitting) > 1:
            raise AttributeValueError(f"spatial dimension {axis}: filters of {ends} taps fit; say which with taps")
    return TensorType((loss[1], image[1] // groups, *taps), accumulator_result(types, attributes["dtype"]))


def _wgrad_reference(
    image: Array,
    loss: Array,
    *,
    taps: Sizes,
    stride: Sizes,
    padding: Pads,
    dilation: Sizes,
    groups: int,
    mode: str,
    dtype: Any = None,
    **_: Any,
) -> Array:
    padded = np.pad(widen(image), ((0, 0), (0, 0), *padding))
    n, c, k, out = image.shape[0], image.shape[1], loss.shape[1], loss.shape[2:]
    grouped_x = padded.reshape(n, groups, c // groups, *padded.shape[2:])
    grouped_loss = _columns(widen(loss).reshape(n, groups, k // groups, *out))
    total = np.zeros((groups, k // groups, c // groups, *taps), dtype=np.result_type(padded, grouped_loss))
    with np.errstate(all="ignore"):
        for tap in np.ndindex(*taps):
            over = _columns(grouped_x[_window(tap, out, stride, dilation)]).swapaxes(2, 3)
            total[(..., *tap)] = np.matmul(grouped_loss, over).sum(axis=0)
    return wrapped(_turned(total.reshape(k, c // groups, *taps), mode), image, loss, dtype)


register(
    Op(
        name="conv_wgrad",
        kind=Kind.CONTRACTION,
        role=Role.WGRAD,
        operands=("image", "loss"),
        attributes={"taps": None, **_COMMON},
        words=_WORDS,
        normalize=_wgrad_normalize,
        infer=_wgrad_infer,
        reference=_wgrad_reference,
        gradient=_by_image_and_loss,
        products=lambda types, _: types[1].shape[0] * prod(types[1].shape[2:]),
        cudnn="conv_wgrad",
        keeps_layout=True,
        doc="""Gradient of a convolution's filter: (K, C / groups, taps...), 1-D to 3-D.

        From the image (N, C, spatial...) and the loss (N, K, positions...), the gradient of the convolution's result.
        taps: an integer, or one for each spatial dimension; may be left out where only one fits, as with stride 1.
        stride, padding, dilation, groups and mode are those of the convolution; groups is 1 if it is not given.  The
        result lies in memory as the image does (a filter in KRSC from an image in NHWC).  dtype, compute_dtype and the
        accumulator are as for matmul.""",
    )
)
