"""Sizes that vary: arithmetic of Sizes, plans for ranges, and kernels that serve all sizes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fusegraph as fg
from codegen.sizes import Bounds, Size, at, dimension, in_units, least, most
from fusegraph.dims import corner
from fusegraph.errors import ArgumentError, AttributeValueError, GraphError, ShapeError
from fusegraph.lowering.base import Options
from fusegraph.ranges import plan_ranges
from fusegraph.runtime import host_compiler
from fusegraph.runtime.targets import named
from fusegraph.sized_graphs import bounds_in, check_shapes, graph_at

# ---- arithmetic

NUMBERS = st.integers(1, 40)
LEAVES = st.sampled_from(["n", "m"]) | NUMBERS
SUMS = st.recursive(
    LEAVES,
    lambda part: st.tuples(st.sampled_from("+-*"), part, part) | st.tuples(st.sampled_from(["//", "%"]), part, NUMBERS),
    max_leaves=8,
)


def evaluated(expression: Any, sizes: dict[str, int]) -> int:
    """Returns the value of an expression."""
    if not isinstance(expression, tuple):
        return sizes[expression] if isinstance(expression, str) else expression
    operation, a, b = expression[0], *(evaluated(part, sizes) for part in expression[1:])
    if operation in ("//", "%"):
        return a // b if operation == "//" else a % b
    return a + b if operation == "+" else a - b if operation == "-" else a * b


@settings(max_examples=300, deadline=None)
@given(SUMS, st.integers(2, 500), st.integers(2, 500), st.integers(2, 500), st.integers(2, 500))
def test_sizes_follow_from_their_dimensions(expression: Any, n: int, m: int, p: int, q: int) -> None:
    bounds = Bounds(2, 500)
    found = evaluated(expression, {"n": dimension("n", n, bounds), "m": dimension("m", m, bounds)})
    assert int(found) == evaluated(expression, {"n": n, "m": m})
    assert at(found, {"n": p, "m": q}) == evaluated(expression, {"n": p, "m": q})


@settings(max_examples=200, deadline=None)
@given(st.integers(-50, 50), st.integers(-200, 200), st.integers(1, 64), st.integers(1, 300), st.integers(1, 300))
def test_quotients_and_remainders_hold_at_all_sizes(a: int, c: int, d: int, here: int, there: int) -> None:
    n = dimension("n", here, Bounds(1, 300))
    for found, expected in ((a * n + c) // d, (a * there + c) // d), ((a * n + c) % d, (a * there + c) % d):
        assert at(found, {"n": there}) == expected
    assert at(-(-(a * n + c) // d), {"n": there}) == -(-(a * there + c) // d)


def test_what_is_known_of_a_size_is_a_number() -> None:
    n, m = (dimension(name, 7, Bounds(1, 300)) for name in "nm")
    assert n - n == 0
    assert type(n - n) is int
    assert 24 * n % 8 == 0
    assert 24 * n // 8 == 3 * n
    assert (8 * n + 5) % 8 == 5
    assert at((5 % n, -1 % n), {"n": 3}) == (2, 2)
    assert n != 7
    assert n == dimension("n", 7, Bounds(1, 300))
    assert hash(n) != hash(7)
    assert -(-n // 128) == (n + 127) // 128
    assert type(n // 512) is int
    assert (n // 4 + 1) // 2 == (n + 4) // 8
    assert ((n + 1) // 2 + m - 1) // 3 == (n + 2 * m - 1) // 6
    assert n % 8 != 0
    assert n * n // n == n
    assert (most(3 * n - 1), least(3 * n - 1), most(5)) == (899, 2, 5)
    assert in_units(n, {"n": 8}) % 8 == 0
    assert str(768 * n) == "size_768_n"


def test_dims_say_what_is_wrong_with_them() -> None:
    for wrong, words in (({"name": "2n"}, "name"), ({"min": -1}, "at least 0"), ({"max": 0}, "no multiple")):
        with pytest.raises(ShapeError, match=words):
            fg.Dim(**{"name": "n", **wrong})
    assert int(fg.Dim("n", 8, 64, multiple_of=8)) % 8 == 0
    graph = fg.Graph("two")
    a, b = graph.tensor("a", (fg.Dim("n", max=8), 4)), graph.tensor("b", (fg.Dim("m", max=9), 4))
    with pytest.raises(ShapeError, match="broadcast"):
        _ = a + b


# ---- graphs


def pointwise(graph: fg.Graph) -> None:
    n = fg.Dim("n", max=500)
    a, b = graph.tensor("a", (n, 24)), graph.tensor("b", (24,))
    graph.output(graph.sigmoid(a * b + 1.0), name="y")


def softmax_rows(graph: fg.Graph) -> None:
    graph.output(graph.softmax(graph.tensor("x", (fg.Dim("n", max=400), 100)), axis=-1), name="y")


def softmax_along(graph: fg.Graph) -> None:
    graph.output(graph.softmax(graph.tensor("x", (6, fg.Dim("n", max=3000))), axis=-1), name="y")


def mean(graph: fg.Graph) -> None:
    n, m = fg.Dim("n", max=60), fg.Dim("m", max=300)
    graph.output(graph.reduction(graph.tensor("x", (n, m)), mode="avg", axes=(1,)), name="y")


def product(graph: fg.Graph) -> None:
    n, m = fg.Dim("n", max=300), fg.Dim("m", max=200)
    a, b, c = graph.tensor("a", (n, 64), "float16"), graph.tensor("b", (64, m), "float16"), graph.tensor("c", (m,))
    graph.output(graph.relu(a @ b + c), name="y", dtype="float16")


def inner(graph: fg.Graph) -> None:
    k = fg.Dim("k", max=700)
    graph.output(graph.tensor("a", (20, k), "float16") @ graph.tensor("b", (k, 40), "float16"), name="y")


def convolution(graph: fg.Graph) -> None:
    n, h, w = fg.Dim("n", max=4), fg.Dim("h", min=4, max=40), fg.Dim("w", min=4, max=40)
    x = graph.tensor("x", (n, 8, h, w), "float16", layout="NHWC")
    f = graph.tensor("f", (16, 8, 3, 3), "float16", layout="KRSC")
    graph.output(graph.relu(graph.conv_fprop(x, f, padding=1, stride=2)), name="y")


def attention(graph: fg.Graph) -> None:
    n, s = fg.Dim("n", max=3), fg.Dim("s", max=300)
    q, k, v = (graph.tensor(name, (n, 2, s, 32), "float16") for name in "qkv")
    graph.output(graph.sdpa(q, k, v, use_causal_mask=True), name="y")


def movement(graph: fg.Graph) -> None:
    n, m = fg.Dim("n", max=30), fg.Dim("m", max=50, multiple_of=2)
    x = graph.transpose(graph.tensor("x", (n, m, 6)), perm=(1, 0, 2))
    graph.output(graph.exp(x).reshape(m * n, 6), name="y")


def pools(graph: fg.Graph) -> None:
    """Pools of pools: their sizes are quotients of quotients, and their windows end beyond the image at some sizes."""
    n, h, w = fg.Dim("n", max=3), fg.Dim("h", min=20, max=40), fg.Dim("w", min=20, max=40)
    x = graph.tensor("x", (n, 8, h, w), layout="NHWC")
    graph.output(graph.max_pool(graph.max_pool(x, 3, 2, 1), 3, 2, 1), name="y")


GRAPHS = (pointwise, softmax_rows, softmax_along, mean, product, inner, convolution, pools, attention, movement)


def built(write: Callable[[fg.Graph], None]) -> fg.Graph:
    graph = fg.Graph(write.__name__)
    write(graph)
    return graph


def arrays(graph: fg.Graph) -> list[np.ndarray[Any, Any]]:
    """Returns random inputs of a graph of known sizes."""
    rng, made = np.random.default_rng(0), []
    for tensor in graph.inputs:
        order = sorted(range(tensor.rank), key=lambda d: -tensor.strides[d])
        x = rng.standard_normal([tensor.shape[d] for d in order]).astype(tensor.dtype.numpy)
        made.append(x.transpose([order.index(d) for d in range(tensor.rank)]))
    return made


def sizes_of(graph: fg.Graph, count: int) -> list[dict[str, int]]:
    """Returns sizes by symbol: both ends, and some between."""
    bounds: dict[str, Bounds] = {}
    for tensor in graph.inputs:
        for size in tensor.shape:
            bounds |= dict(size.dims) if isinstance(size, Size) else {}
    rng = random.Random(1)
    some = [
        {k: round(np.exp(rng.uniform(np.log(max(low, 1)), np.log(high)))) for k, (low, high) in bounds.items()}
        for _ in range(count)
    ]
    return [{k: b.min for k, b in bounds.items()}, {k: b.max for k, b in bounds.items()}, *some]


@pytest.mark.parametrize("target", [None, pytest.param("h200", marks=pytest.mark.slow)])
@pytest.mark.parametrize("write", GRAPHS, ids=lambda f: f.__name__)
def test_all_sizes_run_on_kernels_that_were_compiled_once(
    write: Callable[[fg.Graph], None], target: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = built(write)
    executable = graph.compile("cpu", target=target)
    monkeypatch.setattr(host_compiler, "build", None)  # from here on nothing is compiled
    for sizes in sizes_of(graph, 5):
        known, _ = graph_at(graph, sizes)
        given_ = arrays(known)
        expected = np.float64(known.compile("reference")(*given_))
        np.testing.assert_allclose(np.float64(executable(*given_)), expected, rtol=1e-2, atol=1e-2, err_msg=str(sizes))


@pytest.mark.parametrize("target", [None, "h200"])
def test_batches_may_be_empty(target: str | None) -> None:
    batch, rows = fg.Dim("batch", min=0, max=8), fg.Dim("rows", min=0, max=40, multiple_of=2)
    graph = fg.Graph("empty")
    x, w = graph.tensor("x", (batch, rows, 32)), graph.tensor("w", (32, 48))
    graph.output(graph.softmax(x @ w), name="y")
    executable = graph.compile("cpu", target=target)
    for shape in ((0, 0, 32), (0, 2, 32), (3, 0, 32), (0, 34, 32), (1, 2, 32), (5, 34, 32)):
        known, _ = graph_at(graph, {"batch": shape[0], "rows": shape[1] // 2})
        given_ = arrays(known)
        logits = np.float64(given_[0]) @ np.float64(given_[1])
        weights = np.exp(logits)
        expected = weights / weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(executable(*given_), expected, rtol=1e-4, atol=1e-5, err_msg=str(shape))


SLICES: dict[str, Callable[[Any], Any]] = {
    "x[:16]": lambda x: x[:16],
    "x[-16:]": lambda x: x[-16:],
    "x[16:]": lambda x: x[16:],
    "x[8:24]": lambda x: x[8:24],
    "x[:-16]": lambda x: x[:-16],
    "x[16::-1]": lambda x: x[16::-1],
    "x[::16]": lambda x: x[::16],
}


@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize("least", [0, 1, 32])
def test_slices_by_numbers_end_where_each_size_does(name: str, least: int) -> None:
    graph, n = fg.Graph("sliced"), fg.Dim("n", least, 64)
    graph.output(SLICES[name](graph.tensor("x", (n, 4))) * 2.0, name="y")
    executable = graph.compile("cpu")
    for size in (0, 3, 16, 20, 40, 64):
        if size >= least:
            x = np.random.default_rng(size).standard_normal((size, 4)).astype(np.float32)
            np.testing.assert_array_equal(executable(x), SLICES[name](x) * np.float32(2), err_msg=str(size))


def test_slices_by_sizes_of_either_sign_are_refused() -> None:
    n = fg.Dim("n", 1, 64)
    x = fg.Graph("sliced").tensor("x", (n, 4))
    with pytest.raises(AttributeValueError, match="negative at some sizes"):
        x[: x.shape[0] - 9]
    assert x[: x.shape[0] - 0].shape == x.shape


def two_parts(graph: fg.Graph) -> None:
    n, m = fg.Dim("n", 0, 9), fg.Dim("m", 0, 7)
    graph.output(graph.concatenate([graph.tensor("a", (n, 8)), graph.tensor("b", (m, 8))], axis=0) * 2.0, name="y")


def product_over_none(graph: fg.Graph) -> None:
    k = fg.Dim("k", 0, 9)
    graph.output(graph.tensor("a", (3, k)) @ graph.tensor("b", (k, 5)), name="y")


def total_of_joined(graph: fg.Graph) -> None:
    x = graph.tensor("x", (fg.Dim("n", 0, 9), fg.Dim("m", 0, 7)))
    graph.output(graph.reduction(graph.reshape(x, (1, x.shape[0] * x.shape[1])), "add", axes=(1,)), name="y")


def windows_of_few(graph: fg.Graph) -> None:
    x = graph.tensor("x", (2, 3, fg.Dim("h", 2, 9), fg.Dim("w", 2, 9)))
    graph.output(graph.max_pool(x, 2, 2, 0) + graph.avg_pool(x, 2, 2, 0), name="y")


@pytest.mark.parametrize("write", [two_parts, product_over_none, total_of_joined, windows_of_few])
def test_sizes_from_none(write: Callable[[fg.Graph], None]) -> None:
    graph = fg.Graph("none")
    write(graph)
    executable = graph.compile("cpu")
    bounds = bounds_in(graph)
    for which in ("min", "max"):
        known, _ = graph_at(graph, {name: getattr(b, which) for name, b in bounds.items()})
        given_ = arrays(known)
        expected = known.compile("reference")(*given_)
        np.testing.assert_allclose(executable(*given_), expected, rtol=1e-5, atol=1e-5, err_msg=which)


def long_attention(graph: fg.Graph) -> None:
    n, s = fg.Dim("n", max=16), fg.Dim("s", max=1024)
    q, k, v = (graph.tensor(name, (n, 12, s, 64), "float16") for name in "qkv")
    graph.output(graph.sdpa(q, k, v, use_causal_mask=True), name="y")


@pytest.mark.slow
@pytest.mark.parametrize(
    "write", [*GRAPHS, pytest.param(long_attention, marks=pytest.mark.slow)], ids=lambda f: f.__name__
)
def test_nothing_is_planned_by_size(write: Callable[[fg.Graph], None]) -> None:
    planned = plan_ranges(built(write), Options(target=named("h200")))
    assert planned.by_size == []
    assert all(other.by_size == [] for _, other in planned.aligned)


def test_what_divides_both_bounds_divides_no_size_between() -> None:
    graph = fg.Graph("between", io_dtype="float16")
    c = fg.Dim("c", min=120, max=128)  # the only prime is 127; 8 divides both bounds
    x, f = graph.tensor("x", (1, c, 5, 5), layout="NHWC"), graph.tensor("f", (8, c, 3, 3), layout="KRSC")
    graph.output(graph.conv_fprop(x, f, padding=1), name="y")
    executable = graph.compile("cpu")
    for size in (120, 121, 122, 127, 128):
        known, _ = graph_at(graph, {"c": size})
        given_ = arrays(known)
        expected = np.float64(known.compile("reference")(*given_))
        np.testing.assert_allclose(np.float64(executable(*given_)), expected, rtol=1e-2, atol=0.1, err_msg=str(size))


@pytest.mark.parametrize(("low", "high"), [(2, 3), (8, 10), (24, 28), (90, 96), (114, 126), (120, 128), (2, 8192)])
def test_ends_of_a_range_have_no_divisor_in_common(low: int, high: int) -> None:
    ends = [corner({"n": Bounds(low, high)}, which)["n"] for which in ("min", "max")]
    assert low <= ends[0] < ends[1] <= high
    assert math.gcd(*ends) == 1


def test_rows_of_whole_vectors_have_kernels_of_their_own() -> None:
    planned = plan_ranges(built(inner), Options(target=named("h200")))
    assert [units for units, _ in planned.aligned] == [{"k": 8}, {"k": 2}]
    aligned, odd = (planned.at({"k": k}).kernels[0].choice.schedule for k in (640, 639))
    assert aligned != odd


def test_ends_of_a_range_are_different_sizes() -> None:
    for low in range(1, 12):
        for high in range(low + 1, 14):
            bounds = {"a": Bounds(low, high), "b": Bounds(low, high)}
            first, last = corner(bounds, "min"), corner(bounds, "max")
            assert all(low <= first[name] < last[name] <= high for name in bounds)


def test_shapes_that_do_not_follow_are_refused() -> None:
    graph = fg.Graph("leak")
    n = fg.Dim("n", max=64)
    x = graph.tensor("x", (n, 4))
    graph.output(x[n - 3 :], name="y")  # which counts from the end where there are fewer
    with pytest.raises(GraphError, match="does not follow"):
        check_shapes(graph, {"n": 2})


@pytest.mark.parametrize("bounds", [(1, 64), (2, 9), (1, 2**20)])
def test_slices_are_those_of_python_at_all_sizes(bounds: tuple[int, int]) -> None:
    keys = [slice(a, b, c) for a in (None, 2, -2) for b in (None, 5, 16, -3) for c in (None, 2, -1, -3)]
    graph = fg.Graph("slices")
    x = graph.tensor("x", (fg.Dim("n", *bounds),))
    for number, key in enumerate(keys):
        graph.output(graph.relu(x[key]), name=f"y{number}")
    run = graph.compile("reference")
    for n in (2, 3, 9):
        given = np.arange(n, dtype=np.float32)
        for key, found in zip(keys, run(given), strict=True):
            np.testing.assert_array_equal(found, given[key], err_msg=str(key))


def test_errors_write_sizes_in_the_names_of_dims() -> None:
    graph, n = fg.Graph("names"), fg.Dim("rows", max=64)
    with pytest.raises(fg.errors.ShapeError, match=r"\[\(rows // 2\) \+ 1\].*\[min\(16, rows\)\]"):
        graph.tensor("x", (n // 2 + 1,)) + graph.tensor("y", (n,))[:16]


def test_calls_with_wrong_sizes_say_which() -> None:
    graph = fg.Graph("wrong")
    n = fg.Dim("n", min=8, max=64, multiple_of=8)
    graph.output(graph.tensor("a", (n, 4)) + graph.tensor("b", (n, 4)), name="y")
    executable = graph.compile("cpu")
    ones = {k: np.ones((k, 4), np.float32) for k in (8, 16, 12, 72)}
    assert executable(ones[16], ones[16]).shape == (16, 4)
    for a, b, words in ((12, 12, "multiple of 8"), (72, 72, "8 to 64"), (8, 16, "shape")):
        with pytest.raises(ArgumentError, match=words):
            executable(ones[a], ones[b])


def test_a_dim_that_no_input_tells_has_to_be_given() -> None:
    graph = fg.Graph("nowhere")
    n, m = fg.Dim("n", max=8), fg.Dim("m", max=8)
    graph.output(graph.relu(graph.tensor("x", (n + m, 4))), name="y")
    executable, x = graph.compile("cpu"), np.full((5, 4), -1.0, np.float32)
    with pytest.raises(GraphError, match="no input"):
        executable(x)
    np.testing.assert_array_equal(executable.at({"n": 2, "m": 3})(x), 0)


def test_engines_without_kernels_compile_for_every_size() -> None:
    executable = built(pointwise).compile("reference")
    a, b = np.ones((3, 24), np.float32), np.ones(24, np.float32)
    np.testing.assert_allclose(executable(a, b), 1 / (1 + np.exp(-2.0)), rtol=1e-6)
