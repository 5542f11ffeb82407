"""ATen's diagonals: every (columns + 1)-th element of a row-major matrix."""

from __future__ import annotations

from fusegraph.frontends.torch.table import Call, aten, free, turned
from fusegraph.graph import Tensor


def _last(x: Tensor, first: int, second: int) -> list[int]:
    """Returns the axes of x with these two at the end."""
    pair = first % x.rank, second % x.rank
    return [*(d for d in range(x.rank) if d not in pair), *pair]


@free("diagonal.default", "diagonal_copy.default")
def _diagonal(c: Call, x: Tensor, offset: int = 0, first: int = 0, second: int = 1) -> Tensor:
    matrices = turned(x, _last(x, first, second))
    rows, columns = matrices.shape[-2:]
    start = offset if offset >= 0 else -offset * columns
    stop = start + max(c.form.shape[-1] - 1, 0) * (columns + 1) + (c.form.shape[-1] > 0)
    line = matrices.reshape((*matrices.shape[:-2], rows * columns))
    return line[..., start : stop : columns + 1]


@aten("diagonal_scatter.default")
def _diagonal_scatter(c: Call, x: Tensor, source: Tensor, offset: int = 0, first: int = 0, second: int = 1) -> Tensor:
    """Replaces the elements on the diagonal by those of the source."""
    order = _last(x, first, second)
    if not source.size:
        return c.graph.identity(x)
    row, column = (c.graph.gen_index(x, axis=d) for d in order[-2:])
    above = max(-offset, 0)
    below = x.shape[order[-2]] - above - source.shape[-1]
    rows = c.graph.pad(source, [(0, 0)] * (source.rank - 1) + [(above, below)]) if above or below else source
    spread = rows.reshape((*rows.shape, 1)).transpose([order.index(d) for d in range(x.rank)])
    return c.cast(c.graph.binary_select(c.cast(spread), x, c.graph.cmp_eq(column, row + offset)))
