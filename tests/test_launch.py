"""Kernels launched through the driver, against a double of it (see driver_double)."""

from __future__ import annotations

import ctypes
import gc
import threading
from typing import Any

import numpy as np
from driver_double import CAPTURING, library, log, raises, run_double

from codegen.spec import TensorMap
from fusegraph.errors import ArgumentError, DeviceError
from fusegraph.runtime import driver, launch, replay

TILED = TensorMap(1, "bfloat16", (100, 50), (256,), (64, 32), (1, 2), 128, offset=16)
IM2COL = TensorMap(
    1, "float16", (64, 20, 10, 3), (128, 2560, 25600), (8, 16), (1, 2, 2, 1), 0, lower=(-1, -3), upper=(-2, -4)
)


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
    run = launch.LaunchSequence([(step, (0, 3, 4)), (step, (4, 2, 1))], 2, [0x77], [(0, 0), (1, 0x100)], device=0)

    def kernels(*call: Any) -> list[str]:
        lib.double_clear()
        *given, workspace = call
        run(*given, (workspace, workspace))
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
            launch.LaunchSequence([(step, wrong)], 2, [0x77], [(0, 0), (1, 0x100)], device=0)


def double_recorded_sequences() -> None:
    """The third call with the same addresses records a graph; from then on it is launched as a whole."""
    lib = library()
    function = launch.Module(b"\x7fELF", 0).function("any")
    lib.double_pointers(1)
    step = launch.Launch(function, (1, 1, 1), (1, 1, 1), 0, 1)
    run = launch.LaunchSequence([(step, (n % 2,)) for n in range(5)], 1, (), [(0, 0)], device=0)

    def queued(addresses: Any, stream: int = 0x50, workspace: int = 0x1000) -> list[str]:
        lib.double_clear()
        run(addresses, stream, (workspace,))
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
        run((0xA0,), 0xBAD, (0x1000,))
    for _ in range(5):
        assert queued([0xC0])[0] == "kernel c0"  # a list may change
    for address in range(0xD0, 0xD8):  # the oldest give way
        for _ in range(3):
            run((address,), 0x50, (0x1000,))
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
    run = launch.LaunchSequence([(step, (0, 1))], 1, (), [(0, 32)], device=0)
    for workspace, calls in ((0x1000, ["tiled", "tiled"]), (0x1000, []), (0x2000, ["replace", "replace"])):
        lib.double_clear()
        run([0x10], 0, (workspace,))
        assert [line.split()[0] for line in log(lib)] == [*calls, "launch", "mixed"]
    run([0x20], 0, (0x2000,))
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


DOUBLES = [name for name in dict(globals()) if name.startswith("double_")]


def test_with_the_double() -> None:
    run_double("test_launch", *DOUBLES)
