"""What the pooling ops and local norms mean: their references by the definition, element by element."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest
from graphs import check_all, executables

import fusegraph as fg
from codegen.windows import Adaptive
from fusegraph.ops import TABLE
from fusegraph.report.check import check_executable, run

# ---- what the ops mean


def elements(how: Mapping[str, Any], p: tuple[int, ...], sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the elements of the window at a position, by the definition."""
    per_axis = []
    for a, size in enumerate(sizes):
        taps, stride, before = (_at(how[k], a) for k in ("window", "stride", "padding"))
        dilation = _at(how.get("dilation", 1), a)
        start = p[a] * stride - (before[0] if isinstance(before, tuple) else before)
        per_axis.append([i for t in range(taps) if 0 <= (i := start + t * dilation) < size])
    return list(product(*per_axis))


def _at(value: Any, axis: int) -> Any:
    return value[axis] if isinstance(value, tuple) else value


DEFINED = (
    {"window": 3, "stride": 2, "padding": 1},
    {"window": (2, 3), "stride": (1, 2), "padding": (0, 2), "dilation": 2},
)


@pytest.mark.parametrize("how", DEFINED)
def test_references_follow_the_definition(how: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(-5, 6, (5, 7)).astype(np.float64)  # with equal elements
    x[1, 2] = np.nan
    x[1, 3] = np.nan
    g = fg.Graph("defined")
    image = g.tensor("x", (1, 1, 5, 7), "float64")
    nodes = [g.producer(g.max_pool(image, **how)), g.producer(g.max_pool_index(image, **how))]
    assert nodes[0] is not None
    assert nodes[1] is not None
    most, index = (n.op.reference(x[None, None], **n.attributes)[0, 0] for n in nodes if n is not None)
    loss = rng.standard_normal(most.shape)
    gradient = np.zeros((5, 7))
    for p in product(*map(range, most.shape)):
        held = elements(how, p, (5, 7))
        values = [x[i] for i in held]
        assert np.array_equal(most[p], max(values, default=-np.inf) if not any(map(np.isnan, values)) else np.nan, True)
        if not held:
            assert index[p] == -1
            continue
        nan = [i for i in held if np.isnan(x[i])]
        chosen = nan[-1] if nan else next(i for i in held if x[i] == max(values))
        assert index[p] == chosen[0] * 7 + chosen[1]
        gradient[chosen] += loss[p]
    op = TABLE["max_pool_backward_index"]
    attributes = {**nodes[0].attributes, "size": (5, 7)}
    found = op.reference(loss[None, None], index[None, None], **attributes)[0, 0]
    np.testing.assert_allclose(found, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("ceil", [True, False])
def test_means_follow_the_definition(include: bool, ceil: bool) -> None:
    """In ceil mode torch divides by the elements of image and padding, not by those that hang over."""
    how = {"window": 3, "stride": 3, "padding": 1, "ceil_mode": ceil, "count_include_pad": include}
    x = np.random.default_rng(1).standard_normal((6, 8))
    g = fg.Graph("defined")
    y = g.avg_pool(g.tensor("x", (1, 1, 6, 8), "float64"), **how)
    assert y.shape[2:] == ((3, 3) if ceil else (2, 3))
    node = g.producer(y)
    assert node is not None
    mean = node.op.reference(x[None, None], **node.attributes)[0, 0]
    loss = np.random.default_rng(2).standard_normal(mean.shape)
    gradient = np.zeros(x.shape)
    for p in product(*map(range, mean.shape)):
        held = elements(how, p, (6, 8))
        inside = [[i for i in range(c * 3 - 1, c * 3 + 2) if i < size + 1] for c, size in zip(p, (6, 8))]
        count = len(inside[0]) * len(inside[1]) if include else len(held)
        np.testing.assert_allclose(mean[p], sum(x[i] for i in held) / count, rtol=1e-12)
        for i in held:
            gradient[i] += loss[p] / count
    found = TABLE["avg_pool_backward"].reference(loss[None, None], **{**node.attributes, "size": (6, 8)})[0, 0]
    np.testing.assert_allclose(found, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("n", "m"), [(7, 3), (3, 7), (10, 4), (4, 4), (1, 5), (5, 1)])
def test_adaptive_windows_follow_the_definition(n: int, m: int) -> None:
    x = np.random.default_rng(3).standard_normal(n)
    starts, ends = [p * n // m for p in range(m)], [-(-(p + 1) * n // m) for p in range(m)]
    values = {"size": (m,), "axes": (2,)}
    mean = TABLE["adaptive_avg_pool"].reference(x[None, None], **values)[0, 0]
    most = TABLE["adaptive_max_pool"].reference(x[None, None], **values)[0, 0]
    np.testing.assert_allclose(mean, [x[a:b].mean() for a, b in zip(starts, ends)], rtol=1e-12)
    assert list(most) == [x[a:b].max() for a, b in zip(starts, ends)]
    loss, gradient = np.random.default_rng(4).standard_normal(m), np.zeros(n)
    for value, a, b in zip(loss, starts, ends):
        gradient[a:b] += value / (b - a)
    found = TABLE["adaptive_avg_pool_backward"].reference(loss[None, None], **{**values, "size": (n,)})[0, 0]
    np.testing.assert_allclose(found, gradient, rtol=1e-12, atol=1e-15)
    # The windows that hold an element are Adaptive too.
    holding = Adaptive(m, n)
    for i in range(n):
        assert [p for p in range(m) if starts[p] <= i < ends[p]] == list(range(holding.start(i), holding.end(i)))


def test_local_response_norm_follows_the_definition() -> None:
    x = np.random.default_rng(5).standard_normal((2, 7, 3))
    found = TABLE["local_response_norm"].reference(x, window=4, alpha=0.5, beta=0.75, k=2.0, axis=1)
    for n, c, i in product(range(2), range(7), range(3)):
        around = x[n, max(c - 2, 0) : c + 2, i]  # as torch: half a window back, the rest ahead
        np.testing.assert_allclose(found[n, c, i], x[n, c, i] / (2 + 0.5 * (around**2).sum() / 4) ** 0.75)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("local_response_norm", {"window": 4, "alpha": 0.5, "beta": 0.75, "k": 2.0, "axis": 1}),
        ("local_contrast_norm", {"window": (2, 3), "epsilon": 1e-5, "axes": (2, 3)}),
        ("local_contrast_norm", {"window": (3, 1), "epsilon": 0.7, "axes": (2, 3)}),
    ],
)
def test_gradients_of_local_norms_are_those_of_the_result(name: str, how: dict[str, Any]) -> None:
    """Against differences of the norm, in float64."""
    rng = np.random.default_rng(3)
    x, loss = rng.standard_normal((2, 2, 3, 5, 4))
    found = TABLE[f"{name}_backward"].reference(loss, x, **how)
    norm, step = TABLE[name].reference, 1e-6
    for place in product(*(range(n) for n in x.shape)):
        each = np.zeros_like(x)
        each[place] = step
        slope = ((norm(x + each, **how) - norm(x - each, **how)) * loss).sum() / (2 * step)
        np.testing.assert_allclose(found[place], slope, rtol=1e-5, atol=1e-7)


def test_windows_of_nothing_but_padding() -> None:
    """The maximum of no elements is the least value, it is nowhere, and their mean is NaN; no gradient comes of it."""
    g = fg.Graph("padding")
    x, n = g.tensor("x", (1, 1, 2, 3)), g.tensor("n", (1, 1, 2, 3), "int8")
    how: dict[str, Any] = {"window": 1, "stride": 1, "padding": ((2, 0), (0, 1))}
    index = g.output(g.max_pool_index(x, **how), name="index")
    g.output(g.max_pool(x, **how), name="max")
    g.output(g.max_pool(n, **how), name="least")
    mean = g.output(g.avg_pool(x, **how, count_include_pad=False), name="mean")
    g.output(g.avg_pool(x, **how), name="zeros")
    g.output(g.max_pool_backward_index(mean, index, (2, 3), **how), name="gradient")
    g.output(g.avg_pool_backward(mean, (2, 3), **how, count_include_pad=False), name="share")
    check_all([g])
    (executable,) = executables([g])
    found = run(executable, {"x": np.ones((1, 1, 2, 3), np.float32), "n": np.ones((1, 1, 2, 3), np.int8)})
    empty = np.ones((1, 1, 4, 4), bool)
    empty[0, 0, 2:, :3] = False
    assert (found["max"][empty] == -np.inf).all()
    assert (found["least"][empty] == -128).all()
    assert (found["index"][empty] == -1).all()
    assert np.isnan(found["mean"][empty]).all()
    assert (found["zeros"][empty] == 0).all()
    assert (found["gradient"] == 1).all()
    assert (found["share"] == 1).all()


def test_nan_and_ties() -> None:
    """NaN wins, the last of several; of equal elements the first; rows of minus infinity have a maximum somewhere."""
    g = fg.Graph("special")
    x = g.tensor("x", (1, 1, 3, 4))
    g.output(g.max_pool(x, (1, 4)), name="max")
    g.output(g.max_pool_index(x, (1, 4)), name="index")
    (executable,) = executables([g])
    values = np.array([[1, np.nan, np.nan, 5], [2, 3, 3, -1], [-np.inf] * 4], np.float32)
    found = run(executable, {"x": values[None, None]})
    assert np.array_equal(found["max"].ravel(), np.float32([np.nan, 3, -np.inf]), equal_nan=True)
    assert list(found["index"].ravel()) == [2, 5, 8]


def test_an_index_outside_of_its_window_counts_nowhere() -> None:
    g = fg.Graph("wrong index")
    loss, index = g.tensor("loss", (1, 1, 2, 2)), g.tensor("index", (1, 1, 2, 2), "int64")
    g.output(g.max_pool_backward_index(loss, index, 4, 2), name="y")
    (executable,) = executables([g])
    given = {"loss": np.ones((1, 1, 2, 2), np.float32), "index": np.array([[[[0, 0], [-1, 10**12]]]])}
    (y,) = run(executable, given).values()
    assert y.sum() == y[0, 0, 0, 0] == 1
    assert check_executable(executable, given).ok
