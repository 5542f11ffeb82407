"""The driver layer: without a driver, and against a double of it (see driver_double)."""

from __future__ import annotations

import ctypes
import gc
import threading
from typing import Any

import numpy as np
import pytest
from driver_double import CAPTURING, double, library, log, raises, run_double, run_python, streams_log
from graphs import quick

from codegen.dtypes import ALL, bfloat16, float32
from codegen.spec import TensorMap
from fusegraph.errors import ArgumentError, DeviceError
from fusegraph.runtime import arrays, dlpack, driver, launch, replay
from fusegraph.runtime.arrays import CPU, DeviceArray, cuda_device
from fusegraph.runtime.entry_points import pointer_device
from fusegraph.runtime.views import from_dlpack_viewer

TILED = TensorMap(1, "bfloat16", (100, 50), (256,), (64, 32), (1, 2), 128, offset=16)
IM2COL = TensorMap(
    1, "float16", (64, 20, 10, 3), (128, 2560, 25600), (8, 16), (1, 2, 2, 1), 0, lower=(-1, -3), upper=(-2, -4)
)


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
    assert (seen.shared_per_sm_bytes, seen.registers_per_sm, seen.max_threads_per_sm) == (233472, 65536, 2048)
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


def double_launch() -> None:
    lib = library()
    with raises(DeviceError, "load a kernel image of 3 bytes", "CUDA_ERROR_INVALID_IMAGE"):
        launch.Module(b"abc")
    module = launch.Module(b"IMG")
    with raises(DeviceError, "find kernel absent", "CUDA_ERROR_NOT_FOUND"):
        module.function("absent")
    function = module.function("mixed")
    assert (function.registers, function.shared_bytes, function.max_threads) == (32, 1000, 1024)

    parameters = [0, TILED, 1, IM2COL]
    run = launch.Launch(function, (2, 3, 4), (32, 2, 1), 0, 2, parameters)
    lib.double_clear()
    run((0xFFFF_0000_1234, 0x8000), 9)
    assert log(lib) == [
        "tiled type 9 swizzle 3 box 64(1) 63(2) 100 50 /256",
        "im2col type 6 swizzle 0 box 8 16 from -1..-2(2) -3..-4(2) 64 20 10 3 /128 /2560 /25600",
        "launch 2,3,4 32,2,1 0 0x9",
        "mixed ffff00001234 8000 map0 16..7 map0",
    ]
    lib.double_clear()
    run([0xFFFF_0000_1234, 0x8000], 9)  # nothing is described again
    assert log(lib)[0].startswith("launch")
    lib.double_clear()
    run([1, 0x9020], 9)
    assert log(lib) == ["replace", "replace", "launch 2,3,4 32,2,1 0 0x9", "mixed 1 9020 map0 48..7 map0"]
    for wrong in ([1], [1, 2, 3]):
        with raises(ArgumentError, f"2 addresses, not {len(wrong)}"):
            run(wrong, 0)
    with raises(ArgumentError, "addresses, not ['text', 1]"):
        run(["text", 1], 0)
    with raises(DeviceError, "point a tensor map of kernel mixed to address 0x18", "INVALID_VALUE"):
        run([1, 8], 0)
    lib.double_clear()
    run([1, 0x9020], 9)  # what failed is written anew
    assert [line.split()[0] for line in log(lib)] == ["tiled", "launch", "mixed"]
    with raises(DeviceError, "launch mixed, grid (2, 3, 4), block (32, 2, 1)", "cuLaunchKernelEx"):
        run((1, 0x9020), 0xBAD)
    assert len(run._alone._free) == 1  # errors give the argument memory back
    bad = launch.Launch(function, (2, 3, 4), (32, 2, 1), 0, 2, parameters)
    with raises(DeviceError, "kernel mixed", "tensor", "0x18"):
        bad([1, 8], 0)

    lib.double_clear()
    launch.Launch(function, (8, 2, 1), (32, 1, 1), 0, 2, parameters, cluster=(4, 2, 1))([1, 16], 0)
    launch.Launch(function, (8, 2, 1), (32, 1, 1), 0, 2, parameters, dependent=True)([1, 16], 0)
    launch.Launch(function, (8, 2, 1), (32, 1, 1), 0, 2, parameters, cluster=(8, 2, 1), dependent=True)([1, 16], 0)
    assert [line for line in log(lib) if line.split()[0] in ("launch", "attribute")] == [
        "launch 8,2,1 32,1,1 0 (nil) cluster 4,2,1",
        "launch 8,2,1 32,1,1 0 (nil) dependent 1",
        "attribute 14 = 1",
        "launch 8,2,1 32,1,1 0 (nil) cluster 8,2,1 dependent 1",
    ]
    for cluster in ((3, 1, 1), (0, 1, 1), (1, 4, 1)):
        with raises(DeviceError, f"kernel mixed cannot run a grid of (8, 2, 1) in clusters of {cluster}"):
            launch.Launch(function, (8, 2, 1), (32, 1, 1), 0, 2, cluster=cluster)

    # What is to be zero is set to that before the kernel.
    with driver.using(0):
        block = driver.allocate(64, 0)
        driver.memset(block.pointer, 1, 64, 0)
        add_one = module.function("add_one")
        clear = launch.Launch(add_one, (1, 1, 1), (4, 1, 1), 0, 2, zeroed=[(0, 16)], dependent=True)
        assert not clear.dependent
        clear([block.pointer, block.pointer + 32], 0)
        values = (ctypes.c_float * 16).from_address(block.pointer)
        assert values[:4] == [0] * 4
        assert values[8:12] == [1] * 4
        assert values[4] == values[12] != 0
        with raises(DeviceError, "launch add_one", "INVALID_VALUE"):
            clear([block.pointer + 56, block.pointer], 0)
    del add_one, clear

    # Shared memory above 48 KB, the kernel's own 1000 bytes included, is asked for once; it never shrinks.
    lib.double_clear()
    launch.Launch(function, (1, 1, 1), (1, 1, 1), 48 * 1024 - 1000, 2)
    assert log(lib) == []
    launch.Launch(function, (1, 1, 1), (1, 1, 1), 48 * 1024, 2)
    launch.Launch(function, (1, 1, 1), (1, 1, 1), 48 * 1024, 2)
    launch.Launch(function, (1, 1, 1), (1, 1, 1), 48 * 1024 - 500, 2)
    assert log(lib) == ["attribute 8 = 49152"]
    with raises(DeviceError, "mixed wants 232448 bytes of dynamic shared memory; cuda:0 has 231448"):
        launch.Launch(function, (1, 1, 1), (1, 1, 1), 232448, 2)
    for grid, block, message in (
        ((0, 1, 1), (1, 1, 1), "grid of (0, 1, 1)"),
        ((1, 65536, 1), (1, 1, 1), "grid of (1, 65536, 1)"),
        ((1, 1, 1), (1025, 1, 1), "1025 threads, of at most 1024 at its 32 registers"),
        ((1, 1, 1), (1, 1, 65), "blocks of (1, 1, 65)"),
        ((1, 1, 1), (0, 1, 1), "blocks of (0, 1, 1)"),
    ):
        with raises(DeviceError, message):
            launch.Launch(function, grid, block, 0, 1)

    lib.double_clear()
    del module
    gc.collect()
    assert log(lib) == []  # the function keeps its module
    del function, run, bad
    gc.collect()
    assert log(lib)[-1] == "unload"


def double_threads() -> None:
    """One Launch from several threads: no call sees another's arguments (the double's kernel dawdles over them)."""
    library()
    n, calls = 64, 40
    add_one = launch.Launch(launch.Module(b"IMG").function("add_one"), (2, 1, 1), (32, 1, 1), 0, 2)
    wrong: list[object] = []

    def work(seed: int) -> None:
        driver.enter(0)
        for call in range(calls):
            x = np.full(n, seed * 1000 + call, np.float32)
            y = np.zeros(n, np.float32)
            add_one((x.ctypes.data, y.ctypes.data), seed)
            if not (y == x + 1).all():
                wrong.append((seed, call))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert 1 < len(add_one._alone._free) <= 4  # they did overlap


def double_sequences() -> None:
    """Several kernels with one table of addresses; the thread's context is looked at each time."""
    lib = library()
    function = launch.Module(b"\x7fELF", 0).function("any")
    lib.double_pointers(3)
    step = launch.Launch(function, (1, 1, 1), (32, 1, 1), 0, 3)
    run = launch.LaunchSequence([(step, (0, 3, 4)), (step, (4, 2, 1))], 2, [0x77], [0, 0x100], device=0)

    def kernels(*call: Any) -> list[str]:
        lib.double_clear()
        run(*call)
        return [line for line in log(lib) if not line.startswith("launch")]

    assert kernels([0xA0, 0xB0], 0, 0x1000) == ["kernel a0 1000 1100", "kernel 1100 77 b0"]
    assert kernels([0xA0, 0xB0], 0, 0x1000) == ["kernel a0 1000 1100", "kernel 1100 77 b0"]
    assert kernels([0xA0, 0xC0], 5, 0x2000) == ["kernel a0 2000 2100", "kernel 2100 77 c0"]
    assert log(lib)[::2] == ["launch 1,1,1 32,1,1 0 0x5"] * 2
    addresses = [0xD0, 0xE0]
    assert kernels(addresses, 0, 0x2000)[0] == "kernel d0 2000 2100"
    assert log(lib)[::2] == ["launch 1,1,1 32,1,1 0 (nil)"] * 2
    addresses[0] = 0xF0  # the caller's list is not kept
    assert kernels(addresses, 0, 0x2000)[0] == "kernel f0 2000 2100"

    with driver.using(1):
        assert kernels([1, 2], 0, 3)[0] == "push 0"
        assert log(lib)[-1] == "pop 0"
    seen: list[list[str]] = []

    def without_a_context() -> None:
        seen.append(kernels([1, 2], 0, 0x30))
        seen.append(kernels([1, 2], 0, 0x30))

    thread = threading.Thread(target=without_a_context)
    thread.start()
    thread.join()
    assert seen == [["set current", "kernel 1 30 130", "kernel 130 77 2"], ["kernel 1 30 130", "kernel 130 77 2"]]
    for wrong in ((0, 1), (0, 1, 5), (0, 1, -1)):
        with raises(ArgumentError, "kernel any takes 3 arguments"):
            launch.LaunchSequence([(step, wrong)], 2, [0x77], [0, 0x100], device=0)


def double_recorded_sequences() -> None:
    """The third call with the same addresses records a graph; from then on it is launched as a whole."""
    lib = library()
    function = launch.Module(b"\x7fELF", 0).function("any")
    lib.double_pointers(1)
    step = launch.Launch(function, (1, 1, 1), (1, 1, 1), 0, 1)
    run = launch.LaunchSequence([(step, (n % 2,)) for n in range(5)], 1, (), [0], device=0)

    def queued(addresses: Any, stream: int = 0x50, workspace: int = 0x1000) -> list[str]:
        lib.double_clear()
        run(addresses, stream, workspace)
        return [line for line in log(lib) if line.startswith(("kernel", "graph"))]

    kernels = ["kernel a0", "kernel 1000", "kernel a0", "kernel 1000", "kernel a0"]
    assert queued((0xA0,)) == queued((0xA0,)) == kernels
    assert queued((0xA0,)) == kernels * 2  # the double runs what it should only record
    assert [line.split()[-1] for line in log(lib) if line.startswith("launch")][5:] == [hex(CAPTURING)] * 5
    assert queued((0xA0,)) == ["graph 0x50 on 0"]
    assert queued((0xA0,), 0x60) == ["graph 0x60 on 0"]
    assert queued((0xA0,), CAPTURING) == kernels  # as parts of the caller's graph
    assert queued((0xA0,), 0x50, 0x2000)[1] == "kernel 2000"  # other intermediates
    assert queued((0xB0,))[0] == "kernel b0"
    assert queued((0xA0,)) == ["graph 0x50 on 0"]
    with raises(DeviceError, "cuGraphLaunch"):
        run((0xA0,), 0xBAD, 0x1000)
    for _ in range(5):
        assert queued([0xC0])[0] == "kernel c0"  # a list may change
    for address in range(0xD0, 0xD8):  # the oldest give way
        for _ in range(3):
            run((address,), 0x50, 0x1000)
    gc.collect()
    assert log(lib).count("graph gone") == 5
    assert queued((0xD7,)) == ["graph 0x50 on 0"]
    assert queued((0xA0,)) == kernels
    short = launch.LaunchSequence([(step, (0,))], 1, device=0)
    for _ in range(5):
        lib.double_clear()
        short((0xA0,), 0x50)
        assert "kernel a0" in log(lib)


def double_tensor_maps_of_intermediates() -> None:
    """Their address changes with the workspace alone."""
    lib = library()
    mixed = launch.Module(b"IMG").function("mixed")
    step = launch.Launch(mixed, (1, 1, 1), (32, 1, 1), 0, 2, [0, TILED, 1, TILED])
    run = launch.LaunchSequence([(step, (0, 1))], 1, (), [32], device=0)
    for workspace, calls in ((0x1000, ["tiled", "tiled"]), (0x1000, []), (0x2000, ["replace", "replace"])):
        lib.double_clear()
        run([0x10], 0, workspace)
        assert [line.split()[0] for line in log(lib)] == [*calls, "launch", "mixed"]
    run([0x20], 0, 0x2000)
    assert log(lib)[-1] == "mixed 20 2020 map0 48..7 map0"


def double_replays() -> None:
    lib = library()
    streams: list[int] = []
    done = replay.record(streams.append, 1, None)
    assert streams == [CAPTURING]
    lib.double_clear()
    with driver.using(1):
        done(5)
    done()
    assert [line for line in log(lib) if line.startswith("graph")] == ["graph 0x5 on 1", "graph (nil) on 1"]
    with raises(DeviceError, "launch a CUDA graph", "cuGraphLaunch"):
        done(0xBAD)
    lib.double_clear()
    del done
    gc.collect()
    assert "graph gone" in log(lib)


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


@pytest.mark.parametrize("names", quick(DOUBLES[:1], DOUBLES[1:]), ids=["first", "others"])
def test_with_the_double(names: list[str]):
    run_double("test_driver", *names)


def test_a_driver_without_devices():
    reason = run_python(UNAVAILABLE, LD_LIBRARY_PATH=double(), DOUBLE_NO_DEVICE="1")
    assert "did not start: CUDA_ERROR_NO_DEVICE (100): described by the double; use engine='cpu'" in reason
