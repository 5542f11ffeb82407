"""Graphs on a real GPU: numerics of all families, arrays of every framework, streams, captures, large tensors."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import fusegraph as fg
from codegen import contraction
from codegen.contraction_simt_schedule import TILES, SimtSchedule
from codegen.dtypes import ALL
from codegen.spec import WindowSpec
from fusegraph.engines.cuda import CudaExecutable
from fusegraph.errors import ArgumentError, DeviceError
from fusegraph.lowering.base import Options
from fusegraph.report.check import check, check_executable, random_inputs
from fusegraph.runtime import driver
from fusegraph.runtime.arrays import DeviceArray, to_device, to_numpy, torch_dtype

pytestmark = pytest.mark.gpu

DTYPES = [d.name for d in ALL]
LAYOUTS = ("contiguous", "channels_last")


@pytest.fixture
def torch() -> Any:
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("torch without CUDA")
    return module


def passes(graph: fg.Graph, **how: Any) -> None:
    result = check(graph, engine="cuda", **how)
    assert result.ok, str(result)


# ---- graphs: each also runs on the cpu engine, in the tests of its family


def pointwise(shape: tuple[int, ...] = (33, 1025), dtype: str = "float32") -> fg.Graph:
    graph = fg.Graph("pointwise", io_dtype=dtype)
    a, b, c = graph.tensor("a", shape), graph.tensor("b", shape[-1:]), graph.tensor("c", (*shape[:-1], 1))
    if a.dtype.is_bool:
        graph.output(graph.logical_and(graph.logical_or(a, b), c), name="y")
        return graph
    if a.dtype.is_float:
        graph.output(graph.sigmoid((a + b) * c), name="y")
        graph.output(graph.gelu(a) - c, name="z")
    else:
        graph.output((a + b) * c, name="y")
    graph.output(a > b, name="mask")
    return graph


def activated(graph: fg.Graph, y: fg.Tensor) -> fg.Graph:
    """Bias by the last dimension (matmul) or channel (convolution), a residual; two outputs."""
    bias = graph.tensor("bias", (y.shape[-1],) if y.rank < 3 else (y.shape[1], *(1,) * (y.rank - 2)), y.dtype)
    residual = graph.tensor("residual", y.shape, y.dtype, strides=y.strides)
    inner = y + bias + residual
    graph.output(graph.relu(inner), name="y")
    graph.output(y > residual, name="mask")
    return graph


def product(
    a: tuple[int, ...],
    b: tuple[int, ...],
    dtype: str = "float32",
    *,
    result: str | None = None,
    transposed: bool = False,
) -> fg.Graph:
    graph = fg.Graph("product")
    strides = (1, a[-2]) if transposed else None
    y = graph.matmul(graph.tensor("a", a, dtype, strides=strides), graph.tensor("b", b, dtype), dtype=result)
    return activated(graph, y) if y.rank == 2 else _plain(graph, y)


def _plain(graph: fg.Graph, y: fg.Tensor) -> fg.Graph:
    graph.output(y, name="y")
    return graph


def convolution(
    x: tuple[int, ...], w: tuple[int, ...], dtype: str = "float32", layout: str = "contiguous", **attributes: Any
) -> fg.Graph:
    graph = fg.Graph("convolution")
    image = graph.tensor("x", x, dtype, layout=layout)
    return activated(graph, graph.conv_fprop(image, graph.tensor("w", w, dtype), **attributes))


def network() -> fg.Graph:
    """Three kernels with intermediates in the workspace."""
    graph = fg.Graph("network")
    y = graph.tensor("x", (2, 16, 20, 20))
    for k in range(3):
        y = graph.relu(graph.conv_fprop(y, graph.tensor(f"w{k}", (16, 16, 3, 3)), padding=1))
    graph.output(y, name="y")
    return graph


def of_every_dtype(dtype: str) -> Iterator[fg.Graph]:
    yield pointwise(dtype=dtype)
    yield product((65, 130), (130, 67), dtype)
    yield product((64, 64), (64, 128), dtype, transposed=True)
    yield product((3, 33, 20), (3, 20, 40), dtype)
    for layout in LAYOUTS:
        yield convolution((2, 24, 9, 10), (40, 24, 3, 3), dtype, layout, padding=1)
        yield convolution((2, 16, 14, 15), (16, 1, 3, 3), dtype, layout, padding=1, groups=16)
        yield convolution((2, 3, 33, 40), (8, 3, 3, 3), dtype, layout, padding=1)


# ---- numerics


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_family_of_every_dtype(dtype):
    for graph in of_every_dtype(dtype):
        passes(graph)


@pytest.mark.parametrize("dtype", DTYPES[:6])
def test_special_values(dtype):
    for graph in of_every_dtype(dtype):
        passes(graph, inputs=random_inputs(graph, 1, special=0.02))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3"])
def test_strict(dtype):
    for graph in of_every_dtype(dtype):
        passes(graph, strict=True)


def test_without_fusion():
    passes(network(), fusion=False)
    passes(pointwise(), fusion=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_convolutions_of_every_kind(layout):
    for x, w, attributes in [
        ((2, 5, 19), (7, 5, 3), {"padding": 1}),
        (
            (2, 10, 9, 11),
            (4, 5, 3, 5),
            {"groups": 2, "stride": (2, 1), "dilation": (1, 2), "padding": ((2, 1), (0, 4))},
        ),
        ((2, 5, 4, 5, 6), (9, 5, 3, 2, 3), {"padding": ((1, 1), (0, 1), (2, 0)), "stride": (1, 2, 1)}),
        ((1, 8, 2, 3), (9, 8, 5, 7), {"padding": ((2, 2), (3, 4))}),
        ((2, 64, 56, 56), (64, 64, 1, 1), {}),
        ((1, 32, 7, 7), (37, 32, 3, 3), {"padding": 1, "mode": "convolution"}),
        ((4, 64, 57, 57), (64, 1, 3, 3), {"groups": 64, "padding": 1, "stride": 2}),
        ((4, 33, 40, 41), (33, 1, 7, 7), {"groups": 33, "padding": 3, "mode": "convolution"}),
        ((1, 12, 30, 31), (24, 1, 5, 5), {"groups": 12, "dilation": 2}),
        ((70, 32, 7, 7), (32, 1, 3, 3), {"groups": 32, "padding": 1}),
        ((2, 8, 5, 6, 37), (8, 1, 3, 3, 3), {"groups": 8, "padding": 1}),
        ((2, 16, 500), (16, 1, 31), {"groups": 16, "padding": 15}),
        ((1, 1, 270, 481), (1, 1, 15, 15), {"padding": 7}),
        ((2, 4, 64, 65), (8, 4, 8, 8), {"padding": 3}),
    ]:
        for dtype in ("float32", "bfloat16"):
            passes(convolution(x, w, dtype, layout, **attributes))


@pytest.mark.parametrize("itype", ["int32", "int64"])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile(tile, itype, monkeypatch):
    monkeypatch.setattr(contraction, "schedules", lambda spec, arch: (SimtSchedule(*tile, itype),))
    passes(product((257, 65), (65, 260)))
    passes(product((129, 64), (64, 255), "bfloat16", transposed=True))
    passes(convolution((2, 9, 19, 20), (40, 9, 3, 3), padding=1))


def test_random_matmuls_and_convolutions():
    r = random.Random(0)
    for _ in range(20):
        m, n, k = (r.choice([1, 7, 32, 63, 129, 200]) for _ in range(3))
        passes(product((m, k), (k, n), r.choice(DTYPES), transposed=r.random() < 0.5))
    for _ in range(20):
        groups = r.choice([1, 1, 2, 16])
        channels, filters = r.choice([1, 3, 8, 17]), r.choice([1, 2, 8, 33])
        size, taps, dilation = r.choice([5, 14, 33]), r.choice([1, 2, 3, 5]), r.choice([1, 2])
        padding = (r.randint(0, 4), r.randint(max(0, (taps - 1) * dilation + 1 - size), 6))
        passes(
            convolution(
                (r.choice([1, 3]), groups * channels, size, size + 1),
                (groups * filters, channels, taps, taps),
                r.choice(DTYPES),
                r.choice(LAYOUTS),
                groups=groups,
                stride=r.choice([1, 2, 3]),
                dilation=dilation,
                padding=(padding, padding),
                mode=r.choice(["convolution", "cross_correlation"]),
            )
        )


def test_the_same_inputs_give_the_same_bits():
    for graph in (network(), product((130, 1000), (1000, 70), "bfloat16"), pointwise()):
        executable = graph.compile("cuda")
        inputs = [to_device(a) for a in random_inputs(graph).values()]
        first = _numpy(executable(*inputs))
        for _ in range(5):
            for a, b in zip(first, _numpy(executable(*inputs))):
                assert a.tobytes() == b.tobytes()


def test_cpu_engine_gives_what_the_gpu_gives():
    """The emitted source is the same: sums run in the same order, so float results agree to the last bits."""
    graph = product((65, 130), (130, 67))
    inputs = random_inputs(graph)
    there, here = graph.compile("cuda"), graph.compile("cpu")
    assert there.plan.kernels[0].source == here.plan.kernels[0].source
    for a, b in zip(_numpy(there(*map(to_device, inputs.values()))), _numpy(here(*inputs.values()))):
        np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), rtol=1e-4, atol=1e-4)


def _numpy(results: Any) -> list[np.ndarray[Any, Any]]:
    return [to_numpy(r) for r in (results if isinstance(results, tuple) else (results,))]


# ---- empty and odd tensors


def test_empty_tensors():
    for graph in (
        pointwise((0, 5)),
        product((0, 4), (4, 5)),
        product((4, 0), (0, 5)),
        product((0, 4, 3), (0, 3, 5)),
        convolution((0, 5, 8, 8), (7, 5, 3, 3)),
        convolution((2, 0, 8, 8), (7, 0, 3, 3), groups=1),
        convolution((0, 8, 8, 8), (8, 1, 3, 3), groups=8),
    ):
        passes(graph)


def test_non_contiguous_inputs_and_outputs():
    graph = fg.Graph("strided")
    a = graph.tensor("a", (20, 30), strides=(1, 40))
    b = graph.tensor("b", (30, 24), strides=(100, 3))
    y = a @ b + graph.tensor("c", (20, 24), strides=(0, 1))
    graph.output(graph.tanh(y), name="y", strides=(2, 50))
    graph.output(y, name="packed")
    passes(graph)


# ---- arrays


def test_torch_arrays(torch):
    graph = fg.Graph("dense", io_dtype="bfloat16")
    a, b, bias = graph.tensor("a", (64, 96)), graph.tensor("b", (96, 40)), graph.tensor("bias", (40,))
    graph.output(graph.gelu(a @ b + bias), name="y")
    executable = graph.compile("cuda")
    x, w, v = (torch.randn(*t.shape, device="cuda", dtype=torch.bfloat16) for t in graph.inputs)
    y = executable(x, w, v)
    assert isinstance(y, torch.Tensor)
    assert y.is_cuda
    assert y.dtype == torch.bfloat16
    expected = torch.nn.functional.gelu(x.float() @ w.float() + v.float())
    torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)
    out = torch.empty_like(y)
    assert executable(a=x, b=w, bias=v, out=out) is out
    assert torch.equal(out, y)
    with pytest.raises(DeviceError, match="'b' of graph 'dense'"):
        executable(x, w.cpu(), v)
    big = torch.empty(64 * 96, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match="overlaps input 'a'"):
        executable(big.view(64, 96), w, v, out=big[: 64 * 40].view(64, 40))


def test_torch_convolution_in_channels_last(torch):
    graph = fg.Graph("conv")
    x, w = graph.tensor("x", (2, 16, 13, 13), layout="NHWC"), graph.tensor("w", (24, 16, 3, 3))
    graph.output(graph.relu(graph.conv_fprop(x, w, padding=1)), name="y")
    image = torch.randn(2, 16, 13, 13, device="cuda").to(memory_format=torch.channels_last)
    weights = torch.randn(24, 16, 3, 3, device="cuda")
    y = graph.compile("cuda")(image, weights)
    assert y.stride() == (24 * 169, 1, 24 * 13, 24)
    expected = torch.relu(torch.nn.functional.conv2d(image.double(), weights.double(), padding=1))
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)


def test_misaligned_torch_views(torch):
    """x[1:] starts at no multiple of 16 bytes: a variant with narrow accesses is built and gives the same values."""
    for graph in (pointwise((16, 64), "bfloat16"), product((16, 32), (32, 24), "bfloat16"), network()):
        executable = graph.compile("cuda")
        inputs = {k: np.asarray(v) for k, v in random_inputs(graph).items()}
        expected = _numpy(executable(*map(to_device, inputs.values())))
        shifted = []
        for tensor, array in zip(graph.inputs, inputs.values()):
            wide = torch.from_dlpack(to_device(np.concatenate([array.reshape(-1)[:1], array.reshape(-1)])))
            shifted.append(wide[1:].view(tensor.shape))
            assert shifted[-1].data_ptr() % 16
        for a, b in zip(_numpy(executable(*shifted)), expected):
            assert a.tobytes() == b.tobytes()


def test_cupy_arrays():
    cupy = pytest.importorskip("cupy")
    graph = pointwise((40, 50))
    inputs = random_inputs(graph)
    executable = graph.compile("cuda")
    results = executable(*(cupy.asarray(a) for a in inputs.values()))
    assert all(isinstance(r, cupy.ndarray) for r in results)
    for a, b in zip(results, _numpy(executable(*map(to_device, inputs.values())))):
        np.testing.assert_array_equal(cupy.asnumpy(a), b)


def test_numpy_arrays_are_refused_with_a_hint():
    graph = pointwise((8, 8))
    with pytest.raises(DeviceError, match=r"fusegraph\.to_device"):
        graph.compile("cuda")(*random_inputs(graph).values())


def test_constants_are_copied_once():
    graph = fg.Graph("constants")
    table = np.arange(64, dtype=np.float32)
    graph.output(graph.tensor("x", (8, 64)) * graph.constant(table) + 1.0, name="y")
    passes(graph)


# ---- streams and captures


def test_streams(torch):
    """The call is queued behind what the stream is doing: a long chain of work that makes its input."""
    graph = network()
    executable = graph.compile("cuda")
    inputs = {t.name: torch.randn(*t.shape, device="cuda") * 0.2 for t in graph.inputs}
    expected = executable(**inputs)
    torch.cuda.synchronize()
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(5):
        late = torch.zeros_like(inputs["x"])
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            busy = torch.randn(2000, 2000, device="cuda")
            for _ in range(20):
                busy = busy @ busy * 1e-3
            late.copy_(inputs["x"] + 0 * busy.nan_to_num(0, 0, 0)[0, 0])
            y = executable(**{**inputs, "x": late})
        # Meanwhile on another stream, with a workspace of its own.
        z = executable(**inputs, stream=other)
        torch.cuda.synchronize()
        assert torch.equal(y, expected)
        assert torch.equal(z, expected)


@pytest.mark.parametrize("make", [network, lambda: pointwise((64, 256))], ids=["workspace", "none"])
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "first call"])
def test_capture_into_a_torch_graph(torch, make, warm):
    graph = make()
    executable = graph.compile("cuda")
    assert (executable.workspace_bytes > 0) == (make is network)
    inputs = [torch.randn(*t.shape, device="cuda") * 0.3 for t in graph.inputs]
    outputs = [torch.empty(t.shape, dtype=torch_dtype(torch, t.dtype), device="cuda") for t in graph.outputs]
    if warm:
        executable(*inputs, out=outputs)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        executable(*inputs, out=outputs)
    for seed in range(3):
        torch.manual_seed(seed)
        for x in inputs:
            x.copy_(torch.randn_like(x) * 0.3)
        for y in outputs:
            y.zero_()
        captured.replay()
        # A call beside the replay does not disturb it, nor it the call.
        direct = executable(*inputs)
        torch.cuda.synchronize()
        for a, b in zip(outputs, direct if isinstance(direct, tuple) else (direct,)):
            assert torch.equal(a, b)


def test_recorded_calls():
    graph = network()
    executable = graph.compile("cuda")
    arrays = [to_device(a) for a in random_inputs(graph).values()]
    result, replay = executable.record(*arrays)
    changed = random_inputs(graph, 7)
    for array, new in zip(arrays, changed.values()):
        driver.copy_to_device(array.pointer, new.ctypes.data, new.nbytes)
    replay(0)
    driver.synchronize(0)
    (seen,) = _numpy(result)
    (expected,) = _numpy(graph.compile("cuda")(*map(to_device, changed.values())))
    assert seen.tobytes() == expected.tobytes()


def test_several_devices():
    if driver.device_count() < 2:
        pytest.skip("one GPU")
    graph = network()
    inputs = random_inputs(graph)
    results = []
    for device in (1, 0):
        executable = graph.compile("cuda", device=device)
        assert executable.device.index == device
        results += _numpy(executable(*(to_device(a, device) for a in inputs.values())))
    np.testing.assert_array_equal(*results)
    with pytest.raises(DeviceError, match="is on cuda:1"):
        graph.compile("cuda", device=0)(*(to_device(a, 1) for a in inputs.values()))


# ---- tensors of more than 4 GiB


def _needs(gib: float) -> None:
    have = driver.properties(0).total_memory / 2**30
    if have < gib * 1.25:
        pytest.skip(f"needs {gib:.0f} GiB of device memory, the GPU has {have:.0f}")


def _filled(shape: tuple[int, ...], dtype: str, byte: int) -> DeviceArray:
    """An array whose bytes are all ``byte``."""
    array = DeviceArray.empty(shape, dtype)
    driver.memset(array.pointer, byte, array.nbytes)
    return array


def _put(array: DeviceArray, start: int, values: np.ndarray[Any, Any]) -> None:
    values = np.ascontiguousarray(values)
    driver.copy_to_device(array.pointer + start * values.itemsize, values.ctypes.data, values.nbytes)


def _get(array: DeviceArray, start: int, count: int) -> np.ndarray[Any, Any]:
    values = np.empty(count, array.dtype.numpy)
    driver.copy_to_host(values.ctypes.data, array.pointer + start * values.itemsize, values.nbytes)
    return values


@pytest.mark.parametrize(("dtype", "width"), [("int8", 1), ("bfloat16", 2)])
def test_pointwise_of_more_than_4_gib_elements(dtype, width):
    count = 2**32 + 12345
    _needs(2 * count * width / 2**30)
    graph = fg.Graph("huge", io_dtype=dtype)
    graph.output(graph.neg(graph.tensor("x", (count,))), name="y")
    executable = graph.compile("cuda")
    x, y = _filled((count,), dtype, 0), _filled((count,), dtype, 0x55)
    places = [0, 2**31 - 50, 2**32 - 50, count - 100]
    values = np.arange(1, 101).astype(x.dtype.numpy)
    for place in places:
        _put(x, place, values)
    executable(x, out=y)
    for place in places:
        np.testing.assert_array_equal(_get(y, place, 100).astype(np.float32), -values.astype(np.float32))
    for place in (1000, 2**31 + 1000, 2**32 + 1000):
        assert not _get(y, place, 100).astype(np.float32).any()


def test_matmul_of_more_than_4_gib_elements():
    m, k = 2**16 + 3, 2**16
    _needs(m * k * 2 / 2**30)
    graph = fg.Graph("huge", io_dtype="bfloat16")
    graph.output(graph.matmul(graph.tensor("a", (m, k)), graph.tensor("b", (k, 8)), dtype="float32"), name="y")
    executable = graph.compile("cuda")
    rng = np.random.default_rng(0)
    a, b = _filled((m, k), "bfloat16", 0), rng.integers(-3, 4, (k, 8)).astype(fg.bfloat16.numpy)
    rows = {r: rng.integers(-3, 4, k).astype(fg.bfloat16.numpy) for r in (0, 2**15 - 1, 2**15, 2**16 - 1, 2**16, m - 1)}
    for row, values in rows.items():
        _put(a, row * k, values)
    y = to_numpy(executable(a, to_device(b)))
    for row, values in rows.items():
        np.testing.assert_array_equal(y[row], values.astype(np.float32) @ b.astype(np.float32))
    assert np.count_nonzero(y.any(axis=1)) == len(rows)


@pytest.mark.parametrize("channels", [4, 8])
def test_convolution_of_more_than_4_gib_elements(channels):
    """A window kernel (4 channels) and a contraction (8): ones everywhere, so that results count taps inside."""
    height, width = 2**16 // channels * 2 + 1, 2**15
    _needs(channels * height * width / 2**30)
    graph = fg.Graph("huge", io_dtype="int8")
    x, w = graph.tensor("x", (1, channels, height, width)), graph.tensor("w", (8, channels, 3, 3))
    y = graph.conv_fprop(x, w, padding=1, stride=16)
    graph.output(y, name="y")
    executable = graph.compile("cuda")
    spec = executable.plan.kernels[0].group.lowered.spec
    assert isinstance(spec, WindowSpec) == (channels == 4)
    assert "int64" in executable.plan.kernels[0].source.code
    image = _filled((1, channels, height, width), "int8", 1)
    seen = width // 16 * 16 - 16  # the last column that a window has its centre on, in the very last row and channel
    _put(image, channels * height * width - width + seen, np.array([5], np.int8))
    weights = np.random.default_rng(1).integers(-5, 6, (8, channels, 3, 3)).astype(np.int8)
    result = to_numpy(executable(image, to_device(weights)))[0]
    np.testing.assert_array_equal(result, _over_ones(weights, height, width, 5))


def _over_ones(weights: np.ndarray[Any, Any], height: int, width: int, last: int) -> np.ndarray[Any, Any]:
    """What stride 16 and padding 1 give on ones, with ``last`` under the last window's centre in the last channel."""
    assert height % 16 == 1  # so that the last windows reach below the image
    assert width % 16 == 0
    wide = weights.astype(np.int32)
    result = np.empty((weights.shape[0], height // 16 + 1, width // 16), np.int32)
    result[:] = wide.sum((1, 2, 3))[:, None, None]
    result[:, 0] = wide[:, :, 1:].sum((1, 2, 3))[:, None]
    result[:, -1] = wide[:, :, :2].sum((1, 2, 3))[:, None]
    result[:, :, 0] = wide[:, :, :, 1:].sum((1, 2, 3))[:, None]
    result[:, 0, 0] = wide[:, :, 1:, 1:].sum((1, 2, 3))
    result[:, -1, 0] = wide[:, :, :2, 1:].sum((1, 2, 3))
    result[:, -1, -1] += (last - 1) * wide[:, -1, 1, 1]
    return result


# ---- what a call costs on the host


def test_host_time_of_a_call(record_property, capsys):
    """Measured, not judged."""
    graph = pointwise((64, 64))
    executable = graph.compile("cuda")
    inputs = [to_device(a) for a in random_inputs(graph).values()]
    outputs = list(executable(*inputs))

    def microseconds(call: Callable[[], Any]) -> float:
        for _ in range(20):
            call()
        driver.synchronize(0)
        start = time.perf_counter()
        for _ in range(500):
            call()
        taken = time.perf_counter() - start
        driver.synchronize(0)
        return taken / 500 * 1e6

    allocating, given = (
        microseconds(lambda: executable(*inputs)),
        microseconds(lambda: executable(*inputs, out=outputs)),
    )
    record_property("host_us_allocating", round(allocating, 1))
    record_property("host_us_out", round(given, 1))
    with capsys.disabled():
        print(f"\nhost time of a call: {allocating:.1f} us, with out= {given:.1f} us")


def test_every_kernel_compiles_for_the_device_it_runs_on():
    executable = network().compile("cuda")
    assert isinstance(executable, CudaExecutable)
    assert {k.arch for k in executable.kernels} == {driver.properties(0).arch}
    assert all(k.spill_bytes == 0 for k in executable.kernels)
    assert check_executable(executable).ok
    assert Options() == executable._options
