"""Kernels for the device library's tensor-core functions, and their expected results, for the CPU and for a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from codegen.spec import KernelSource

Array = NDArray[Any]

_E4M3, _E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
TYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "tf32": np.dtype(np.float32),
    "float8_e4m3": _E4M3,
    "float8_e5m2": _E5M2,
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
}
PAIRS = [(name, name) for name in ("bfloat16", "float16", "tf32")] + [
    (a, b) for pair in (("float8_e4m3", "float8_e5m2"), ("int8", "uint8")) for a in pair for b in pair
]


def result_of(a: str) -> tuple[str, np.dtype[Any]]:
    """Returns C type and dtype of a product's result."""
    return ("int32", np.dtype(np.int32)) if "int" in a else ("float", np.dtype(np.float32))


def integers(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    """Returns small integers, exact in products and sums of any float type; integer types get their full range."""
    if "int" in name:
        info = np.iinfo(TYPES[name])
        return rng.integers(info.min, info.max, shape, endpoint=True).astype(TYPES[name])
    return rng.integers(-8, 8, shape, endpoint=True).astype(TYPES[name])


def product(a: Array, b: Array, d: Array) -> Array:
    """Returns d + a b^T, of [M, K], [N, K] and [M, N], exact in float64 (integers in int64, which wrap around into
    int32).
    """
    wide = np.int64 if d.dtype.kind == "i" else np.float64
    return np.asarray(d.astype(wide) + a.astype(wide) @ b.astype(wide).T)


def kernel(name: str, code: str, threads: int = 32, shared: int = 0, grid: int = 1) -> KernelSource:
    return KernelSource(name, code.replace("NAME", name), (grid, 1, 1), (threads, 1, 1), shared, True)


# ---- mma, ldmatrix, stmatrix, cp.async


def mma_kernel(a: str, b: str) -> KernelSource:
    """Computes d [16, 8] += a [16, 32 bytes] b [8, 32 bytes]^T, with fragments laid out as mma.cuh says."""
    code = """#include "mma.cuh"
extern "C" __global__ void NAME(const unsigned char* a, const unsigned char* b, RESULT* d) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  uint32 ra[4], rb[2];
  RESULT rd[4];
  for (int r = 0; r < 4; ++r) ra[r] = *(const uint32*)(a + (g + 8 * (r & 1)) * 32 + 4 * t + 16 * (r >> 1));
  for (int r = 0; r < 2; ++r) rb[r] = *(const uint32*)(b + g * 32 + 4 * t + 16 * r);
  for (int i = 0; i < 4; ++i) rd[i] = d[(g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)];
  mma<A_TYPE, B_TYPE>(rd, ra, rb);
  for (int i = 0; i < 4; ++i) d[(g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)] = rd[i];
}
"""
    code = code.replace("RESULT", result_of(a)[0]).replace("A_TYPE", a).replace("B_TYPE", b)
    return kernel(f"mma_{a}_{b}", code)


def matrices_kernel(count: int, transposed: bool, store: bool) -> KernelSource:
    """Loads `count` matrices from the rows at places[...] of x [32, 8] into y [32, count, 2], or stores them back."""
    suffix = "_transposed" if transposed else ""
    store_row = f"""store_matrices{suffix}(row, r);
  __syncwarp();
  for (int i = 0; i < 8; ++i) y[threadIdx.x * 8 + i] = tile[threadIdx.x * 8 + i];"""
    load_row = f"""load_matrices{suffix}(r, row);
  for (int i = 0; i < COUNT; ++i) ((uint32*)y)[threadIdx.x * COUNT + i] = r[i];"""
    code = """#include "mma.cuh"
extern "C" __global__ void NAME(const uint16* x, const uint32* registers, const int* places, uint16* y) {
  __shared__ __align__(16) uint16 tile[32 * 8];
  for (int i = 0; i < 8; ++i) tile[threadIdx.x * 8 + i] = x[threadIdx.x * 8 + i];
  __syncwarp();
  uint32 r[COUNT];
  for (int i = 0; i < COUNT; ++i) r[i] = registers[threadIdx.x * COUNT + i];
  uint16* row = tile + places[threadIdx.x] * 8;
  MOVE
}
"""
    name = f"{'store' if store else 'load'}_matrices_{count}{suffix}"
    return kernel(name, code.replace("MOVE", store_row if store else load_row).replace("COUNT", str(count)))


def matrices_expected(count: int, transposed: bool, store: bool, x: Array, registers: Array, places: Array) -> Array:
    """Returns the expected result of matrices_kernel: [32, count, 2], or [32, 8] for stores."""
    lane = np.arange(32)
    result = x.copy() if store else np.zeros((32, count, 2), np.uint16)
    halves = registers.view(np.uint16).reshape(32, count, 2)
    for i in range(count):
        for half in range(2):
            row, column = (lane % 4 * 2 + half, lane // 4) if transposed else (lane // 4, lane % 4 * 2 + half)
            at = places[8 * i + row], column
            if store:
                result[at] = halves[:, i, half]
            else:
                result[:, i, half] = x[at]
    return result


TO_TF32 = kernel(
    "round_to_tf32",
    """#include "mma.cuh"
extern "C" __global__ void NAME(const float* x, uint32* y) { y[threadIdx.x] = to_tf32(x[threadIdx.x]) & 0xffffe000u; }
""",
)

# Two groups of copies of 16, 8 and 4 bytes with `valid` bytes each; y is what is in shared memory after each wait.
COPIES = kernel(
    "copies",
    """#include "async_copy.cuh"
extern "C" __global__ void NAME(const unsigned char* x, unsigned char* y, int valid) {
  __shared__ __align__(16) unsigned char tile[2][32 * 28];
  const int t = threadIdx.x;
  for (int group = 0; group < 2; ++group) {
    const unsigned char* from = x + group * 32 * 28;
    copy_async<16>(tile[group] + t * 16, from + t * 16, min(valid, 16));
    copy_async<8>(tile[group] + 512 + t * 8, from + 512 + t * 8, min(valid, 8));
    copy_async<4>(tile[group] + 768 + t * 4, from + 768 + t * 4);
    copy_async_commit();
  }
  copy_async_wait<1>();
  __syncthreads();
  for (int i = t; i < 32 * 28; i += 32) y[i] = tile[0][i];
  copy_async_wait<0>();
  __syncthreads();
  for (int i = t; i < 32 * 28; i += 32) y[32 * 28 + i] = tile[1][i];
}
""",
)


def copies_expected(x: Array, valid: int) -> Array:
    """Returns the expected result of COPIES for x of 2 * 896 bytes."""
    y = x.reshape(2, 896).copy()
    y[:, :512].reshape(2, 32, 16)[:, :, min(valid, 16) :] = 0
    y[:, 512:768].reshape(2, 32, 8)[:, :, min(valid, 8) :] = 0
    return y.reshape(-1)


def tile_kernel(by_columns: bool) -> KernelSource:
    """Computes d [16, 16] = a [16, 64] b in bfloat16 with one warp: cp.async, ldmatrix from swizzled rows, mma.

    b is [16, 64] (columns) or, loaded transposed, [64, 16].
    """
    load = (
        "load_matrices(b, tile_b + at(lane % 8 + lane / 16 * 8, k * 2 + lane / 8 % 2));"
        if by_columns
        else "load_matrices_transposed(b, tile_b + (k * 16 + lane % 16) * 32 + lane / 16 * 16);"
    )
    copy_b = (
        "copy_async<16>(tile_b + at(i / 8, i % 8), b_rows + i * 16);"
        if by_columns
        else "copy_async<16>(tile_b + i * 16, b_rows + i * 16);"
    )
    code = """#include "async_copy.cuh"
#include "mma.cuh"
__device__ int at(int row, int piece) { return row * 128 + (piece ^ row % 8) * 16; }

extern "C" __global__ void NAME(const unsigned char* a_rows, const unsigned char* b_rows, float* y) {
  __shared__ __align__(16) unsigned char tile_a[16 * 128], tile_b[16 * 128];
  const int lane = threadIdx.x;
  for (int i = lane; i < 128; i += 32) {
    copy_async<16>(tile_a + at(i / 8, i % 8), a_rows + i * 16);
    COPY_B
  }
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
  float d[2][4] = {};
  for (int k = 0; k < 4; ++k) {
    uint32 a[4], b[4];
    load_matrices(a, tile_a + at(lane % 16, k * 2 + lane / 16));
    LOAD_B
    for (int n = 0; n < 2; ++n) {
      const uint32 column[2] = {b[2 * n], b[2 * n + 1]};
      mma<bfloat16, bfloat16>(d[n], a, column);
    }
  }
  for (int n = 0; n < 2; ++n)
    for (int i = 0; i < 4; ++i) y[(lane / 4 + i / 2 * 8) * 16 + n * 8 + lane % 4 * 2 + i % 2] = d[n][i];
}
"""
    code = code.replace("LOAD_B", load).replace("COPY_B", copy_b)
    return kernel(f"tile_by_{'columns' if by_columns else 'rows'}", code)


# ---- wgmma


@dataclass(frozen=True)
class Layout:
    """How an operand lies in shared memory: an image of bytes and what the descriptors say.

    swizzle      128, 64, 32 or 0.
    transposed   sum outermost.
    far          transposed: pieces along the rows are the farther ones apart (else groups along the sum are).
    """

    swizzle: int = 128
    transposed: bool = False
    far: bool = True


@dataclass(frozen=True)
class Placed:
    image: Array  # uint8
    leading: int
    stride: int
    steps: list[int]  # byte offset of every 32 bytes of the sum


def place(layout: Layout, tile: Array) -> Placed:
    """Returns the shared-memory image of a tile [rows, K], element by element as PTX's "canonical layouts" say."""
    rows, inner = tile.shape
    size, depth = tile.dtype.itemsize, 32 // tile.dtype.itemsize
    row, k = np.indices(tile.shape)
    width = layout.swizzle or 16
    if layout.transposed:
        blocks, groups = -(-rows * size // width), inner // 8
        along, group = (groups * 8 * width, 8 * width) if layout.far else (8 * width, blocks * 8 * width)
        offset = row * size // width * along + row * size % width + k // 8 * group + k % 8 * width
        leading, stride = (along, group) if layout.swizzle else (group, along)
        steps = [2 * group * i for i in range(inner // depth)]
    elif layout.swizzle:
        panel = rows * width
        offset = k * size // width * panel + row * width + k * size % width
        leading, stride = 16, 8 * width
        steps = [32 * i // width * panel + 32 * i % width for i in range(inner // depth)]
    else:
        leading, stride = rows * 16, 128
        offset = k * size // 16 * leading + row // 8 * stride + row % 8 * 16 + k * size % 16
        steps = [2 * leading * i for i in range(inner // depth)]
    if layout.swizzle:
        offset = offset ^ (offset >> 3 & (layout.swizzle - 16))
    image = np.zeros(-(-(int(offset.max()) + size) // 1024) * 1024, np.uint8)
    bytes_of = np.ascontiguousarray(tile).view(np.uint8).reshape(rows, inner, size)
    for i in range(size):
        image[offset + i] = bytes_of[:, :, i]
    return Placed(image, leading, stride, steps)


@dataclass(frozen=True)
class Wgmma:
    """One product: d [64, columns] = (d +) a [64, K] b [columns, K]^T.

    a_layout is None for a in registers.  accumulate is whether the first step adds to d.
    """

    a: str
    b: str
    columns: int
    a_layout: Layout | None = Layout()
    b_layout: Layout = Layout()
    steps: int = 4
    accumulate: bool = True

    @property
    def inner(self) -> int:
        return self.steps * 32 // TYPES[self.a].itemsize

    @property
    def name(self) -> str:
        def text(layout: Layout | None) -> str:
            if layout is None:
                return "registers"
            return f"{layout.swizzle}{'t' if layout.transposed else ''}{'' if layout.far else 'n'}"

        return (
            f"wgmma_{self.a}_{self.b}_{self.columns}_{text(self.a_layout)}_{text(self.b_layout)}"
            f"{'' if self.accumulate else '_zero'}"
        )

    def operands(self, rng: np.random.Generator) -> tuple[Array, Array, Array]:
        d = rng.integers(-100, 100, (64, self.columns)).astype(result_of(self.a)[1])
        return integers(rng, self.a, (64, self.inner)), integers(rng, self.b, (self.columns, self.inner)), d

    def image(self, a: Array, b: Array) -> Array:
        placed = [place(self.a_layout, a).image] if self.a_layout else []
        return np.concatenate([*placed, place(self.b_layout, b).image])

    @property
    def source(self) -> KernelSource:
        """Takes the shared-memory image, a (if in registers) and d."""
        a, b, _ = self.operands(np.random.default_rng(0))
        placed_a = place(self.a_layout or Layout(), a)
        placed_b = place(self.b_layout, b)
        a_bytes = len(placed_a.image) if self.a_layout else 0
        lines = []
        for i in range(self.steps):
            of_b = (
                f"matrix_descriptor<{self.b_layout.swizzle}>(image + {a_bytes + placed_b.steps[i]}, "
                f"{placed_b.leading}, {placed_b.stride})"
            )
            if self.a_layout:
                of_a = (
                    f"matrix_descriptor<{self.a_layout.swizzle}>(image + {placed_a.steps[i]}, "
                    f"{placed_a.leading}, {placed_a.stride})"
                )
                flags = f"{int(self.a_layout.transposed)}, {int(self.b_layout.transposed)}"
            else:
                of_a, flags = f"ra[{i}]", f"{int(self.b_layout.transposed)}"
            sums = "true" if self.accumulate or i else "false"
            lines.append(f"  wgmma<{self.a}, {self.b}, {self.columns}, {flags}>(d, {of_a}, {of_b}, {sums});")
        code = WGMMA_FRAME
        registers = {
            "READ_A": "" if self.a_layout else READ_A.replace("STEPS", str(self.steps)),
            "PRODUCTS": "\n".join(lines),
            "COLUMNS": str(self.columns),
            "RESULT": result_of(self.a)[0],
            "BYTES": str(a_bytes + len(placed_b.image)),
        }
        for key, value in registers.items():
            code = code.replace(key, value)
        return kernel(self.name, code, 128, a_bytes + len(placed_b.image))


READ_A = """
  uint32 ra[STEPS][4];
  for (int i = 0; i < STEPS; ++i)
    for (int r = 0; r < 4; ++r)
      ra[i][r] = a[(row + 8 * (r & 1)) * STEPS * 8 + i * 8 + column / 2 + 4 * (r >> 1)];"""

WGMMA_FRAME = """#include "shared.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
FUSEGRAPH_WGMMA(COLUMNS)

extern "C" __global__ void __launch_bounds__(128) NAME(const uint64* from, const uint32* a, RESULT* y) {
  FUSEGRAPH_DYNAMIC_SHARED(image);
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  for (int i = threadIdx.x; i < BYTES / 8; i += 128) ((uint64*)image)[i] = from[i];
  fence_async_shared();
  __syncthreads();
  RESULT d[COLUMNS / 2];READ_A
  for (int i = 0; i < COLUMNS / 2; ++i) d[i] = y[(row + 8 * (i >> 1 & 1)) * COLUMNS + i / 4 * 8 + column + (i & 1)];
  wgmma_fence();
PRODUCTS
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; i < COLUMNS / 2; ++i) y[(row + 8 * (i >> 1 & 1)) * COLUMNS + i / 4 * 8 + column + (i & 1)] = d[i];
}
"""

_PLAIN = Wgmma("bfloat16", "bfloat16", 64)
WGMMA: list[Wgmma] = [
    *(Wgmma("bfloat16", "bfloat16", n, steps=1) for n in (8, 40, 128, 256)),
    Wgmma("float16", "float16", 72, accumulate=False),
    *(Wgmma("bfloat16", "bfloat16", 48, Layout(s), Layout(s)) for s in (128, 64, 32, 0)),
    *(Wgmma("bfloat16", "bfloat16", 64, Layout(s, True), Layout()) for s in (128, 64, 32, 0)),
    *(Wgmma("bfloat16", "bfloat16", 96, Layout(), Layout(s, True)) for s in (128, 64, 32, 0)),
    *(
        Wgmma("float16", "float16", 256, Layout(s, True, far), Layout(s, True, far))
        for s in (128, 64)
        for far in (True, False)
    ),
    Wgmma("float16", "float16", 24, Layout(0, True, False), Layout(32, True, False)),
    *(Wgmma(a, b, 32) for a, b in PAIRS if a not in ("bfloat16", "float16")),
    Wgmma("tf32", "tf32", 64, Layout(32), Layout(0)),
    Wgmma("int8", "uint8", 144, Layout(64), Layout(128)),
    *(Wgmma(a, b, 16, None) for a, b in PAIRS),
    Wgmma("bfloat16", "bfloat16", 80, None, Layout(64, True)),
]


# Two warpgroups with 64 rows each and one b, a group of products at a time under way.
PIPELINE = replace(_PLAIN, columns=32, steps=8)
PIPELINE_SOURCE = kernel(
    "wgmma_pipeline",
    """#include "shared.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
FUSEGRAPH_WGMMA(32)

extern "C" __global__ void __launch_bounds__(256) NAME(const uint64* from, float* y) {
  FUSEGRAPH_DYNAMIC_SHARED(image);
  const int t = threadIdx.x % 128, row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  for (int i = threadIdx.x; i < 40960 / 8; i += 256) ((uint64*)image)[i] = from[i];
  fence_async_shared();
  __syncthreads();
  float d[16];
  for (int k = 0; k < 8; ++k) {
    wgmma_fence();
    const unsigned char* a = image + k / 4 * 16384 + threadIdx.x / 128 * 8192 + k % 4 * 32;
    const unsigned char* b = image + 32768 + k / 4 * 4096 + k % 4 * 32;
    wgmma<bfloat16, bfloat16, 32>(d, matrix_descriptor<128>(a, 16, 1024), matrix_descriptor<128>(b, 16, 1024), k != 0);
    wgmma_commit();
    wgmma_wait<1>();
  }
  wgmma_wait<0>();
  for (int i = 0; i < 16; ++i) y[(row + 8 * (i >> 1 & 1)) * 32 + i / 4 * 8 + column + (i & 1)] = d[i];
}
""",
    256,
    40960,
)
