"""Barriers in shared memory, named barriers and warpgroups on the CPU: results, and every way of going wrong."""

from __future__ import annotations

import re

import numpy as np
import pytest
from cluster_kernels import barrier_cases, cluster_cases, pipeline

from codegen.cpu import GuardedArray
from codegen.spec import KernelSource
from fusegraph.errors import KernelError
from fusegraph.runtime.cache import default_cache
from fusegraph.runtime.host_compiler import CpuModule, Order, build
from fusegraph.runtime.nvrtc import compile_kernels

pytestmark = pytest.mark.slow

CASES = {case.name: case for case in barrier_cases()}
HASTY = {f"without_{what}": pipeline(f"without_{what}", skip=what) for what in ("full", "empty")}

#: Kernels that go wrong: name -> (what the error says, code), of one warp or as many threads as THREADS says.
WRONG = {
    "no_barrier": ("was not initialised", "barrier_arrive(one);"),
    "poisoned": ("was not initialised", "barrier_wait(one, 0);"),
    "twice": ("initialised before", "first { barrier_init(one, 1); barrier_init(one, 1); }"),
    "no_arrivals": ("0 arrivals; 1 to 1048575", "barrier_init(one, 0);"),
    "not_shared": (
        "the barrier, 8 bytes at .* is not in the block's shared memory",
        "Barrier here; barrier_init(here, 1);",
    ),
    "misaligned": (
        "not aligned to 8 bytes",
        "barrier_init(*reinterpret_cast<Barrier*>(reinterpret_cast<char*>(&one) + 4), 1);",
    ),
    "overwritten": (
        "was overwritten; it holds 0x0000000000000000",
        "first { barrier_init(one, 1); one.state = 0; barrier_arrive(one); }",
    ),
    "parity": ("parity 2; 0 or 1", "first { barrier_init(one, 1); barrier_wait(one, 2); }"),
    "too_many": (
        "more than 2 arrivals in phase 0",
        "first { barrier_init(one, 2); barrier_expect(one, 16); barrier_arrive(one); barrier_arrive(one); }",
    ),
    "too_many_bytes": ("cannot count 2097152 bytes", "first { barrier_init(one, 1); barrier_expect(one, 1u << 21); }"),
    "unfinished": (
        "the block ends while the barrier .* misses 64 bytes",
        "first { barrier_init(one, 1); barrier_expect(one, 64); }",
    ),
    "too_few": (
        r"deadlock.*threads 0-31 wait in barrier_wait at too_few.cu:\d+ "
        r".*phase 0: 1 of 33 arrivals and 0 bytes are missing",
        "first barrier_init(one, 33); __syncwarp(); barrier_arrive(one); barrier_wait(one, 0);",
    ),
    "named_zero": ("barrier 0 for 32 threads", "named_barrier_sync(0, 32);"),
    "named_sixteen": ("barrier 16 for 32 threads", "named_barrier_arrive(16, 32);"),
    "named_odd": ("barrier 1 for 31 threads", "named_barrier_sync(1, 31);"),
    "half_a_warpgroup": ("no whole warpgroup", "registers_increase<64>();"),
    "too_many_registers": (
        "registers_increase at .*: the block's warpgroups want 66560 registers together, it has 64512 at launch",
        "if (threadIdx.x < 128) registers_decrease<40>(); else registers_increase<240>();",
    ),
    "registers_kept": (  # by a warpgroup that gives nothing away
        "the block's warpgroups want 74752 registers together, it has 65536 at launch",
        "if (threadIdx.x >= 128) return; registers_increase<200>();",
    ),
    "registers_twice": (
        "the warpgroup was given 24 registers a thread before",
        "registers_decrease<24>(); registers_decrease<24>();",
    ),
    "missed": (
        "the barrier .* completed phase 1 before the thread saw that the one waited for was done",
        "first barrier_init(one, 1); __syncwarp();\n"
        "    if (threadIdx.x == 16) for (int i = 0; i < 2; ++i) barrier_arrive(one);\n"
        "    else barrier_wait(one, 0);",
    ),
}
THREADS = {"too_many_registers": 384, "registers_kept": 512, "registers_twice": 128}
_WRONG = """
#include "mbarrier.cuh"
#include "warpgroup.cuh"

#define first if (threadIdx.x == 0)

extern "C" __global__ void {name}(int* out)
{{
    __shared__ Barrier one;
    {code}
}}
"""


@pytest.fixture(scope="module")
def module() -> CpuModule:
    sources = [case.source for case in [*CASES.values(), *HASTY.values()]]
    for name, (_, code) in WRONG.items():
        block = (THREADS.get(name, 32), 1, 1)
        sources.append(KernelSource(name, _WRONG.format(name=name, code=code), (1, 1, 1), block, 0, True))
    loop = _WRONG.format(name="loop", code="barrier_init(one, 1);")
    return build([*sources, KernelSource("loop", loop, (1, 1, 1), (32, 1, 1))], cache=default_cache())


@pytest.mark.parametrize("order", ["forward", "reverse", "late"])
@pytest.mark.parametrize("name", CASES)
def test_results(module: CpuModule, name: str, order: Order) -> None:
    case = CASES[name]
    arrays = [GuardedArray(array) for array in case.arrays]
    module.launch(name, [array.pointer for array in arrays], order=order)
    for array, expected in zip(arrays, case.expected):
        np.testing.assert_array_equal(array.array, expected)


@pytest.mark.parametrize(("name", "wrong_in"), [("without_full", "forward"), ("without_empty", "reverse")])
def test_a_missing_wait_shows(module: CpuModule, name: str, wrong_in: Order) -> None:
    case = HASTY[name]
    arrays = [GuardedArray(array) for array in case.arrays]
    try:
        module.launch(name, [array.pointer for array in arrays], order=wrong_in)
    except KernelError as error:
        assert re.search("still writes|announced too few|ends|arrivals", str(error))  # noqa: PT017 - or else wrong
    else:
        assert not np.array_equal(arrays[1].array, case.expected[1])


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize("name", WRONG)
def test_errors(module: CpuModule, name: str, order: Order) -> None:
    with pytest.raises(KernelError, match=re.compile(WRONG[name][0], re.DOTALL)):
        module.launch(name, [0], order=order)


def test_a_late_warp_misses_a_phase() -> None:
    """One thread gives a stage away that other warps of its warpgroup may not have waited for."""
    code = """
#include "mbarrier.cuh"
#include "warpgroup.cuh"

extern "C" __global__ void hasty(int* out)
{
    __shared__ Barrier full, empty;
    if (threadIdx.x == 0) {
        barrier_init(full, 1);
        barrier_init(empty, 1);
        barrier_fence_init();
    }
    __syncthreads();
    for (int k = 0; k < 4; ++k) {
        if (threadIdx.x == 0) {
            barrier_wait(empty, k % 2 ^ 1);
            barrier_arrive(full);
        } else if (threadIdx.x >= 128) {
            barrier_wait(full, k % 2);
            MEET
            if (threadIdx.x == 128) barrier_arrive(empty);
        }
    }
}
"""
    kernels = {name: code.replace("hasty", name) for name in ("hasty", "together")}
    kernels["hasty"] = kernels["hasty"].replace("MEET", "")
    kernels["together"] = kernels["together"].replace("MEET", "named_barrier_sync(1, 128);")
    sources = [KernelSource(name, text, (1, 1, 1), (256, 1, 1), 0, True) for name, text in kernels.items()]
    module = build(sources, cache=default_cache())
    orders: tuple[Order, ...] = ("forward", "reverse", "late")
    for order in orders:
        module.launch("together", [0], order=order)
    for order in orders[:2]:
        module.launch("hasty", [0], order=order)
    with pytest.raises(KernelError, match=r"deadlock|completed phase"):
        module.launch("hasty", [0], order="late")


def test_kernels_without_fibers_have_no_barriers(module: CpuModule) -> None:
    with pytest.raises(KernelError, match="uses_barriers=False"):
        module.launch("loop", [0])


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120"])
def test_all_compile(arch: str) -> None:
    sources = [case.source for case in [*barrier_cases(), *cluster_cases()]]
    if arch == "sm_120":  # has no registers to move
        sources = [source for source in sources if "registers_" not in source.code]
    for kernel in compile_kernels(sources, arch):
        assert kernel.spill_bytes == 0
        assert not kernel.warnings
