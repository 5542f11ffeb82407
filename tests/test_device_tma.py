"""Tensor copies on the CPU against NumPy, every way of going wrong, and tensor maps that cannot be."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from tma_kernels import Case, cases, describe, sample

from codegen.cpu import GuardedArray
from codegen.spec import KernelSource, TensorMap
from codegen.tensor_map import refusal
from fusegraph.errors import KernelError
from fusegraph.runtime.cache import default_cache
from fusegraph.runtime.host_compiler import CpuModule, Order, build
from fusegraph.runtime.nvrtc import compile_kernels
from fusegraph.runtime.tensor_map import encode_for_cpu

pytestmark = pytest.mark.slow

CASES = {case.name: case for case in cases()}


@pytest.fixture(scope="module")
def module() -> CpuModule:
    return build([case.source for case in CASES.values()], cache=default_cache())


def run(module: CpuModule, case: Case, order: Order) -> list[GuardedArray]:
    arrays = [GuardedArray(array, name=f"argument {i}") for i, array in enumerate(case.arrays)]
    module.launch(case.name, [array.pointer for array in arrays], order=order)
    return arrays


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize("name", CASES)
def test_copies(module: CpuModule, name: str, order: Order) -> None:
    case = CASES[name]
    for array, expected in zip(run(module, case, order), case.expected):
        np.testing.assert_array_equal(array.array.view(np.uint8), expected.view(np.uint8))
        assert array.damage() is None


def test_cases_tell_swizzles_apart() -> None:
    """A load that ignored the swizzle, or took it from another address, would show; every case changes something."""
    outputs = [case.expected[2] for name, case in CASES.items() if re.match("tile_2d_", name)]
    assert len({output.tobytes() for output in outputs}) == len(outputs)
    for case in CASES.values():
        assert any((a.view(np.uint8) != e.view(np.uint8)).any() for a, e in zip(case.arrays, case.expected))


HALF = sample((37, 72), np.float16)
MAP = describe(HALF, (64, 8), 128)
IM2COL = describe(sample((2, 5, 6, 64), np.float16), (64, 8), 128, steps=(1, 1, 1, 1), lower=(-1, -1), upper=(-1, -1))
ANY, FORWARD = ("forward", "reverse"), ("forward",)

#: Kernels that go wrong: name -> (orders, what the error says, thread 0's code).  `full` is a barrier for one arrival.
WRONG = {
    "misaligned": (
        ANY,
        "shared memory, .* is not a multiple of 128",
        "expect(1024); tma_load(shared + 64, map, full, 0, 0);",
    ),
    "past_the_end": (ANY, "is not in the block's shared memory", "tma_load(shared + 2048, map, full, 0, 0);"),
    "not_shared": (ANY, "is not in the block's shared memory", "tma_load(out, map, full, 0, 0);"),
    "wrong_rank": (ANY, "3 coordinates for a tensor map of 2", "tma_load(shared, map, full, 0, 0, 0);"),
    "misaligned_coordinate": (
        ANY,
        r"tma_load at .*: coordinate 0 is -4; it must be a multiple of 8",
        "tma_load(shared, map, full, -4, 0);",
    ),
    "misaligned_channel": (
        ANY,
        "coordinate 0 is 4; it must be a multiple of 8",
        "tma_load_im2col(shared, im2col, full, 4, 0, 0, 0, uint16(0), uint16(0));",
    ),
    "misaligned_store": (
        ANY,
        "tma_store at .*: coordinate 0 is 1; it must be a multiple of 8",
        "fence_async_shared(); tma_store(map, shared, 1, 0);",
    ),
    "not_im2col": (ANY, "not for im2col", "tma_load_im2col(shared, map, full, 0, 0, 0, uint16(0));"),
    "not_tiled": (ANY, "the tensor map is for im2col", "tma_load(shared, im2col, full, 0, 0, 0, 0);"),
    "outside_corners": (
        ANY,
        "coordinate 1 is 5; the corners of the tensor map hold it within -1 and 4",
        "tma_load_im2col(shared, im2col, full, 0, 5, 0, 0, uint16(0), uint16(0));",
    ),
    "no_tensor_map": (ANY, "the map is no tensor map", "TensorMap none = {}; tma_load(shared, none, full, 0, 0);"),
    "no_fence_init": (
        ANY,
        "initialised without barrier_fence_init",
        "barrier_init(other, 1); tma_load(shared, map, other, 0, 0);",
    ),
    "no_barrier": (ANY, "was not initialised", "tma_load(shared, map, other, 0, 0);"),
    "wrong_mask": (ANY, "the mask 0x2 names blocks", "tma_load_multicast(shared, map, full, 0, 0, uint16(2));"),
    "too_few_bytes": (
        ANY,
        "got 512 bytes more than barrier_expect announced",
        "expect(512); tma_load(shared, map, full, 0, 0); barrier_wait(full, 0);",
    ),
    "too_many_bytes": (
        ANY,
        "deadlock.*phase 0: 0 of 1 arrivals and 1024 bytes are missing",
        "expect(2048); tma_load(shared, map, full, 0, 0); barrier_wait(full, 0);",
    ),
    "bytes_of_two": (
        ANY,
        "announced too few|and -1024 bytes are missing",
        "expect(1024); tma_load(shared, map, full, 0, 0); tma_load(shared + 1024, map, full, 0, 8);"
        "barrier_wait(full, 0); barrier_wait(full, 1);",
    ),
    "same_bytes": (
        FORWARD,
        "still writes to these bytes",
        "expect(2048); tma_load(shared, map, full, 0, 0); tma_load(shared, map, full, 0, 8); barrier_wait(full, 0);",
    ),
    "ends_before": (FORWARD, "ends before the copy", "expect(1024); tma_load(shared, map, full, 0, 0);"),
    "no_fence": (
        ANY,
        "without fence_async_shared",
        "shared[0] = 1; tma_store(map, shared, 0, 0); tma_commit(); tma_wait<0>();",
    ),
    "no_second_fence": (
        ANY,
        "without fence_async_shared",
        "shared[0] = 1; fence_async_shared(); tma_store(map, shared, 0, 0); tma_commit(); tma_wait<0>();"
        "shared[0] = 2; tma_store(map, shared, 0, 0); tma_commit(); tma_wait<0>();",
    ),
    "no_wait": (
        ANY,
        "tma_wait_read<0> must come before",
        "fence_async_shared(); tma_store(map, shared, 0, 0); tma_commit();",
    ),
    "no_commit": (
        ANY,
        "tma_commit and tma_wait_read<0> must",
        "fence_async_shared(); tma_store(map, shared, 0, 0); tma_wait<0>();",
    ),
    "waits_for_older": (
        ANY,
        "tma_wait_read<0> must come before",
        "fence_async_shared(); tma_store(map, shared, 0, 0); tma_commit(); tma_store(map, shared + 1024, 0, 8);"
        "tma_commit(); tma_wait_read<1>();",
    ),
    "no_sum": (ANY, "cannot be added", "fence_async_shared(); tma_store_add(bytes, shared, 0, 0);"),
    "bulk_misaligned": (ANY, "global memory, .* is not a multiple of 16", "bulk_load(shared, out + 1, 16, full);"),
    "bulk_bytes": (ANY, "bytes is not a multiple of 16", "bulk_load(shared, out, 24, full);"),
    "past_the_tensor": (
        ANY,
        "read out of bounds",
        "expect(1024); tma_load(shared, map, full, 0, 37); barrier_wait(full, 0);",
    ),
}

_WRONG = """
#include "tma.cuh"

extern "C" __global__ void {name}(const __grid_constant__ TensorMap map, const __grid_constant__ TensorMap im2col,
                                  const __grid_constant__ TensorMap bytes, uint32* out)
{{
    FUSEGRAPH_DYNAMIC_SHARED(shared);
    __shared__ Barrier full, other;
    const auto expect = [&](uint32 bytes) {{ barrier_expect(full, bytes); }};
    if (threadIdx.x != 0) return;
    barrier_init(full, 1);
    barrier_fence_init();
    {code}
}}
"""


def wrong_kernel(name: str, code: str) -> KernelSource:
    # The map says that the array has more rows than it has, which only past_the_tensor looks at.
    longer = replace(MAP, sizes=(72, 1037))
    maps = (longer, replace(IM2COL, argument=1), replace(MAP, argument=0, element="int8", box=(128, 8)), 2)
    return KernelSource(name, _WRONG.format(name=name, code=code), (1, 1, 1), (32, 1, 1), 2048, True, maps)


@pytest.fixture(scope="module")
def wrong() -> CpuModule:
    sources = [wrong_kernel(name, code) for name, (_, _, code) in WRONG.items()]
    return build([*sources, *DATA.values()], cache=default_cache())


@pytest.mark.parametrize("name", WRONG)
def test_errors(wrong: CpuModule, name: str) -> None:
    orders, message, _ = WRONG[name]
    for order in orders:
        arrays = [GuardedArray(HALF), GuardedArray(sample((2, 5, 6, 64), np.float16)), GuardedArray(np.zeros(64))]
        with pytest.raises(KernelError, match=re.compile(message, re.DOTALL)):
            wrong.launch(name, [array.pointer for array in arrays], order=order)


_DATA = """
#include "tma.cuh"

extern "C" __global__ void {name}(const __grid_constant__ TensorMap map, const __grid_constant__ TensorMap to,
                                  uint32* out)
{{
    FUSEGRAPH_DYNAMIC_SHARED(shared);
    __shared__ Barrier full;
    uint32* const words = reinterpret_cast<uint32*>(shared);
    if (threadIdx.x == 0) {{
        barrier_init(full, 1);
        barrier_fence_init();
    }}
    __syncthreads();
    {code}
}}
"""
#: Kernels without a wait: results that are wrong in one order.
DATA = {
    name: KernelSource(
        name, _DATA.format(name=name, code=code), (1, 1, 1), (32, 1, 1), 1024, True, (MAP, replace(MAP, argument=1), 2)
    )
    for name, code in {
        "reads_early": """
    if (threadIdx.x == 0) {
        barrier_expect(full, 1024);
        tma_load(shared, map, full, 0, 0);
    }
    __syncthreads();
    out[threadIdx.x] = words[threadIdx.x];
    barrier_wait(full, 0);""",
        "writes_early": """
    for (int i = threadIdx.x; i < 256; i += 32) words[i] = i;
    fence_async_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
        tma_store(to, shared, 0, 0);
        tma_commit();
    }
    __syncthreads();
    words[threadIdx.x] = 0;
    __syncthreads();
    if (threadIdx.x == 0) tma_wait_read<0>();""",
    }.items()
}


def test_reading_before_the_wait_shows(wrong: CpuModule) -> None:
    for order in ("forward", "reverse"):
        out = np.zeros(32, np.uint32)
        arrays = [GuardedArray(HALF), GuardedArray(HALF)]
        wrong.launch("reads_early", [*(array.pointer for array in arrays), out.ctypes.data], order=order)
        assert (out == 0xFFFFFFFF).all() == (order == "forward")


def test_writing_before_the_wait_shows(wrong: CpuModule) -> None:
    words = np.arange(256, dtype=np.uint32).view(np.uint8)
    results = []
    for order in ("forward", "reverse"):
        arrays = [GuardedArray(HALF), GuardedArray(HALF), GuardedArray(np.zeros(32, np.uint32))]
        wrong.launch("writes_early", [array.pointer for array in arrays], order=order)
        results.append(arrays[1].array[:8, :64].tobytes())
    assert results[0] != results[1]
    assert sorted(results[1]) == sorted(words.tobytes())


def changed(described: TensorMap, **fields: object) -> TensorMap:
    return replace(described, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("described", "reason"),
    [
        (changed(MAP, element="half"), "'half' is none of"),
        (changed(MAP, sizes=(72,), strides=(), steps=(1,), box=(64,)), "1 dimensions"),
        (changed(MAP, strides=(144, 144)), "2 strides"),
        (changed(MAP, sizes=(72, 0)), "a size is 0"),
        (changed(MAP, steps=(1, 9)), "a step is 9"),
        (changed(MAP, steps=(2, 1)), "innermost dimension is 2"),
        (changed(MAP, strides=(148,)), "a stride is 148 bytes"),
        (changed(MAP, offset=8), "begins 8 bytes"),
        (changed(MAP, swizzle=16), "swizzle is 16"),
        (changed(MAP, box=(4, 8)), "has 8 bytes; multiples of 16"),
        (changed(MAP, box=(72, 8)), "144 bytes, more than the 128"),
        (changed(MAP, box=(64, 257)), "spans 257 elements"),
        (changed(MAP, box=(64, 100), steps=(1, 3)), "spans 100 elements in steps of 3"),
        (changed(MAP, box=(64,)), "1 dimensions and the tensor 2"),
        (changed(MAP, upper=(0,)), "no lower"),
        (changed(MAP, lower=(), upper=()), "im2col takes 3 to 5"),
        (changed(IM2COL, upper=(0,)), "2 and 1 coordinates"),
        (changed(IM2COL, lower=(-129, 0)), "a corner is -129"),
        (changed(IM2COL, upper=(-7, 0)), "leave nothing of 6"),
        (changed(IM2COL, box=(64, 1025)), "(64, 1025)"),
        (changed(IM2COL, steps=(1, 1, 1, 2)), "from image to image is 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_maps_that_cannot_be(described: TensorMap, reason: str) -> None:
    assert reason in (refusal(described) or "")
    with pytest.raises(KernelError, match=re.escape(reason)):
        encode_for_cpu(described, 0, "k")


def test_maps_that_can_be() -> None:
    assert refusal(MAP) is None
    assert refusal(IM2COL) is None
    with pytest.raises(KernelError, match="0x1008, which is no multiple of 16"):
        encode_for_cpu(MAP, 0x1008, "k")


def test_arguments_of_maps_are_addresses(wrong: CpuModule) -> None:
    with pytest.raises(KernelError, match="takes the addresses of 3 arguments"):
        wrong.launch("no_sum", [0, 0])


ALL_COPIES = """
#include "tma.cuh"

extern "C" __global__ void all_copies(const __grid_constant__ TensorMap map, const float* from, float* to)
{
    FUSEGRAPH_DYNAMIC_SHARED(shared);
    __shared__ Barrier full;
    const uint16 mask = 3, offset = uint16(blockIdx.x);
    tma_prefetch(map);
    tma_load(shared, map, full, 1, 2);
    tma_load(shared, map, full, 1, 2, 3);
    tma_load(shared, map, full, 1, 2, 3, 4);
    tma_load(shared, map, full, 1, 2, 3, 4, 5);
    tma_load_multicast(shared, map, full, 1, 2, mask);
    tma_load_multicast(shared, map, full, 1, 2, 3, mask);
    tma_load_multicast(shared, map, full, 1, 2, 3, 4, mask);
    tma_load_multicast(shared, map, full, 1, 2, 3, 4, 5, mask);
    tma_load_im2col(shared, map, full, 1, 2, 3, offset);
    tma_load_im2col(shared, map, full, 1, 2, 3, 4, offset, offset);
    tma_load_im2col(shared, map, full, 1, 2, 3, 4, 5, offset, offset, offset);
    tma_load_im2col_multicast(shared, map, full, 1, 2, 3, offset, mask);
    tma_load_im2col_multicast(shared, map, full, 1, 2, 3, 4, offset, offset, mask);
    tma_load_im2col_multicast(shared, map, full, 1, 2, 3, 4, 5, offset, offset, offset, mask);
    bulk_load(shared, from, 64, full);
    barrier_wait(full, 0);
    fence_async_shared();
    tma_store(map, shared, 1, 2);
    tma_store(map, shared, 1, 2, 3);
    tma_store(map, shared, 1, 2, 3, 4);
    tma_store(map, shared, 1, 2, 3, 4, 5);
    tma_store_add(map, shared, 1, 2);
    tma_store_add(map, shared, 1, 2, 3);
    tma_store_add(map, shared, 1, 2, 3, 4);
    tma_store_add(map, shared, 1, 2, 3, 4, 5);
    bulk_store(to, shared, 64);
    tma_commit();
    tma_wait_read<1>();
    tma_wait<0>();
}
"""


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120"])
def test_every_copy_compiles(arch: str) -> None:
    source = KernelSource("all_copies", ALL_COPIES, (1, 1, 1), (1, 1, 1), 1024)
    (kernel,) = compile_kernels([source], arch)
    assert kernel.spill_bytes == 0
    # Advice on the speed of multicast on later architectures is no concern of the header.
    assert not kernel.warnings
