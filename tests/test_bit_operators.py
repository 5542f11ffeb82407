"""``& | ^ ~ << >>`` of tensors are NumPy's: bit by bit on integers, on booleans logic."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
from graphs import quick_dtypes, results_of

import fusegraph as fg
from fusegraph import dtypes as dt
from fusegraph.errors import DTypeError

INTEGERS = tuple(d for d in dt.ALL if d.is_int and d.bits >= 8)
BITS = (operator.and_, operator.or_, operator.xor)
SHIFTS = (operator.lshift, operator.rshift)


def values(dtype: dt.DType, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    if dtype.is_bool:
        return rng.random((3, 37)) < 0.5
    low, high = int(dtype.min), int(dtype.max)
    x = rng.integers(low, high, (3, 37), dtype.numpy, endpoint=True)
    x[0, :4] = low, high, 0, 1
    return x


@pytest.mark.parametrize("dtype", quick_dtypes([*INTEGERS, dt.bool_], "int8", "uint64", "bool"))
def test_operators_are_numpys(dtype: dt.DType) -> None:
    number: Any = True if dtype.is_bool else 5
    a, b = values(dtype, 0), values(dtype, 1)
    row = b[1]
    count = np.tile(np.arange(37) % dtype.bits, (3, 1)).astype(dtype.numpy)

    def body(_: Any, x: Any, y: Any, n: Any) -> list[Any]:
        made = [f(x, y) for f in BITS] + [f(x, number) for f in BITS] + [f(number, x) for f in BITS]
        made += [f(x, row) for f in BITS] + [f(row, x) for f in BITS] + [~x]
        if dtype.is_int:
            made += [f(x, n) for f in SHIFTS] + [f(x, 3) for f in SHIFTS] + [f(3, n) for f in SHIFTS]
        return made

    scalar = dtype.numpy.type
    with np.errstate(over="ignore"):
        expected = [f(a, b) for f in BITS] + 2 * [f(a, scalar(number)) for f in BITS] + 2 * [f(a, row) for f in BITS]
        expected += [~a]
        if dtype.is_int:
            expected += [f(a, count) for f in SHIFTS] + [f(a, scalar(3)) for f in SHIFTS]
            expected += [f(scalar(3), count) for f in SHIFTS]
    for found, wanted in zip(results_of(body, a, b, count), expected, strict=True):
        assert found.dtype == dtype.numpy
        np.testing.assert_array_equal(found, wanted)


def test_a_boolean_beside_an_integer_is_a_number() -> None:
    m, x = values(dt.bool_, 0), values(dt.int32, 1)
    found = results_of(lambda _, m, x: [m & x, x | m, m ^ x, m & 3, x & True, m & (x > 0), ~(x > 0) | m], m, x)
    expected = [m & x, x | m, m ^ x, m & np.int32(3), x & True, m & (x > 0), ~(x > 0) | m]
    for result, wanted in zip(found, expected, strict=True):
        assert result.dtype == wanted.dtype
        np.testing.assert_array_equal(result, wanted)


@pytest.mark.parametrize(
    "body",
    [*(lambda x, f=f: f(x, x) for f in (*BITS, *SHIFTS)), operator.invert, lambda x: (x > 0) & x, lambda x: x | True],
)
def test_floats_have_no_bits(body: Any) -> None:
    g = fg.Graph("floats")
    with pytest.raises(DTypeError, match="does not take float32; cast to one of"):
        body(g.tensor("x", (4,)))


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_bitcast_keeps_the_bits(bits: int) -> None:
    every = [d for d in dt.ALL if d.bits == bits and not d.is_bool]
    raw = np.random.default_rng(bits).integers(0, 256, 64 * bits // 8, np.uint8)
    for source in every:
        x = raw.view(source.numpy)
        wide = x.astype(np.float64) if source.is_float else np.zeros(x.shape)
        x = np.where(np.isnan(wide), x.dtype.type(1), x)
        found = results_of(lambda _, x: [*(x.graph.bitcast(x, dtype=d) for d in every), x.graph.bitcast(x)], x)
        for result, target in zip(found, [*every, dt.as_dtype(f"uint{bits}")], strict=True):
            expected = x.view(target.numpy)
            assert result.dtype == expected.dtype
            number = expected.astype(np.float64) if target.is_float else np.zeros(x.shape)
            same = (result.view(f"u{bits // 8}") == expected.view(f"u{bits // 8}")) | np.isnan(number)
            assert same.all(), (source, target)


def test_bitcast_takes_what_is_rounded() -> None:
    """A sum of bfloat16 has the bits with which it would be stored."""
    x = np.array([1.0, 2.0**-9, 3.0], np.float32)
    (found,) = results_of(lambda _, x: [x.graph.bitcast(x.graph.cast(x, "bfloat16") + 1)], x)
    np.testing.assert_array_equal(found, [0x4000, 0x3F80, 0x4080])
    g = fg.Graph("refused")
    with pytest.raises(DTypeError, match="the bits of float32 are none of int16"):
        g.bitcast(g.tensor("x", (3,)), dtype="int16")
    with pytest.raises(DTypeError, match="the bits of int8 are none of bool"):
        g.bitcast(g.tensor("y", (3,), "int8"), dtype="bool")
