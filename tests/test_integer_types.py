"""Integers of every width, signed and unsigned, on the cpu engine: NumPy's results, wrapping around as NumPy does."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from graphs import ARCHS, check_all, compile_for, quick_dtypes, results_of

import fusegraph as fg
from fusegraph import dtypes as dt
from fusegraph.errors import DTypeError
from fusegraph.ops import TABLE, Kind
from fusegraph.report.check import random_inputs

INTEGERS = tuple(d for d in dt.ALL if d.is_int and d.bits >= 8)
EACH = quick_dtypes(INTEGERS, "int8", "uint32", "uint64")


def values(dtype: dt.DType, shape: tuple[int, ...], seed: int) -> Any:
    """Returns random integers of the full range, with the limits, zero and one among them."""
    rng = np.random.default_rng(seed)
    x = rng.integers(int(dtype.min), int(dtype.max), shape, dtype.numpy, endpoint=True)
    ends = np.array([dtype.min, dtype.max, 0, 1, int(dtype.max) - 1], dtype.numpy)
    return np.where(rng.random(shape) < 0.3, rng.choice(ends, shape), x)


def assert_equal(found: tuple[Any, ...], expected: list[Any]) -> None:
    for k, (result, wanted) in enumerate(zip(found, expected, strict=True)):
        assert result.dtype == wanted.dtype, k
        np.testing.assert_array_equal(result, wanted, err_msg=str(k))


@pytest.mark.parametrize("dtype", EACH)
def test_pointwise(dtype: dt.DType) -> None:
    a, b = values(dtype, (3, 41), 0), values(dtype, (3, 41), 1)
    mask = values(dtype, (3, 41), 2) > 1
    found = results_of(
        lambda g, a, b, m: [
            a + b, a - b, a * b, g.max(a, b), g.min(a, b), -a, abs(a), g.sign(a), g.quotient(a, b), g.mod(a, b),
            g.binary_select(a, b, m), g.clamp(a, 2, 100), g.relu(a), a > b, a >= b, a < b, a <= b, g.cmp_eq(a, b),
            g.cmp_neq(a, b), g.logical_and(a, b), g.logical_not(a), a + 1, 1 - a,
        ],
        a, b, mask,
    )  # fmt: skip
    one = dtype.numpy.type(1)
    with np.errstate(all="ignore"):
        exact = [(int(x), int(y)) for x, y in zip(a.ravel(), b.ravel())]
        quotient = [0 if y == 0 else abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1) for x, y in exact]
        rest = [0 if y == 0 else x - q * y for (x, y), q in zip(exact, quotient)]

        def wrapped(numbers: list[int]) -> Any:
            span = 2**dtype.bits
            inside = [(n - int(dtype.min)) % span + int(dtype.min) for n in numbers]
            return np.array(inside, dtype.numpy).reshape(a.shape)

        expected = [
            a + b, a - b, a * b, np.maximum(a, b), np.minimum(a, b), -a, np.abs(a), np.sign(a), wrapped(quotient),
            wrapped(rest), np.where(mask, a, b), np.clip(a, 2, 100), np.maximum(a, 0), a > b, a >= b, a < b, a <= b,
            a == b, a != b, (a != 0) & (b != 0), a == 0, a + one, one - a,
        ]  # fmt: skip
    assert_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", EACH)
def test_reductions_scans_and_products(dtype: dt.DType) -> None:
    x, w = values(dtype, (37, 70), 0), values(dtype, (70, 9), 1)
    small = dt.int32 if dtype.bits < 32 else dtype
    wide = dt.uint64 if dtype.min == 0 else dt.int64
    found = results_of(
        lambda g, x, w: [
            *(g.reduction(x, mode, axes, keepdims=False) for mode in ("add", "max", "min", "mul") for axes in (0, 1)),
            g.reduction(x, "amax", 1, keepdims=False), g.reduction(x, "norm1", 1, keepdims=False),
            g.reduction(x, "add", keepdims=False, dtype=wide), g.reduction(x, "argmax", 1, keepdims=False),
            g.cumsum(x, axis=1), x @ w, g.matmul(x, w, dtype=wide), g.reduction(x, "any", 0, keepdims=False),
        ],
        x, w,
    )  # fmt: skip
    s, t = small.numpy, wide.numpy
    with np.errstate(all="ignore"):
        combined = (lambda x, k: x.sum(k, s), np.max, np.min, lambda x, k: x.prod(k, s))
        expected = [f(x, axis) for f in combined for axis in (0, 1)]
        expected += [
            np.abs(x).max(1), np.abs(x.astype(s)).sum(1, s), x.sum(dtype=t), x.argmax(1), x.cumsum(1, s),
            x.astype(s) @ w.astype(s), x.astype(t) @ w.astype(t), x.any(0),
        ]  # fmt: skip
    assert_equal(found, [np.asarray(e) for e in expected])


@pytest.mark.parametrize("dtype", EACH)
def test_movement_and_indices(dtype: dt.DType) -> None:
    x = values(dtype, (5, 6, 7), 0)
    index = np.array([[0, 4], [2, 2], [1, 3]], dtype.numpy)
    found = results_of(
        lambda g, x, i: [
            g.transpose(x, (2, 0, 1)), x[::-1, 1:5:2], g.concatenate(x, x, axis=1), g.pad(x, [(1, 2), (0, 0), (3, 1)]),
            g.gather(x, i, axis=0), g.broadcast(x[:, :1], (5, 6, 7)), g.gather(g.cast(x, "float32"), i, axis=1),
        ],
        x, index,
    )  # fmt: skip
    expected = [
        x.transpose(2, 0, 1), x[::-1, 1:5:2], np.concatenate([x, x], 1), np.pad(x, [(1, 2), (0, 0), (3, 1)]),
        x[index.astype(int)], np.broadcast_to(x[:, :1], (5, 6, 7)), x.astype(np.float32)[:, index.astype(int)],
    ]  # fmt: skip
    assert_equal(found, expected)


def test_promotion_is_numpys() -> None:
    for a, b in itertools.product(INTEGERS, INTEGERS):
        if {a, b} == {dt.int8, dt.uint8}:
            assert dt.promote(a, b) == dt.int32  # in which their products are summed
        elif np.promote_types(a.numpy, b.numpy).kind == "f":
            with pytest.raises(DTypeError, match="no integer type holds all of"):
                dt.promote(a, b)
        else:
            assert dt.promote(a, b).numpy == np.promote_types(a.numpy, b.numpy)


def test_numbers_beside_unsigned_tensors() -> None:
    g = fg.Graph("numbers")
    x, y = g.tensor("x", (3,), "uint32"), g.tensor("y", (3,), "uint64")
    assert [(x + n).dtype for n in (1, 2**32 - 1, -1, 2**40)] == [dt.uint32, dt.uint32, dt.int64, dt.int64]
    assert (y + (2**64 - 1)).dtype == dt.uint64
    assert (y & 2**63).dtype == dt.uint64
    with pytest.raises(DTypeError, match="no integer type holds all of uint64 and int32"):
        y + -1


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile(arch: str) -> None:
    graphs = []
    for dtype in (dt.int16, dt.uint16, dt.uint32, dt.uint64):
        g = fg.Graph(f"compiled {dtype}")
        x, w = g.tensor("x", (96, 128), dtype), g.tensor("w", (128, 64), dtype)
        g.output(g.cast(g.max(x * 3, x >> 1), "float32"))
        g.output(g.cast(g.cast(x, "float16"), dtype))
        g.output(g.reduction(x, "max", 0))
        g.output(g.reduction(x, "add", 1))
        g.output(x @ w)
        graphs.append(g)
    assert [k.name for k in compile_for(arch, graphs) if k.spill_bytes] == []


def _special(graph: fg.Graph) -> dict[str, Any]:
    return {
        t.name: values(t.dtype, t.shape, n) if t.dtype.is_int else random_inputs(graph)[t.name]
        for n, t in enumerate(graph.inputs)
    }


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [d for d in INTEGERS if d.bits < 64], ids=str)
def test_results_inside_of_an_expression_wrap_around(dtype: dt.DType) -> None:
    """In front of a product no variable of the dtype holds an op's result: it must be of the dtype by itself."""
    graphs = []
    for op in TABLE.values():
        if op.kind is Kind.POINTWISE and "int" in op.cuda and op.name not in ("bitcast", "identity", "clamp"):
            g = fg.Graph(f"{op.name} {dtype}")
            operands = [g.tensor(k, (3, 33, 20), "bool" if k in op.masks else dtype) for k in op.operands]
            g.output(g.matmul(g.apply(op, operands, {}), g.tensor("w", (20, 9), "bfloat16"), dtype="float32"))
            graphs.append(g)
    check_all(graphs, inputs=_special)
