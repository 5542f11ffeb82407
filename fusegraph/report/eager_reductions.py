"""Reductions as torch computes them; see `report.eager`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _product(x: Any, wide: Any, dim: tuple[int, ...], keepdim: bool) -> Any:
    for axis in reversed(dim):
        x = x.prod(dim=axis, keepdim=keepdim, dtype=wide)
    return x


#: Mode of a reduction -> function (torch, x, dtype in which to accumulate, dim, keepdim, ...) -> result.
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "add": lambda torch, x, wide, **how: x.sum(dtype=wide, **how),
    "mul": lambda torch, x, wide, **how: _product(x.to(wide), wide, **how),
    "mul_no_zeros": lambda torch, x, wide, **how: _product(x.where(x != 0, 1), wide, **how),
    "min": lambda torch, x, wide, **how: torch.amin(x, **how),
    "max": lambda torch, x, wide, **how: torch.amax(x, **how),
    "amax": lambda torch, x, wide, **how: torch.amax(x.abs(), **how),
    "avg": lambda torch, x, wide, **how: x.mean(dtype=wide, **how),
    "norm1": lambda torch, x, wide, **how: x.to(wide).abs().sum(dtype=wide, **how),
    "norm2": lambda torch, x, wide, **how: torch.linalg.vector_norm(x, 2, dtype=wide, **how),
    "logaddexp": lambda torch, x, wide, **how: x.to(wide).logsumexp(**how),
    "var": lambda torch, x, wide, **how: x.to(wide).var(**how),
    "argmin": lambda torch, x, wide, **how: torch.argmin(x, **how),
    "argmax": lambda torch, x, wide, **how: torch.argmax(x, **how),
    "any": lambda torch, x, wide, **how: torch.any(x != 0, **how),
    "all": lambda torch, x, wide, **how: torch.all(x != 0, **how),
}
