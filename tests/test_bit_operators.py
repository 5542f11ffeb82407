"""``& | ^ ~ << >>`` of tensors are NumPy's: bit by bit on integers, on booleans logic."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest

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


def run(body: Any, *inputs: Any) -> tuple[Any, ...]:
    """The results of a graph on the cpu engine."""
    g = fg.Graph("bits")
    for made in body(*(g.tensor(f"x{k}", x.shape, x.dtype) for k, x in enumerate(inputs))):
        g.output(made)
    found = g.compile("cpu")(*inputs)
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("dtype", [*INTEGERS, dt.bool_], ids=str)
def test_operators_are_numpys(dtype: dt.DType) -> None:
    number: Any = True if dtype.is_bool else 5
    a, b = values(dtype, 0), values(dtype, 1)
    row = b[1]
    count = np.tile(np.arange(37) % dtype.bits, (3, 1)).astype(dtype.numpy)

    def body(x: Any, y: Any, n: Any) -> list[Any]:
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
    for found, wanted in zip(run(body, a, b, count), expected, strict=True):
        assert found.dtype == dtype.numpy
        np.testing.assert_array_equal(found, wanted)


def test_a_boolean_beside_an_integer_is_a_number() -> None:
    m, x = values(dt.bool_, 0), values(dt.int32, 1)
    found = run(lambda m, x: [m & x, x | m, m ^ x, m & 3, x & True, m & (x > 0), ~(x > 0) | m], m, x)
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
