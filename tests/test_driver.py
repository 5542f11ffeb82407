"""The driver layer: without a driver, and against a double of it (see driver_double)."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
from driver_double import CAPTURING, double, library, log, raises, run_double, run_python, streams_log
from graphs import quick

from codegen.dtypes import ALL, bfloat16, float32
from fusegraph.errors import DeviceError
from fusegraph.runtime import arrays, dlpack, driver, launch
from fusegraph.runtime.arrays import CPU, DeviceArray, cuda_device
from fusegraph.runtime.entry_points import pointer_device
from fusegraph.runtime.views import from_dlpack_viewer

# --- no driver -----------------------------------------------------------------------------------------------------

UNAVAILABLE = """
from fusegraph.errors import DeviceError
from fusegraph.runtime import driver
assert not driver.available()
assert driver.device_count() == 0
reason = driver.unavailable_reason()
for attempt in (driver.bindings, driver.properties, driver.primary_context, lambda: driver.allocate(4)):
    try:
        attempt()
    except DeviceError as error:
        assert str(error) == reason, error
    else:
        raise SystemExit("no error")
print(reason)
"""


def test_no_gpu():
    """CUDA hides every GPU here; without a driver that makes no difference."""
    reason = run_python(UNAVAILABLE, CUDA_VISIBLE_DEVICES="")
    assert "(libcuda.so.1)" in reason
    assert reason.rstrip().endswith("use engine='cpu', which needs no GPU")
    assert "\n" not in reason.rstrip()


def test_no_bindings():
    hide = "import sys\nsys.modules['cuda.bindings'] = None\n"
    reason = run_python(hide + UNAVAILABLE)
    assert reason.startswith("cuda.bindings cannot be imported (ModuleNotFoundError")
    assert "install cuda-python 13; use engine='cpu'" in reason


def test_importing_the_runtime_imports_no_framework_and_no_bindings():
    run_python(
        "import sys, fusegraph.runtime.arrays, fusegraph.runtime.launch\n"
        "assert not {'cuda.bindings.driver', 'torch', 'cupy', 'jax'} & set(sys.modules)"
    )


# --- the double ----------------------------------------------------------------------------------------------------


def double_devices() -> None:
    library()
    assert driver.unavailable_reason() is None
    assert driver.device_count() == 2
    assert driver.driver_version() == (13, 0)
    seen = driver.properties(1)
    assert (seen.ordinal, seen.name, seen.compute_capability, seen.arch) == (1, "Double 1", (9, 0), "sm_90a")
    assert (seen.sm_count, seen.l2_bytes, seen.shared_optin_bytes) == (132, 50 << 20, 232448)
    assert seen.total_memory == 1 << 30
    figures = (seen.target.name, seen.target.sms, seen.target.l2_bytes, seen.target.clock, seen.target.memory_rate)
    assert figures == ("sm_90a", 132, 50 << 20, 1980, 2 * 2619 * 5120 / 8)
    for device in (2, -1):
        with raises(DeviceError, f"no cuda:{device}", "sees 2 GPU(s)"):
            driver.properties(device)


def double_contexts() -> None:
    lib = library()
    assert not driver.enter(0)  # a thread without a context keeps that of device 0
    assert log(lib) == ["retain 0", "set current"]
    lib.double_clear()
    assert not driver.enter(0)
    assert log(lib) == []  # current already
    with driver.using(1), driver.using(1):
        assert log(lib) == ["retain 1", "push 1"]
        with driver.using(0):
            assert log(lib)[2:] == ["push 0"]
    assert log(lib)[3:] == ["pop 0", "pop 1"]
    assert lib.double_depth() == 1
    try:
        with driver.using(1):
            raise KeyError
    except KeyError:
        assert lib.double_depth() == 1
    assert driver.primary_context(1) is driver.primary_context(1)

    def other_thread() -> None:
        assert driver.enter(1)  # pushed: the runtime's current device of this thread stays 0
        driver.leave()
        depths.append(lib.double_depth())

    depths: list[int] = []
    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert depths == [0]


def double_memory() -> None:
    lib = library()
    x = np.arange(100, dtype=np.int32)
    y = np.zeros_like(x)
    for device in (0, 1):
        buffer = driver.allocate(x.nbytes, device)
        assert (buffer.nbytes, buffer.device, buffer.pointer % 256) == (400, device, 0)
        assert pointer_device(buffer.pointer + 10) == device
        driver.copy_to_device(buffer.pointer, x.ctypes.data, x.nbytes, device, stream=5)
        driver.copy_to_host(y.ctypes.data, buffer.pointer, x.nbytes, device)
        np.testing.assert_array_equal(x, y)
        driver.memset(buffer.pointer, 1, 8, device)
        driver.copy_on_device(buffer.pointer + 16, buffer.pointer, 8, device)
        driver.copy_to_host(y.ctypes.data, buffer.pointer, x.nbytes, device)
        assert y[:7].tolist() == [0x01010101, 0x01010101, 2, 3, 0x01010101, 0x01010101, 6]
        with raises(DeviceError, "copy 401 bytes", "cuMemcpyDtoHAsync", "CUDA_ERROR_INVALID_VALUE (1)", "described by"):
            driver.copy_to_host(y.ctypes.data, buffer.pointer, 401, device)
    assert "sync 0x5" in log(lib)
    assert pointer_device(x.ctypes.data) is None
    with driver.using(1):
        lib.double_clear()
        assert pointer_device(buffer.pointer) == 1
        assert log(lib) == []  # any context will do
    assert driver.allocate(0).pointer != 0
    with raises(
        DeviceError, "allocate 2000000000 bytes on cuda:1", "536870912 of 1073741824 free", "OUT_OF_MEMORY (2)"
    ):
        driver.allocate(2_000_000_000, 1)
    lib.double_clear()
    del buffer
    gc.collect()
    assert "free 400 on 1" in log(lib)
    assert lib.double_live() == 0
    assert "bad free" not in log(lib)


def double_capture() -> None:
    """Memory, modules and finalisers work while a stream is captured; the thread's capture mode is put back."""
    lib = library()
    buffer = driver.allocate(16)
    module = launch.Module(b"IMG")
    lib.double_capture(1)
    inside = driver.allocate(32)
    other = launch.Module(b"IMG")
    del buffer, module
    gc.collect()
    assert log(lib)[-1] == "unload"
    assert "free 16 on 0" in log(lib)
    assert driver.bindings().cuMemAlloc(8)[0] == driver.bindings().CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    assert driver.is_capturing(CAPTURING)
    assert not driver.is_capturing(5)
    assert not driver.is_capturing(0)
    lib.double_clear()
    driver.order(5, CAPTURING)
    assert log(lib) == ["sync 0x5"]  # work outside the graph: waited for
    assert inside.nbytes == 32
    assert other.device == 0


def double_streams_and_events() -> None:
    lib = library()
    driver.enter(0)
    lib.double_clear()
    start, stop = driver.Event(), driver.Event()
    start.record(5)
    stop.record(5)
    stop.synchronize()
    assert stop.elapsed_ms(start) > 0
    lib.double_clear()
    driver.order(5, 5)
    assert log(lib) == []
    driver.order(5, 6)
    assert log(lib) == ["event 2", "record 0x5", "wait 0x6", "event gone"]
    with raises(DeviceError, "wait for the stream", "CUDA_ERROR_ILLEGAL_ADDRESS (700)", "unusable in this process"):
        driver.synchronize(0xBAD)


def double_device_arrays() -> None:
    lib = library()
    base = np.arange(120).reshape(2, 3, 4, 5)
    for dtype in ALL:
        x = base.astype(dtype.numpy)
        for source in (x, x.transpose(3, 1, 0, 2), x[:, ::2, 1:], x[:, :0], x[1, 2, 3, 4, ...]):
            there = arrays.to_device(source, 1)
            assert (there.dtype, there.shape, there.device) == (dtype, source.shape, cuda_device(1))
            assert there.nbytes == source.nbytes
            for copy in (there, there.copy(), arrays.to_device(there, 0)):
                np.testing.assert_array_equal(copy.to_numpy(), source)
            assert arrays.to_device(there, 1) is there
    elsewhere = arrays.to_device(base, 0)
    elsewhere.stream = 3
    lib.double_clear()
    np.testing.assert_array_equal(arrays.to_device(elsewhere, 1, stream=5).to_numpy(), base)
    syncs = [line for line in log(lib) if line.startswith(("sync", "wait"))]
    assert syncs[-4:] == ["wait (nil)", "sync (nil)", "sync 0x5", "sync 0x5"]  # read there, then written here
    del elsewhere
    dense = base.transpose(3, 1, 0, 2).astype(np.float32)
    assert arrays.to_device(dense).strides == tuple(s // 4 for s in dense.strides)  # no gaps: the layout is kept
    assert arrays.to_device(dense[:, ::2]).strides == (16, 8, 4, 1)

    there = arrays.to_device(base.astype(np.float32), 1, stream=5)
    interface = there.__cuda_array_interface__
    assert interface["data"] == (there.pointer, False)
    assert (interface["typestr"], interface["strides"], interface["stream"]) == ("<f4", (240, 80, 20, 4), 5)
    assert arrays.to_device(base).__cuda_array_interface__["stream"] == 1
    assert not hasattr(DeviceArray.empty((3,), "bfloat16"), "__cuda_array_interface__")
    with raises(TypeError, "use .to_numpy()"):
        np.asarray(there)

    for versioned in (None, (1, 0)):
        lib.double_clear()
        seen = dlpack.consume(there.__dlpack__(stream=6, max_version=versioned))
        assert streams_log(lib) == ["event 2", "record 0x5", "wait 0x6", "event gone"]
        assert (seen.pointer, seen.shape, seen.device) == (there.pointer, there.shape, cuda_device(1))
    lib.double_clear()
    there.__dlpack__(stream=-1)
    assert streams_log(lib) == []
    copied = dlpack.consume(there.__dlpack__(stream=-1, copy=True))
    assert copied.pointer != there.pointer
    host = dlpack.consume(there.__dlpack__(dl_device=(1, 0), copy=None))
    assert host.device == CPU
    np.testing.assert_array_equal(np.from_dlpack(there, device="cpu"), base)
    for arguments in ({"dl_device": (1, 0), "copy": False}, {"dl_device": (2, 0)}):
        with raises(BufferError, "the array is on cuda:1"):
            there.__dlpack__(**arguments)

    # Through the protocols back into views, in stream order.
    lib.double_clear()
    seen = from_dlpack_viewer("dlpack")(there, "x", 6)
    assert seen[:6] == (there.pointer, there.shape, there.strides, float32, cuda_device(1), "dlpack")
    only = type("Only", (), {"__cuda_array_interface__": interface})()
    again = arrays.view(only, name="x", stream=6)
    assert again[:5] == (there.pointer, there.shape, there.strides, float32, cuda_device(1))
    assert log(lib).count("wait 0x6") == 2
    assert arrays.view(there, name="x", stream=5).framework == "fusegraph"
    assert log(lib).count("wait 0x6") == 2
    arrays.view(there, name="x", stream=6)
    assert log(lib).count("wait 0x6") == 3

    new = arrays.allocator("numpy", (3, 4), (1, 4), bfloat16, cuda_device(1), stream=5)()
    assert isinstance(new, DeviceArray)
    assert (new.strides, new.stream, new.owner.nbytes) == ((1, 4), 5, 30)

    del there, new, seen, again, only, copied, copy, host
    gc.collect()
    assert lib.double_live() == 0


def double_exit() -> None:
    """What is still alive at the end of the process is left to the driver, without a word."""
    library()
    global kept
    module = launch.Module(b"IMG")
    kept = [module, module.function("nothing"), driver.allocate(8), driver.Event(), DeviceArray.empty((3,), "int8")]
    kept.append(kept)


kept: list[Any]

DOUBLES = [name for name in dict(globals()) if name.startswith("double_")]


@pytest.mark.slow
@pytest.mark.parametrize("names", quick(DOUBLES[:1], DOUBLES[1:]), ids=["first", "others"])
def test_with_the_double(names: list[str]):
    run_double("test_driver", *names)


def test_a_driver_without_devices():
    reason = run_python(UNAVAILABLE, LD_LIBRARY_PATH=double(), DOUBLE_NO_DEVICE="1")
    assert "did not start: CUDA_ERROR_NO_DEVICE (100): described by the double; use engine='cpu'" in reason
