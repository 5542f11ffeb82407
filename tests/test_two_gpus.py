"""Two GPUs in one process: executables of the second one are built, called, captured and timed while the first one is
current, which it stays."""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_graphs import as_numpy, network, pointwise, product

import fusegraph as fg
from fusegraph import functional
from fusegraph.errors import DeviceError
from fusegraph.report.check import check_executable, random_inputs
from fusegraph.runtime import driver
from fusegraph.runtime.arrays import DeviceArray, cuda_device, to_device, view
from fusegraph.runtime.cache import DiskCache
from fusegraph.runtime.entry_points import pointer_device

pytestmark = pytest.mark.gpu


def current() -> int:
    """Returns the current context of this thread."""
    return int(driver.call("cuCtxGetCurrent", doing="read the current context"))


@pytest.fixture(autouse=True)
def the_first_stays_current() -> Iterator[None]:
    if driver.device_count() < 2:
        pytest.skip("one GPU")
    with driver.using(0):
        first = current()
        yield
        assert current() == first == driver.primary_context(0).address


def softmax() -> fg.Graph:
    """Builds a softmax whose rows are reduced by clusters of blocks."""
    graph = fg.Graph("softmax", io_dtype="float16")
    graph.output(graph.softmax(graph.tensor("x", (4, 65536))), name="y")
    return graph


def constants() -> fg.Graph:
    graph = fg.Graph("constants")
    graph.output(graph.tensor("x", (8, 64)) * graph.constant(np.arange(64, dtype=np.float32)) + 1.0, name="y")
    return graph


def gradients() -> fg.Graph:
    """Builds attention gradients, whose sums accumulate in memory that is zeroed before their kernel."""
    graph = fg.Graph("gradients", io_dtype="bfloat16")
    q, k, v, o, loss = (graph.tensor(name, (1, 2, 512, 64)) for name in ("q", "k", "v", "o", "dO"))
    stats = graph.tensor("stats", (1, 2, 512, 1), "float32")
    for name, result in zip(("dQ", "dK", "dV"), graph.sdpa_backward(q, k, v, o, loss, stats, use_causal_mask=True)):
        graph.output(result, name=name)
    return graph


GRAPHS: dict[str, Callable[[], fg.Graph]] = {
    "workspace": network,
    "several outputs": pointwise,
    "TMA": lambda: product((256, 512), (512, 256), "bfloat16"),
    "clusters": softmax,
    "constants": constants,
    "zeroed": gradients,
}


def inputs_on(graph: fg.Graph, device: int, seed: int = 0) -> list[DeviceArray]:
    return [to_device(a, device) for a in random_inputs(graph, seed).values()]


def same(results: Any, others: Any) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(as_numpy(results), as_numpy(others), strict=True))


# ---- calls


@pytest.mark.parametrize("make", GRAPHS.values(), ids=GRAPHS)
def test_both_compute_the_same(make):
    graph = make()
    results = []
    for device in (1, 0):
        executable = graph.compile("cuda", device=device)
        assert executable.device == cuda_device(device)
        results.append(executable(*inputs_on(graph, device)))
        first = results[-1][0] if isinstance(results[-1], tuple) else results[-1]
        assert first.device == cuda_device(device)
        assert pointer_device(first.pointer) == device
        if make is not gradients:  # its inputs are random: no forward pass made them
            assert check_executable(executable).ok
    assert same(*results)


def test_calls_from_threads_at_once():
    """One thread a GPU, and one without a context of its own that calls both."""
    graph = network()
    executables = [graph.compile("cuda", device=device) for device in (0, 1)]
    arrays = [inputs_on(graph, device) for device in (0, 1)]
    expected = executables[0](*arrays[0])
    wrong: list[str] = []

    def call(devices: tuple[int, ...]) -> None:
        try:
            for _ in range(10):
                for device in devices:
                    if not same(executables[device](*arrays[device]), expected):
                        wrong.append(f"other results on cuda:{device}")
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=call, args=(devices,)) for devices in ((0,), (1,), (0, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("device", [0, 1])
def test_arrays_of_the_other_are_refused(device):
    graph = pointwise((8, 32))
    executable = graph.compile("cuda", device=device)
    here, there = inputs_on(graph, device), inputs_on(graph, 1 - device)
    hint = r"fusegraph\.to_device\(array, 1\)" if device else r"fusegraph\.to_device\(array\)"
    for position in range(len(here)):
        mixed = [*here[:position], there[position], *here[position + 1 :]]
        with pytest.raises(DeviceError, match=rf"is on cuda:{1 - device}, .* runs on cuda:{device}; .*{hint}"):
            executable(*mixed)
    elsewhere = [DeviceArray.empty(t.shape, t.dtype, device=1 - device) for t in graph.outputs]
    with pytest.raises(DeviceError, match=rf"output .* is on cuda:{1 - device}"):
        executable(*here, out=elsewhere)
    assert same(executable(*here), executable(*here))


def test_arrays_go_from_one_to_the_other():
    values = np.random.default_rng(0).standard_normal((300, 1000)).astype(np.float32)
    first = to_device(values, 0)
    second = to_device(first, 1)
    assert (second.device, pointer_device(second.pointer)) == (cuda_device(1), 1)
    back = to_device(second.copy(), 0)
    for array in (first, second, back):
        np.testing.assert_array_equal(array.to_numpy(), values)
    seen = view(type("Wrapper", (), {"__cuda_array_interface__": second.__cuda_array_interface__})(), name="x")
    assert seen.device == cuda_device(1)


def test_memory_goes_back_to_the_device_it_is_of():
    def free(device: int) -> int:
        with driver.using(device):
            return int(driver.call("cuMemGetInfo", doing="read the free memory")[0])

    size = 1 << 30
    driver.allocate(1, 1)
    before = [free(0), free(1)]
    array = DeviceArray.empty((size,), "uint8", device=1)
    assert before[1] - free(1) >= size // 2
    assert abs(before[0] - free(0)) < size // 2
    del array
    gc.collect()
    assert abs(before[1] - free(1)) < size // 2


# ---- streams


def test_torch_streams(torch):
    """A call is queued behind what the second GPU's stream is doing, be it torch's current one or one that is given."""
    graph = network()
    executable = graph.compile("cuda", device=1)
    arrays = [torch.randn(*t.shape, device="cuda:1") * 0.2 for t in graph.inputs]
    expected = executable(*arrays)
    torch.cuda.synchronize(1)
    side = torch.cuda.Stream(device=1)
    for given in (None, side):
        late = torch.zeros_like(arrays[0])
        torch.cuda.synchronize(1)
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
            late.copy_(arrays[0])
            with torch.cuda.device(0):
                y = executable(late, *arrays[1:], stream=given)
                assert torch.cuda.current_device() == 0
        # Read behind the call: nothing has waited for it.
        side.synchronize()
        assert torch.equal(y, expected)
    assert (y.device.index, torch.cuda.current_device()) == (1, 0)


def test_streams_of_the_other_are_refused(torch):
    for make in (network, pointwise):
        graph = make()
        executable = graph.compile("cuda", device=1)
        arrays = inputs_on(graph, 1)
        expected = executable(*arrays)
        with pytest.raises(DeviceError, match=r"cannot (launch|ask)"):
            executable(*arrays, stream=torch.cuda.Stream(device=0))
        assert same(executable(*arrays), expected)


def test_cupy_arrays():
    cupy = pytest.importorskip("cupy")
    graph = pointwise((40, 50))
    executable = graph.compile("cuda", device=1)
    inputs = random_inputs(graph)
    with cupy.cuda.Device(1):
        arrays = [cupy.asarray(a) for a in inputs.values()]
    with cupy.cuda.Device(0):
        results = executable(*arrays)
        assert all(r.device.id == 1 for r in results)
    with cupy.cuda.Device(1):
        assert same(tuple(cupy.asnumpy(r) for r in results), executable(*inputs_on(graph, 1)))


# ---- captures and timings


def test_recorded_calls(torch):
    graph = network()
    executable = graph.compile("cuda", device=1)
    arrays = inputs_on(graph, 1)
    result, replay = executable.record(*arrays)
    side = torch.cuda.Stream(device=1)
    for seed, stream in ((1, 0), (2, side.cuda_stream)):
        changed = random_inputs(graph, seed)
        for array, new in zip(arrays, changed.values()):
            driver.copy_to_device(array.pointer, new.ctypes.data, new.nbytes, 1)
        replay(stream)
        driver.synchronize(stream, 1)
        assert same(result, executable(*(to_device(a, 1) for a in changed.values())))


def test_capture_into_a_torch_graph(torch):
    graph = network()
    executable = graph.compile("cuda", device=1)
    arrays = [torch.randn(*t.shape, device="cuda:1") * 0.2 for t in graph.inputs]
    with torch.cuda.device(1):
        y = executable(*arrays)
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            executable(*arrays, out=y)
        for x in arrays:
            x.copy_(torch.randn_like(x) * 0.2)
        captured.replay()
        direct = executable(*arrays)
        torch.cuda.synchronize()
        assert torch.equal(y, direct)


def test_schedules_are_timed_where_the_kernels_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    allocated: set[int] = set()
    allocate = driver.allocate

    def noted(nbytes: int, device: int = 0) -> driver.DeviceBuffer:
        allocated.add(device)
        return allocate(nbytes, device)

    monkeypatch.setattr(driver, "allocate", noted)
    graph = fg.Graph("tuned")
    graph.output(graph.sigmoid(graph.tensor("x", (1 << 20,)) * 2.0), name="y")
    executable = graph.compile("cuda", device=1, autotune=True, cache=DiskCache(tmp_path))
    assert executable.plan is not None
    assert [k.choice.reason.partition(":")[0] for k in executable.plan.kernels] == ["tuned"]
    assert allocated == {1}
    assert check_executable(executable).ok


# ---- other roads to a device


def test_functions_follow_their_arrays(torch):
    x, w = (torch.randn(*shape, device="cuda:1") for shape in ((4, 8), (5, 8)))
    y = functional.linear(x, w, activation="relu")
    assert y.device.index == 1
    torch.testing.assert_close(y, torch.relu(x @ w.T), rtol=1e-4, atol=1e-4)


def test_cudnn():
    pytest.importorskip("cudnn")
    graph = product((64, 64), (64, 64), "float16")
    executable = graph.compile("cudnn", device=1, partition=True)
    assert executable.device == cuda_device(1)
    assert check_executable(executable).ok


def test_torch_compile(torch):
    importlib.import_module("fusegraph.torch")  # registers the backend where the package is not installed
    model = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.GELU()).to("cuda:1")
    x = torch.randn(8, 16, device="cuda:1")
    with torch.no_grad():
        y = torch.compile(model, backend="fusegraph")(x)
        assert y.device.index == 1
        torch.testing.assert_close(y, model(x), rtol=1e-3, atol=1e-3)
