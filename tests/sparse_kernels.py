"""A sparse warpgroup product alone, for the CPU and for a GPU: operands and metadata, laid out by definition."""

from __future__ import annotations

from typing import Any

import numpy as np
from tensor_kernels import TYPES, Array, kernel

from codegen.spec import KernelSource

COLUMNS, TERMS = 32, 64


def source(element: str) -> KernelSource:
    """Returns a kernel of y [64, 32] = a [64, 64] b [32, 64]^T: two products of 32 terms, one with either selector."""
    code = """#include "shared.cuh"
#include "tma.cuh"
#include "wgmma.cuh"
FUSEGRAPH_WGMMA(32)

extern "C" __global__ void NAME(const uint64* from, const uint32* words, float* y) {
  FUSEGRAPH_DYNAMIC_SHARED(image);
  const int t = threadIdx.x, row = t / 32 * 16 + t % 32 / 4, column = t % 4 * 2;
  for (int i = t; i < 8192 / 8; i += blockDim.x) ((uint64*)image)[i] = from[i];
  fence_async_shared();
  __syncthreads();
  float d[16];
  const uint64 a = matrix_descriptor<64>(image, 16, 512), b = matrix_descriptor<128>(image + 4096, 16, 1024);
  wgmma_fence();
  wgmma_sparse<TYPE, TYPE, 32, 0>(d, a, b, words[t], false);
  wgmma_sparse<TYPE, TYPE, 32, 1>(d, matrix_behind(a, 32), matrix_behind(b, 64), words[t], true);
  wgmma_commit();
  wgmma_wait<0>();
  for (int i = 0; i < 16; ++i) y[(row + 8 * (i >> 1 & 1)) * 32 + i / 4 * 8 + column + (i & 1)] = d[i];
}
"""
    return kernel(f"sparse_{element}", code.replace("TYPE", element), 128, 8192)


def swizzled(rows: Array, width: int) -> Array:
    """Returns rows of ``width`` bytes as wgmma finds them in shared memory: pieces of 16 bytes change places."""
    flat = np.ascontiguousarray(rows).view(np.uint8).reshape(-1)
    at = np.arange(flat.size)
    image = np.empty_like(flat)
    image[at ^ (at >> 3 & width - 16)] = flat
    return image


def words(places: Array) -> Array:
    """Returns the words of the 128 threads: places [64, 32] of what is kept, thread by thread and bit by bit."""
    found = np.zeros(128, np.uint32)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for half in range(2):
            row = 16 * warp + lane // 4 + 8 * half
            for n in range(8):
                found[thread] |= np.uint32(int(places[row, lane % 4 * 8 + n]) << (16 * half + 2 * n))
    return found


def operands(element: str, seed: int = 0) -> tuple[Array, Array, Array, Array]:
    """Returns (values [64, 32], their places, b [32, 64], the result) of small integers, so that sums are exact."""
    random = np.random.default_rng(seed)
    values, b = (random.integers(-8, 9, shape).astype(TYPES[element]) for shape in ((64, 32), (COLUMNS, TERMS)))
    pairs = np.array([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)])
    places = pairs[random.integers(0, 6, (64, 16))]
    whole = np.zeros((64, 16, 4))
    np.put_along_axis(whole, places, values.reshape(64, 16, 2).astype(np.float64), axis=-1)
    return values, places.reshape(64, 32), b, whole.reshape(64, 64) @ b.astype(np.float64).T


def arguments(element: str, seed: int = 0) -> tuple[Array, Array, Any]:
    """Returns the kernel's image of shared memory and words, and the result."""
    values, places, b, wanted = operands(element, seed)
    return np.concatenate([swizzled(values, 64), swizzled(b, 128)]), words(places), wanted
