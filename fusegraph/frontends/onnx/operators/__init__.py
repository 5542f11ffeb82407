"""The functions of the table, by what their operators do.  Importing this package fills the table."""

from fusegraph.frontends.onnx.operators import constants, elementwise, movement, norms, products, reductions, windows

__all__ = ["constants", "elementwise", "movement", "norms", "products", "reductions", "windows"]
