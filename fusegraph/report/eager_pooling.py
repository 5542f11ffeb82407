"""Pooling as torch computes it; see `report.eager`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusegraph.dtypes import float32
from fusegraph.errors import NotSupportedError
from fusegraph.graph import Node
from fusegraph.ops.evaluate import compute_dtype

#: Composite ops, made of pooling or a reduction, that are one or two functions in torch.
POOLING_COMPOSITES = ("max_pool_backward", "adaptive_max_pool_backward", "global_max_pool", "global_avg_pool")


def response_norm(torch: Any, node: Node) -> Callable[..., Any]:
    """Returns the torch function that normalizes over a window of channels.

    Raises NotSupportedError for any axis but 1.
    """
    at, x, result = node.attributes, node.inputs[0], getattr(torch, node.output.dtype.name)
    if at["axis"] != 1:
        raise NotSupportedError(f"torch normalizes along the channels; {node.op.name} {node.name!r} does not")
    wide = getattr(torch, compute_dtype(x.dtype, float32).name)
    how = at["window"], at["alpha"], at["beta"], at["k"]
    return lambda x: torch.nn.functional.local_response_norm(x.to(wide), *how).to(result)


def pooling(torch: Any, node: Node) -> Callable[..., Any]:
    """Returns the torch function that pools over the spatial axes; gradients only for two-dimensional windows.

    Raises NotSupportedError for pooling that torch lacks.
    """
    f, at = torch.nn.functional, node.attributes
    name, x, result = node.op.name, node.inputs[0], getattr(torch, node.output.dtype.name)
    axes = at["axes"]
    rank = len(axes)
    if axes != tuple(range(2, x.rank)) or rank > 3:
        raise NotSupportedError(f"torch pools the spatial dimensions; {name} {node.name!r} is along {list(axes)}")
    pads = at.get("padding", ())
    if any(a != b or 2 * a > n for (a, b), n in zip(pads, at.get("window", ()))):
        raise NotSupportedError(
            f"torch pads both sides of an image alike, by half a window at most; {name} {node.name!r} by {pads}"
        )
    if not x.dtype.is_float:
        raise NotSupportedError(f"torch pools floats; {name} {node.name!r} is of {x.dtype}")
    slides = (at["window"], at["stride"], tuple(a for a, _ in pads)) if "window" in at else ()
    if node.op.operands[0] == "loss" and rank != 2:
        raise NotSupportedError(f"torch's gradient for {name} {node.name!r} is of two-dimensional windows")
    aten, ceil = torch.ops.aten, at.get("ceil_mode")

    def of_rank(kind: str) -> Any:
        return getattr(f, f"{kind}{rank}d")

    def whole(loss: Any) -> Any:
        return loss.new_empty((*loss.shape[:2], *node.output.shape[2:]))

    maxima = (*slides, at.get("dilation"), ceil)
    functions: dict[str, Callable[..., Any]] = {
        "max_pool": lambda x: of_rank("max_pool")(x, *maxima),
        "max_pool_index": lambda x: of_rank("max_pool")(x, *maxima, True)[1],
        "avg_pool": lambda x: of_rank("avg_pool")(x, *slides, ceil, at["count_include_pad"]),
        "adaptive_max_pool": lambda x: of_rank("adaptive_max_pool")(x, at["size"]),
        "adaptive_max_pool_index": lambda x: of_rank("adaptive_max_pool")(x, at["size"], True)[1],
        "adaptive_avg_pool": lambda x: of_rank("adaptive_avg_pool")(x, at["size"]),
        "max_pool_backward": lambda loss, x: aten.max_pool2d_with_indices_backward(
            loss, x.to(loss.dtype), *maxima, f.max_pool2d(x, *maxima, True)[1]
        ),
        "adaptive_max_pool_backward": lambda loss, x: aten.adaptive_max_pool2d_backward(
            loss, x.to(loss.dtype), f.adaptive_max_pool2d(x, loss.shape[2:], True)[1]
        ),
        "global_max_pool": lambda x: x.amax(dim=axes, keepdim=True),
        "global_avg_pool": lambda x: x.mean(dim=axes, keepdim=True),
        "max_pool_backward_index": lambda loss, index: aten.max_pool2d_with_indices_backward(
            loss, whole(loss), *maxima, index.long()
        ),
        "avg_pool_backward": lambda loss: aten.avg_pool2d_backward(
            loss, whole(loss), *slides, ceil, at["count_include_pad"], None
        ),
        "adaptive_max_pool_backward_index": lambda loss, index: aten.adaptive_max_pool2d_backward(
            loss, whole(loss), index.long()
        ),
        "adaptive_avg_pool_backward": lambda loss: aten._adaptive_avg_pool2d_backward(loss, whole(loss)),
    }
    function = functions.get(name)
    if function is None:
        raise NotSupportedError(f"no torch function for {name} {node.name!r}")
    return lambda *xs: function(*xs).to(result)
