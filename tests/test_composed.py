"""Functions that are written with ops of the table, against NumPy; and as kernels against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import check_all, check_on_gpu

import fusegraph as fg
from fusegraph.errors import AttributeValueError, DTypeError, ShapeError
from fusegraph.resampling import interpolation

Build = Callable[..., fg.Tensor]
RNG = np.random.default_rng(1)


def graph_of(build: Build, *arrays: np.ndarray[Any, Any]) -> fg.Graph:
    graph = fg.Graph("composed")
    tensors = [graph.tensor(f"x{n}", a.shape, a.dtype) for n, a in enumerate(arrays)]
    graph.output(build(graph, *tensors), name="y")
    return graph


def result(build: Build, *arrays: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return graph_of(build, *arrays).compile("reference")(*arrays)


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.normal(size=shape).astype(np.float32)


# ---- Einstein's convention

EINSUMS = {
    "ij,jk->ik": [(2, 3), (3, 4)],
    "bij,bjk->bik": [(5, 2, 3), (5, 3, 4)],
    "...ij,...jk->...ik": [(7, 1, 2, 3), (5, 3, 4)],
    "bhqd,bhkd->bhqk": [(2, 3, 4, 5), (2, 3, 6, 5)],
    "ii->i": [(3, 3)],
    "ii": [(3, 3)],
    "iij->j": [(3, 3, 2)],
    "...ii->...i": [(2, 3, 3)],
    "aii,ibi->ab": [(2, 3, 3), (3, 4, 3)],
    "i,j,k->kji": [(2,), (3,), (4,)],
    "abc,cd,de->abe": [(2, 3, 4), (4, 5), (5, 6)],
    "ij,ij->": [(2, 3), (2, 3)],
    "ba": [(2, 3)],
    "i,i": [(4,), (4,)],
    "ab,cd->": [(2, 3), (3, 4)],
    "ij,kj->": [(2, 3), (2, 3)],
    "ij, ij -> ij": [(2, 3), (1, 3)],
    "ij,j->i": [(0, 3), (3,)],
    "ij,jk->ik ": [(2, 0), (0, 3)],
}


@pytest.mark.parametrize("equation", EINSUMS)
def test_einsum(equation: str) -> None:
    arrays = [floats(*shape) for shape in EINSUMS[equation]]
    found = result(lambda g, *xs: g.einsum(equation, *xs), *arrays)
    expected = np.einsum(equation, *arrays)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("equation", "shapes", "message"),
    [
        ("ij,jk->ik", [(2, 3)], "has 2 operands, got 1"),
        ("ij,jk->ik", [(2, 3), (4, 5)], "'j' has sizes 3 and 4"),
        ("ij->ik", [(2, 3)], "'k' of the result is in no operand"),
        ("ij->ii", [(2, 3)], "the result has a letter twice"),
        ("ij", [(2, 3, 4)], "is for another operand than one of 3 dimensions"),
        ("i1->i", [(2, 3)], "takes an equation as"),
        ("ii", [(2, 3)], "'i' has sizes 2 and 3"),
    ],
)
def test_equations_that_are_refused(equation: str, shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises((AttributeValueError, ShapeError), match=message):
        result(lambda g, *xs: g.einsum(equation, *xs), *(floats(*s) for s in shapes))


# ---- elements by index


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_take_along_axis(axis: int) -> None:
    x = floats(3, 4, 5)
    shape = [3, 4, 5]
    shape[axis] = 7
    index = RNG.integers(0, x.shape[axis], shape)
    found = result(lambda g, a, i: g.take_along_axis(a, i, axis), x, index)
    np.testing.assert_array_equal(found, np.take_along_axis(x, index, axis))
    beyond = np.where(index == 0, -9, np.where(index == x.shape[axis] - 1, 99, index)).astype(np.int8)
    np.testing.assert_array_equal(result(lambda g, a, i: g.take_along_axis(a, i, axis), x, beyond), found)


def test_gather_nd() -> None:
    x, index = floats(3, 4, 5), RNG.integers(0, 3, (6, 2))
    np.testing.assert_array_equal(result(lambda g, a, i: g.gather_nd(a, i), x, index), x[index[:, 0], index[:, 1]])
    each = RNG.integers(0, 4, (3, 2, 1))
    expected = np.stack([x[b][each[b, :, 0]] for b in range(3)])
    np.testing.assert_array_equal(result(lambda g, a, i: g.gather_nd(a, i, batch=1), x, each), expected)


def test_one_hot() -> None:
    index = np.array([[1, 0], [3, 9]])
    expected = np.where(index[:, None, :] == np.arange(4)[:, None], 5, -1)
    np.testing.assert_array_equal(result(lambda g, i: g.one_hot(i, 4, 1, 5, -1), index), expected)


@pytest.mark.parametrize("diagonal", [-9, -1, 0, 2, 9])
def test_triangles(diagonal: int) -> None:
    x = np.where(RNG.random((2, 3, 5)) < 0.1, np.nan, 1).astype(np.float32)
    np.testing.assert_array_equal(result(lambda g, a: g.tril(a, diagonal), x), np.tril(x, diagonal))
    np.testing.assert_array_equal(result(lambda g, a: g.triu(a, diagonal), x), np.triu(x, diagonal))


def test_where_and_arange() -> None:
    x = floats(3, 4)
    found = result(lambda g, a: g.where(a > 0, a, g.arange(4, 2, 3, "float32")), x)
    np.testing.assert_array_equal(found, np.where(x > 0, x, np.float32([2, 5, 8, 11])))
    assert fg.Graph("g").arange(0).shape == (0,)


# ---- interpolation


def coordinates(old: int, new: int, align: bool) -> np.ndarray[Any, Any]:
    return np.linspace(0, old - 1, new) if align else (np.arange(new) + 0.5) * old / new - 0.5


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("sizes", [(7, 9), (14, 3), (5, 12)])
def test_linear_interpolation(align: bool, sizes: tuple[int, int]) -> None:
    x = floats(2, 3, 7, 6)
    expected = x
    for axis, new in enumerate(sizes, 2):
        old = x.shape[axis]
        places = coordinates(old, new, align)
        expected = np.apply_along_axis(lambda row, p=places, n=old: np.interp(p, np.arange(n), row), axis, expected)
    found = result(lambda g, a: g.interpolate(a, sizes, "linear", align), x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_cubic_interpolation() -> None:
    """Through the elements themselves, exact for straight lines away from the ends, and of weights that add up to 1."""
    x = np.arange(9, dtype=np.float32).reshape(1, 1, 9) * 2 + 1
    found = result(lambda g, a: g.interpolate(a, 17, "cubic", True), x)[0, 0]
    np.testing.assert_allclose(found[::2], x[0, 0], rtol=1e-6)
    np.testing.assert_allclose(found[3:-3], np.linspace(1, 17, 17)[3:-3], rtol=1e-6)
    _, weights = interpolation(np.linspace(-0.5, 8.5, 50), 9, "cubic")
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-12)


@pytest.mark.parametrize(("old", "new"), [(4, 8), (4, 12), (8, 4), (7, 3), (5, 7), (1, 3)])
def test_nearest_interpolation(old: int, new: int) -> None:
    x = floats(2, 2, old)
    graph = graph_of(lambda g, a: g.interpolate(a, new), x)
    expected = x[:, :, [i * old // new for i in range(new)]]
    np.testing.assert_array_equal(graph.compile("reference")(x), expected)
    gathers = any(n.op.name == "gather" for n in graph.nodes)
    assert gathers == ((old, new) == (5, 7)), "positions at equal distances, and whole factors, need no table"


def test_many_taps_are_a_product() -> None:
    x, index, weights = floats(2, 20, 3), RNG.integers(0, 20, (4, 10)), RNG.normal(size=(4, 10))
    expected = np.einsum("nkt,nk->nt", x[0][index], weights)
    graph = graph_of(lambda g, a: g.resample(a, 1, index, weights), x)
    np.testing.assert_allclose(graph.compile("reference")(x)[0], expected, rtol=1e-4, atol=1e-5)
    assert [n.op.name for n in graph.nodes].count("matmul") == 1


def test_what_resampling_refuses() -> None:
    graph = fg.Graph("g")
    x, n = graph.tensor("x", (2, 3, 4)), graph.tensor("n", (2, 3, 4), "int8")
    with pytest.raises(ShapeError, match="index goes from 0 to 4, axis 2 has 4 elements"):
        graph.resample(x, 2, [0, 4])
    with pytest.raises(DTypeError, match="weights are for floats"):
        graph.resample(n, 2, [0, 1], [0.5, 0.5])
    with pytest.raises(AttributeValueError, match="mode is one of nearest, linear, cubic"):
        graph.interpolate(x, 4, "sinc")
    with pytest.raises(AttributeValueError, match="size has a positive number for each spatial dimension"):
        graph.interpolate(x, (4, 4))


# ---- grids


def sampled(x: np.ndarray[Any, Any], places: np.ndarray[Any, Any], padding: str, align: bool) -> np.ndarray[Any, Any]:
    """Interpolates one image (H, W) linearly at places (n, 2), one place after another."""
    found = []
    for across, down in places:
        total = 0.0
        ends = [(p + 1) / 2 * (n - 1) if align else ((p + 1) * n - 1) / 2 for p, n in zip((down, across), x.shape)]
        for corner in np.ndindex(2, 2):
            value, weight = [], 1.0
            for end, more, n in zip(ends, corner, x.shape):
                at = int(np.floor(end)) + more
                weight *= 1 - abs(end - at)
                if padding == "zeros":
                    weight *= 0 <= at < n
                while padding == "reflection" and not 0 <= at < n:
                    at = (-at if align else -1 - at) if at < 0 else (2 * n - 2 - at if align else 2 * n - 1 - at)
                value.append(min(max(at, 0), n - 1))
            total += weight * x[tuple(value)]
        found.append(total)
    return np.array(found)


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_grid_sample(padding: str, align: bool) -> None:
    x, grid = floats(2, 3, 5, 4), RNG.uniform(-2.5, 2.5, (2, 6, 7, 2)).astype(np.float32)
    found = result(lambda g, a, b: g.grid_sample(a, b, "linear", padding, align), x, grid)
    for n, c in np.ndindex(2, 3):
        expected = sampled(x[n, c].astype(float), grid[n].reshape(-1, 2).astype(float), padding, align)
        np.testing.assert_allclose(found[n, c].reshape(-1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_grids_of_the_image_itself(mode: str) -> None:
    """Places at the centres of all elements give the image, in one, two and three dimensions."""
    for sizes in ((6,), (5, 4), (3, 4, 5)):
        x = floats(2, 3, *sizes)
        lines = [np.linspace(-1, 1, n) for n in sizes]
        grid = np.stack(np.meshgrid(*lines, indexing="ij")[::-1], -1).astype(np.float32)
        grid = np.broadcast_to(grid, (2, *grid.shape)).copy()
        found = result(lambda g, a, b: g.grid_sample(a, b, mode, "border", True), x, grid)
        np.testing.assert_allclose(found, x, rtol=1e-4, atol=1e-5)


# ---- as kernels


def graphs() -> list[fg.Graph]:
    x, image = floats(5, 17, 9), floats(2, 3, 7, 6).astype(np.float16)
    along = RNG.integers(0, 17, (5, 11, 9))
    return [
        graph_of(lambda g, a, b: g.relu(g.einsum("bij,bkj->bik", a, b)), x, floats(5, 4, 9)),
        graph_of(lambda g, a: g.einsum("iij->j", a), floats(6, 6, 7)),
        graph_of(lambda g, a, i: g.take_along_axis(a, i, 1), x, along),
        graph_of(lambda g, a, i: g.gather_nd(a, i), x, RNG.integers(0, 5, (7, 2))),
        graph_of(lambda g, i: g.one_hot(i, 5, dtype="float16"), np.arange(33) % 7),
        graph_of(lambda g, a: g.tril(a, 2) + g.arange(9, dtype="float32"), x),
        graph_of(lambda g, a: g.interpolate(a, (13, 12)), image),
        graph_of(lambda g, a: g.interpolate(a, (5, 13), "linear"), image),
        graph_of(lambda g, a: g.interpolate(a, (9, 6), "cubic"), image),
        graph_of(
            lambda g, a, b: g.grid_sample(a, b), floats(2, 3, 7, 6), (RNG.integers(-9, 9, (2, 5, 4, 2)) / 8).astype("f")
        ),
    ]


@pytest.mark.slow
def test_kernels_equal_the_reference() -> None:
    check_all(graphs())


@pytest.mark.gpu
def test_kernels_equal_the_reference_on_a_gpu() -> None:
    check_on_gpu(graphs())
