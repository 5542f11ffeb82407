"""Calls on a real GPU: arrays of every framework, streams, captures, devices, and what a call costs on the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu_graphs import (
    as_numpy,
    network,
    passes,
    pointwise,
    product,
)

import fusegraph as fg
from fusegraph.engines.cuda import CudaExecutable
from fusegraph.errors import ArgumentError, DeviceError
from fusegraph.lowering.base import Options
from fusegraph.report.check import check_executable, random_inputs
from fusegraph.runtime import driver
from fusegraph.runtime.arrays import to_device, torch_dtype

pytestmark = pytest.mark.gpu


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
        expected = as_numpy(executable(*map(to_device, inputs.values())))
        shifted = []
        for tensor, array in zip(graph.inputs, inputs.values()):
            wide = torch.from_dlpack(to_device(np.concatenate([array.reshape(-1)[:1], array.reshape(-1)])))
            shifted.append(wide[1:].view(tensor.shape))
            assert shifted[-1].data_ptr() % 16
        for a, b in zip(as_numpy(executable(*shifted)), expected):
            assert a.tobytes() == b.tobytes()


def test_cupy_arrays():
    cupy = pytest.importorskip("cupy")
    graph = pointwise((40, 50))
    inputs = random_inputs(graph)
    executable = graph.compile("cuda")
    results = executable(*(cupy.asarray(a) for a in inputs.values()))
    assert all(isinstance(r, cupy.ndarray) for r in results)
    for a, b in zip(results, as_numpy(executable(*map(to_device, inputs.values())))):
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
    (seen,) = as_numpy(result)
    (expected,) = as_numpy(graph.compile("cuda")(*map(to_device, changed.values())))
    assert seen.tobytes() == expected.tobytes()


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
    assert replace(executable._options, target=Options().target) == Options()
