"""8-bit floats: movement keeps their bits; casts round once, and saturate or overflow as each frontend asks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import quick, quick_dtypes, results_of

import fusegraph as fg
from fusegraph import dtypes as dt
from fusegraph.report.check import check

EIGHT = tuple(d for d in dt.ALL if d.is_float and d.bits == 8)
EACH = quick_dtypes(EIGHT, "float8_e4m3", "float8_e5m2")
HALVES = (dt.float16, dt.bfloat16)


def every(dtype: dt.DType) -> Any:
    """Returns every bit pattern of a dtype, in rows of 16."""
    return np.arange(1 << dtype.bits).astype(f"u{dtype.itemsize}").view(dtype.numpy).reshape(-1, 16)


def wide(dtype: dt.DType) -> Any:
    """Returns float32 numbers at, next to and halfway between all numbers of a dtype, and some beyond its range."""
    with np.errstate(all="ignore"):
        x = every(dtype).astype(np.float32).ravel()
        x = np.unique(x[np.isfinite(x)])
        ends = x[-1] + (x[-1] - x[-2]) * np.array([0.25, 0.5, 0.75, 1, 2, 1e3], np.float32)
        x = np.concatenate([x, (x[1:] + x[:-1]) / 2, ends, -ends, np.float32([3e38, -3e38, 1e-40])])
        x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))])
    x = np.concatenate([x, np.float32([np.inf, -np.inf, np.nan, 0.0, -0.0])])
    return np.resize(x, (-(-len(x) // 16), 16))


def assert_same(found: Any, expected: Any) -> None:
    """Asserts equality bit by bit, except for the kind of NaN."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    same = found.view(f"u{found.itemsize}") == expected.view(f"u{found.itemsize}")
    same |= np.isnan(found.astype(np.float32)) & np.isnan(expected.astype(np.float32))
    assert same.all(), (found[~same][:5], expected[~same][:5])


@pytest.mark.parametrize("dtype", EACH)
def test_what_is_moved_stays_as_it_is(dtype: dt.DType) -> None:
    x = every(dtype)
    found = results_of(
        lambda g, x: [
            g.transpose(x), g.concatenate(x, x, axis=1), g.slice(x, (1, 0), None), g.identity(x),
            g.binary_select(x, x, True), g.max(x, x),
            g.reduction(x[:, None], mode="max", axes=1, keepdims=False), x[::-1],
        ],
        x,
    )  # fmt: skip
    moved = [x.T, np.concatenate([x, x], 1), x[1:], x, x, x, x, x[::-1]]
    for result, expected in zip(found, moved, strict=True):
        assert_same(result, np.ascontiguousarray(expected))


@pytest.mark.parametrize("saturate", quick(False, True))
@pytest.mark.parametrize("dtype", EACH)
def test_casts_of_all_values(dtype: dt.DType, saturate: bool) -> None:
    """Stored at once, after a movement, and taken on by the kernel that made it."""
    given = [*(every(d) for d in (*HALVES, *EIGHT) if d != dtype), wide(dtype)]
    given.append(np.arange(-(2**17), 2**17, 113, np.int32).reshape(-1, 1))

    def body(g: Any, *inputs: Any) -> list[Any]:
        made = []
        for x in inputs:
            y = g.cast(x, dtype, saturate=saturate)
            made += [y, g.transpose(g.cast(x, dtype, saturate=saturate)), g.cast(y, "float32")]
        return made

    found = iter(results_of(body, *given))
    for x in given:
        with np.errstate(all="ignore"):
            exact = x.astype(np.float32)
            if saturate:
                exact = np.clip(exact, dtype.min, dtype.max)
            expected = exact.astype(dtype.numpy)
        assert_same(next(found), expected)
        assert_same(next(found), np.ascontiguousarray(expected.T))
        assert_same(next(found), expected.astype(np.float32))


def test_casts_to_other_types_are_one() -> None:
    g = fg.Graph("casts")
    x = g.tensor("x", (4,))
    modes = {}
    for dtype in (*HALVES, *EIGHT, dt.int8, dt.bool_):
        nodes = [g.producer(g.cast(x, dtype, saturate=saturate)) for saturate in (True, False)]
        modes[dtype] = [n.attributes["saturate"] for n in nodes if n is not None]
    assert modes == {d: [True, d not in EIGHT] for d in modes}
    with pytest.raises(fg.errors.AttributeValueError, match="saturate is True or False, got 1"):
        g.cast(x, "float8_e5m2", saturate=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("strict", [False, True])
def test_check_knows_both_casts(strict: bool) -> None:
    g = fg.Graph("both")
    x = g.tensor("x", (64, 33))
    for dtype in EIGHT:
        for saturate in (True, False):
            y = g.cast(g.exp(x * 6), dtype, saturate=saturate)
            g.output(g.cast(y, "float16") * 0.5)
    assert check(g, "cpu", strict=strict).ok


def test_infinities_of_arithmetic_stay() -> None:
    x = np.array([[np.inf, -np.inf, 1e30, 2.0]], np.float32)
    (found,) = results_of(lambda g, x: [g.add(g.cast(x, "float8_e5m2", saturate=False), 1)], x)
    np.testing.assert_array_equal(found.astype(np.float32), [[np.inf, -np.inf, np.inf, 3.0]])
    g = fg.Graph("constant")
    assert np.isinf(g.constant(-np.inf, dtype="float8_e5m2").value)  # type: ignore[call-overload]


# ---- front doors


@pytest.mark.slow
@pytest.mark.parametrize("dtype", EACH)
def test_casts_are_torchs(dtype: dt.DType) -> None:
    torch = pytest.importorskip("torch")
    import fusegraph.torch

    target = getattr(torch, dtype.numpy.name)
    given = [
        torch.from_numpy(values).view(source)
        for source, values in (
            (torch.float16, every(dt.float16).view(np.int16)),
            (torch.bfloat16, every(dt.bfloat16).view(np.int16)),
            (torch.float32, wide(dtype).view(np.int32)),
        )
    ]

    def cast(*inputs: Any) -> Any:
        return [z for y in (x.to(target) for x in inputs) for z in (y, y.t().contiguous(), y.to(torch.float32))]

    torch._dynamo.reset()
    fusegraph.torch.report(clear=True)
    found, expected = torch.compile(cast, backend="fusegraph")(*given), cast(*given)
    assert "identity" in str(fusegraph.torch.report())
    for result, wanted in zip(found, expected, strict=True):
        assert result.dtype == wanted.dtype
        kind = np.float32 if wanted.dtype == torch.float32 else dtype.numpy
        bits = [t.contiguous().view(torch.uint8).numpy().view(kind) for t in (result, wanted)]
        assert_same(*bits)


@pytest.mark.parametrize("saturate", quick(1, 0))
@pytest.mark.parametrize("dtype", EACH)
def test_casts_are_onnxs(dtype: dt.DType, saturate: int) -> None:
    pytest.importorskip("onnx")
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    from fusegraph.onnx import Backend

    target = helper.np_dtype_to_tensor_dtype(dtype.numpy)
    for x in (every(dt.float16), every(dt.bfloat16), wide(dtype)):
        source = helper.np_dtype_to_tensor_dtype(x.dtype)
        nodes = [
            helper.make_node("Cast", ["x"], ["y"], to=target, saturate=saturate),
            helper.make_node("QuantizeLinear", ["x", "scale"], ["z"], output_dtype=target, saturate=saturate),
            helper.make_node("CastLike", ["x", "y"], ["w"], saturate=saturate),
        ]
        given = [helper.make_tensor_value_info(n, source, s) for n, s in (("x", x.shape), ("scale", ()))]
        results = [helper.make_tensor_value_info(n, target, None) for n in "yzw"]
        graph = helper.make_graph(nodes, "casts", given, results)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])
        scale = np.array(0.5, x.dtype)
        with np.errstate(all="ignore"):
            expected = ReferenceEvaluator(model).run(None, {"x": x, "scale": scale})
        for found, wanted in zip(Backend.run_model(model, [x, scale]), expected, strict=True):
            assert_same(found, wanted)


@pytest.mark.parametrize("dtype", [dt.float8_e4m3, dt.float8_e5m2], ids=str)
def test_casts_are_cudnns(dtype: dt.DType) -> None:
    """Which saturate, as its documentation of fp8 says."""
    cudnn = pytest.importorskip("cudnn")
    kinds = {"float8_e4m3": cudnn.data_type.FP8_E4M3, "float8_e5m2": cudnn.data_type.FP8_E5M2}
    for source, x in ((cudnn.data_type.HALF, every(dt.float16)), (cudnn.data_type.BFLOAT16, every(dt.bfloat16))):
        g = cudnn.pygraph(
            io_data_type=source, intermediate_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT
        )
        a = g.tensor(dim=[1, *x.shape], stride=[x.size, 16, 1], data_type=source)
        y = g.identity(a).set_output(True).set_data_type(kinds[dtype.name])
        graph = fg.from_cudnn(g)
        graph.build(engine="cpu")
        out = np.empty(x.shape, dtype.numpy)
        graph.execute({a: x, y: out})
        with np.errstate(all="ignore"):
            assert_same(out, np.clip(x.astype(np.float32), dtype.min, dtype.max).astype(dtype.numpy))
