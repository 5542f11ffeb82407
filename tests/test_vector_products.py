"""Products of a float32 matrix and a vector are sums of rows where that is estimated to be faster."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fusegraph as fg
from fusegraph.lowering.base import Options
from fusegraph.passes.vector_products import NAME, SUMS
from fusegraph.plan import plan
from fusegraph.report.check import check_executable, random_inputs


def product(a: tuple[int, ...], b: tuple[int, ...], *, turned: bool = False, **attributes: Any) -> fg.Graph:
    graph = fg.Graph("product")
    first = graph.tensor("a", a)
    second = graph.tensor("b", (*b[:-2], b[-1], b[-2]) if turned else b)
    if turned:
        second = graph.transpose(second, (*range(len(b) - 2), len(b) - 1, len(b) - 2))
    y = graph.matmul(first, second, **attributes)
    graph.output(graph.relu(y + graph.tensor("bias", (y.shape[-1],))), name="y")
    return graph


CASES = [
    ((1, 512), (512, 200), True),
    ((1, 512), (512, 200), False),
    ((300, 257), (257, 1), False),
    ((2, 3, 1, 64), (2, 3, 64, 33), True),
    ((2, 3, 40, 64), (64, 1), False),
    ((1, 700), (700, 1), False),
]


@pytest.mark.parametrize(("a", "b", "turned"), CASES)
def test_equal_to_the_reference(a: tuple[int, ...], b: tuple[int, ...], turned: bool) -> None:
    graph = product(a, b, turned=turned)
    exe = fg.compile(graph, engine="cpu")
    for special in (0.0, 0.02):
        result = check_executable(exe, random_inputs(graph, 1, special=special))
        assert result.ok, str(result)


def taken(graph: fg.Graph) -> list[str]:
    made = plan(graph, Options())
    return [c.taken for c in made.choices if c.what == NAME]


def test_only_products_with_vectors() -> None:
    assert taken(product((1, 2048), (2048, 2048), turned=True)) == [SUMS]
    assert taken(product((1, 2048), (2048, 2048), turned=True, compute_dtype="tf32")) == [SUMS]
    assert taken(product((2, 2048), (2048, 2048))) == []
    graph = product((1, 2048), (2048, 2048), turned=True)
    assert {k.group.family for k in plan(graph).kernels} == {"rows"}


def test_against_float64() -> None:
    graph = product((1, 3000), (3000, 65), turned=True)
    rng = np.random.default_rng(0)
    a, b, bias = (rng.standard_normal(t.shape).astype(np.float32) for t in graph.inputs)
    y = fg.compile(graph, engine="cpu")(a, b, bias)
    expected = np.maximum(a.astype(np.float64) @ b.T.astype(np.float64) + bias, 0)
    assert np.abs(y - expected).max() < 1e-4
