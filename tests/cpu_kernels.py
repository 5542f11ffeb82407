"""Kernels for test_cpu_run.py: some right, most wrong in one way."""

from __future__ import annotations

import re

from codegen.spec import KernelSource

_LAUNCH = re.compile(r"// launch: grid (\d+), block (\d+)x(\d+)x(\d+), shared (\d+), (fibers|loop)\n")


def _kernels(text: str) -> list[KernelSource]:
    """Returns one KernelSource for each "// launch:" line, which is followed by the kernel's code."""
    parts = _LAUNCH.split(text)[1:]
    kernels = []
    for grid, x, y, z, shared, mode, code in zip(*(parts[i::7] for i in range(7))):
        name = re.search(r"(\w+)\(", code.split("__global__")[1].replace("__launch_bounds__(", ""))
        assert name is not None, code
        kernels.append(
            KernelSource(name[1], code, (int(grid), 1, 1), (int(x), int(y), int(z)), int(shared), mode == "fibers")
        )
    return kernels


KERNELS = _kernels(r"""
// launch: grid 8, block 256x1x1, shared 0, fibers
// Softmax of each row, one block a row.
extern "C" __global__ void __launch_bounds__(256)
softmax(const float* __restrict__ x, float* __restrict__ y, int n) {
  __shared__ float partial[32];
  const float* row = x + (long long)blockIdx.x * n;
  const int warps = blockDim.x / 32;
  float largest = -3e38f;
  for (int i = threadIdx.x; i < n; i += blockDim.x) largest = fmaxf(largest, row[i]);
  for (int step = 16; step; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = largest;
  __syncthreads();
  for (int i = 0; i < warps; ++i) largest = fmaxf(largest, partial[i]);
  __syncthreads();
  float sum = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += __builtin_expf(row[i] - largest);
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int i = 0; i < warps; ++i) sum += partial[i];
  float* to = y + (long long)blockIdx.x * n;
  for (int i = threadIdx.x; i < n; i += blockDim.x) to[i] = __builtin_expf(row[i] - largest) / sum;
}

// launch: grid 1, block 64x1x1, shared 0, loop
extern "C" __global__ void scale(const float* __restrict__ x, float* __restrict__ y, float factor, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = factor * x[i];
}

// launch: grid 1, block 32x32x1, shared 0, fibers
extern "C" __global__ void transpose(const float* x, float* y) {
  __shared__ float tile[32][33];
  tile[threadIdx.y][threadIdx.x] = x[threadIdx.y * 32 + threadIdx.x];
  __syncthreads();
  y[threadIdx.y * 32 + threadIdx.x] = tile[threadIdx.x][threadIdx.y];
}

// launch: grid 1, block 32x32x1, shared 0, fibers
extern "C" __global__ void transpose_racy(const float* x, float* y) {
  __shared__ float tile[32][33];
  tile[threadIdx.y][threadIdx.x] = x[threadIdx.y * 32 + threadIdx.x];
  y[threadIdx.y * 32 + threadIdx.x] = tile[threadIdx.x][threadIdx.y];
}

// launch: grid 1, block 64x1x1, shared 0, fibers
// Lacks the barrier between reading and writing v.  Every element was written before: poison cannot show it.
extern "C" __global__ void rotate_racy(float* y) {
  __shared__ float v[64];
  v[threadIdx.x] = y[threadIdx.x];
  __syncthreads();
  v[threadIdx.x] = 2 * v[(threadIdx.x + 1) % 64];
  __syncthreads();
  y[threadIdx.x] = v[threadIdx.x];
}

// launch: grid 1, block 64x1x1, shared 0, fibers
extern "C" __global__ void divergent(int n) {
  if (threadIdx.x < n) __syncthreads();
  else __syncwarp();
}

// launch: grid 1, block 64x1x1, shared 0, fibers
extern "C" __global__ void wait_elsewhere() {
  if (threadIdx.x < 32) fusegraph_cpu::named_barrier_sync(1, 64);
  else __syncthreads();
}

// launch: grid 1, block 32x1x1, shared 0, fibers
extern "C" __global__ void shuffle_after_exit(int* y) {
  if (threadIdx.x == 5) return;
  y[0] = __shfl_sync(0xffffffffu, 1, 0);
}

// launch: grid 1, block 48x1x1, shared 0, fibers
extern "C" __global__ void shuffle_outside(int* y) {
  y[threadIdx.x] = __shfl_xor_sync(0xffffffffu, int(threadIdx.x), 16);
}

// launch: grid 1, block 32x1x1, shared 0, fibers
extern "C" __global__ void shuffle_not_named(int* y) { y[0] = __shfl_sync(0xfu, 1, 0); }

// launch: grid 1, block 32x1x1, shared 0, fibers
extern "C" __global__ void mixed_meeting(int* y) {
  if (threadIdx.x % 2) y[0] = __ballot_sync(~0u, 1);
  else __syncwarp();
}

// launch: grid 1, block 64x1x1, shared 0, fibers
extern "C" __global__ void bad_barrier(int id, int n) { fusegraph_cpu::named_barrier_sync(id, n); }

// launch: grid 1, block 64x1x1, shared 0, fibers
extern "C" __global__ void two_counts() { fusegraph_cpu::named_barrier_sync(3, threadIdx.x < 32 ? 64 : 32); }

// launch: grid 1, block 64x1x1, shared 0, loop
extern "C" __global__ void no_fibers() { __syncthreads(); }

// launch: grid 1, block 64x1x1, shared 0, loop
extern "C" __global__ void read_at(const float* x, float* y, long long i) { y[threadIdx.x] = x[i + threadIdx.x]; }

// launch: grid 4, block 64x1x1, shared 0, fibers
extern "C" __global__ void write_at(float* y, long long i) {
  __syncthreads();
  if (threadIdx.x == 17 && blockIdx.x == 2) y[i] = 1;
  __syncthreads();
}

// launch: grid 1, block 1x1x1, shared 0, loop
extern "C" __global__ void vector_at(const char* x, int bytes) {
  fusegraph_cpu::check_aligned(x, bytes);
}

// launch: grid 1, block 64x1x1, shared 256, fibers
extern "C" __global__ void dynamic_reverse(const int* x, int* y, int n) {
  FUSEGRAPH_DYNAMIC_SHARED(memory);
  int* v = reinterpret_cast<int*>(memory);
  v[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = v[n - 1 - int(threadIdx.x)];
}

// launch: grid 1, block 1x1x1, shared 0, loop
extern "C" __global__ void dynamic_at(unsigned char* y, int i, int write) {
  FUSEGRAPH_DYNAMIC_SHARED(memory);
  if (write) memory[i] = 1;
  else y[0] = memory[i];
}

// launch: grid 3, block 8x1x1, shared 32, loop
extern "C" __global__ void poisoned(unsigned* y) {
  __shared__ unsigned v[8];
  FUSEGRAPH_DYNAMIC_SHARED(memory);
  unsigned* w = reinterpret_cast<unsigned*>(memory);
  y[threadIdx.x] = v[threadIdx.x];
  y[8 + threadIdx.x] = w[threadIdx.x];
  v[threadIdx.x] = w[threadIdx.x] = 1;
}

// launch: grid 1, block 32x1x1, shared 0, fibers
extern "C" __global__ void large_array(int* y, int n) {
  char large[1 << 18];
  for (int i = 0; i < n; ++i) large[i] = char(y[0] + i);
  __syncthreads();
  y[0] = large[n / 2];
}

// launch: grid 1, block 1x1x1, shared 0, loop
extern "C" __global__ void divide(int* y, int by) { y[0] = y[0] / by; }

// launch: grid 1, block 64x1x1, shared 0, loop
extern "C" __global__ void trap() {
  if (threadIdx.x == 3) __trap();
}

// launch: grid 500, block 64x1x1, shared 0, loop
extern "C" __global__ void count_atomically(unsigned* total, int* largest) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(total, 1u);
  atomicMax(largest, i);
}

// launch: grid 64, block 64x1x1, shared 0, fibers
extern "C" __global__ void last_block(unsigned* counter, int* done, const int* x, int* y) {
  __shared__ bool last;
  y[blockIdx.x * 64 + threadIdx.x] = x[threadIdx.x];
  if (threadIdx.x == 0) last = atomicAdd(counter, 1u) == gridDim.x - 1;
  __syncthreads();
  if (last && threadIdx.x == 0) atomicAdd(done, 1);
}

// launch: grid 1, block 64x1x1, shared 0, fibers
extern "C" __global__ void collectives(int* y) {
  const int t = threadIdx.x, lane = t % 32;
  const unsigned all = 0xffffffffu;
  int* r = y + t * 9;
  r[0] = __shfl_sync(all, t, 3);
  r[1] = __shfl_sync(all, t, 3, 8);
  r[2] = __shfl_up_sync(all, t, 2, 16);
  r[3] = __shfl_xor_sync(all, t, 5);
  r[4] = __shfl_xor_sync(all, t, 16, 8);
  r[5] = int(__ballot_sync(all, t % 3 == 0));
  r[6] = __all_sync(all, t >= 32);
  const unsigned half = lane < 16 ? 0xffffu : 0xffff0000u;  // the halves do not wait for each other
  int v = t;
  for (int i = 0; i < (lane < 16 ? 3 : 7); ++i) v = __shfl_xor_sync(half, v, 1);
  r[7] = v;
  r[8] = int(2 * __shfl_up_sync(all, 0.5 * t, 1));
}

// launch: grid 1, block 48x1x1, shared 0, fibers
extern "C" __global__ void part_of_a_warp(int* y) {  // 16 lanes in the second warp
  int sum = threadIdx.x;
  for (int step = 8; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  __syncwarp();
  y[threadIdx.x] = __all_sync(0xffffffffu, 1) ? sum : -1;
}

// launch: grid 1, block 64x1x1, shared 0, fibers
extern "C" __global__ void producer_consumer(int* y, int rounds) {
  __shared__ int slot;
  const bool producer = threadIdx.x < 32;
  for (int i = 0; i < rounds; ++i) {
    if (producer) {
      if (i) fusegraph_cpu::named_barrier_sync(2, 64);
      if (threadIdx.x == 0) slot = i * i;
      fusegraph_cpu::named_barrier_arrive(1, 64);
    } else {
      fusegraph_cpu::named_barrier_sync(1, 64);
      y[i * 32 + threadIdx.x - 32] = slot;
      if (i + 1 < rounds) fusegraph_cpu::named_barrier_arrive(2, 64);
    }
  }
}

// launch: grid 1, block 64x1x1, shared 0, fibers
extern "C" __global__ void wait_for_flag(int* y, int sets_it) {
  __shared__ int flag;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x == 40 && sets_it) flag = 7;
  const auto is_set = [](void* f) { return *static_cast<volatile int*>(f) == 7; };
  fusegraph_cpu::wait_until(is_set, &flag, "wait for flag");
  y[threadIdx.x] = flag;
}

// launch: grid 1, block 4x3x2, shared 0, loop
extern "C" __global__ void indices(unsigned* y) {
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  y[block * blockDim.x * blockDim.y * blockDim.z + t] +=
      1 + blockIdx.y + 10 * blockIdx.z + 100 * threadIdx.y + 1000 * threadIdx.z;
}

// launch: grid 1, block 4x3x2, shared 0, fibers
extern "C" __global__ void indices_of_fibers(unsigned* y) {
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  __syncthreads();
  y[block * blockDim.x * blockDim.y * blockDim.z + t] +=
      1 + blockIdx.y + 10 * blockIdx.z + 100 * threadIdx.y + 1000 * threadIdx.z;
}

// launch: grid 1, block 1x1x1, shared 0, loop
extern "C" __global__ void intrinsics(const unsigned* x, long long* y) {
  const unsigned u = x[0];
  const float nan = __builtin_nanf("");
  y[0] = __ffs(int(u)), y[1] = __umulhi(u, u), y[2] = __funnelshift_r(0x80000000u, 1u, 31);
  y[3] = __double2ll_rn(1e30), y[4] = __double2ll_rn(nan), y[5] = __double2ll_rn(-1e30), y[6] = __double2ll_rn(2.5);
  y[7] = __double_as_longlong(-2.0), y[8] = min(-3, 4), y[9] = max(3u, 4u);
  y[10] = max(3.0f, nan), y[11] = min(nan, 2.0f);
}

// launch: grid 8, block 64x1x1, shared 64, fibers
extern "C" __global__ void alignments(unsigned long long* y) {
  __shared__ char odd[3];
  __shared__ __align__(128) float a[5];
  alignas(256) __shared__ float b[5];
  FUSEGRAPH_DYNAMIC_SHARED(c);
  odd[0] = 0;
  __syncthreads();
  typedef unsigned long long address;
  atomicAdd(y, (address)a % 128 + (address)b % 256 + (address)c % 1024 + odd[0]);
}

// launch: grid 1, block 1x1x1, shared 0, loop
extern "C" __global__ void slow(int* y) {
  volatile int x = 0;
  for (int i = 0; i < 2000000; ++i) x = x + i % 3;
  y[0] = x;
}
""")
