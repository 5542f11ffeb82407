"""Block scaling: MXFP8, MXFP4, NVFP4 and integers, by the builder and from cuDNN, against NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from graphs import check_all, executables, quick

import fusegraph as fg
from fusegraph import dtypes as dt
from fusegraph.errors import AttributeValueError, DTypeError, GraphError, NotSupportedError, ShapeError

#: format -> (elements, scales, elements of a block)
FORMATS = {
    "MXFP8": ("float8_e4m3", "float8_e8m0", 32),
    "MXFP8 e5m2": ("float8_e5m2", "float8_e8m0", 32),
    "MXFP4": ("float4_e2m1", "float8_e8m0", 32),
    "NVFP4": ("float4_e2m1", "float8_e4m3", 16),
    "integers": ("int4", "float16", 8),
}


def elements(dtype: dt.DType, shape: tuple[int, ...], seed: int) -> Any:
    rng = np.random.default_rng(seed)
    if dtype.is_int:
        return rng.integers(int(dtype.min), int(dtype.max), shape, endpoint=True).astype(dtype.numpy)
    return rng.normal(0, 2, shape).astype(np.float32).astype(dtype.numpy)


def scales(dtype: dt.DType, shape: tuple[int, ...], seed: int) -> Any:
    found = np.exp2(np.random.default_rng(seed).integers(-3, 3, shape)).astype(np.float32)
    return (found if dtype == dt.float8_e8m0 else found * 1.25).astype(dtype.numpy)


def dequantised(x: Any, scale: Any, axis: int) -> Any:
    return x.astype(np.float64) * np.repeat(scale.astype(np.float64), x.shape[axis] // scale.shape[axis], axis)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", quick(19, 1))
def test_products_of_scaled_blocks_are_one_kernel(name: str, rows: int) -> None:
    kind, scale_kind, block = FORMATS[name]
    size, columns = 4 * block, 24
    g = fg.Graph("scaled", "bfloat16")
    x = g.tensor("x", (rows, size))
    w = g.tensor("w", (columns, size), kind, parameter=True)
    s = g.tensor("s", (columns, size // block), scale_kind, parameter=True)
    g.output(x @ g.block_scale_dequantize(w, s, block_size=block, dtype="bfloat16").T, name="y")
    executable = g.compile("cpu")
    assert (len(executable.plan.kernels), dict(executable.plan.packed)) == (1, {})
    given = np.random.default_rng(0).normal(size=(rows, size)).astype(ml_dtypes.bfloat16)
    quantised = elements(dt.BY_NAME[kind], (columns, size), 1), scales(dt.BY_NAME[scale_kind], (columns, 4), 2)
    expected = given.astype(np.float64) @ dequantised(*quantised, 1).T
    found = executable(given, *quantised).astype(np.float64)
    np.testing.assert_allclose(found, expected, rtol=2**-7, atol=2**-7 * np.abs(expected).max())


def test_blocks_of_several_dimensions_and_what_has_no_number() -> None:
    g = fg.Graph("blocks")
    x, s = g.tensor("x", (3, 4, 6), "float8_e5m2"), g.tensor("s", (3, 2, 2), "float8_e8m0")
    g.output(g.block_scale_dequantize(x, s, block_size=(2, 3)), name="y")
    values, factors = elements(dt.float8_e5m2, (3, 4, 6), 0), scales(dt.float8_e8m0, (3, 2, 2), 1)
    values[0, 0, :3], factors[1, 0, 0] = [np.inf, -np.inf, np.nan], np.nan
    factors[2] = [[2.0**-127, 2.0**127], [1, 2.0**-100]]
    with np.errstate(over="ignore", under="ignore"):
        wide = np.repeat(np.repeat(factors.astype(np.float64), 2, 1), 3, 2) * values.astype(np.float64)
        expected = wide.astype(np.float32)
    for engine in ("cpu", "reference"):
        np.testing.assert_array_equal(g.compile(engine)(values, factors), expected)


def test_last_blocks_have_what_is_left() -> None:
    g = fg.Graph("ragged")
    x, s = g.tensor("x", (3, 5, 7), "float8_e5m2"), g.tensor("s", (3, 3, 3), "float16")
    g.output(g.block_scale_dequantize(x, s, block_size=(2, 3)), name="y")
    values, factors = elements(dt.float8_e5m2, (3, 5, 7), 0), scales(dt.float16, (3, 3, 3), 1)
    wide = np.repeat(np.repeat(factors, 2, 1), 3, 2)[:, :5, :7].astype(np.float32)
    for engine in ("cpu", "reference"):
        np.testing.assert_array_equal(g.compile(engine)(values, factors), values.astype(np.float32) * wide)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (1, 1)])
def test_nothing_and_one_element(shape: tuple[int, int]) -> None:
    g = fg.Graph("small")
    x, s = g.tensor("x", shape, "int8"), g.tensor("s", shape)
    g.output(g.block_scale_dequantize(x, s, block_size=1), name="y")
    found = g.compile("cpu")(np.full(shape, 3, np.int8), np.full(shape, 0.5, np.float32))
    np.testing.assert_array_equal(found, np.full(shape, 1.5, np.float32))


@pytest.mark.parametrize("how", quick({}, {"strict": True}, {"fusion": False}), ids=str)
def test_check_knows_it(how: dict[str, Any]) -> None:
    g = fg.Graph("checked")
    for kind, scale_kind, block in FORMATS.values():
        x = g.tensor(f"x {kind} {scale_kind}", (2, 4 * block), kind)
        s = g.tensor(f"s {kind} {scale_kind}", (2, 4), scale_kind)
        g.output(g.block_scale_dequantize(x, s, block_size=block))
    check_all([g], **how)


def test_refusals() -> None:
    g = fg.Graph("refused")
    x, s = g.tensor("x", (4, 30), "float4_e2m1"), g.tensor("s", (4, 2), "float8_e4m3")
    for body, error, text in (
        (lambda: g.block_scale_dequantize(x, s, (3, 15)), ShapeError, r"\[4, 30\] has \[2, 2\] blocks of \[3, 15\]"),
        (lambda: g.block_scale_dequantize(x, s, 10), ShapeError, r"\[4, 30\] has \[4, 3\] blocks of \[10\], scale 's'"),
        (lambda: g.block_scale_dequantize(x, s, 0), AttributeValueError, "positive sizes"),
        (lambda: g.block_scale_dequantize(x, s, (1, 1, 15)), AttributeValueError, "from 1 to 2 positive sizes"),
        (lambda: g.block_scale_dequantize(x, g.tensor("i", (4, 2), "int8"), 15), DTypeError, "times int8"),
        (lambda: g.block_scale_dequantize(x, s, 15, "int8"), DTypeError, "to int8"),
        (lambda: g.exp(g.tensor("e", (4,), "float8_e8m0")), DTypeError, "cast to bfloat16 or float32"),
    ):
        with pytest.raises(error, match=text):
            body()


# ---- scales whose shapes say how large blocks are

#: x, scale, zero point
GRIDS: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None], ...] = (
    ((4, 12), (), ()),
    ((4, 12), (4, 1), (4, 1)),
    ((4, 12), (12,), None),
    ((4, 12), (4, 3), (4, 3)),
    ((4, 12), (4, 3), (4, 1)),
    ((4, 12), (2, 3), (3,)),
    ((4, 12), (1, 6), (1,)),
    ((2, 4, 12), (4, 2), (4, 2)),
    ((2, 4, 12), (2, 1, 4), None),
    ((2, 4, 12), (2, 2, 12), (2, 1, 12)),
    ((0, 12), (0, 3), (0, 3)),
    ((0, 12), (1, 3), None),
    ((1,), (1,), (1,)),
)


def blocks(numbers: Any, shape: tuple[int, ...]) -> Any:
    """Numbers of blocks for each element, found by its position."""
    wide, found = numbers.astype(np.float64), np.zeros(shape)
    own = shape[len(shape) - wide.ndim :]
    for place in np.ndindex(shape):
        inner = place[len(shape) - wide.ndim :]
        found[place] = wide[tuple(p * n // size for p, n, size in zip(inner, wide.shape, own))]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_dequantised_numbers(grid: Any) -> None:
    shape, scaled, zeros = grid
    cases: list[tuple[fg.Graph, list[Any], Any]] = []
    for kind, zero in (("int8", "int8"), ("uint4", "uint4"), ("float8_e4m3", "float16")):
        g = fg.Graph("dequantised")
        x, s = g.tensor("x", shape, kind), g.tensor("s", scaled, "float16")
        q, f = elements(dt.BY_NAME[kind], shape, 0), scales(dt.float16, scaled, 1)
        given, less = [q, f], np.zeros(())
        if zeros is not None:
            less = elements(dt.BY_NAME[zero], zeros, 2)
            given.append(less)
        z = None if zeros is None else g.tensor("z", zeros, zero)
        g.output(g.dequantize(x, s, z), name="y")
        g.output(g.dequantize(x, s, z, "float32"), name="wide")
        cases.append((g, given, (q.astype(np.float64) - blocks(less, shape)) * blocks(f, shape)))
    for (g, given, expected), made in zip(cases, executables([g for g, *_ in cases]), strict=True):
        for executable in (made, g.compile("reference")):
            y, wide = executable(*given)
            assert (y.dtype, wide.dtype) == (np.float16, np.float32)
            np.testing.assert_array_equal(wide, expected.astype(np.float32))
            np.testing.assert_array_equal(y, expected.astype(np.float16))


def test_dequantised_weights_are_part_of_their_product() -> None:
    g = fg.Graph("layer", "bfloat16")
    x = g.tensor("x", (3, 96))
    w = g.tensor("w", (24, 96), "uint4", parameter=True)
    s, z = (g.tensor(n, (24, 3), k, parameter=True) for n, k in (("s", "bfloat16"), ("z", "uint8")))
    g.output(g.gelu(x @ g.dequantize(w, s, z).T), name="y")
    made = g.compile("cpu").plan
    assert (len(made.kernels), made.packing) == (1, None)
    check_all([g])


def test_what_does_not_divide() -> None:
    g, other = fg.Graph("wrong"), fg.Graph("other")
    x, s = g.tensor("x", (4, 30), "int8"), g.tensor("s", (4, 4))
    fine = g.tensor("fine", (4, 3))
    for body, error, text in (
        (lambda: g.dequantize(x, s), ShapeError, r"scale 's' \[4, 4\] does not divide 'x' \[4, 30\]"),
        (lambda: g.dequantize(x, g.tensor("d", (1, 4, 3))), ShapeError, "does not divide"),
        (lambda: g.dequantize(x, g.tensor("n", (4, 0))), ShapeError, "does not divide"),
        (lambda: g.dequantize(x, fine, g.tensor("z", (4, 6), "int8")), ShapeError, "is not one for each of the scales"),
        (lambda: g.dequantize(x, x), DTypeError, "int8 times int8 to int8"),
        (lambda: g.dequantize(x, fine, None, "int8"), DTypeError, "to int8"),
        (lambda: g.dequantize(x, fine, g.tensor("b", (4, 3), "bool")), DTypeError, "int8 less bool times float32"),
        (lambda: g.dequantize(x, fine, other.tensor("z", (4, 3))), GraphError, "belongs to graph 'other'"),
    ):
        with pytest.raises(error, match=text):
            body()


# ---- scales that are powers of 2


@pytest.mark.parametrize("engine", ["cpu", "reference"])
@pytest.mark.parametrize("source", ["float64", "float32", "float16", "bfloat16", "int32", "uint8"])
def test_powers_of_two_are_the_nearest(source: str, engine: str) -> None:
    kind = dt.BY_NAME[source]
    if kind.is_int:
        x = np.array([0, 1, 2, 3, 5, 6, 7, 11, 12, 100, int(kind.max)], kind.numpy)
    else:
        grid = np.ldexp(*np.meshgrid([0.5, 0.625, 0.7, 0.75, 0.8, -0.5], np.arange(-20, 8))).reshape(-1)
        x = np.concatenate([grid, [0.0, -0.0, np.nan, np.inf, -np.inf]])
        if kind.bits >= 32:
            x = np.concatenate(
                [x, np.array([1, 1.4, 1.5, 1.9, 2]) * 2.0**-127, [1e-44, 2.0**127, 1.4 * 2.0**127, 3e38]]
            )
            x = np.concatenate([x, np.nextafter(x.astype(kind.numpy), kind.numpy.type(0)).astype(np.float64)])
        x = x.astype(kind.numpy)
    expected = []
    for v in map(float, x):
        if not 0 < v < np.inf:
            expected.append(255)
            continue
        code = min(range(256), key=lambda c, v=v: (abs(v - 2.0 ** (c - 127)), -c))  # halfway up
        expected.append(code)
    g = fg.Graph("powers")
    g.output(g.cast(g.tensor("x", x.shape, kind), "float8_e8m0"))
    np.testing.assert_array_equal(g.compile(engine)(x).view(np.uint8), expected)


# ---- cuDNN


def test_cudnn_graphs() -> None:
    cudnn = pytest.importorskip("cudnn")
    data = cudnn.data_type
    for element, factor, block, output in (
        (data.FP8_E4M3, data.FP8_E8M0, 32, data.FLOAT),
        (data.FP4_E2M1, data.FP8_E4M3, 16, data.BFLOAT16),
    ):
        p = cudnn.pygraph(io_data_type=output, intermediate_data_type=data.FLOAT, compute_data_type=data.FLOAT)
        a = p.tensor(dim=[1, 8, 64], stride=[512, 64, 1], data_type=element, name="a")
        b = p.tensor(dim=[1, 64, 16], stride=[1024, 1, 64], data_type=element, name="b")
        sa = p.tensor(dim=[1, 8, 64 // block], stride=[512 // block, 64 // block, 1], data_type=factor, name="sa")
        sb = p.tensor(dim=[1, 64 // block, 16], stride=[1024 // block, 1, 64 // block], data_type=factor, name="sb")
        left = p.block_scale_dequantize(a, sa, block_size=[1, block])
        right = p.block_scale_dequantize(b, sb, block_size=[block, 1])
        p.matmul(left, right, name="product").set_output(True).set_name("y")
        graph = fg.from_cudnn(p)
        kinds = [t.dtype for t in graph.inputs]
        shapes = ((1, 8, 64), (1, 16, 64), (1, 8, 64 // block), (1, 16, 64 // block))
        found = {
            "a": elements(kinds[0], shapes[0], 0),
            "b": elements(kinds[0], shapes[1], 1),
            "sa": scales(graph.tensors["sa"].dtype, shapes[2], 2),
            "sb": scales(graph.tensors["sb"].dtype, shapes[3], 3),
        }
        executable = graph.compile("cpu")
        assert len(executable.plan.kernels) == 1
        given = [found[t.name] if t.name in ("a", "sa") else found[t.name].transpose(0, 2, 1) for t in graph.inputs]
        y = np.asarray(executable(*given)).astype(np.float64)
        expected = dequantised(found["a"], found["sa"], 2) @ dequantised(found["b"], found["sb"], 2).transpose(0, 2, 1)
        np.testing.assert_allclose(y, expected, rtol=2**-8, atol=1e-5)
    p = cudnn.pygraph(io_data_type=data.FLOAT, intermediate_data_type=data.FLOAT, compute_data_type=data.FLOAT)
    a = p.tensor(dim=[1, 8, 64], data_type=data.FP8_E4M3, name="a")
    s = p.tensor(dim=[1, 8, 2], data_type=data.FP8_E8M0, name="s")
    p.block_scale_dequantize(a, s, block_size=[1, 32], is_negative_scale=True).set_output(True)
    with pytest.raises(NotSupportedError, match="is_negative_scale"):
        fg.from_cudnn(p)
