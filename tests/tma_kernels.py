"""Kernels that use TMA, and their expected results by NumPy; test_device_tma.py runs them on the CPU.

A Case is one kernel with its arrays; ``expected`` are the arrays after the launch, bit for bit.  The model here is
written from the definition of tiled and im2col loads, not from the CPU's implementation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from codegen import dtypes
from codegen.spec import KernelSource, TensorMap

Array = NDArray[Any]


@dataclass(frozen=True)
class Case:
    """A kernel, the arrays whose addresses are its arguments, and those arrays afterwards."""

    source: KernelSource
    arrays: tuple[Array, ...]
    expected: tuple[Array, ...]

    @property
    def name(self) -> str:
        return self.source.name


def describe(array: Array, box: Sequence[int], swizzle: int = 0, argument: int = 0, **fields: Any) -> TensorMap:
    """Describes an array of 2 to 5 dimensions; ``box`` and the fields are innermost first, as in TensorMap."""
    return TensorMap(
        argument=argument,
        element=dtypes.BY_NUMPY[array.dtype].ctype,
        sizes=array.shape[::-1],
        strides=array.strides[-2::-1],
        box=tuple(box),
        steps=fields.pop("steps", (1,) * array.ndim),
        swizzle=swizzle,
        **fields,
    )


def sample(shape: Sequence[int], dtype: Any, seed: int = 0) -> Array:
    """Returns random integers between -100 and 99."""
    values = np.random.default_rng(seed).integers(-100, 100, tuple(shape))
    return values.astype(dtype)


def swizzle_bytes(dense: Array, span: int, start: int = 0) -> Array:
    """Swizzles the bytes of a dense box with a span of ``span`` bytes, for a box at shared address ``start``."""
    address = np.arange(start, start + dense.size)
    mask = {0: 0, 32: 0x10, 64: 0x30, 128: 0x70}[span]
    moved = np.empty_like(dense)
    moved[(address ^ (address >> 3 & mask)) - start] = dense
    return moved


def _take(array: Array, index: Sequence[int]) -> Any:
    """Returns an element, 0 outside the array."""
    inside = all(0 <= i < size for i, size in zip(index, array.shape))
    return array[tuple(index)] if inside else array.dtype.type(0)


def in_tf32(values: Array) -> Array:
    """Rounds floats to 11 significant bits (fewer below the smallest normal number), ties to even."""
    with np.errstate(over="ignore", invalid="ignore"):
        mantissa, exponent = np.frexp(values.astype(np.float64))
        places = 11 - np.maximum(-125 - exponent, 0)
        rounded = np.ldexp(np.rint(np.ldexp(mantissa, places)), exponent - places).astype(np.float32)
    rounded.view(np.uint32)[np.isnan(values)] = 0x7FFFE000
    return rounded


def tile(array: Array, at: Sequence[int], described: TensorMap) -> Array:
    """Returns the dense box of a tiled load at coordinates ``at``, innermost first."""
    array = in_tf32(array) if described.element == "tf32" else array
    shape, steps, start = described.box[::-1], described.steps[::-1], tuple(at)[::-1]
    box = np.zeros(shape, array.dtype)
    for index in itertools.product(*map(range, shape)):
        box[index] = _take(array, [s + i * step for s, i, step in zip(start, index, steps)])
    return box


def pixels(array: Array, at: Sequence[int], offsets: Sequence[int], described: TensorMap) -> Array:
    """Returns the dense box (pixels, channels) of an im2col load; coordinates and offsets innermost first."""
    array = in_tf32(array) if described.element == "tf32" else array
    assert described.lower is not None
    assert described.upper is not None
    channels, count = described.box
    channel, *start = at
    ranges = [
        range(low, size + high, step)
        for size, step, low, high in zip(array.shape[-2:0:-1], described.steps[1:], described.lower, described.upper)
    ]
    origins = list(itertools.product(range(array.shape[0] + count), *ranges[::-1]))  # (n, d, h, w), w fastest
    first = origins.index(tuple(start[::-1]))
    box = np.zeros((count, channels), array.dtype)
    for number, origin in enumerate(origins[first : first + count]):
        place = [origin[0], *(o + offset for o, offset in zip(origin[1:], offsets[::-1]))]
        for c in range(channels):
            box[number, c] = _take(array, [*place, channel + c])
    return box


_LOAD = """
#include "tma.cuh"
{also}
extern "C" __global__ void {cluster} {name}(
    const __grid_constant__ TensorMap map, const int* __restrict__ at, uint32* __restrict__ out)
{{
    FUSEGRAPH_DYNAMIC_SHARED(shared);
    __shared__ Barrier full;
    uint32* const words = reinterpret_cast<uint32*>(shared + {offset});
    for (int i = threadIdx.x; i < {words}; i += blockDim.x) words[i] = 0xabababab;
    fence_async_shared();
    if (threadIdx.x == 0) {{
        tma_prefetch(map);
        barrier_init(full, 1);
        barrier_fence_init();
    }}
    {sync};
    at += blockIdx.x * {coordinates};
    if (threadIdx.x == 0) {{
        barrier_expect(full, {bytes});
        {load}
    }}
    barrier_wait(full, 0);
    for (int i = threadIdx.x; i < {words}; i += blockDim.x) out[blockIdx.x * {words} + i] = words[i];
    {end}
}}
"""


def load(name: str, array: Array, described: TensorMap, places: Sequence[Sequence[int]], offset: int = 0) -> Case:
    """Loads a box a block and writes what shared memory then holds; ``offset`` from a multiple of 1024 bytes.

    An im2col load's places have its offsets after its coordinates.
    """
    rank, im2col = len(described.sizes), described.lower is not None
    boxes = [
        pixels(array, place[:rank], place[rank:], described) if im2col else tile(array, place, described)
        for place in places
    ]
    moved = [swizzle_bytes(box.reshape(-1).view(np.uint8), described.swizzle, offset) for box in boxes]
    arguments = [f"at[{i}]" for i in range(rank)] + [f"uint16(at[{i}])" for i in range(rank, len(places[0]))]
    function = "tma_load_im2col" if im2col else "tma_load"
    code = _LOAD.format(
        also="",
        cluster="",
        name=name,
        offset=offset,
        words=moved[0].size // 4,
        sync="__syncthreads()",
        coordinates=len(places[0]),
        bytes=moved[0].size,
        load=f"{function}(shared + {offset}, map, full, {', '.join(arguments)});",
        end="",
    )
    at, out = np.array(places, np.int32), np.full((len(places), moved[0].size // 4), 7, np.uint32)
    source = KernelSource(name, code, (len(places), 1, 1), (64, 1, 1), offset + moved[0].size, True, (described, 1, 2))
    return Case(source, (array, at, out), (array, at, np.stack(moved).view(np.uint32)))


def multicast(name: str, array: Array, described: TensorMap, places: Sequence[Sequence[int]], blocks: int) -> Case:
    """Every block of a cluster loads one box into all blocks of the cluster; each writes what it then holds."""
    rank, im2col = len(described.sizes), described.lower is not None
    boxes = [
        pixels(array, place[:rank], place[rank:], described) if im2col else tile(array, place, described)
        for place in places
    ]
    moved = [swizzle_bytes(box.reshape(-1).view(np.uint8), described.swizzle) for box in boxes]
    size = moved[0].size
    arguments = [f"at[{i}]" for i in range(rank)] + [f"uint16(at[{i}])" for i in range(rank, len(places[0]))]
    function = "tma_load_im2col_multicast" if im2col else "tma_load_multicast"
    call = f"{function}(shared + cluster_rank() * {size}, map, full, {', '.join(arguments)}, uint16({2**blocks - 1}));"
    code = _LOAD.format(
        also='#include "cluster.cuh"',
        cluster=f"__cluster_dims__({blocks}, 1, 1)",
        name=name,
        offset=0,
        words=size * blocks // 4,
        sync="cluster_sync()",
        coordinates=len(places[0]),
        bytes=size * blocks,
        load=call,
        end="cluster_sync();",
    )
    together = [np.concatenate(moved[i : i + blocks]) for i in range(0, len(moved), blocks)]
    expected = np.stack([box for box in together for _ in range(blocks)]).view(np.uint32)
    at, out = np.array(places, np.int32), np.full_like(expected, 7)
    source = KernelSource(
        name,
        code,
        (len(places), 1, 1),
        (64, 1, 1),
        size * blocks,
        True,
        (described, 1, 2),
        (blocks, 1, 1),
    )
    return Case(source, (array, at, out), (array, at, expected))


_STORE = """
#include "tma.cuh"

extern "C" __global__ void {name}(
    const __grid_constant__ TensorMap map, const int* __restrict__ at, const uint32* __restrict__ boxes)
{{
    FUSEGRAPH_DYNAMIC_SHARED(shared);
    uint32* const words = reinterpret_cast<uint32*>(shared);
    for (int i = threadIdx.x; i < {words}; i += blockDim.x) words[i] = boxes[blockIdx.x * {words} + i];
    fence_async_shared();
    __syncthreads();
    at += blockIdx.x * {rank};
    if (threadIdx.x == 0) {{
        {store}(map, shared, {coordinates});
        tma_commit();
        tma_wait_read<0>();
        {wait}
    }}
}}
"""


def store(name: str, array: Array, described: TensorMap, places: Sequence[Sequence[int]], add: bool = False) -> Case:
    """Stores, or adds, one box per block; boxes must not overlap within the array."""
    shape = described.box[::-1]
    boxes = sample((len(places), *shape), array.dtype, seed=1)
    expected = array.copy()
    for box, place in zip(boxes, places):
        for index in itertools.product(*map(range, shape)):
            target = tuple(
                s + i * step for s, i, step in zip(tuple(place)[::-1], index, described.steps[::-1], strict=True)
            )
            if all(0 <= i < size for i, size in zip(target, array.shape)):
                expected[target] = expected[target] + box[index] if add else box[index]
    moved = np.stack([swizzle_bytes(box.reshape(-1).view(np.uint8), described.swizzle) for box in boxes])
    rank = len(described.sizes)
    code = _STORE.format(
        name=name,
        words=moved.shape[1] // 4,
        rank=rank,
        store="tma_store_add" if add else "tma_store",
        coordinates=", ".join(f"at[{i}]" for i in range(rank)),
        wait="tma_wait<0>();" if len(places) % 2 else "",
    )
    at, words = np.array(places, np.int32), moved.view(np.uint32)
    source = KernelSource(name, code, (len(places), 1, 1), (64, 1, 1), moved.shape[1], True, (described, 1, 2))
    return Case(source, (array, at, words), (expected, at, words))


_BULK = """
#include "tma.cuh"

extern "C" __global__ void bulk(const uint32* __restrict__ x, uint32* __restrict__ y)
{
    FUSEGRAPH_DYNAMIC_SHARED(shared);
    __shared__ Barrier full;
    if (threadIdx.x == 0) {
        barrier_init(full, 1);
        barrier_fence_init();
        barrier_expect(full, 1008);
        bulk_load(shared + 16, x + blockIdx.x * 252, 1008, full);
    }
    __syncthreads();
    barrier_wait(full, 0);
    uint32* const words = reinterpret_cast<uint32*>(shared + 16);
    for (int i = threadIdx.x; i < 252; i += blockDim.x) words[i] += 1;
    fence_async_shared();
    __syncthreads();
    if (threadIdx.x == 0) {
        bulk_store(y + blockIdx.x * 252, shared + 16, 1008);
        tma_commit();
        tma_wait_read<0>();
    }
}
"""


def bulk() -> Case:
    """Copies a run of bytes to shared memory and back in bulk."""
    x = np.random.default_rng(2).integers(0, 2**32 - 1, 3 * 252, np.uint32)
    source = KernelSource("bulk", _BULK, (3, 1, 1), (96, 1, 1), 1024, True)
    return Case(source, (x, np.zeros_like(x)), (x, x + 1))


def _im2col(
    name: str,
    shape: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    before: Sequence[int],
    after: Sequence[int],
    channels: int,
    count: int,
    swizzle: int,
    dtype: Any = np.float16,
    blocks: int = 1,
) -> Case:
    """Returns im2col loads of an array (n, [d, [h,]] w, c) for a convolution: all filter taps, from several first
    pixels.

    ``shape`` is the array's; what belongs to spatial dimensions is in its order, outermost first.
    """
    array = sample(shape, dtype)
    lower = [-p for p in before]
    upper = [p - (k - 1) * d for p, k, d in zip(after, kernel, dilation)]
    described = describe(
        array,
        (channels, count),
        swizzle,
        steps=(1, *stride[::-1], 1),
        lower=tuple(lower[::-1]),
        upper=tuple(upper[::-1]),
    )
    ranges = [range(low, size + high, step) for low, size, high, step in zip(lower, shape[1:-1], upper, stride)]
    origins = list(itertools.product(range(shape[0]), *ranges))
    taps = list(itertools.product(*map(range, kernel)))
    places = []
    for number, tap in enumerate(taps):
        n, *origin = origins[number * count // 2 % len(origins)]
        offsets = [t * d for t, d in zip(tap, dilation)]
        places.append([number * channels % shape[-1], *origin[::-1], n, *offsets[::-1]])
    unit = 16 // array.itemsize
    places.append([-unit, *places[0][1:]])  # channels before the first
    places.append([shape[-1] - unit, *places[-2][1:]])  # and past the last
    last = origins[-1]  # the pixels after it are in no image
    places.append([0, *last[:0:-1], last[0], *([0] * len(kernel))])
    if blocks > 1:
        return multicast(name, array, described, places[: len(places) // blocks * blocks], blocks)
    return load(name, array, described, places)


def load_cases() -> Iterator[Case]:
    """Yields tiled loads: ranks, swizzles, types, edges, steps."""
    half = sample((37, 72), np.float16)
    edges = [(0, 0), (8, 3), (-8, -7), (64, 36), (56, -20), (72, 0), (-200, 5), (16, 1000)]
    for swizzle in (0, 32, 64, 128):
        box = (swizzle // 2 or 40, 24)
        yield load(f"tile_2d_{swizzle}", half, describe(half, box, swizzle), edges)
    yield load("tile_2d_unaligned_128", half, describe(half, (64, 24), 128), edges, offset=384)
    yield load("tile_2d_unaligned_64", half, describe(half, (32, 24), 64), edges, offset=128)
    yield load("tile_2d_unaligned_32", half, describe(half, (16, 24), 32), edges, offset=128)
    yield load("tile_narrow_128", half, describe(half, (32, 16), 128), edges[:4])
    yield load("tile_narrow_64", half, describe(half, (16, 16), 64), edges[:4])
    yield load("tile_narrow_128_of_16_bytes", half, describe(half, (8, 16), 128), edges[:4])
    for dtype in (np.float32, np.float64, np.int8, np.int32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
        array = sample((20, 128), dtype)
        box = (128 // array.itemsize, 16)
        yield load(f"tile_{dtypes.BY_NUMPY[array.dtype].name}", array, describe(array, box, 128), [(0, 0), (112, 9)])
    every = np.random.default_rng(0).integers(0, 2**32, (20, 64), np.uint32)
    every[0, :32] = every[0, :32] >> 9 | 0x3F800000  # above 1
    every[1, :32] = every[1, :32] >> 9  # subnormal
    every[2, :32] = every[2, :32] & 0xFFFFE000 | 0x1000  # ties
    every[3, :8] = 0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC01234, 0x7F7FFFFF, 0xFF7FF000
    floats = every.view(np.float32)
    rounds = replace(describe(floats, (32, 16), 128), element="tf32")
    yield load("tile_tf32", floats, rounds, [(0, 0), (32, 0), (40, 9)])
    deep = sample((5, 9, 40), np.float32)
    yield load("tile_3d", deep, describe(deep, (32, 4, 2), 128), [(0, 0, 0), (-8, 7, 4), (20, -3, -1), (36, 8, 4)])
    deep = sample((3, 4, 5, 48), np.float16)
    yield load("tile_4d", deep, describe(deep, (32, 2, 2, 2), 64), [(0, 0, 0, 0), (40, 4, 3, 2), (-8, -1, -1, -1)])
    deep = sample((2, 3, 3, 4, 24), np.float16)
    yield load("tile_5d", deep, describe(deep, (16, 2, 2, 2, 2), 32), [(0,) * 5, (16, 3, 2, 2, 1), (-8, -1, 1, -1, 0)])
    rows = sample((40, 64), np.float16)
    yield load("tile_steps", rows, describe(rows, (64, 9), 128, steps=(1, 3)), [(0, 0), (0, 2), (8, -4), (0, 30)])
    rows = sample((9, 12, 32), np.float16)
    stepped = describe(rows, (32, 4, 3), 64, steps=(1, 2, 4))
    yield load("tile_steps_3d", rows, stepped, [(0, 0, 0), (0, -3, -1), (16, 7, 5)])
    wide = sample((16, 256), np.float16)
    yield _part(wide, replace(describe(wide[:, 32:150], (64, 8), 128), offset=64))
    yield _broadcast(sample((1, 64), np.float16))


def _part(array: Array, described: TensorMap) -> Case:
    """Returns loads of a column range of an array; the range does not end at a multiple of 16 bytes."""
    places = [(0, 0), (104, 10), (-8, -1)]
    view = array[:, 32:150]
    case = load("tile_part", np.ascontiguousarray(view), described, places)
    return Case(case.source, (array, *case.arrays[1:]), (array, *case.expected[1:]))


def _broadcast(row: Array) -> Case:
    """Returns loads of a map that repeats one row with a stride of zero."""
    rows = np.repeat(row, 20, 0)
    described = replace(describe(rows, (64, 16), 128), strides=(0,))
    case = load("tile_broadcast", rows, described, [(0, 0), (8, 10)])
    return Case(case.source, (row, *case.arrays[1:]), (row, *case.expected[1:]))


def im2col_cases() -> Iterator[Case]:
    """Yields im2col loads: dimensions, strides, dilation, asymmetric padding."""
    yield _im2col("im2col_2d", (3, 6, 7, 64), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 64, 64, 128)
    yield _im2col("im2col_2d_stride", (3, 9, 8, 72), (3, 3), (2, 2), (1, 1), (1, 1), (1, 1), 32, 48, 64)
    yield _im2col("im2col_2d_strides", (2, 9, 11, 16), (3, 2), (2, 3), (1, 1), (0, 1), (2, 0), 16, 32, 32)
    yield _im2col("im2col_2d_dilation", (2, 9, 8, 64), (3, 2), (1, 2), (2, 3), (2, 3), (1, 0), 64, 40, 128)
    yield _im2col("im2col_2d_asymmetric", (2, 5, 6, 40), (2, 3), (1, 1), (1, 1), (2, 0), (0, 1), 40, 32, 0)
    yield _im2col("im2col_2d_image", (5, 2, 2, 32), (1, 1), (1, 1), (1, 1), (0, 0), (0, 0), 32, 32, 64)
    yield _im2col("im2col_1d", (4, 23, 64), (3,), (1,), (2,), (2,), (2,), 64, 40, 128)
    yield _im2col("im2col_1d_stride", (4, 23, 32), (5,), (3,), (1,), (1,), (2,), 32, 24, 64)
    yield _im2col("im2col_3d", (2, 4, 5, 6, 32), (2, 3, 3), (1, 1, 1), (1, 1, 1), (0, 1, 1), (1, 1, 1), 32, 48, 64)
    yield _im2col(
        "im2col_3d_stride", (2, 5, 6, 7, 16), (2, 2, 2), (2, 1, 2), (1, 2, 1), (1, 0, 1), (0, 2, 1), 16, 32, 32
    )
    yield _im2col("im2col_float", (2, 6, 6, 32), (3, 3), (2, 1), (1, 1), (1, 1), (1, 1), 32, 32, 128, np.float32)
    yield _im2col("im2col_multicast", (3, 6, 7, 64), (3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 64, 32, 128, blocks=2)


def store_cases() -> Iterator[Case]:
    """Yields stores and additions: swizzles, ranks, edges."""
    for swizzle in (0, 32, 64, 128):
        array = sample((37, 72), np.float16)
        box = (swizzle // 2 or 40, 8)
        places = [(0, 0), (-8, 10), (56, 20), (8, 34), (104, 0)]
        yield store(f"store_2d_{swizzle}", array, describe(array, box, swizzle), places)
    array = sample((5, 9, 40), np.float32)
    yield store("store_3d", array, describe(array, (32, 4, 2), 128), [(0, 0, 0), (20, 7, 2), (-4, -2, 4)])
    array = sample((3, 4, 5, 48), np.float16)
    yield store("store_4d", array, describe(array, (32, 2, 2, 2), 64), [(0, 0, 0, 0), (24, 3, 3, 2)])
    array = sample((2, 3, 3, 4, 24), np.float16)
    yield store("store_5d", array, describe(array, (16, 2, 2, 2, 2), 32), [(0,) * 5, (16, 2, 2, 2, 1)])
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16, np.int32, np.int64):
        array = sample((20, 64), dtype)
        name = dtypes.BY_NUMPY[array.dtype].name
        box = (128 // array.itemsize, 8)
        yield store(f"store_add_{name}", array, describe(array, box, 128), [(0, 0), (16, 10), (-8, -4)], add=True)


def multicast_cases() -> Iterator[Case]:
    """Loads into several blocks of a cluster."""
    half = sample((37, 72), np.float16)
    places = [(0, 0), (8, 3), (-8, -7), (64, 36)]
    yield multicast("multicast_2", half, describe(half, (64, 16), 128), places, 2)
    yield multicast("multicast_4", half, describe(half, (32, 16), 64), places, 4)


def cases() -> list[Case]:
    return [*load_cases(), *im2col_cases(), *store_cases(), *multicast_cases(), bulk()]
