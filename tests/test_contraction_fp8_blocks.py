"""Products of 8-bit floats with scales for blocks of the sum on both sides, against NumPy and float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kernel_cases import Case
from test_contraction_wgmma import shape

import fusegraph as fg


def blocks(
    sizes: tuple[int, int, int],
    of_a: Sequence[int] = (1, 128),
    of_b: Sequence[int] = (128, 128),
    *,
    batch: tuple[int, ...] = (),
    codes: str = "float8_e4m3",
    scale: str = "float32",
    dtype: str = "bfloat16",
    result: str | None = None,
    shared: bool = False,
    epilogue: Any = None,
    **more: Any,
) -> Case:
    """Returns a product of two operands (M, K) and (N, K) of codes with a scale for each block of so many."""
    m, n, k = sizes
    graph = fg.Graph("scaled", dtype)
    sides = []
    for name, rows, block in (("a", m, of_a), ("w", n, of_b)):
        lead = () if shared and name == "w" else batch
        x = graph.tensor(name, (*lead, rows, k), codes)
        grid = (*lead, rows // block[0], k // block[1])
        sides.append(graph.block_scale_dequantize(x, graph.tensor(f"s{name}", grid, scale), block, dtype=dtype))
    x, w = sides
    y = graph.matmul(x, w.T if not batch or shared else w.transpose((*range(len(batch)), -1, -2)), dtype=result)
    if epilogue is None:
        graph.output(y, name="y")
    else:
        epilogue(graph, y)
    return Case(graph, "contraction", **more)


def scaled(**fields: Any) -> Any:
    return lambda s: s.scales and shape(**fields)(s)
