"""ATen's pooling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusegraph.dtypes import int64
from fusegraph.errors import NotSupportedError
from fusegraph.frontends.torch.table import Call, aten, pair
from fusegraph.graph import Tensor


def _windows(
    x: Tensor, window: Sequence[int], stride: Sequence[int], padding: int | Sequence[int], ceil_mode: bool
) -> dict[str, Any]:
    """Returns the attributes that all pooling along the last axes has."""
    count = len(window)
    return {
        "axes": _spatial(x, count),
        "window": pair(window, count),
        "stride": pair(stride, count) if stride else None,
        "padding": pair(padding, count),
        "ceil_mode": ceil_mode,
    }


def _dilated(
    x: Tensor,
    window: Sequence[int],
    stride: Sequence[int] = (),
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> dict[str, Any]:
    """Returns the attributes of max pooling."""
    return _windows(x, window, stride, padding, ceil_mode) | {"dilation": pair(dilation, len(window))}


@aten("max_pool2d_with_indices.default", "max_pool3d_with_indices.default")
def _max_pool(c: Call, x: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    how = _dilated(x, *given)
    return c.graph.max_pool(x, **how), c.graph.max_pool_index(x, dtype=int64, **how)


@aten("max_pool2d_with_indices_backward.default", "max_pool3d_with_indices_backward.default")
def _max_pool_backward(c: Call, loss: Tensor, x: Tensor, *given: Any) -> Tensor:
    *windows, index = given
    how = _dilated(x, *windows)
    return c.cast(c.graph.max_pool_backward_index(loss, index, size=x.shape[-len(how["axes"]) :], **how))


def _averaged(
    x: Tensor,
    window: Sequence[int],
    stride: Sequence[int] = (),
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> dict[str, Any]:
    """Returns the attributes of average pooling.  Raises NotSupportedError for a divisor_override."""
    if divisor_override is not None:
        raise NotSupportedError("avg_pool with a divisor_override")
    return _windows(x, window, stride, padding, ceil_mode) | {"count_include_pad": count_include_pad}


@aten("avg_pool1d.default", "avg_pool2d.default", "avg_pool3d.default")
def _avg_pool(c: Call, x: Tensor, *given: Any) -> Tensor:
    return c.graph.avg_pool(x, **_averaged(x, *given))


@aten("avg_pool2d_backward.default", "avg_pool3d_backward.default")
def _avg_pool_backward(c: Call, loss: Tensor, x: Tensor, *given: Any) -> Tensor:
    how = _averaged(x, *given)
    return c.graph.avg_pool_backward(loss, size=x.shape[-len(how["axes"]) :], **how)


@aten("_adaptive_avg_pool2d.default", "_adaptive_avg_pool3d.default")
def _adaptive_avg_pool(c: Call, x: Tensor, size: Sequence[int]) -> Tensor:
    return c.graph.adaptive_avg_pool(x, size=tuple(size), axes=_spatial(x, len(size)))


@aten("_adaptive_avg_pool2d_backward.default", "_adaptive_avg_pool3d_backward.default")
def _adaptive_avg_pool_backward(c: Call, loss: Tensor, x: Tensor) -> Tensor:
    count = 2 if x.rank < 5 else 3
    return c.graph.adaptive_avg_pool_backward(loss, size=x.shape[-count:], axes=_spatial(x, count))


@aten("adaptive_max_pool2d.default", "adaptive_max_pool3d.default")
def _adaptive_max_pool(c: Call, x: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    how: dict[str, Any] = {"size": tuple(size), "axes": _spatial(x, len(size))}
    return c.graph.adaptive_max_pool(x, **how), c.graph.adaptive_max_pool_index(x, dtype=int64, **how)


def _adaptive_max_pool_backward(count: int) -> Any:
    def handler(c: Call, loss: Tensor, x: Tensor, index: Tensor) -> Tensor:
        how: dict[str, Any] = {"size": x.shape[-count:], "axes": _spatial(x, count)}
        return c.cast(c.graph.adaptive_max_pool_backward_index(loss, index, **how))

    return handler


for _count in (2, 3):
    aten(f"adaptive_max_pool{_count}d_backward.default")(_adaptive_max_pool_backward(_count))


def _spatial(x: Tensor, count: int) -> tuple[int, ...]:
    return tuple(range(x.rank - count, x.rank))
