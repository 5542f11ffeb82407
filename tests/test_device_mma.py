"""cp.async, ldmatrix, stmatrix and mma.sync on the CPU: results, and every misuse that must become a KernelError."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tensor_kernels import (
    COPIES,
    PAIRS,
    TO_TF32,
    TYPES,
    Array,
    copies_expected,
    integers,
    kernel,
    matrices_expected,
    matrices_kernel,
    mma_kernel,
    product,
    result_of,
    tile_kernel,
)

from codegen.cpu import GuardedArray
from fusegraph.errors import KernelError
from fusegraph.runtime.cache import default_cache
from fusegraph.runtime.host_compiler import CpuModule, build
from fusegraph.runtime.nvrtc import compile_kernels

pytestmark = pytest.mark.slow

MATRICES = [(count, transposed, store) for count in (4, 2) for transposed in (False, True) for store in (False, True)]
ORDERS = ("forward", "reverse")

# Kernels that do something wrong if `wrong` is what they look for.
MISUSES = kernel(
    "misuses",
    """#include "async_copy.cuh"
#include "mma.cuh"
extern "C" __global__ void NAME(const unsigned char* x, unsigned char* y, int wrong) {
  __shared__ __align__(16) unsigned char tile[2048];
  const int t = threadIdx.x;
  if (wrong == 1) copy_async<16>(tile + t * 16 + 8, x + t * 16);
  if (wrong == 2) copy_async<16>(tile + t * 16, x + t * 16 + 4);
  if (wrong == 3) copy_async<8>(tile + t * 8, x + t * 8, 9);
  if (wrong == 4) copy_async<4>(tile + t * 4, x + t * 4, -1);
  if (wrong == 5) copy_async<16>(y + t * 16, x + t * 16);
  if (wrong == 6) copy_async<16>(tile + t * 16, x + 16 + t * 16);
  if (wrong == 7) copy_async<16>(tile + t * 16, x + 16 + t * 16, t == 31 ? 0 : 16);  // right: nothing is read there
  if (wrong == 8) {  // does not wait
    copy_async<16>(tile + t * 16, x + t * 16);
    copy_async_commit();
    copy_async_wait<1>();
    __syncthreads();
    for (int i = t; i < 512; i += 32) y[i] = tile[i];
  }
  if (wrong == 9) {  // waits for what is not committed
    copy_async<16>(tile + t * 16, x + t * 16);
    copy_async_wait<0>();
    __syncthreads();
    for (int i = t; i < 512; i += 32) y[i] = tile[i];
  }
  uint32 r[4] = {1, 2, 3, 4}, s[2] = {5, 6};
  float d[4] = {};
  if (wrong == 10) load_matrices(r, tile + t * 16 + 8);
  if (wrong == 11) load_matrices(s, x + t * 16);
  if (wrong == 12) store_matrices(y + t * 16, r);
  if (wrong == 13 && t != 3) load_matrices(r, tile + t * 16);
  if (wrong == 14 && t != 3) mma<bfloat16, bfloat16>(d, r, s);
  if (wrong == 15) t % 2 ? mma<bfloat16, bfloat16>(d, r, s) : mma<float16, float16>(d, r, s);
  if (wrong == 16) load_matrices(s, t < 16 ? tile + t * 16 : x);  // right: lanes from 16 on give no address
}
""",
)
SOURCES = [
    *(mma_kernel(a, b) for a, b in PAIRS),
    *(matrices_kernel(*case) for case in MATRICES),
    tile_kernel(True),
    tile_kernel(False),
    TO_TF32,
    COPIES,
    MISUSES,
]


@pytest.fixture(scope="module")
def module() -> CpuModule:
    return build(SOURCES, cache=default_cache())


def run(module: CpuModule, name: str, *arrays: Array | int, order: Any = "forward") -> None:
    module.launch(name, [a if isinstance(a, int) else a.ctypes.data for a in arrays], order=order)


# ---- products


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("a_type", "b_type"), PAIRS)
def test_mma(module: CpuModule, a_type: str, b_type: str, order: str) -> None:
    rng = np.random.default_rng(0)
    inner = 32 // TYPES[a_type].itemsize
    a, b = integers(rng, a_type, (16, inner)), integers(rng, b_type, (8, inner))
    d = rng.integers(-100, 100, (16, 8)).astype(result_of(a_type)[1])
    expected = product(a, b, d)
    run(module, f"mma_{a_type}_{b_type}", a, b, d, order=order)
    np.testing.assert_array_equal(d, expected)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3", "float8_e5m2", "tf32"])
def test_mma_of_any_number(module: CpuModule, name: str) -> None:
    """Random bits, but no product that a float cannot hold, against a float64 product."""
    rng = np.random.default_rng(1)
    dtype = TYPES[name]
    inner = 32 // dtype.itemsize
    bits = rng.integers(0, 256, (2, 64, 16, 32), dtype=np.uint8)
    for a, b in zip(bits[0].view(dtype), bits[1][:, :8].view(dtype)):
        with np.errstate(invalid="ignore"):
            a, b = (np.where(np.abs(x.astype(np.float64)) < 1e18, x, np.zeros_like(x)) for x in (a, b))
        d = np.zeros((16, 8), np.float32)
        run(module, f"mma_{name}_{name}", a, b, d)
        if name == "tf32":
            a, b = ((x.view(np.uint32) & 0xFFFFE000).view(np.float32) for x in (a, b))
        expected, size = product(a, b, d * 0), product(np.abs(a), np.abs(b), d * 0)
        unit = 2.0**-24 if dtype.itemsize > 1 else 2.0**-13  # of sums of fp8 products 14 bits are kept
        assert (np.abs(d - expected) <= (inner + 2) * unit * size + 1e-37).all()


@pytest.mark.parametrize("name", ["bfloat16", "float16", "tf32", "float8_e5m2"])
def test_mma_of_nan_and_infinity(module: CpuModule, name: str) -> None:
    dtype = TYPES[name]
    inner = 32 // dtype.itemsize
    a, b = np.ones((16, inner), dtype), np.ones((8, inner), dtype)
    a[3, 1], a[5, 2], a[7, 0], a[7, 1], b[6, 0] = np.nan, np.inf, np.inf, -np.inf, 0
    d = np.zeros((16, 8), np.float32)
    run(module, f"mma_{name}_{name}", a, b, d)
    with np.errstate(invalid="ignore"):
        expected = (a.astype(np.float64)[:, None] * b.astype(np.float64)).sum(-1)
    assert np.isnan(expected[3]).all()
    assert np.isinf(expected[5]).all()
    np.testing.assert_array_equal(d, expected)


def test_to_tf32(module: CpuModule) -> None:
    x = np.zeros(32, np.float32)
    bits = [0x3F800000, 0x3F800FFF, 0x3F801000, 0x3F801001, 0x3F803000, 0xBF801000, 0x7F7FFFFF, 0x7F800000, 0xFF800000]
    x[: len(bits)] = np.array(bits, np.uint32).view(np.float32)
    x[9:] = np.random.default_rng(0).standard_normal(23)
    y = np.zeros(32, np.uint32)
    run(module, "round_to_tf32", x, y)
    rounded = [
        0x3F800000,
        0x3F800000,
        0x3F802000,
        0x3F802000,
        0x3F804000,
        0xBF802000,
        0x7F800000,
        0x7F800000,
        0xFF800000,
    ]
    assert y[:9].tolist() == rounded
    scale = np.ldexp(np.ones(23), 11 - np.frexp(x[9:])[1])
    np.testing.assert_array_equal(y[9:].view(np.float32), np.rint(x[9:].astype(np.float64) * scale) / scale)


# ---- loads, stores and copies


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("count", "transposed", "store"), MATRICES)
def test_matrices(module: CpuModule, count: int, transposed: bool, store: bool, order: str) -> None:
    rng = np.random.default_rng(2)
    x = rng.integers(0, 65536, (32, 8)).astype(np.uint16)
    registers = rng.integers(0, 2**32, (32, count)).astype(np.uint32)
    places = rng.permutation(32).astype(np.int32)
    expected = matrices_expected(count, transposed, store, x, registers, places)
    y = np.zeros_like(expected)
    name = f"{'store' if store else 'load'}_matrices_{count}{'_transposed' if transposed else ''}"
    run(module, name, x, registers, places, y, order=order)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("valid", [0, 1, 7, 8, 15, 16])
def test_copies(module: CpuModule, valid: int, order: str) -> None:
    x = np.random.default_rng(3).integers(1, 255, 2 * 896, dtype=np.uint8)
    y = np.zeros_like(x)
    run(module, "copies", x, y, valid, order=order)
    np.testing.assert_array_equal(y, copies_expected(x, valid))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("by_columns", [True, False])
def test_tile(module: CpuModule, by_columns: bool, order: str) -> None:
    rng = np.random.default_rng(4)
    a, b = integers(rng, "bfloat16", (16, 64)), integers(rng, "bfloat16", (16, 64))
    y = np.full((16, 16), np.nan, np.float32)
    name = f"tile_by_{'columns' if by_columns else 'rows'}"
    run(module, name, a, b if by_columns else np.ascontiguousarray(b.T), y, order=order)
    np.testing.assert_array_equal(y, product(a, b, np.zeros((16, 16), np.float32)))


# ---- misuse


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (1, r"access of 16 bytes at .* not 16-byte aligned \(misuses\.cu:"),
        (2, r"access of 16 bytes at .* not 16-byte aligned"),
        (3, r"thread \(0, 0, 0\): copy_async at misuses\.cu:\d+: 9 valid bytes of 8"),
        (4, "-1 valid bytes of 4"),
        (5, "are not in the block's shared memory"),
        (6, r"thread \(31, 0, 0\): read out of bounds .*0 bytes past the end of x"),
        (10, r"access of 16 bytes at .* not 16-byte aligned"),
        (11, "load_matrices at .*: the row at .* is not in the block's shared memory"),
        (12, "store_matrices at .*: the row at .* is not in the block's shared memory"),
        (13, "deadlock.* threads 0-2, 4-31 wait in load_matrices at .*; thread 3 has exited"),
        (14, "deadlock.* threads 0-2, 4-31 wait in mma at .*; thread 3 has exited"),
        (15, "lanes of one warp meet in mma at .* and in mma at"),
    ],
)
def test_misuse(module: CpuModule, wrong: int, message: str) -> None:
    x, y = GuardedArray(np.zeros(512, np.uint8), name="x"), np.zeros(512, np.uint8)
    with pytest.raises(KernelError, match=message):
        module.launch("misuses", [x.pointer, y.ctypes.data, wrong])


@pytest.mark.parametrize("wrong", [7, 16])
def test_what_is_not_read_may_be_anywhere(module: CpuModule, wrong: int) -> None:
    x, y = GuardedArray(np.zeros(512, np.uint8), name="x"), np.zeros(512, np.uint8)
    for order in ORDERS:
        module.launch("misuses", [x.pointer, y.ctypes.data, wrong], order=order)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [8, 9])
def test_missing_wait_shows(module: CpuModule, wrong: int) -> None:
    x = np.arange(512, dtype=np.uint8)
    results = {}
    for order in ORDERS:
        y = np.zeros(512, np.uint8)
        run(module, "misuses", x, y, wrong, order=order)
        results[order] = y
    assert (results["forward"] == 0xFF).all()  # has not landed
    assert (results["reverse"] == x).all()  # has


# ---- compilation for GPUs


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_120"])
def test_compiles(arch: str) -> None:
    newer = {"sm_80": ("float8", "store"), "sm_89": ("store",)}.get(arch, ())
    sources = [s for s in SOURCES if s is not MISUSES and not any(word in s.name for word in newer)]
    for compiled in compile_kernels(sources if arch == "sm_90a" else sources[::3], arch):
        assert compiled.spill_bytes == 0
        assert not compiled.warnings
