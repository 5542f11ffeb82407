"""Resize, Upsample and GridSample: interpolation between elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from fusegraph.errors import ModelError
from fusegraph.frontends.onnx.operators.movement import normal_axes_in_order
from fusegraph.frontends.onnx.table import Call, operator
from fusegraph.frontends.onnx.tensors import Array
from fusegraph.graph import Tensor
from fusegraph.resampling import MAX_TABLE, interpolation

_NEAREST: dict[str, Callable[[Array], Array]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


@operator("Resize")
def resize(
    call: Call, x: Tensor, roi: Tensor | None = None, scales: Tensor | None = None, sizes: Tensor | None = None
) -> Tensor:
    axes = normal_axes_in_order(call["axes"], x.rank) if call["axes"] is not None else range(x.rank)
    return _resized(call, x, axes, *_scaled(call, [x.shape[d] for d in axes], scales, sizes), roi)


def _resized(
    call: Call, x: Tensor, axes: Sequence[int], factors: list[float], new: list[int], roi: Tensor | None = None
) -> Tensor:
    """Resizes along axes by these factors to the sizes ``new``."""
    graph = call.graph
    mode, how = call.word("mode", "nearest", "linear", "cubic"), call["coordinate_transformation_mode"]
    crop = [0.0] * len(axes) + [1.0] * len(axes)
    if how == "tf_crop_and_resize":
        crop = [] if roi is None else [float(v) for v in call.known(roi, "roi").reshape(-1)]
        if len(crop) != 2 * len(axes):
            raise ModelError(f"roi has {2 * len(axes)} numbers, got {len(crop)}")
    beyond: Tensor | None = None
    y = x if mode == "nearest" or x.dtype.is_float else graph.cast(x, "float32")
    for number, axis in enumerate(axes):
        old, count, factor = x.shape[axis], new[number], factors[number]
        if count == old and factor == 1 and how != "tf_crop_and_resize":
            continue
        if not old or count > MAX_TABLE:
            raise ModelError(f"axis {axis} of {list(x.shape)} cannot be resized to {count} elements")
        start, end = crop[number], crop[number + len(axes)]
        places = _positions(how, old, count, factor, start, end)
        y = graph.resample(y, axis, *_table(call, places, old, factor))
        outside = (places < 0) | (places > old - 1)
        if how == "tf_crop_and_resize" and outside.any():
            shape = [count if d == axis else 1 for d in range(x.rank)]
            mask = graph.constant(outside.reshape(shape))
            beyond = mask if beyond is None else graph.logical_or(beyond, mask)
    if beyond is not None:
        y = graph.binary_select(call["extrapolation_value"], y, beyond)
    return graph.cast(y, x.dtype)


@operator("Upsample")
def upsample(call: Call, x: Tensor, scales: Tensor | None = None) -> Tensor:
    """Resizes as before operator set 10; before version 9 the scales are an attribute."""
    factors = call["scales"] if scales is None else [float(v) for v in call.known(scales, "scales").reshape(-1)]
    if len(factors) != x.rank or not all(1 <= f < 2**31 for f in factors):
        raise ModelError(f"scales {factors[:8]} are not numbers of at least 1 for {list(x.shape)}")
    mode = {"bilinear": "linear"}.get(call["mode"], call["mode"])
    if mode not in ("nearest", "linear"):
        raise ModelError(f"mode is nearest or linear, got {mode[:40]!r}")
    since = {"mode": mode, "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
    new = [_times(factor, old) for old, factor in zip(x.shape, factors)]
    return _resized(replace(call, attributes={**call.attributes, **since}), x, range(x.rank), factors, new)


def _scaled(
    call: Call, old: Sequence[int], scales: Tensor | None, sizes: Tensor | None
) -> tuple[list[float], list[int]]:
    """Returns the factor and the new size of each axis."""
    if sizes is not None and sizes.size:
        new = call.integers(sizes, "sizes")
        if len(new) != len(old) or min(new) < 1 or min(old) < 1:
            raise ModelError(f"sizes {new[:8]} are not those of {list(old)}, each at least 1")
        factors = [1.0 if n == o else n / o for n, o in zip(new, old)]
        if call["keep_aspect_ratio_policy"] in (None, "", "stretch"):
            return factors, new
        policy = call.word("keep_aspect_ratio_policy", "stretch", "not_larger", "not_smaller")
        factor = min(factors) if policy == "not_larger" else max(factors)
        return [factor] * len(old), [int(np.floor(factor * o + 0.5)) for o in old]
    if scales is None or not scales.size:
        raise ModelError("it has neither scales nor sizes")
    factors = [float(v) for v in call.known(scales, "scales").reshape(-1)]
    if len(factors) != len(old) or not all(0 < f < 2**31 for f in factors):
        raise ModelError(f"scales {factors[:8]} are not positive numbers for {list(old)}")
    return factors, [_times(f, o) for f, o in zip(factors, old)]


def _times(factor: float, size: int) -> int:
    """Returns a size times a factor, rounded down."""
    return size * int(factor) if factor == int(factor) else int(np.floor(factor * size))


def _positions(how: str, old: int, count: int, factor: float, start: float, end: float) -> Array:
    """Returns the positions on the input's axis of the elements of the result."""
    x, width = np.arange(count, dtype=np.float64), factor * old
    if how == "asymmetric":
        return np.asarray(x / factor)
    if how == "align_corners":
        return x * ((old - 1) / (width - 1)) if width != 1 else x * 0.0
    if how == "tf_crop_and_resize":
        inside = (end - start) * (old - 1)
        return start * (old - 1) + (x * (inside / (width - 1)) if width != 1 else np.full(count, inside / 2))
    if how == "pytorch_half_pixel" and width == 1:
        return np.full(count, -0.5)
    if how not in ("half_pixel", "pytorch_half_pixel", "half_pixel_symmetric"):
        raise ModelError(f"there is no coordinate_transformation_mode {how[:40]!r}")
    shift = old / 2 * (1 - count / width) if how == "half_pixel_symmetric" else 0.0
    return shift + (x + 0.5) / factor - 0.5


def _table(call: Call, places: Array, old: int, factor: float) -> tuple[Array, Array | None]:
    """Returns the indices of the elements around every position, and their weights (None: 1)."""
    if call["mode"] == "nearest":
        if call["nearest_mode"] not in _NEAREST:
            raise ModelError(f"there is no nearest_mode {call['nearest_mode'][:40]!r}")
        return np.clip(_NEAREST[call["nearest_mode"]](places), 0, old - 1).astype(np.int64), None
    return interpolation(
        places,
        old,
        call["mode"],
        scale=factor if call["antialias"] else 1.0,
        cubic=call["cubic_coeff_a"],
        exclude_outside=bool(call["exclude_outside"]),
    )


@operator("GridSample")
def grid_sample(call: Call, x: Tensor, grid: Tensor) -> Tensor:
    """Samples at positions of a grid; in older versions the modes are called bilinear and bicubic."""
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(call["mode"], call["mode"])
    return call.graph.grid_sample(x, grid, mode, call["padding_mode"], bool(call["align_corners"]))
