"""Hand-written kernels on the CPU: results, and every way of going wrong that must become a KernelError."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from cpu_kernels import KERNELS
from graphs import quick

from codegen.cpu import GuardedArray, translation_unit
from codegen.spec import KernelSource
from fusegraph.errors import KernelError
from fusegraph.runtime.cache import DiskCache, default_cache
from fusegraph.runtime.host_compiler import CpuModule, build


@pytest.fixture(scope="module")
def cache() -> DiskCache:
    return default_cache()


@pytest.fixture(scope="module", params=quick("native", "ucontext"))
def module(request: pytest.FixtureRequest, cache: DiskCache) -> CpuModule:
    return build(KERNELS, cache=cache, ucontext=request.param == "ucontext")


@pytest.fixture(autouse=True, params=["1 host thread", "3 host threads"])
def _host_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEGRAPH_CPU_THREADS", request.param.split()[0])


@pytest.fixture
def still_usable(module: CpuModule) -> Iterator[None]:
    """Checks after the test that softmax is still right: an error leaves the runtime usable."""
    yield
    check_softmax(module)


def check_softmax(module: CpuModule, rows: int = 8, columns: int = 500, block: int = 256) -> None:
    x = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    expected = np.exp(x - x.max(1, keepdims=True), dtype=np.float64)
    expected /= expected.sum(1, keepdims=True)
    for order in ("forward", "reverse"):
        y = GuardedArray(np.full_like(x, np.nan))
        guarded = GuardedArray(x, writable=False)
        arguments = [guarded.pointer, y.pointer, columns]
        module.launch("softmax", arguments, grid=(rows, 1, 1), block=(block, 1, 1), order=order)
        np.testing.assert_allclose(y.array, expected, rtol=2e-6)
        assert y.damage() is None


@pytest.mark.slow
def test_native_switch_is_what_this_processor_has(cache: DiskCache) -> None:
    kinds = [build(KERNELS, cache=cache, ucontext=flag).runtime.context_kind for flag in (False, True)]
    native = "x86-64" if os.uname().machine == "x86_64" else "ucontext"
    assert kinds == [native, "ucontext"]


# ---- results


@pytest.mark.parametrize("n", [1, 64, 1000, 0])
def test_pointwise(module: CpuModule, n: int) -> None:
    x, y = GuardedArray(np.arange(n, dtype=np.float32)), GuardedArray(np.full(n, np.nan, np.float32))
    module.launch("scale", [x.pointer, y.pointer, ctypes.c_float(2.5), n], grid=(-(-n // 64), 1, 1))
    np.testing.assert_array_equal(y.array, 2.5 * x.array)
    assert y.damage() is None


@pytest.mark.parametrize(("rows", "block"), [(1, 32), (8, 256), (70, 1024)])
def test_softmax(module: CpuModule, rows: int, block: int) -> None:
    check_softmax(module, rows, 300, block)


@pytest.mark.parametrize("kernel", ["indices", "indices_of_fibers"])
def test_indices_cover_the_grid_once(module: CpuModule, kernel: str) -> None:
    for order in ("forward", "reverse"):
        y = np.zeros((3, 4, 5, 2, 3, 4), np.uint32)
        module.launch(kernel, [y.ctypes.data], grid=(5, 4, 3), order=order)
        bz, by, _, tz, ty, _ = np.indices(y.shape)
        np.testing.assert_array_equal(y, 1 + by + 10 * bz + 100 * ty + 1000 * tz)


def test_dynamic_shared_memory(module: CpuModule) -> None:
    x, y = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    module.launch("dynamic_reverse", [x.ctypes.data, y.ctypes.data, 64])
    np.testing.assert_array_equal(y, x[::-1])


def test_collectives(module: CpuModule) -> None:
    for order in ("forward", "reverse"):
        results = np.full((64, 9), -1, np.int32)
        module.launch("collectives", [results.ctypes.data], order=order)
        t = np.arange(64)
        lane, warp = t % 32, t // 32
        expected = {
            0: 32 * warp + 3,
            1: t // 8 * 8 + 3,
            2: np.where(t % 16 < 2, t, t - 2),
            3: t ^ 5,
            4: np.where(lane >= 16, t ^ 16, t),  # a later segment gives the lane's own value, an earlier one its own
            5: np.array([sum(1 << i for i in range(32) if (32 * w + i) % 3 == 0) for w in warp]).astype(np.int32),
            6: warp,
            7: t ^ 1,
            8: np.where(lane == 0, t, t - 1),
        }
        for column, values in expected.items():
            np.testing.assert_array_equal(results[:, column], values, err_msg=f"result {column}, {order}")


def test_warp_with_fewer_lanes(module: CpuModule) -> None:
    y = np.zeros(48, np.int32)
    module.launch("part_of_a_warp", [y.ctypes.data])
    np.testing.assert_array_equal(y, np.arange(48).reshape(3, 16).sum(1).repeat(16))


def test_named_barriers_hand_over(module: CpuModule) -> None:
    for order in ("forward", "reverse"):
        y = np.full((9, 32), -1, np.int32)
        module.launch("producer_consumer", [y.ctypes.data, 9], order=order)
        np.testing.assert_array_equal(y, np.repeat(np.arange(9) ** 2, 32).reshape(9, 32))


def test_wait_until(module: CpuModule) -> None:
    for order in ("forward", "reverse"):
        y = np.zeros(64, np.int32)
        module.launch("wait_for_flag", [y.ctypes.data, 1], order=order)
        assert (y == 7).all()


def test_intrinsics(module: CpuModule) -> None:
    x, y = np.array([0x00F12340], np.uint32), np.zeros(12, np.int64)
    module.launch("intrinsics", [x.ctypes.data, y.ctypes.data])
    u = int(x[0])
    assert y.tolist() == [7, u * u >> 32, 3, 2**63 - 1, 0, -(2**63), 2, -(2**62), -3, 4, 3, 2]


def test_alignment_of_shared_variables(module: CpuModule) -> None:
    y = np.zeros(1, np.uint64)
    module.launch("alignments", [y.ctypes.data], grid=(200, 1, 1))
    assert y[0] == 0


def test_atomics_over_blocks(module: CpuModule) -> None:
    total, largest = np.zeros(1, np.uint32), np.full(1, -5, np.int32)
    module.launch("count_atomically", [a.ctypes.data for a in (total, largest)])
    assert (total[0], largest[0]) == (32000, 31999)


def test_last_block_is_one(module: CpuModule) -> None:
    counter, done = np.zeros(1, np.uint32), np.zeros(1, np.int32)
    x, y = np.arange(64, dtype=np.int32), np.zeros((64, 64), np.int32)
    module.launch("last_block", [a.ctypes.data for a in (counter, done, x, y)])
    assert done[0] == 1
    assert (y == x).all()


def test_shared_memory_is_poisoned_before_each_block(module: CpuModule) -> None:
    y = np.zeros(16, np.uint32)
    module.launch("poisoned", [y.ctypes.data])
    assert (y == 0xFFFFFFFF).all()


def test_shared_memory_is_left_alone_without_poison(module: CpuModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEGRAPH_CPU_THREADS", "1")
    y = np.zeros(16, np.uint32)
    module.launch("poisoned", [y.ctypes.data], poison=False)
    assert (y == 1).all()  # what the block before wrote


def test_launches_from_several_python_threads(module: CpuModule) -> None:
    failures: list[BaseException] = []

    def work(wrong: bool) -> None:
        try:
            for _ in range(5):
                check_softmax(module, 4, 100, 64)
                if wrong:
                    with pytest.raises(KernelError, match="deadlock"):
                        module.launch("divergent", [3])
                    with pytest.raises(KernelError, match="null pointer"):
                        module.launch("write_at", [0, 0])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i % 2 == 1,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# ---- what a missing barrier looks like


def test_missing_barrier_shows(module: CpuModule) -> None:
    x = np.arange(1024, dtype=np.float32)
    for order in ("forward", "reverse"):
        y = np.zeros((32, 32), np.float32)
        module.launch("transpose", [x.ctypes.data, y.ctypes.data], order=order)
        np.testing.assert_array_equal(y, x.reshape(32, 32).T)
        module.launch("transpose_racy", [x.ctypes.data, y.ctypes.data], order=order)
        assert np.isnan(y).any()


def test_missing_barrier_of_a_read_before_a_write_shows_by_order(module: CpuModule) -> None:
    results = []
    for order in ("forward", "reverse"):
        y = np.arange(64, dtype=np.float32)
        module.launch("rotate_racy", [y.ctypes.data], order=order)
        results.append(y)
    assert not np.isnan(results).any()
    assert (results[0] != results[1]).any()


# ---- deadlocks


@pytest.mark.usefixtures("still_usable")
class TestDeadlock:
    def test_barrier_while_others_exited(self, module: CpuModule) -> None:
        with pytest.raises(KernelError) as caught:
            module.launch("divergent", [32])
        text = str(caught.value)
        assert "kernel divergent, block (0, 0, 0)" in text
        assert "threads 0-31 wait in __syncthreads at divergent.cu:2 (barrier 0, 32 of 64 threads arrived)" in text
        assert "threads 32-63 have exited" in text

    def test_waiting_at_different_barriers(self, module: CpuModule) -> None:
        with pytest.raises(
            KernelError, match=r"threads 0-31 wait in bar\.sync .*; threads 32-63 wait in __syncthreads"
        ):
            module.launch("wait_elsewhere", [])

    def test_shuffle_with_an_exited_lane(self, module: CpuModule) -> None:
        with pytest.raises(KernelError, match=r"threads 0-4, 6-31 wait in __shfl_sync .*thread 5 has exited"):
            module.launch("shuffle_after_exit", [np.zeros(1, np.int32).ctypes.data])

    def test_waiting_for_what_never_happens(self, module: CpuModule) -> None:
        with pytest.raises(KernelError, match=r"threads 0-63 wait in wait for flag at wait_for_flag\.cu:7"):
            module.launch("wait_for_flag", [np.zeros(64, np.int32).ctypes.data, 0])


# ---- misuse of barriers and shuffles


@pytest.mark.usefixtures("still_usable")
class TestMisuse:
    def test_shuffle_from_a_lane_that_is_not_there(self, module: CpuModule) -> None:
        with pytest.raises(KernelError, match=r"thread \(32, 0, 0\): __shfl_xor_sync .* reads lane 16"):
            module.launch("shuffle_outside", [np.zeros(48, np.int32).ctypes.data])

    def test_mask_without_the_caller(self, module: CpuModule) -> None:
        with pytest.raises(KernelError, match=r"thread \(4, 0, 0\): .*does not name the calling lane 4"):
            module.launch("shuffle_not_named", [np.zeros(1, np.int32).ctypes.data])

    def test_lanes_meet_in_different_functions(self, module: CpuModule) -> None:
        with pytest.raises(KernelError, match=r"meet in __ballot_sync at .* and in __syncwarp"):
            module.launch("mixed_meeting", [np.zeros(1, np.int32).ctypes.data])

    @pytest.mark.parametrize(("barrier", "count", "message"), [(16, 64, "has 16"), (1, 65, "in a block of 64")])
    def test_barrier_out_of_range(self, module: CpuModule, barrier: int, count: int, message: str) -> None:
        with pytest.raises(KernelError, match=message):
            module.launch("bad_barrier", [barrier, count])

    def test_barrier_for_two_counts(self, module: CpuModule) -> None:
        with pytest.raises(KernelError, match=r"thread \(32, 0, 0\): .*for 32 threads here and for 64 where"):
            module.launch("two_counts", [])

    def test_barrier_in_a_kernel_said_to_have_none(self, module: CpuModule) -> None:
        with pytest.raises(KernelError, match="uses_barriers=False"):
            module.launch("no_fibers", [])


# ---- memory


@pytest.mark.usefixtures("still_usable")
class TestMemory:
    def test_read_past_the_end(self, module: CpuModule) -> None:
        x = GuardedArray(np.zeros(100, np.float32), name="x")
        y = np.zeros(64, np.float32)
        module.launch("read_at", [x.pointer, y.ctypes.data, 36])
        with pytest.raises(KernelError) as caught:
            module.launch("read_at", [x.pointer, y.ctypes.data, 37])
        text = str(caught.value)
        assert "kernel read_at, block (0, 0, 0), thread (63, 0, 0): read out of bounds" in text
        assert text.endswith("0 bytes past the end of x (float32 [100], 400 bytes)")

    def test_read_before_the_start(self, module: CpuModule) -> None:
        x = GuardedArray(np.zeros(100, np.float32), flush="start", name="x")
        with pytest.raises(KernelError, match=r"thread \(0, 0, 0\): read out of bounds.*4 bytes before the start of x"):
            module.launch("read_at", [x.pointer, np.zeros(64, np.float32).ctypes.data, -1])

    def test_write_past_the_end(self, module: CpuModule) -> None:
        y = GuardedArray(np.zeros(100, np.float32), name="y")
        with pytest.raises(
            KernelError, match=r"write_at, block \(2, 0, 0\), thread \(17, 0, 0\): write .*4 bytes past the end of y"
        ):
            module.launch("write_at", [y.pointer, 101])

    def test_write_to_an_input(self, module: CpuModule) -> None:
        x = GuardedArray(np.zeros(100, np.float32), writable=False, name="x")
        with pytest.raises(KernelError, match=r"write out of bounds.*byte 40 of x"):
            module.launch("write_at", [x.pointer, 10])

    def test_write_into_the_padding_is_damage(self, module: CpuModule) -> None:
        y = GuardedArray(np.zeros(101, np.float32), name="y")  # 404 bytes, 12 short of a multiple of 16
        module.launch("write_at", [y.pointer, 102])
        damage = y.damage()
        assert damage is not None
        assert "4 bytes past the end" in damage

    def test_null_pointer(self, module: CpuModule) -> None:
        with pytest.raises(KernelError, match="write through a null pointer"):
            module.launch("write_at", [0, 3])

    def test_misaligned_access(self, module: CpuModule) -> None:
        address = GuardedArray(np.zeros(100, np.float32)).pointer
        module.launch("vector_at", [address, 16])
        with pytest.raises(KernelError, match=r"access of 16 bytes at .* not 16-byte aligned \(vector_at\.cu:2\)"):
            module.launch("vector_at", [address + 4, 16])

    @pytest.mark.parametrize("write", [0, 1])
    def test_past_the_dynamic_shared_memory(self, module: CpuModule, write: int) -> None:
        y = np.zeros(1, np.uint8)
        module.launch("dynamic_at", [y.ctypes.data, 1023, write], shared_bytes=1024)
        kind = "write" if write else "read"
        with pytest.raises(KernelError, match=f"{kind} out of bounds: byte 1024 of 1024 bytes of dynamic shared"):
            module.launch("dynamic_at", [y.ctypes.data, 1024, write], shared_bytes=1024)

    def test_write_just_past_the_dynamic_shared_memory(self, module: CpuModule) -> None:
        with pytest.raises(KernelError, match="byte 100 of 100 bytes of dynamic shared memory was written"):
            module.launch("dynamic_at", [0, 100, 1], shared_bytes=100)

    def test_dynamic_shared_memory_of_a_launch_without(self, module: CpuModule) -> None:
        with pytest.raises(KernelError, match="of which this launch has none"):
            module.launch("dynamic_at", [0, 0, 1])

    def test_stack_overflow(self, module: CpuModule) -> None:
        with pytest.raises(KernelError, match="stack overflow: a thread has 128 KiB"):
            module.launch("large_array", [np.zeros(1, np.int32).ctypes.data, 1000])

    def test_division_by_zero(self, module: CpuModule) -> None:
        with pytest.raises(KernelError, match="division by zero"):
            module.launch("divide", [np.ones(1, np.int32).ctypes.data, 0])

    def test_trap(self, module: CpuModule) -> None:
        with pytest.raises(KernelError, match=r"thread \(3, 0, 0\): __trap"):
            module.launch("trap", [])


@pytest.mark.parametrize("_host_threads", ["3 host threads"], indirect=True)
def test_faults_outside_launches_are_not_caught(cache: DiskCache) -> None:
    """The handlers are gone after a launch: a fault of Python's own still ends the process."""
    program = (
        "import ctypes, pathlib, sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_cpu_run import DiskCache, KERNELS, build, check_softmax\n"
        "check_softmax(build(KERNELS, cache=DiskCache(pathlib.Path(sys.argv[2]))))\nctypes.string_at(8)"
    )
    arguments = [os.path.dirname(__file__), str(cache.folder)]
    result = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True)
    assert result.returncode == -signal.SIGSEGV, result.stderr.decode()


def test_interrupt_ends_a_launch(module: CpuModule) -> None:
    # A shell starts what runs in the background with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            module.launch("slow", [np.zeros(1, np.int32).ctypes.data], grid=(20000, 1, 1))
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    check_softmax(module)


def test_what_a_signal_handler_raises_comes_out(module: CpuModule) -> None:
    class Alarm(Exception):
        pass

    def handler(number: int, _: object) -> None:
        raise Alarm(f"signal {number}")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Alarm, match=f"signal {signal.SIGALRM.value}"):
            module.launch("slow", [np.zeros(1, np.int32).ctypes.data], grid=(20000, 1, 1))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---- guarded arrays


@pytest.mark.parametrize("flush", ["end", "start"])
def test_guarded_copy_keeps_values_and_strides(flush: str) -> None:
    base = np.arange(120, dtype=np.int16).reshape(4, 5, 6)
    for array in (
        base,
        base.transpose(2, 0, 1),
        base[::-1, 1:, ::2],
        base[:0],
        np.array(3.0),
        np.broadcast_to(7, (3, 2)),
    ):
        guarded = GuardedArray(array, flush=flush)  # type: ignore[arg-type]
        np.testing.assert_array_equal(guarded.array, array)
        assert guarded.array.strides == array.strides
        assert guarded.address % 16 == 0
        assert guarded.damage() is None


def test_guarded_array_refuses_a_bad_alignment() -> None:
    with pytest.raises(ValueError, match="alignment 24"):
        GuardedArray(np.zeros(3), alignment=24)


# ---- translation units


def test_kernels_of_one_name_share_a_unit(cache: DiskCache) -> None:
    header = '#include "types.cuh"\n#define STEP {step}\n__device__ int helper(int x) {{ return x + STEP; }}\n'
    entry = 'extern "C" __global__ void add(int* y) { y[threadIdx.x] = helper(y[threadIdx.x]); }\n'
    sources = [KernelSource("add", header.format(step=step) + entry, (1, 1, 1), (8, 1, 1)) for step in (1, 20, 300)]
    module = build(sources, cache=cache)
    y = np.arange(8, dtype=np.int32)
    for index in (2, 0, 1):
        module.launch(index, [y.ctypes.data])
    np.testing.assert_array_equal(y, np.arange(8) + 321)
    with pytest.raises(KernelError, match="3 kernels are called 'add'"):
        module.launch("add", [y.ctypes.data])


def test_struct_parameters_and_small_integers(cache: DiskCache) -> None:
    class Descriptor(ctypes.Structure):
        _fields_ = (("values", ctypes.c_int * 32),)

    code = r"""
struct __align__(64) Descriptor { int values[32]; };
extern "C" __global__ void
take(const __grid_constant__ Descriptor d, short a, unsigned char b, double c, int* y) {
  const Descriptor* p = &d;
  y[0] = reinterpret_cast<unsigned long long>(p) % 64;
  y[1] = p->values[31] + a + b + int(c);
}
"""
    module = build([KernelSource("take", code, (1, 1, 1), (1, 1, 1))], cache=cache)
    y = np.full(2, -1, np.int32)
    module.launch(0, [Descriptor((ctypes.c_int * 32)(*range(32))), -5, 200, ctypes.c_double(1000.5), y.ctypes.data])
    assert y.tolist() == [0, 31 - 5 + 200 + 1000]


def test_unit_refuses_late_includes_and_bad_names() -> None:
    with pytest.raises(ValueError, match=r"kernel k, line 2: #include \"types.cuh\" comes after code"):
        translation_unit([KernelSource("k", 'int x;\n#include "types.cuh"\n', (1, 1, 1), (1, 1, 1))])
    with pytest.raises(ValueError, match="not a C identifier"):
        translation_unit([KernelSource('k"; system("x', "", (1, 1, 1), (1, 1, 1))])
