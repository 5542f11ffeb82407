"""Norms described to cuDNN: the operands that its methods take, and the norms that they can express."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from codegen.declined import Declined
from fusegraph.graph import Node

_BACKWARD = ("grad", "input", "scale", "mean", "inv_variance")
#: op -> cuDNN's keywords for the operands.
OPERANDS: dict[str, tuple[str, ...]] = {
    "layernorm": ("input", "scale", "bias"),
    "adalayernorm": ("input", "scale", "bias"),
    "instancenorm": ("input", "scale", "bias"),
    "rmsnorm": ("input", "scale"),
    "batchnorm": ("input", "scale", "bias", "in_running_mean", "in_running_var"),
    "batchnorm_inference": ("input", "mean", "inv_variance", "scale", "bias"),
    "genstats": ("input",),
    "layernorm_backward": _BACKWARD,
    "adalayernorm_backward": _BACKWARD,
    "instancenorm_backward": _BACKWARD,
    "batchnorm_backward": _BACKWARD,
    "rmsnorm_backward": ("grad", "input", "scale", "inv_variance"),
}


def check(node: Node) -> None:
    """Raises Declined unless cuDNN can tell the axes of a norm, which it reads from the shape of scale."""
    if "axes" not in node.attributes:
        return
    x = node.inputs[node.op.operands.index("x")]
    scale = node.inputs[node.op.operands.index("scale")]
    padded = (1,) * (x.rank - scale.rank) + scale.shape
    axes = node.attributes["axes"]
    ada = node.op.name.startswith("ada")  # whose first dimension is of samples, which scale may have too
    for d in range(x.rank):
        wrong = d in axes if ada and d == 0 else (padded[d] > 1) != (d in axes)
        if x.shape[d] > 1 and wrong:
            raise Declined(
                f"cuDNN's {node.op.cudnn} is along the dimensions that scale has, {list(padded)} "
                f"({node.name!r} is along {list(axes)} of {list(x.shape)})"
            )


def describe(
    node: Node,
    method: Callable[..., Any],
    operands: list[Any],
    scalar: Callable[[str, Any], Any],
    phases: Any,
    **how: Any,
) -> tuple[Any, ...]:
    """Adds a norm by cuDNN's method for it; returns its results.  scalar makes a tensor of one number."""
    keywords: dict[str, Any] = dict(zip(OPERANDS[node.op.name], operands))
    for key in ("epsilon", "momentum"):
        if key in node.attributes:
            keywords[key] = scalar(f"{node.name} {key}", np.array([node.attributes[key]], np.float32))
    if "norm_forward_phase" in node.attributes:
        keywords["norm_forward_phase"] = getattr(phases, node.attributes["norm_forward_phase"].upper())
    if node.op.name == "rmsnorm_backward":
        keywords["has_dbias"] = False
    found = method(**keywords, **how)
    return tuple(r for r in (found if isinstance(found, (list, tuple)) else (found,)) if r is not None)
