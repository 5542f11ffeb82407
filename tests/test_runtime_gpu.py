"""Arrays, launches, streams and captures on a real GPU, with torch, CuPy and JAX where they are installed."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest

import fusegraph as fg
from codegen.dtypes import ALL, bfloat16, bool_, float8_e4m3, float32, int32
from codegen.spec import TensorMap
from fusegraph.errors import ArgumentError, DeviceError
from fusegraph.runtime import arrays, driver, launch, views
from fusegraph.runtime.arrays import DeviceArray, cuda_device, view
from fusegraph.runtime.entry_points import pointer_device

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
            assert pointer_device(there.pointer) == 0


def test_device_array_interface_and_protocols():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    there = arrays.to_device(x)
    only = type("Only", (), {"__cuda_array_interface__": there.__cuda_array_interface__})()
    seen = view(only, name="x")
    assert seen[:5] == (there.pointer, (3, 4), (4, 1), float32, cuda_device(0))
    seen = views.from_dlpack_viewer("dlpack")(there, "x", 0)
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
        new = arrays.allocator(seen.framework, (4, 3), (1, 4), dtype, cuda_device(0))()
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
    new = arrays.allocator("cupy", (3, 4), (1, 3), float32, cuda_device(0))()
    assert isinstance(new, cupy.ndarray)
    assert new.strides == (4, 12)
    fallback = arrays.allocator("cupy", (3, 4), (4, 1), float8_e4m3, cuda_device(0))()
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
        new = arrays.allocator("jax", (3, 4), (4, 1), dtype, cuda_device(0))()
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
extern "C" __global__ void copy_map(const __grid_constant__ Map map, unsigned char* y, const float* x) {
  y[threadIdx.x] = map.bytes[threadIdx.x];
}
#if __CUDA_ARCH__ >= 900
extern "C" __global__ void cluster_sizes(int* y) {
  int rank, size;
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  y[blockIdx.x] = y[blockIdx.x] * 1000 + size * 10 + rank;
}
#endif
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
    return launch.Module(bytes(cubin))


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

    z = DeviceArray.empty((64,), "float32")
    launch.Launch(gpu_module.function("big_shared"), (1, 1, 1), (64, 1, 1), 81920, 1)((z.pointer,), 0)
    np.testing.assert_array_equal(z.to_numpy(), np.arange(64)[::-1])


needs_hopper = pytest.mark.skipif(
    not driver.available() or driver.properties(0).compute_capability < (9, 0), reason="needs compute capability 9.0"
)


@needs_hopper
def test_gpu_tensor_maps(gpu_module):
    """A map pointed to another address is the map that would be made for that address."""
    tiled = TensorMap(1, "bfloat16", (128, 64), (256,), (64, 32), (1, 1), 128, offset=32)
    im2col = TensorMap(
        1, "float16", (64, 20, 10, 3), (128, 2560, 25600), (64, 16), (1, 2, 2, 1), 128, lower=(-1, -1), upper=(-1, -1)
    )
    for described in (tiled, im2col):
        maps = {}

        def mapped(launch_, x, maps=maps):
            y = arrays.to_device(np.zeros(128, np.uint8))
            launch_((y.pointer, x.pointer), 0)
            return y.to_numpy().tobytes()

        def new(described=described):
            function = gpu_module.function("copy_map")
            return launch.Launch(function, (1, 1, 1), (128, 1, 1), 0, 2, [described, 0, 1])

        first, second = (DeviceArray.empty((1 << 20,), "int8") for _ in range(2))
        moved = new()
        for x in (first, second, first):
            maps.setdefault(x.pointer, mapped(new(), x))
            assert mapped(moved, x) == maps[x.pointer]
        assert len(set(maps.values())) == 2
    with pytest.raises(DeviceError, match="kernel copy_map"):
        new()((first.pointer, first.pointer + 8), 0)


@needs_hopper
@pytest.mark.parametrize("dependent", [False, True])
def test_gpu_clusters_and_dependent_launches(gpu_module, dependent):
    function = gpu_module.function("cluster_sizes")
    y = arrays.to_device(np.zeros(16, np.int32))
    for size in (1, 2, 8, 16):
        run = launch.Launch(function, (16, 1, 1), (32, 1, 1), 0, 1, cluster=(size, 1, 1), dependent=dependent)
        driver.memset(y.pointer, 0, y.nbytes)
        for _ in range(2):
            run((y.pointer,), 0)
        expected = size * 10 + np.arange(16) % size
        np.testing.assert_array_equal(y.to_numpy(), expected * 1001)


def test_gpu_calls_where_another_context_is_current_or_none():
    graph = fg.Graph("contexts")
    graph.output(-graph.tensor("x", (1000,)), name="y")
    executable = graph.compile("cuda")
    x = arrays.to_device(np.arange(1000, dtype=np.float32))
    seen = []

    def call():
        for _ in range(3):
            y = DeviceArray.empty((1000,), "float32")
            executable(x, out=y)
            seen.append(y.to_numpy())

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if driver.device_count() > 1:
        with driver.using(1):
            call()
    assert len(seen) >= 3
    for y in seen:
        np.testing.assert_array_equal(y, -np.arange(1000))


def test_gpu_torch_tensors_that_change_in_place():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch without CUDA")
    graph = fg.Graph("mutable")
    graph.output(graph.tensor("x", (64, 32)) * 2, name="y")
    executable = graph.compile("cuda")
    x, y = torch.ones(64, 32, device="cuda"), torch.empty(64, 32, device="cuda")
    for _ in range(3):
        executable(x, out=y)
    x.set_(torch.full((64, 32), 3.0, device="cuda"))
    assert (executable(x, out=y) == 6).all()
    for change in (lambda: x.t_(), lambda: setattr(x, "data", x.double()), lambda: setattr(x, "data", x.float().cpu())):
        change()
        with pytest.raises((ArgumentError, DeviceError), match="input 'x' of graph 'mutable'"):
            executable(x, out=y)
        x.data = torch.ones(64, 32, device="cuda")
        assert (executable(x, out=y) == 2).all()
    x.requires_grad_()
    for _ in range(2):
        with torch.no_grad():
            assert (executable(x, out=y) == 2).all()
            assert (executable(x) == 2).all()
        with pytest.raises(ArgumentError, match=r"x\.detach\(\)"):
            executable(x, out=y)


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
    assert pointer_device(buffer.pointer) == 0
    assert pointer_device(host.ctypes.data) is None
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
        launch.Module(b"not a cubin at all" * 10)
