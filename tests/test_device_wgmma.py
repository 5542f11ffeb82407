"""wgmma on the CPU: results for every layout and type, and every misuse that must become a KernelError."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tensor_kernels import PIPELINE, PIPELINE_SOURCE, WGMMA, Array, Layout, Wgmma, kernel, place, product

from fusegraph.errors import CompileError, KernelError
from fusegraph.runtime.cache import default_cache
from fusegraph.runtime.host_compiler import CpuModule, build
from fusegraph.runtime.nvrtc import compile_kernels

pytestmark = pytest.mark.slow

ORDERS = ("forward", "reverse")

# Right if `wrong` is 0: y [64, 8] = a [64, 64] b [8, 64]^T.
MISUSES = kernel(
    "misuses",
    """#include "shared.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
FUSEGRAPH_WGMMA(8)
FUSEGRAPH_WGMMA(16)

extern "C" __global__ void NAME(const uint64* from, float* y, int wrong) {
  FUSEGRAPH_DYNAMIC_SHARED(image);
  __shared__ __align__(1024) unsigned char variable[1024];
  const int t = threadIdx.x, row = t / 32 * 16 + t % 32 / 4, column = t % 4 * 2;
  for (int i = t; i < 9216 / 8; i += blockDim.x) ((uint64*)image)[i] = from[i];
  if (wrong != 1) fence_async_shared();
  __syncthreads();
  float d[4] = {}, wide[8] = {};
  const unsigned char* b = image + 8192;
  if (wrong == 2) b = variable;
  if (wrong == 3) b = image + 8;
  if (wrong == 4) b = image + 8192 + 128;
  if (wrong == 5) b = image + 9216 - 16;
  if (wrong == 6) b = image + 8192 + 112;
  uint64 of_a = matrix_descriptor<128>(image, 16, 1024), of_b = matrix_descriptor<128>(b, 16, wrong == 7 ? 8 : 1024);
  if (wrong == 8) of_a += 2048 >> 4;  // the last rows are those of b, and what follows
  if (wrong == 9) of_b |= 1ull << 49;
  if (wrong == 10) of_b = 0;
  if (wrong == 11 && t == 100) of_b += 2;
  if (wrong != 12) wgmma_fence();
  if (wrong != 13 || t != 77)
    for (int k = 0; k < 4; ++k) {
      wgmma<bfloat16, bfloat16, 8>(d, of_a + 2 * k, of_b + 2 * k, wrong == 14 && t == 5 ? true : k != 0);
      if (wrong == 15 && k == 1) d[1] += 1;
    }
  if (wrong == 16) wgmma<bfloat16, bfloat16, 16>(wide, of_a, of_a, false);
  if (wrong == 17) wgmma<bfloat16, bfloat16, 16>(*(float (*)[8])d, of_a, of_a, false);
  uint32 registers[4] = {1, 2, 3, 4};
  if (wrong == 25) wgmma<bfloat16, bfloat16, 8>(d, registers, of_b, true);
  if (wrong == 25 && t == 6) registers[2] = 5;
  if (wrong != 18) wgmma_commit();
  if (wrong == 19) d[2] = 1;
  if (wrong == 20 && t == 9) image[8192 + 9] ^= 1;
  if (wrong == 21) {
    wgmma_wait<1>();
    y[t] = d[0];
    return;
  }
  if (wrong == 22 && t >= 64)
    wgmma_fence();
  else
    wgmma_wait<0>();
  if (wrong == 23) {
    wgmma<bfloat16, bfloat16, 8>(d, of_a, of_b, true);
    wgmma_commit();
    wgmma_wait<0>();
  }
  if (wrong == 24) {  // a second accumulator, its own group, while the first is at work
    wgmma_fence();
    wgmma<bfloat16, bfloat16, 8>(d, of_a, of_b, false);
    for (int k = 1; k < 4; ++k) wgmma<bfloat16, bfloat16, 8>(d, of_a + 2 * k, of_b + 2 * k, true);
    wgmma_commit();
    wgmma<bfloat16, bfloat16, 16>(wide, of_a, of_a, false);
    wgmma_commit();
    wgmma_wait<1>();
  }
  for (int i = 0; i < 4; ++i) y[(row + 8 * (i >> 1)) * 8 + column + (i & 1)] = d[i];
  if (wrong == 24) wgmma_wait<0>();
}
""",
    128,
    9216,
)


@pytest.fixture(scope="module")
def module() -> CpuModule:
    return build([*(case.source for case in WGMMA), PIPELINE_SOURCE, MISUSES], cache=default_cache())


def run(module: CpuModule, name: str, *arrays: Array | int, order: Any = "forward", **rest: Any) -> None:
    module.launch(name, [a if isinstance(a, int) else a.ctypes.data for a in arrays], order=order, **rest)


@pytest.mark.parametrize("case", WGMMA, ids=lambda case: case.name)
def test_product(module: CpuModule, case: Wgmma) -> None:
    a, b, d = case.operands(np.random.default_rng(0))
    expected = product(a, b, d if case.accumulate else d * 0)
    order = "reverse" if len(case.name) % 2 else "forward"
    run(module, case.name, case.image(a, b), a, d, order=order)
    np.testing.assert_array_equal(d, expected)


def test_rounded_sums(module: CpuModule) -> None:
    """Random operands: within the bound of a float sum of any order."""
    case = WGMMA[3]
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((n, case.inner)).astype("bfloat16") for n in (64, case.columns))
    d = np.zeros((64, case.columns), np.float32)
    run(module, case.name, case.image(a, b), a, d)
    assert (np.abs(d - product(a, b, d * 0)) <= case.inner * 2.0**-24 * product(np.abs(a), np.abs(b), d * 0)).all()


@pytest.mark.parametrize("order", ORDERS)
def test_pipeline(module: CpuModule, order: str) -> None:
    rng = np.random.default_rng(2)
    upper, b, _ = PIPELINE.operands(rng)
    a = np.concatenate([upper, PIPELINE.operands(rng)[0]])
    image = np.concatenate([place(Layout(), a).image, place(Layout(), b).image])
    y = np.full((128, 32), np.nan, np.float32)
    run(module, "wgmma_pipeline", image, y, order=order)
    np.testing.assert_array_equal(y, product(a, b, np.zeros_like(y)))


def small_problem() -> tuple[Array, Array]:
    """Returns the shared-memory image and the result for MISUSES."""
    a, b, d = Wgmma("bfloat16", "bfloat16", 8).operands(np.random.default_rng(3))
    return np.concatenate([place(Layout(), a).image, place(Layout(), b).image]), product(a, b, d * 0)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("wrong", [0, 24])
def test_right_uses(module: CpuModule, wrong: int, order: str) -> None:
    image, expected = small_problem()
    y = np.zeros((64, 8), np.float32)
    run(module, "misuses", image, y, wrong, order=order)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (1, r"wgmma at misuses\.cu:\d+ reads shared memory that ordinary stores wrote, without fence_async_shared"),
        (2, r"matrix_descriptor at misuses\.cu:\d+: the tile is not in the block's dynamic shared memory"),
        (3, "the tile is at byte 8, its strides are 16 and 1024 bytes: all are multiples of 16"),
        (4, r"wgmma at misuses\.cu:\d+: B starts at byte 0x2080 of shared memory, not at a multiple of 8 rows of 128"),
        (5, "B starts at byte 0x23f0 of shared memory, not at a multiple"),
        (6, "B is read from byte 112 of rows of 128 bytes: no 32 bytes are left"),
        (7, "its strides are 16 and 8 bytes: all are multiples of 16"),
        (9, "B's descriptor 0x4.* has bits set that have no meaning here"),
        (10, "B reaches byte -1024 of 9216 bytes of dynamic shared memory"),
        (11, "threads 0 and 100 of the warpgroup disagree: descriptors"),
        (12, "wgmma at .*: no wgmma_fence since the kernel started"),
        (13, "threads of one warpgroup meet in wgmma(_commit)? at .* and in wgmma(_commit)? at"),
        (14, "threads 0 and 5 of the warpgroup disagree: .* accumulate 0 and 1"),
        (15, r"wgmma at .*: d\[1\] of thread 0 of the warpgroup was written before wgmma_wait"),
        (17, "d is, in part or as another type, that of a product that is not waited for"),
        (19, r"wgmma_wait at .*: d\[2\] of thread 0 of the warpgroup was written before wgmma_wait"),
        (20, "wgmma at .*: the shared memory that it reads was written before wgmma_wait"),
        (25, r"wgmma at .*: a\[2\] of thread 6 of the warpgroup was written before wgmma_wait"),
        (22, "threads of one warpgroup meet in wgmma_(fence|wait) at .* and in wgmma_(fence|wait) at"),
        (23, "wgmma at .*: no wgmma_fence since wgmma_wait gave d back"),
    ],
)
def test_misuse(module: CpuModule, wrong: int, message: str, order: str) -> None:
    y = np.zeros((64, 8), np.float32)
    with pytest.raises(KernelError, match=message):
        run(module, "misuses", small_problem()[0], y, wrong, order=order)


def test_tile_past_the_end(module: CpuModule) -> None:
    with pytest.raises(KernelError, match="A reaches byte 9216 of 9216 bytes of dynamic shared memory"):
        run(
            module, "misuses", np.concatenate([small_problem()[0]] * 2), np.zeros(512, np.float32), 8, shared_bytes=9216
        )


@pytest.mark.parametrize("threads", [64, 192])
def test_needs_a_warpgroup(module: CpuModule, threads: int) -> None:
    with pytest.raises(KernelError, match=r"(?s)no whole warpgroup|deadlock"):
        run(module, "misuses", small_problem()[0], np.zeros(1024, np.float32), 0, block=(threads, 1, 1))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("wrong", [18, 21])
def test_result_before_the_wait_is_nan(module: CpuModule, wrong: int, order: str) -> None:
    y = np.zeros((64, 8), np.float32)
    run(module, "misuses", small_problem()[0], y, wrong, order=order)
    assert np.isnan(y.reshape(-1)[:128]).all()


def test_two_accumulators(module: CpuModule) -> None:
    image, expected = small_problem()
    y = np.zeros((64, 8), np.float32)
    run(module, "misuses", image, y, 16)
    np.testing.assert_array_equal(y, expected)


# ---- compilation


def test_compiles() -> None:
    sources = [*(case.source for case in WGMMA[1::5] if case.columns < 96), PIPELINE_SOURCE]
    for compiled in compile_kernels(sources, "sm_90a"):
        assert compiled.spill_bytes == 0
        assert not compiled.warnings


@pytest.mark.slow
def test_all_compile() -> None:
    for compiled in compile_kernels([case.source for case in WGMMA], "sm_90a"):
        assert compiled.spill_bytes == 0
        assert not compiled.warnings


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bfloat16, bfloat16, 64, 0, 0", "tf32, tf32, 64, 0, 1", "only operands of 16 bits can be transposed"),
        ("FUSEGRAPH_WGMMA(64)\n", "", "incomplete type"),
    ],
)
def test_does_not_compile(old: str, new: str, message: str) -> None:
    code = Wgmma("bfloat16", "bfloat16", 64, steps=1).source.code
    assert old in code
    with pytest.raises(CompileError, match=message):
        compile_kernels([kernel("wgmma_wrong", code.replace(old, new))], "sm_90a")
