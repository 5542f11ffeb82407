"""Decisions on sizes that vary, each of which was once right at both ends of a range and wrong between, or too late."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fusegraph as fg
from codegen.size_expressions import value
from codegen.sizes import Bounds, Size, aligned, below, dimension, larger, limits, smaller
from fusegraph.errors import LayoutError, ShapeError
from fusegraph.lowering.base import Options
from fusegraph.passes.parameters import fixed
from fusegraph.ranges import plan_ranges
from fusegraph.sized_graphs import graph_at


def of(n: int, low: int = 1, high: int = 40) -> int:
    return dimension("n", n, Bounds(low, high))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(-20, 20), st.integers(1, 40), st.integers(1, 40))
def test_comparisons_hold_at_all_sizes(a: int, d: int, c: int, here: int, other: int) -> None:
    """Also those of quotients of quotients, and of sizes of which one follows from the other."""
    n = of(here)
    size = n - (-(-((n + a) // d + 1) // a)) * a + c
    low, high = limits(size)
    plain = other - (-(-((other + a) // d + 1) // a)) * a + c
    assert low <= plain <= high
    assert not below(size, c) or plain < c
    for combine, wanted in ((smaller, min), (larger, max)):
        found = combine(size, n)
        assert (value(found.expression, {"n": other}) if isinstance(found, Size) else found) == wanted(plain, other)


def test_a_size_is_smaller_than_itself_and_more() -> None:
    n = of(7)
    assert smaller(2 * n - 1, 2 * n) == 2 * n - 1
    assert larger(n, 3 * n) == 3 * n
    assert limits(n - -(-n // 8) * 8) == (-7, 0)


def test_numbers_that_follow_from_sizes_are_not_packed() -> None:
    """The mean's divisor is another number for each size."""
    g, n = fg.Graph("packed"), fg.Dim("n", max=50)
    x = g.tensor("x", (3, n))
    g.output(x * g.constant(n) + g.constant(2.0) * 3)
    sizes = {t.name for node in g.nodes for t in node.outputs if node.op.name == "size"}
    assert sizes
    assert not sizes & {t.name for t in fixed(g, Options())}
    assert sizes <= {t.name for t in fixed(graph_at(g, {"n": 7})[0], Options())}


def test_strides_that_overlap_at_some_sizes_are_refused() -> None:
    g, n = fg.Graph("overlap"), fg.Dim("n", 2, 10)
    x = g.tensor("x", (4, n))
    with pytest.raises(LayoutError, match="share an address"):
        g.output(x, strides=(9, 1))
    g.output(g.exp(x), strides=(10, 1))


def test_a_dim_follows_from_a_size_that_is_more() -> None:
    g, n = fg.Graph("more"), fg.Dim("n", 1, 10, multiple_of=2)
    g.output(g.tensor("x", (n + 1,)) + n)
    np.testing.assert_array_equal(g.compile("reference")(np.ones(5, np.float32)), 5)
    for wrong in (4, 12, 1):
        with pytest.raises(fg.FusegraphError, match="less than the size"):
            g.compile("reference")(np.ones(wrong, np.float32))


def test_sizes_that_do_not_go_together_are_refused_when_they_come() -> None:
    g, n = fg.Graph("windows"), fg.Dim("n", 1, 10)
    g.output(g.max_pool(g.tensor("x", (1, 1, n)), window=3, stride=1) * 2)
    run = g.compile("cpu")
    np.testing.assert_array_equal(run(np.ones((1, 1, 3), np.float32)), 2)
    with pytest.raises(ShapeError, match="'max_pool', at n = 2: a window that reaches over 3 elements"):
        run(np.ones((1, 1, 2), np.float32))


def test_positions_take_a_size_once() -> None:
    """The kernel that copies values to a position has the tensor's size as a parameter already."""
    g, n = fg.Graph("position"), fg.Dim("n", 1, 37)
    x, p = g.tensor("x", (8, 32)), g.tensor("p", (), "int32")
    g.assign(g.tensor("state", (8, n))[:, p], x[:, 0])
    sources = plan_ranges(g).sources
    assert sources
    for source in sources:
        declared = source.code[source.code.index("__global__") : source.code.index("\n{\n")]
        assert declared.count("const int32 size_n") <= 1


@pytest.mark.slow
def test_kernels_that_do_not_fit_are_none() -> None:
    """Rows that are kept in shared memory may be too long for it at the end of a range."""
    g, n = fg.Graph("long"), fg.Dim("n", 2, 80_000)
    g.output(g.softmax(g.tensor("x", (40, n)), 1))
    planned = plan_ranges(g)
    most = planned.options.target.arch.shared_bytes_per_block
    assert all(source.dynamic_shared_bytes <= most for source in planned.sources)


def test_parts_that_begin_at_a_size_are_aligned_as_at_all_sizes() -> None:
    n = fg.Dim("n", min=2, max=3000)
    assert [aligned(16, step) for step in (4 * (n - 1), 8 * n, 32 * n, 12, 0)] == [4, 8, 16, 4, 16]
    graph = fg.Graph("end")
    graph.output(graph.slice(graph.tensor("x", (4, n)), (0, n - 1), (4, n)) + 1, name="y")
    (planned,) = plan_ranges(graph, Options()).plans
    assert planned.range.bounds["n"] == (2, 3000)
