"""Linear layers with 2:4 sparse weights: square ones, and the layers of a perceptron of Llama 7B's size."""

from __future__ import annotations

from collections.abc import Iterator

from fusegraph.bench.workload import Input, Workload
from fusegraph.graph import Graph, Tensor

#: Rows of x, rows of the weight, and terms of the sums.
SIZES = ((4096, 4096, 4096), (8192, 8192, 8192), (4096, 11008, 4096), (4096, 4096, 11008), (16, 11008, 4096))


def sparse() -> Iterator[Workload]:
    """Yields every workload.  Its operations are those whose factors are kept: half of the dense product's."""
    for m, n, k in SIZES:
        operands = Input("x", (m, k)), Input("w", (n, k), parameter=True)
        name = f"2:4 sparse bf16 matmul {m}x{n}x{k}"
        yield Workload(name, "bfloat16", operands, (m, n), "sparse_matmul", m * n * k, "bf16", _layer)


def _layer(g: Graph, x: Tensor, w: Tensor) -> Tensor:
    return x @ g.sparse_2_4(w).T
