"""The functions of the table, by what their operators do.  Importing this package fills the table."""

from fusegraph.frontends.onnx.operators import (
    constants,
    elementwise,
    indices,
    movement,
    norms,
    products,
    quantized,
    reductions,
    resize,
    windows,
)

__all__ = [
    "constants",
    "elementwise",
    "indices",
    "movement",
    "norms",
    "products",
    "quantized",
    "reductions",
    "resize",
    "windows",
]
