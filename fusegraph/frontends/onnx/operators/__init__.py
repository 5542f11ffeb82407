"""The functions of the table, grouped by what their operators do.  Importing this package fills the table."""

from fusegraph.frontends.onnx.operators import (  # noqa: F401 - they fill the table
    attention,
    constants,
    contributed,
    elementwise,
    fourier,
    indices,
    learning,
    losses,
    movement,
    norms,
    products,
    quantized,
    recurrent,
    reductions,
    regions,
    resize,
    sorting,
    windows,
)
