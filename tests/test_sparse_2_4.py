"""2:4 structured sparsity: pruning, the compressed form and its gradients, and products with it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from graphs import check_all, results_of

import fusegraph as fg
from fusegraph.errors import DTypeError, ShapeError

Array = np.ndarray[Any, Any]


def pruned(x: Array) -> Array:
    """Returns what is left of x, four by four, from the definition."""
    result = np.zeros_like(x)
    for place in np.ndindex(*x.shape[:-1], x.shape[-1] // 4):
        four = slice(4 * place[-1], 4 * place[-1] + 4)
        of, into = x[(*place[:-1], four)], result[(*place[:-1], four)]
        large = [float("inf") if np.isnan(v) else abs(float(v)) for v in of]
        for n in sorted(range(4), key=lambda n: (-large[n], n))[:2]:
            into[n] = of[n]
    return result


def ties() -> Array:
    """Returns every four of a few numbers, of which many are alike: NaN, infinities, zeros of both signs."""
    numbers = (0.0, -0.0, 1.0, -1.0, 2.0, np.inf, -np.inf, np.nan)
    return np.array(list(itertools.product(numbers, repeat=4)), np.float32).reshape(64, -1)


@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_two_of_the_largest_magnitude_are_kept(engine: str) -> None:
    x = ties()
    g = fg.Graph("ties")
    w = g.tensor("w", x.shape)
    values, metadata = g.sparse_2_4_compress(w)
    g.output(g.sparse_2_4(w), name="whole")
    g.output(g.sparse_2_4_mask(w), name="mask")
    g.output(values, name="values")
    g.output(g.cast(metadata, "int32"), name="places")
    g.output(g.sparse_2_4(values, metadata), name="again")
    whole, mask, kept, places, again = map(np.asarray, g.compile(engine)(w=x))
    assert np.array_equal(whole, pruned(x), equal_nan=True)
    assert np.array_equal(np.signbit(whole[mask]), np.signbit(x[mask]))
    assert (mask.reshape(-1, 4).sum(axis=1) == 2).all()
    assert np.array_equal(kept.reshape(-1), x[mask], equal_nan=True)
    assert np.array_equal(places.reshape(-1), np.nonzero(mask.reshape(-1, 4))[1])
    assert np.array_equal(again, whole, equal_nan=True)


def everything(shape: tuple[int, ...], dtype: str) -> fg.Graph:
    g = fg.Graph(f"sparse {shape} {dtype}", io_dtype="float32")
    x = g.tensor("x", shape, dtype)
    values, metadata = g.sparse_2_4_compress(x)
    g.output(g.sparse_2_4(x), name="whole")
    g.output(values, name="values")
    g.output(metadata, name="metadata")
    g.output(g.sparse_2_4(values, metadata), name="again")
    return g


@pytest.mark.slow
def test_every_dtype_and_ragged_shapes() -> None:
    shapes = ((3, 4), (5, 7, 12), (1, 36), (4,), (0, 8), (3, 0))
    dtypes = ("float16", "bfloat16", "float8_e4m3", "float8_e5m2", "int8", "uint8", "float64")
    check_all([everything(shape, "bfloat16") for shape in shapes] + [everything((3, 20), d) for d in dtypes])


def test_int8_has_a_least_number() -> None:
    x = np.array([[-128, 127, -127, 1, 0, 5, -5, 4]], np.int8)
    g = fg.Graph("least")
    g.output(g.sparse_2_4(g.tensor("x", x.shape, "int8")))
    assert np.asarray(g.compile("cpu")(x=x)).tolist() == [[-128, 127, 0, 0, 0, 5, -5, 0]]


@pytest.mark.parametrize("integers", ["uint2", "int8", "int32", "int64"])
def test_metadata_of_every_integer(integers: str) -> None:
    g = fg.Graph("given")
    values, places = g.tensor("values", (2, 4)), g.tensor("places", (2, 4), integers)
    g.output(g.sparse_2_4(values, places))
    kind = np.uint8 if integers == "uint2" else np.dtype(integers)
    given: Array = np.array([[0, 3, 1, 2], [2, 3, 0, 1]], kind)
    if integers == "uint2":
        given = (given * [1, 4, 16, 64]).sum(axis=1).astype(np.uint8)
    x = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32)
    wanted = [[1, 0, 0, 2, 0, 3, 4, 0], [0, 0, 5, 6, 7, 8, 0, 0]]
    assert np.asarray(g.compile("cpu")(values=x, places=given)).tolist() == wanted


def test_gradients_are_those_of_what_is_kept() -> None:
    random = np.random.default_rng(1)
    x, factor = (random.standard_normal((3, 8)).astype(np.float32) for _ in range(2))

    def body(g: fg.Graph, w: fg.Tensor, f: fg.Tensor) -> list[fg.Tensor]:
        values, metadata = g.sparse_2_4_compress(w)
        one = g.reduction(g.sparse_2_4(w) * f, mode="add")
        two = g.reduction(g.sparse_2_4(values, metadata) * f, mode="add")
        return [*g.gradients(one, [w]), *g.gradients(two, [values])]

    by_whole, by_values = results_of(body, x, factor)
    kept = pruned(x) != 0
    assert np.array_equal(by_whole, factor * kept)
    assert np.array_equal(by_values.reshape(-1), factor[kept])


def test_wrong_operands() -> None:
    g = fg.Graph("wrong")
    x, half = g.tensor("x", (4, 6)), g.tensor("half", (4, 4), "float16")
    with pytest.raises(ShapeError, match=r"multiple of 4 elements, got 6 elements.*'x'"):
        g.sparse_2_4(x)
    with pytest.raises(ShapeError, match="multiple of 4 elements, got no axis"):
        g.sparse_2_4_mask(g.tensor("number", ()))
    with pytest.raises(ShapeError, match="one place for each"):
        g.sparse_2_4(half, g.tensor("few", (4, 2), "uint2"))
    with pytest.raises(DTypeError, match="places in a four, integers from 0 to 3, got float32"):
        g.sparse_2_4(half, g.tensor("real", (4, 4), "float32"))
    with pytest.raises(DTypeError, match="integers of 8 bits, got int32"):
        g.sparse_2_4_compress(g.tensor("wide", (4, 4), "int32"))
    with pytest.raises(DTypeError, match="for storage"):
        g.sparse_2_4(g.tensor("packed", (4, 4), "int4"))
