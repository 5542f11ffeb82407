"""Arrays, launches, streams and captures on a real GPU, with torch, CuPy and JAX where they are installed."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest

from codegen.dtypes import ALL, bfloat16, bool_, float8_e4m3, float32, int32
from fusegraph.errors import ArgumentError, DeviceError
from fusegraph.runtime import arrays, driver, launch, views
from fusegraph.runtime.arrays import DeviceArray, cuda_device, view

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not driver.available(), reason="no CUDA driver or no GPU"),
]

BASE = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_device_array_round_trip(dtype):
    x = np.arange(24).reshape(2, 3, 4).astype(dtype.numpy)
    for source in (x, x.transpose(2, 0, 1), x[:, ::2], x[:, :0], x[1, 2, 3]):
        there = arrays.to_device(np.asarray(source))
        assert (there.dtype, there.shape, there.device) == (dtype, source.shape, cuda_device(0))
        np.testing.assert_array_equal(there.to_numpy(), source)
        np.testing.assert_array_equal(there.copy().to_numpy(), source)
        assert arrays.to_device(there) is there
        seen = view(there, name="x")
        assert (seen.framework, seen.pointer, seen.strides) == ("fusegraph", there.pointer, there.strides)
        if there.size:
            assert driver.pointer_device(there.pointer) == 0


def test_device_array_interface_and_protocols():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    there = arrays.to_device(x)
    only = type("Only", (), {"__cuda_array_interface__": there.__cuda_array_interface__})()
    seen = view(only, name="x")
    assert seen[:5] == (there.pointer, (3, 4), (4, 1), float32, cuda_device(0))
    seen = arrays.from_dlpack(there)
    assert seen[:6] == (there.pointer, (3, 4), (4, 1), float32, cuda_device(0), "dlpack")
    np.testing.assert_array_equal(arrays.to_numpy(seen), x)


def test_torch_on_cuda():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch without CUDA")
    for dtype in ALL:
        x = torch.arange(24, device="cuda").reshape(2, 3, 4).to(views.torch_dtype(torch, dtype)).transpose(0, 2)
        seen = view(x, name="x")
        assert seen[:6] == (x.data_ptr(), (4, 3, 2), (1, 4, 12), dtype, cuda_device(0), "torch")
        there = arrays.to_device(x)
        torch.cuda.synchronize()
        host = x.to(torch.float64).cpu().numpy()
        np.testing.assert_array_equal(there.to_numpy().astype(np.float64), host)
        back = torch.from_dlpack(there)
        assert (back.data_ptr(), back.dtype, back.stride()) == (x.data_ptr(), x.dtype, x.stride())
        new = arrays.empty_like_framework(seen, (4, 3), (1, 4), dtype, cuda_device(0))
        assert (new.dtype, new.stride(), new.device.type) == (x.dtype, (1, 4), "cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert arrays.current_stream("torch", cuda_device(0)) == stream.cuda_stream == arrays.as_stream(stream)
    assert arrays.current_stream("torch", cuda_device(0)) == torch.cuda.default_stream().cuda_stream == 0


def test_device_arrays_outlive_their_maker_in_torch():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch without CUDA")
    there = arrays.to_device(np.full((64, 64), 7, np.float32))
    buffer = weakref.ref(there.owner)
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor = torch.from_dlpack(there)
        del there
        gc.collect()
        assert buffer() is not None
        assert float(tensor.sum()) == 7 * 64 * 64
    del tensor
    gc.collect()
    assert buffer() is None


def test_cupy_on_cuda():
    cupy = pytest.importorskip("cupy")
    x = cupy.arange(24, dtype=cupy.float32).reshape(2, 3, 4)
    for array_ in (x, x.transpose(2, 0, 1), x[:, 1:, ::2]):
        seen = view(array_, name="x")
        assert (seen.pointer, seen.framework, seen.device) == (array_.data.ptr, "cupy", cuda_device(0))
        np.testing.assert_array_equal(arrays.to_numpy(seen), cupy.asnumpy(array_))
    with pytest.raises(ArgumentError, match="negative stride"):
        view(x[::-1], name="x")
    new = arrays.empty_like_framework("cupy", (3, 4), (1, 3), float32, cuda_device(0))
    assert isinstance(new, cupy.ndarray)
    assert new.strides == (4, 12)
    fallback = arrays.empty_like_framework("cupy", (3, 4), (4, 1), float8_e4m3, cuda_device(0))
    assert view(fallback, name="y").dtype == float8_e4m3
    with cupy.cuda.Stream(non_blocking=True) as stream:
        assert arrays.current_stream("cupy", cuda_device(0)) == stream.ptr == arrays.as_stream(stream)
    np.testing.assert_array_equal(cupy.asnumpy(cupy.from_dlpack(arrays.to_device(BASE))), BASE)
    np.testing.assert_array_equal(cupy.asnumpy(cupy.asarray(arrays.to_device(BASE))), BASE)


def test_jax_on_cuda():
    jax = pytest.importorskip("jax")
    try:
        gpu = jax.devices("cuda")[0]
    except RuntimeError:
        pytest.skip("JAX without CUDA")
    for dtype in (float32, bfloat16, float8_e4m3, bool_, int32):
        x = jax.device_put(np.arange(12).reshape(3, 4).astype(dtype.numpy), gpu)
        seen = view(x, name="x")
        assert seen[1:6] == ((3, 4), (4, 1), dtype, cuda_device(0), "jax")
        np.testing.assert_array_equal(arrays.to_numpy(seen), np.asarray(x))
        new = arrays.empty_like_framework("jax", (3, 4), (4, 1), dtype, cuda_device(0))
        assert isinstance(new, DeviceArray)
        driver.memset(new.pointer, 0, new.nbytes)
        done = arrays.hand_over(new, "jax")
        np.testing.assert_array_equal(np.asarray(done), np.zeros((3, 4), dtype.numpy))


SOURCE = r"""
extern "C" __global__ void add_one(const float* x, float* y) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = x[i] + 1.0f;
}
struct alignas(64) Map { unsigned char bytes[128]; };
extern "C" __global__ void mixed(long long* y, int a, float b, const __grid_constant__ Map map, long long c) {
  y[0] = a; y[1] = (long long)(b * 2); y[2] = map.bytes[0]; y[3] = map.bytes[127]; y[4] = c;
}
extern "C" __global__ void big_shared(float* y) {
  extern __shared__ float tile[];
  tile[threadIdx.x + 20000] = threadIdx.x;
  __syncthreads();
  y[threadIdx.x] = tile[20000 + blockDim.x - 1 - threadIdx.x];
}
"""


@pytest.fixture(scope="module")
def gpu_module() -> launch.Module:
    from cuda.bindings import nvrtc

    arch = driver.properties(0).arch
    program = nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"test.cu", 0, [], [])[1]
    options = [f"--gpu-architecture={arch}".encode(), b"--std=c++17"]
    code = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    assert int(code) == 0
    cubin = bytearray(nvrtc.nvrtcGetCUBINSize(program)[1])
    assert int(nvrtc.nvrtcGetCUBIN(program, cubin)[0]) == 0
    return launch.load_module(bytes(cubin))


def test_gpu_properties():
    seen = driver.properties(0)
    assert seen.compute_capability >= (7, 0)
    assert seen.sm_count > 0
    assert seen.shared_optin_bytes >= 48 * 1024
    assert seen.total_memory > seen.l2_bytes > 0
    assert seen.name
    assert driver.driver_version() >= (12, 0)


def test_gpu_launch(gpu_module):
    driver.enter(0)
    function = gpu_module.function("add_one")
    assert function.registers > 0
    run = launch.Launch(function, (4, 1, 1), (64, 1, 1), 0, 2)
    x = np.arange(256, dtype=np.float32)
    there, result = arrays.to_device(x), DeviceArray.empty((256,), "float32")
    run((there.pointer, result.pointer), 0)
    np.testing.assert_array_equal(result.to_numpy(), x + 1)

    y = arrays.to_device(np.zeros(5, np.int64))
    mixed = gpu_module.function("mixed")
    layout = ["pointer", "int32", "float32", "tensor_map", "int64"]
    launch.Launch(mixed, (1, 1, 1), (1, 1, 1), 0, 0, layout)((y.pointer, -7, 1.5, bytes(range(128)), -(2**40)), 0)
    assert y.to_numpy().tolist() == [-7, 3, 0, 127, -(2**40)]

    z = DeviceArray.empty((64,), "float32")
    launch.Launch(gpu_module.function("big_shared"), (1, 1, 1), (64, 1, 1), 81920, 1)((z.pointer,), 0)
    np.testing.assert_array_equal(z.to_numpy(), np.arange(64)[::-1])


def test_gpu_events_and_memory():
    buffer = driver.allocate(1 << 24)
    start, stop = driver.Event(), driver.Event()
    start.record()
    driver.memset(buffer.pointer, 3, buffer.nbytes)
    stop.record()
    stop.synchronize()
    assert 0 < stop.elapsed_ms(start) < 1000
    host = np.zeros(16, np.uint8)
    driver.copy_to_host(host.ctypes.data, buffer.pointer + buffer.nbytes - 16, 16)
    assert (host == 3).all()
    assert driver.pointer_device(buffer.pointer) == 0
    assert driver.pointer_context(buffer.pointer) == driver.primary_context(0).address
    assert driver.pointer_device(host.ctypes.data) is None
    with pytest.raises(DeviceError, match=r"cannot allocate .* CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        driver.allocate(driver.properties(0).total_memory * 2)


def test_gpu_capture_into_a_torch_graph(gpu_module):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch without CUDA")
    x = torch.arange(256, dtype=torch.float32, device="cuda")
    y = torch.zeros_like(x)
    run = launch.Launch(gpu_module.function("add_one"), (4, 1, 1), (64, 1, 1), 0, 2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = arrays.current_stream("torch", cuda_device(0))
        assert driver.is_capturing(stream)
        during = driver.allocate(64)  # would end the capture were the thread's capture mode not relaxed
        run((x.data_ptr(), y.data_ptr()), stream)
        run((y.data_ptr(), y.data_ptr()), stream)
        del during
    assert not driver.is_capturing(stream)
    x.fill_(5)
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 7).all()


def test_gpu_launch_from_threads(gpu_module):
    run = launch.Launch(gpu_module.function("add_one"), (4, 1, 1), (64, 1, 1), 0, 2)
    results: dict[int, bool] = {}

    def work(seed: int) -> None:
        driver.enter(0)
        x = np.full(256, seed, np.float32)
        there, result = arrays.to_device(x), DeviceArray.empty((256,), "float32")
        for _ in range(200):
            run((there.pointer, result.pointer), 0)
            run((result.pointer, result.pointer), 0)
        results[seed] = bool((result.to_numpy() == x + 2).all())

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), True)


def test_gpu_bad_image():
    with pytest.raises(DeviceError, match="cannot load a kernel image"):
        launch.load_module(b"not a cubin at all" * 10)
