"""Elements of fewer than 8 bits: packed the lowest bits first, cast and moved on the cpu engine as NumPy does it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from graphs import ARCHS, check_all, check_on_gpu, compile_for, quick, quick_dtypes

import fusegraph as fg
from fusegraph import dtypes as dt
from fusegraph.errors import ArgumentError, DTypeError, LayoutError
from fusegraph.report.check import random_inputs, run

TYPES = tuple(dtype for dtype in dt.PACKED if dtype.bits < 8)
EACH = quick_dtypes(TYPES, "int4", "float4_e2m1")
SHAPES = ((16,), (1,), (7,), (3, 5), (2, 3, 4), (0, 3), ())


def codes(dtype: dt.DType, shape: tuple[int, ...], seed: int = 0) -> Any:
    """Returns random bit patterns."""
    return np.random.default_rng(seed).integers(0, 1 << dtype.bits, shape, np.uint8)


def decoded(dtype: dt.DType, code: Any) -> Any:
    """Returns the numbers that patterns stand for, by their definition."""
    if dtype == dt.float8_e8m0:
        return np.where(code == 255, np.float32(np.nan), np.ldexp(np.float32(1), code.astype(np.int32) - 127))
    if dtype.is_float:
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
        return np.where(code & 8, -table[code & 7], table[code & 7])
    number = code.astype(np.int8)
    return number if dtype.min == 0 else np.where(number > dtype.max, number - (1 << dtype.bits), number)


def packed(dtype: dt.DType, code: Any) -> Any:
    """Returns the bytes of patterns, one after another in C order, by their definition."""
    found = np.zeros(-(-code.size * dtype.bits // 8), np.uint8)
    for k, c in enumerate(code.reshape(-1)):
        found[k * dtype.bits // 8] |= c << k * dtype.bits % 8
    return found


def array(dtype: dt.DType, code: Any) -> Any:
    return decoded(dtype, code).astype(dtype.numpy)


@pytest.mark.parametrize("engine", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", EACH)
def test_bytes_and_arrays_come_and_go(dtype: dt.DType, engine: str) -> None:
    every = [codes(dtype, shape) for shape in SHAPES]
    g = fg.Graph("ways")
    for k, code in enumerate(every):
        x = g.tensor(f"x{k}", code.shape, dtype)
        g.output(g.cast(x, "float32"))
        g.output(g.identity(x))
    executable = g.compile(engine)
    arrays, in_bytes = ([f(dtype, code) for code in every] for f in (array, packed))
    for given in (arrays, in_bytes):
        found = executable(*given)
        for code, wide, same in zip(every, found[::2], found[1::2], strict=True):
            np.testing.assert_array_equal(wide, decoded(dtype, code))
            assert (same.dtype, same.shape) == (dtype.numpy, code.shape)
            np.testing.assert_array_equal(np.signbit(wide), np.signbit(same.astype(np.float32)))
            np.testing.assert_array_equal(same.astype(np.float32), decoded(dtype, code))
    for given, made in ((in_bytes, np.uint8), (arrays, dtype.numpy)):
        pairs = zip(every, given, strict=True)
        out = [b for code, x in pairs for b in (np.zeros(code.shape, np.float32), np.zeros(x.shape, made))]
        for result, buffer in zip(executable(*given, out=out), out, strict=True):
            assert result is buffer
        for buffer, x in zip(out[1::2], given, strict=True):
            np.testing.assert_array_equal(buffer.view(np.uint8), x.view(np.uint8))


@pytest.mark.parametrize("dtype", EACH)
def test_torch_has_the_bytes(dtype: dt.DType) -> None:
    torch = pytest.importorskip("torch")
    code = codes(dtype, (6, 8))
    g = fg.Graph("torch")
    g.output(g.transpose(g.tensor("x", (6, 8), dtype)))
    found = g.compile("cpu")(torch.from_numpy(packed(dtype, code)).reshape(6, -1))
    assert found.dtype == torch.uint8
    np.testing.assert_array_equal(found.numpy(), packed(dtype, code.T.copy()))


@pytest.mark.parametrize("dtype", EACH)
def test_casts_to_every_type(dtype: dt.DType) -> None:
    code = np.arange(1 << dtype.bits, dtype=np.uint8)
    g = fg.Graph("from")
    x = g.tensor("x", code.shape, dtype)
    targets = [d for d in (*dt.ALL, *TYPES) if d != dtype]
    for target in targets:
        g.output(g.cast(x, target))
    for found, target in zip(g.compile("cpu")(packed(dtype, code)), targets, strict=True):
        number = decoded(dtype, code)
        if target.is_bool:
            expected = number != 0
        elif target.is_float:
            expected = number.astype(np.float32).astype(target.numpy)
        elif dtype.is_float:  # truncates and saturates
            expected = np.clip(np.trunc(number), float(target.min), float(target.max)).astype(np.int64)
        else:  # wraps around
            span = 1 << target.bits
            expected = np.array([(int(n) - int(target.min)) % span + int(target.min) for n in number], object)
        kind = object if target.is_int else np.float64
        np.testing.assert_array_equal(found.astype(kind), expected.astype(kind), err_msg=str(target))
        assert found.dtype == target.numpy


@pytest.mark.slow
@pytest.mark.parametrize("target", EACH)
def test_casts_from_every_type(target: dt.DType) -> None:
    rng = np.random.default_rng(0)
    g, given = fg.Graph("to"), []
    for source in dt.ALL:
        if source.is_bool:
            x = np.array([True, False, True])
        elif source.is_int:
            x = rng.integers(int(source.min), int(source.max), 99, source.numpy, endpoint=True)
            x[:40] = np.arange(40) - (20 if source.min < 0 else 0)
        else:
            grid = np.concatenate([np.arange(-80, 80) / 8, np.arange(-9, 9) * 0.5 + 0.25, [1e3, -1e3, np.nan, -0.0]])
            x = grid.astype(source.numpy)
            if source.bits >= 32:
                kind = source.numpy.type
                x = np.concatenate([x, np.nextafter(x, kind(np.inf)), np.nextafter(x, kind(-np.inf)), [kind(np.inf)]])
        given.append(x)
        g.output(g.cast(g.tensor(f"of {source}", x.shape, source), target))
    for source, x, found in zip(dt.ALL, given, g.compile("cpu")(*given), strict=True):
        assert found.dtype == target.numpy
        if target.is_float:
            expected = np.array([_nearest_e2m1(float(v)) for v in x])
            np.testing.assert_array_equal(np.signbit(found.astype(float)), np.signbit(expected), err_msg=str(source))
        elif source.is_float:
            wide = np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=1e9, neginf=-1e9)
            expected = np.clip(np.trunc(wide), float(target.min), float(target.max))
        else:
            low, span = int(target.min), 1 << target.bits
            expected = np.array([(int(v) - low) % span + low for v in x], np.float64)
        np.testing.assert_array_equal(found.astype(np.float64), expected, err_msg=str(source))


def _nearest_e2m1(x: float) -> float:
    """Rounds by distance, ties to the even code; NaN becomes -0."""
    if np.isnan(x):
        return -0.0
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    code = min(range(8), key=lambda c: (abs(min(abs(x), 6.0) - table[c]), c % 2))
    return float(np.copysign(table[code], x))


@pytest.mark.parametrize("dtype", EACH)
def test_movement(dtype: dt.DType) -> None:
    a, b = codes(dtype, (3, 5, 4)), codes(dtype, (3, 5, 4), 1)
    mask = np.random.default_rng(2).random((3, 5, 4)) < 0.5
    g = fg.Graph("moved")
    x, y, m = g.tensor("x", a.shape, dtype), g.tensor("y", a.shape, dtype), g.tensor("m", a.shape, "bool")
    rows = np.array([2, 0, 0, 1])
    for made in (
        g.transpose(x, (2, 0, 1)), x[1:, ::-1, 1], g.concatenate(x, y, axis=2), g.binary_select(x, y, m),
        g.gather(x, g.constant(rows), axis=0), g.reshape(x, (5, 12)), g.broadcast(x[:, :1], x.shape),
        g.pad(x, [(0, 1), (1, 0), (0, 0)]), g.identity(y),
    ):  # fmt: skip
        g.output(made)
    expected = [
        a.transpose(2, 0, 1), a[1:, ::-1, 1], np.concatenate([a, b], 2), np.where(mask, a, b), a[rows],
        a.reshape(5, 12), np.broadcast_to(a[:, :1], a.shape), np.pad(a, [(0, 1), (1, 0), (0, 0)]), b,
    ]  # fmt: skip
    found = g.compile("cpu")(array(dtype, a), array(dtype, b), mask)
    for result, wanted in zip(found, expected, strict=True):
        assert (result.dtype, result.shape) == (dtype.numpy, wanted.shape)
        np.testing.assert_array_equal(result.astype(np.float32), decoded(dtype, wanted))


@pytest.mark.parametrize("dtype", EACH)
def test_strides_count_elements_not_bytes(dtype: dt.DType) -> None:
    """Views that begin inside of bytes, with gaps, transposed and repeated."""
    shape, g = (6, 5), fg.Graph("strided")
    memory, expected = [], []
    for strides in ((1, 6), (8, 1), (0, 1), (1, 0), (40, 2), (5, 30), (1, 12)):
        memory.append(codes(dtype, (1 + sum((n - 1) * s for n, s in zip(shape, strides)),)))
        expected.append(np.lib.stride_tricks.as_strided(memory[-1], shape, strides))
        g.output(g.cast(g.tensor(f"x{len(memory)}", shape, dtype, strides=strides), "float32"))
    for engine in ("cpu", "reference"):
        executable = g.compile(engine)
        for given in ([packed(dtype, m) for m in memory], [array(dtype, np.ascontiguousarray(e)) for e in expected]):
            for found, wanted in zip(executable(*given), expected, strict=True):
                np.testing.assert_array_equal(found, decoded(dtype, wanted))


def test_outputs_in_any_packed_order() -> None:
    code = codes(dt.uint4, (2, 3, 5))
    g = fg.Graph("order")
    g.output(g.identity(g.tensor("x", code.shape, "uint4")), strides=(1, 10, 2))
    out = np.empty(15, np.uint8)
    g.compile("cpu")(packed(dt.uint4, code), out=out)
    np.testing.assert_array_equal(out, packed(dt.uint4, code.transpose(1, 2, 0).copy()))


def test_constants_and_weights() -> None:
    """A product with weights of 4 bits in groups with scales, the way they are quantised."""
    code = codes(dt.int4, (64, 24))
    g = fg.Graph("weights", io_dtype="float16")
    x, scale = g.tensor("x", (9, 64)), g.tensor("scale", (4, 1, 24))
    w = g.cast(g.tensor("w", (64, 24), "int4"), "float16")
    held = g.cast(g.constant(array(dt.int4, code), name="held"), "float16")
    g.output(x @ (w.reshape(4, 16, 24) * scale).reshape(64, 24), name="product")
    g.output(w - held, name="difference")
    rng = np.random.default_rng(0)
    given = rng.standard_normal((9, 64)).astype(np.float16), rng.random((4, 1, 24)).astype(np.float16)
    found, difference = g.compile("cpu")(*given, packed(dt.int4, code))
    weights = (decoded(dt.int4, code).reshape(4, 16, 24) * given[1].astype(np.float64)).reshape(64, 24)
    np.testing.assert_allclose(found, given[0].astype(np.float64) @ weights, rtol=1e-2, atol=0.1)
    assert not difference.any()


def _graph(dtype: dt.DType) -> fg.Graph:
    g = fg.Graph(f"all of {dtype}")
    x, y = g.tensor("x", (4, 9), dtype), g.tensor("y", (4, 9))
    wide = g.cast(x, "float32")
    g.output(wide * y)
    g.output(g.cast(g.sin(y) * 5, dtype), name="q")
    g.output(g.reduction(g.cast(g.cast(y * 3, dtype), "float32"), "add", 1))
    g.output(g.concatenate(x, g.cast(y, dtype), axis=0), name="joined")
    return g


@pytest.mark.parametrize("how", quick({}, {"strict": True}, {"fusion": False}), ids=str)
def test_check_knows_them(how: dict[str, Any]) -> None:
    check_all([_graph(d) for d in TYPES], **how)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile(arch: str) -> None:
    assert [k.name for k in compile_for(arch, [_graph(d) for d in TYPES]) if k.spill_bytes] == []


def test_no_byte_has_two_writers() -> None:
    """The order of threads changes nothing, and bytes hold nothing of what was there before."""
    g = fg.Graph("written")
    g.output(g.cast(g.tensor("x", (1001,)), "int4"), name="y")
    executable = g.compile("cpu")
    inputs = random_inputs(g, 3)
    first = run(executable, inputs)["y"]
    executable.order = "reverse"  # type: ignore[attr-defined]
    np.testing.assert_array_equal(first, run(executable, inputs)["y"])
    out = np.full(501, 0xFF, np.uint8)
    executable(*inputs.values(), out=out)
    assert out[-1] < 16


def test_refusals() -> None:
    g = fg.Graph("refused")
    x, f = g.tensor("x", (4, 6), "int4"), g.tensor("f", (4, 6), "float4_e2m1")
    for body in (
        lambda: x + x,
        lambda: x @ g.transpose(x),
        lambda: g.reduction(x, "max"),
        lambda: x > 0,
        lambda: g.relu(x),
    ):
        with pytest.raises(DTypeError, match="does not compute in int4, which is for storage; cast to int8 or a float"):
            body()
    with pytest.raises(DTypeError, match=r"does not compute in float4_e2m1, .* cast to float16 or float32"):
        g.exp(f)
    with pytest.raises(DTypeError, match="matmul does not compute in int4"):
        g.matmul(g.tensor("a", (4, 4), "int8"), g.tensor("b", (4, 4), "int8"), dtype="int4")
    g = fg.Graph("asked")
    g.output(g.cast(g.tensor("x", (4, 6), "int4"), "int8"))
    run_ = g.compile("cpu")
    named = r"input 'x' of graph 'asked', int4 \[4, 6\] packed in bytes,"
    for wrong, reason in (
        (np.zeros(24, np.uint8), named + r" has shape \[24\], the graph was built for \[12\]"),
        (np.zeros((4, 6), np.int8), named + r" has shape \[24\]"),
        (np.zeros(12, np.int8), named + " has dtype int8, the graph was built for uint8"),
        (np.zeros((6, 4), dt.int4.numpy), r"'x' of graph 'asked' has shape \[6, 4\], the graph was built for \[4, 6"),
        (np.zeros((4, 6), np.uint8)[:, ::2], named + r" has shape \[4, 3\]"),
    ):
        with pytest.raises(ArgumentError, match=reason):
            run_(wrong)
    gaps = fg.Graph("gaps")
    gaps.output(gaps.cast(gaps.tensor("x", (4, 6)), "int4"), strides=(8, 1))
    with pytest.raises(LayoutError, match=r"output 'identity' of int4 \[4, 6\] has strides \[8, 1\] with gaps"):
        gaps.compile("cpu")
    windows = fg.Graph("windows")
    windows.output(windows.cast(windows.tensor("x", (4, 6), "int4", strides=(1, 1)), "int8"))
    with pytest.raises(LayoutError, match=r"'x' of int4 \[4, 6\] has strides \[1, 1\], of which one is no multiple"):
        windows.compile("cpu")


def test_promotion_holds_both() -> None:
    for a, b in itertools.product(TYPES, dt.ALL):
        if a.kind == b.kind and not (b == dt.uint64 and a.min < 0):
            both = dt.promote(a, b)
            assert both.holds(a)
            assert both.holds(b)
    assert dt.promote(dt.int4, dt.uint4) == dt.int8
    assert dt.promote(dt.int2, dt.int4) == dt.int4


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    check_on_gpu([_graph(d) for d in TYPES])
