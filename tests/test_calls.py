"""Calls of the cuda engine, without a GPU: which addresses reach which kernel, on which stream, and what is refused.

Against the double of the driver (see driver_double): its kernels compute nothing, they log what they are given.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import time
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driver_double import CAPTURING, library, log, raises, run_double

import fusegraph as fg
from fusegraph.engines import base, cuda
from fusegraph.errors import ArgumentError, DeviceError
from fusegraph.passes import memory
from fusegraph.runtime.arrays import DeviceArray
from fusegraph.runtime.cache import DiskCache


def graph_of_three(device: int = 0) -> Any:
    graph = fg.Graph("three")
    a, b, c = (graph.tensor(name, (64, 16)) for name in "abc")
    graph.output(graph.sigmoid(a + b * c), name="y")
    return graph.compile("cuda", device=device)


def arrays(count: int, device: int = 0) -> list[DeviceArray]:
    """Returns arrays with unused memory before and behind each."""
    made = [DeviceArray.empty((3, 64, 16), "float32", device=device) for _ in range(count)]
    return [DeviceArray(m.pointer + m.size * 4 // 3, (64, 16), (16, 1), m.dtype, m.device, m) for m in made]


def shifted(array: DeviceArray, nbytes: int) -> DeviceArray:
    return DeviceArray(array.pointer + nbytes, array.shape, array.strides, array.dtype, array.device, array)


def layout_of(array: DeviceArray) -> tuple[Any, ...]:
    return array.shape, array.strides, array.dtype, array.device


def launched(lib: Any) -> list[str]:
    """Returns the arguments and stream of each kernel launched since the log was emptied; then empties the log."""
    lines = [line for line in log(lib) if line.split()[0] in ("launch", "kernel")]
    seen = []
    for launch, kernel in zip(lines[::2], lines[1::2]):
        seen.append(f"{launch.split()[4]}: {kernel.removeprefix('kernel ')}")
    lib.double_clear()
    return seen


def pointers(*of: DeviceArray) -> str:
    return " ".join(f"{array.pointer:x}" for array in of)


def double_calls() -> None:
    lib = library()
    lib.double_pointers(4)
    executable = graph_of_three()
    a, b, c, y, z = arrays(5)
    launched(lib)
    for _ in range(2):
        assert executable(a, b, c, out=y) is y
        assert executable(c=c, a=a, b=b, out=[z]) is z
        assert executable(a, b, c, out={"y": y}, stream=5) is y
        assert executable(b, b, b, out=z) is z
        assert launched(lib) == [
            f"(nil): {pointers(a, b, c, y)}",
            f"(nil): {pointers(a, b, c, z)}",
            f"0x5: {pointers(a, b, c, y)}",
            f"(nil): {pointers(b, b, b, z)}",
        ]
    fresh = executable(a, b, c)
    again = executable(a, b, c, stream=6)
    assert (fresh.stream, again.stream) == (0, 6)
    assert launched(lib) == [f"(nil): {pointers(a, b, c, fresh)}", f"0x6: {pointers(a, b, c, again)}"]

    wide = set(executable._built)
    for x in (shifted(arrays(1)[0], 4), shifted(arrays(1)[0], 8)):
        executable(a, x, c, out=y)
        executable(a, b, c, out=y)
        assert launched(lib) == [f"(nil): {pointers(a, x, c, y)}", f"(nil): {pointers(a, b, c, y)}"]
    assert (wide, set(executable._built)) == ({16}, {16, 1})

    for error, message, call in (
        (
            ArgumentError,
            "output 'y' of graph 'three' overlaps input 'b'",
            lambda: executable(a, b, c, out=shifted(b, 16)),
        ),
        (ArgumentError, "overlaps input 'c'", lambda: executable(a, b, c, out=shifted(c, 64 * 16 * 4 - 16))),
        (ArgumentError, "overlaps input 'a'", lambda: executable(a, b, c, out=shifted(a, 16 - 64 * 16 * 4))),
        (ArgumentError, "has shape [64]", lambda: executable(a, b, DeviceArray.empty((64,), "float32"), out=y)),
        (ArgumentError, "has dtype int32", lambda: executable(a, DeviceArray.empty((64, 16), "int32"), c, out=y)),
        (DeviceError, "input 'a' of graph 'three' is on cuda:1", lambda: executable(*arrays(1, 1), b, c, out=y)),
        (DeviceError, "is on cpu", lambda: executable(np.zeros((64, 16), np.float32), b, c, out=y)),
        (ArgumentError, "graph 'three' needs 'c'", lambda: executable(a, b, out=y)),
        (ArgumentError, "1 outputs ['y'], out= has 2", lambda: executable(a, b, c, out=(y, z))),
        (DeviceError, "launch three_kernel", lambda: executable(a, b, c, out=y, stream=0xBAD)),
    ):
        with raises(error, message):
            call()
        lib.double_clear()
        executable(a, b, c, out=y)
        assert launched(lib) == [f"(nil): {pointers(a, b, c, y)}"]
    for _ in range(2):
        assert executable(a, b, c, out=b) is b  # in its place: another form of the kernels
        executable(a, b, c, out=y)
        assert launched(lib) == [f"(nil): {pointers(a, b, c, b)}", f"(nil): {pointers(a, b, c, y)}"]
    assert set(executable._built_in_place) == {(16, frozenset({(1, 0)}))}
    half = DeviceArray(DeviceArray.empty((128, 16), "float32").pointer, a.shape, a.strides, a.dtype, a.device, None)
    executable(half, b, c, out=shifted(half, 64 * 16 * 4))  # they touch


def double_many_addresses() -> None:
    """Addresses are remembered, up to a number; what is wrong with some is found every time."""
    lib = library()
    lib.double_pointers(4)
    executable = graph_of_three()
    a, b, c, y = arrays(4)
    large = DeviceArray.empty((base._KNOWN + 80, 64), "float32")
    outputs = [shifted(DeviceArray(large.pointer, *layout_of(y), large), 16 * i) for i in range(base._KNOWN + 8)]
    for _ in range(2):
        for z in outputs:
            lib.double_clear()
            executable(a, b, c, out=z)
            assert launched(lib) == [f"(nil): {pointers(a, b, c, z)}"]
            assert 0 < len(executable._known) <= base._KNOWN
    for _ in range(2):
        for z in (shifted(a, -16), shifted(c, 16)):
            with raises(ArgumentError, "overlaps input"):
                executable(a, b, c, out=z)
        executable(a, b, c, out=y)
    # The same address with another shape, or as another argument, is no known call.
    flat = DeviceArray(y.pointer, (64 * 16,), (1,), y.dtype, y.device, y)
    with raises(ArgumentError, "has shape [1024]"):
        executable(a, b, c, out=flat)
    with raises(ArgumentError, "overlaps input 'a'"):
        executable(shifted(y, 16), b, c, out=y)


def double_two_outputs() -> None:
    """In the graph's order, given or allocated."""
    lib = library()
    lib.double_pointers(3)
    graph = fg.Graph("two")
    x = graph.tensor("x", (64, 16))
    graph.output(graph.exp(x), name="y")
    graph.output(graph.tanh(x), name="z")
    executable = graph.compile("cuda")
    a, y, z = arrays(3)
    launched(lib)
    for out in ((y, z), [y, z], {"z": z, "y": y}):
        assert executable(a, out=out) == (y, z)
        assert launched(lib) == [f"(nil): {pointers(a, y, z)}"]
    first, second = executable(x=a)
    assert launched(lib) == [f"(nil): {pointers(a, first, second)}"]
    for wrong, message in ((y, "2 outputs ['y', 'z'], out= has 1"), ((y, y), "overlaps output 'y'")):
        with raises(ArgumentError, message):
            executable(a, out=wrong)


def double_ordering() -> None:
    """Arrays whose contents are complete on another stream are waited for, however often they were seen before."""
    lib = library()
    lib.double_pointers(4)
    executable = graph_of_three()
    a, b, c, y = arrays(4)
    for _ in range(2):
        executable(a, b, c, out=y)
    lib.double_clear()
    b.stream = 7
    executable(a, b, c, out=y)
    assert [line for line in log(lib) if line.split()[0] in ("record", "wait")] == ["record 0x7", "wait (nil)"]
    b.stream = 0
    lib.double_clear()
    executable(a, b, c, out=y)
    assert not [line for line in log(lib) if line.startswith("wait")]


def double_several_devices() -> None:
    """A call makes its device's context current for as long as it takes."""
    lib = library()
    lib.double_pointers(4)
    executables = [graph_of_three(device) for device in (0, 1)]
    given = [arrays(4, device) for device in (0, 1)]
    for _ in range(2):
        for device in (1, 0):
            a, b, c, y = given[device]
            lib.double_clear()
            executables[device](a, b, c, out=y)
            moves = [line for line in log(lib) if line.split()[0] in ("push", "pop", "set")]
            assert moves[-2:] == (["push 1", "pop 1"] if device else [])
            assert launched(lib) == [f"(nil): {pointers(a, b, c, y)}"]


def network() -> Any:
    """Returns an executable of three kernels, with two intermediates and a constant."""
    graph = fg.Graph("network")
    x = graph.tensor("x", (8, 64))
    table = graph.constant(np.ones((8, 64), np.float32) * np.arange(64, dtype=np.float32))
    graph.output(graph.exp(graph.tanh(graph.sin(x) * table)), name="y")
    return graph.compile("cuda", fusion=False)


def double_workspaces() -> None:
    """One a stream, and one of its own for each capture; all of them go with the executable."""
    lib = library()
    lib.double_pointers(2)
    executable = network()
    kernels = len(executable.kernels)
    assert kernels == 4
    x, y = (DeviceArray.empty((8, 64), "float32") for _ in range(2))

    def between(executable: Any, stream: int) -> str:
        """Returns the address that the first kernel writes to."""
        lib.double_clear()
        executable(x, out=y, stream=stream)
        seen = launched(lib)
        assert len(seen) == kernels
        assert seen[0].startswith(f"{hex(stream) if stream else '(nil)'}: {x.pointer:x} ")
        assert seen[-1].endswith(f" {y.pointer:x}")
        return seen[0].split()[-1]

    first, second, third, fourth = (between(executable, stream) for stream in (0, 5, CAPTURING, CAPTURING))
    assert len({first, second, third, fourth}) == 4
    assert (between(executable, 0), between(executable, 5)) == (first, second)
    live = lib.double_live()
    del executable
    assert live - lib.double_live() == 5  # four workspaces and the constant, without the collector's help


def double_workspace_of_torch() -> None:
    """On torch's current stream the workspace is torch's memory, of the call alone; on others it is not."""
    lib = library()
    lib.double_pointers(2)
    executable = network()
    x, y = (DeviceArray.empty((8, 64), "float32") for _ in range(2))
    made: list[torch.Tensor] = []

    def empty(*given: Any, dtype: Any, device: Any) -> torch.Tensor:
        assert device == torch.device("cuda", 0)
        made.append(torch.zeros(*given, dtype=dtype))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5 + index, raising=False)
        lib.double_clear()
        executable(x, out=y, stream=5)
        assert [m.numel() for m in made] == [executable.workspace_bytes]
        assert launched(lib)[0].split()[-1] == f"{made[0].data_ptr():x}"
        executable(x, out=y, stream=6)
        assert len(made) == 1


def double_consumed() -> None:
    """A call that may consume its inputs gives them back in stages, and takes memory when kernels need it."""
    lib = library()
    lib.double_pointers(3)
    graph = fg.Graph("chain", io_dtype="float32")
    x = graph.tensor("x", (8, 8))
    for n in range(6):
        x = x @ graph.tensor(f"w{n}", (8, 8), donated=True)
    graph.output(x, name="y")
    given = [DeviceArray.empty((8, 8), "float32") for _ in range(7)]
    others = [DeviceArray.empty((8, 8), "float32") for _ in range(8)]
    seen, addresses = [weakref.ref(array) for array in given], [f"{array.pointer:x}" for array in given]
    alive: list[int] = []
    made = base.allocator

    def allocator(*args: Any, **how: Any) -> Any:
        make = made(*args, **how)
        return lambda: (alive.append(sum(ref() is not None for ref in seen)), make())[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "LEAST", 1)
        patch.setattr(base, "allocator", allocator)
        patch.setattr(cuda, "torch_allocates", lambda stream, ordinal: stream == 0)
        patch.setattr(cuda, "torch_memory", lambda nbytes, ordinal: torch.zeros(nbytes, dtype=torch.uint8))
        executable = graph.compile("cuda")
        lib.double_clear()
        y = executable.consume(given)
        kernels = launched(lib)
    assert given == []
    assert len(kernels) == len(executable.kernels)
    assert all(any(a in kernel for kernel in kernels) for a in addresses)
    assert kernels[-1].endswith(f"{y.pointer:x}")
    assert alive == [2]  # the last product's operands: one of them lies in the other array
    *given, y = others
    executable(*given, out=y)
    assert len(launched(lib)) == len(kernels)


def double_kernels_of_one_code() -> None:
    """Kernels that compute the same of other tensors are loaded once, and launched each with its own."""
    lib = library()
    lib.double_pointers(2)
    graph = fg.Graph("alike")
    y = graph.tensor("x", (8, 64))
    for _ in range(6):
        y = graph.exp(y)
    graph.output(y, name="y")
    executable = graph.compile("cuda", fusion=False)
    x, out = (DeviceArray.empty((8, 64), "float32") for _ in range(2))
    lib.double_clear()
    executable(x, out=out)
    loads = log(lib).count("load")
    ways = [each.split()[1:] for each in launched(lib)]
    assert (loads, len(ways)) == (len({k.name for k in executable.plan.kernels}), 6)
    assert loads < 5
    assert (ways[0][0], ways[-1][-1]) == (f"{x.pointer:x}", f"{out.pointer:x}")
    assert all(before[-1] == after[0] for before, after in pairwise(ways))


def double_recorded() -> None:
    lib = library()
    lib.double_pointers(4)
    executable = graph_of_three()
    a, b, c, y = arrays(4)
    out, replay = executable.record(a, b, c, out=y)
    assert out is y
    assert launched(lib) == [f"(nil): {pointers(a, b, c, y)}", f"{CAPTURING:#x}: {pointers(a, b, c, y)}"]
    replay(9)
    assert log(lib) == ["graph 0x9 on 0"]


def double_threads_and_streams() -> None:
    """Calls of one executable from several threads, each with its own arrays and stream: none sees another's."""
    lib = library()
    lib.double_pointers(4)
    executable = graph_of_three()
    given = [arrays(4) for _ in range(4)]
    calls = 20
    lib.double_clear()

    def work(number: int) -> None:
        *inputs, y = given[number]
        for _ in range(calls):
            executable(*inputs, out=y, stream=number + 1)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = [line for line in log(lib) if line.startswith("kernel")]
    assert len(seen) == 4 * calls
    for number in range(4):
        assert seen.count(f"kernel {pointers(*given[number])}") == calls


def double_threads_on_one_stream() -> None:
    """Calls on one stream share a workspace: the kernels of one are queued without another's between them.  Threads'
    own streams have one handle, and are not one stream.
    """
    lib = library()
    lib.double_pointers(2)
    executable = network()
    given = [[DeviceArray.empty((8, 64), "float32") for _ in range(2)] for _ in range(4)]
    for x, y in given:
        executable(x, out=y)
    calls, between = 10, set()

    def work(x: DeviceArray, y: DeviceArray) -> None:
        for _ in range(calls):
            executable(x, out=y)

    def run(target: Any) -> None:
        threads = [threading.Thread(target=target, args=each) for each in given]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    lib.double_clear()
    lib.double_dawdle(100)
    run(work)
    lib.double_dawdle(0)
    # A graph of recorded kernels is queued as a whole; the others are, too.
    seen = [line.split()[1:] for line in log(lib) if line.startswith("kernel")]
    graphs = sum(line.startswith("graph") for line in log(lib))
    assert graphs
    assert len(seen) == 4 * (4 * calls - graphs + 4)  # the double runs what it should only record
    ends = {f"{x.pointer:x}": f"{y.pointer:x}" for x, y in given}
    for n in range(0, len(seen), 4):
        assert ends[seen[n][0]] == seen[n + 3][-1]
        assert seen[n + 1 : n + 3] == seen[1:3]
    lock, every = threading.Lock(), threading.Barrier(4)

    def on_its_own(x: DeviceArray, y: DeviceArray) -> None:
        with lock:
            lib.double_clear()
            executable(x, out=y, stream=2)
            between.add(launched(lib)[0].split()[-1])
        every.wait()  # all threads live at once

    run(on_its_own)
    assert len(between) == 4


def double_lifetimes() -> None:
    """An executable's module goes with it at once, though calls have been prepared; arrays are not kept."""
    lib = library()
    executable = graph_of_three()
    given = arrays(4)
    executable(*given[:3], out=given[3])
    live = lib.double_live()
    del given
    assert live - lib.double_live() == 4
    gc.disable()
    lib.double_clear()
    del executable
    gc.enable()
    assert "unload" in log(lib)


def double_host_time() -> None:
    """Generous, for slow and busy machines: about 2 us is what a call takes besides the driver."""
    library()
    ctypes.CDLL("libcuda.so.1").double_pointers(0)
    executable = graph_of_three()
    a, b, c, y = arrays(4)
    best = float("inf")
    for _ in range(50):
        began = time.perf_counter()
        for _ in range(20):
            executable(a, b, c, out=y)
        best = min(best, (time.perf_counter() - began) / 20)
    assert best < 30e-6, best


DOUBLES = [value for name, value in dict(globals()).items() if name.startswith("double_")]


def every_double() -> None:
    """All of them in one process: most of their time is its start."""
    for function in DOUBLES:
        print(function.__name__)
        function()


@pytest.mark.slow
def test_with_the_double() -> None:
    assert run_double("test_calls", "every_double").split() == [f.__name__ for f in DOUBLES]


# ---- building from the disk cache


def test_a_warm_build_is_quick(tmp_path: Path) -> None:
    """The Python of it, imports done: from the graph to the cubin read from disk.  Some 2 ms on a quiet machine."""

    def build() -> bool:
        graph = fg.Graph("warm")
        a, b, c = (graph.tensor(name, (1024, 1024)) for name in "abc")
        graph.output(graph.sigmoid(a + b * c), name="y")
        executable: Any = graph.compile("cuda", target="sm_90a", cache=DiskCache(tmp_path))  # a cache without a memory
        return bool(executable.kernels[0].cached)

    assert not build()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        assert build()
        times.append(time.perf_counter() - began)
    assert min(times) < 0.03, times
