"""Reductions of rows that gathers take: embeddings in front of norms, in one kernel, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from graphs import check_all, quick

import fusegraph as fg
from fusegraph.lowering import gathered
from fusegraph.plan import plan
from fusegraph.report.check import random_inputs


def inputs(graph: fg.Graph) -> Mapping[str, Any]:
    """Returns random inputs with indices of all rows, and of some before the first one and behind the last."""
    found = dict(random_inputs(graph))
    for t in graph.inputs:
        if t.dtype.is_int:
            found[t.name] = np.random.default_rng(t.size).integers(-3, 40, t.shape).astype(t.dtype.numpy)
    return found


def embeddings(dtype: str, width: int, index: str = "int64") -> list[fg.Graph]:
    graphs = []

    def graph(name: str) -> tuple[fg.Graph, fg.Tensor, fg.Tensor]:
        graphs.append(fg.Graph(f"{name} {dtype} {width}", io_dtype=dtype))
        return graphs[-1], graphs[-1].tensor("ids", (3, 5), index), graphs[-1].tensor("table", (35, width))

    g, ids, table = graph("norm")
    g.output(g.layernorm(g.gather(table, ids), g.tensor("w", (width,)), g.tensor("b", (width,))), name="y")
    g, ids, table = graph("two")
    x = g.gather(table, ids) + g.tensor("places", (5, width)) + g.gather(table, g.tensor("kinds", (5,), index))
    g.output(x, name="x")
    g.output(g.rmsnorm(x, g.tensor("w", (width,))), name="y")
    g, ids, table = graph("same")
    x = g.gather(table, ids)
    g.output(g.reduction(x * g.gather(g.tensor("other", (9, width)), ids), "add", 2), name="sums")
    g, ids, table = graph("softmax")
    g.output(g.softmax(g.gather(table[1:, :], ids), 2), name="y")
    g, ids, table = graph("across")
    g.output(g.reduction(g.gather(g.tensor("x", (4, 35, 6, width)), ids, axis=1), "max", (3, 4)), name="y")
    return graphs


@pytest.mark.slow
@pytest.mark.parametrize("dtype", quick("bfloat16", "float32", "float64"))
def test_reduced_rows_are_gathered(dtype: str) -> None:
    for width in (8, 72, 7, 1):
        graphs = embeddings(dtype, width)
        check_all(graphs, inputs=inputs)
        kernels = {len(plan(g).kernels) for g in graphs}
        assert kernels == {1} or width == 1, kernels


@pytest.mark.slow
def test_rows_of_other_orders() -> None:
    """Along the rows that are taken, over them and the others, and over what the index numbers."""
    graphs = []
    for axes in (0, 1, 2, (0, 1), (1, 2)):
        for axis in (0, 1):
            g = fg.Graph(f"over {axes} of {axis}")
            x = g.gather(g.tensor("x", (35, 30)), g.tensor("ids", (4, 6), "int8"), axis=axis)
            g.output(g.reduction(x, "add", axes), name="y")
            graphs.append(g)
    check_all(graphs, inputs=inputs)
    check_all(graphs, inputs=inputs, fusion=False)
    check_all(embeddings("float16", 64, "int32"), inputs=inputs, alignment=2)


def test_far_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "FAR", 16)
    graphs = embeddings("bfloat16", 24)
    check_all(graphs, inputs=inputs)
    assert "int64(" in plan(graphs[0]).kernels[0].source.code
