"""Which convolutions direct convolution takes, with which schedules, and how often they read memory."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from graphs import quick
from kernel_cases import Case, check_cases, executable, rendered
from test_direct_convolution import LAYOUTS, activated, direct, spec_of

import fusegraph as fg
from codegen import best_schedule
from codegen.direct_convolution import schedule as schedules
from codegen.direct_convolution.schedule import (
    SHARED_LIMIT,
    ChannelsSchedule,
    PlanesSchedule,
    buffers,
    fits,
    tile_sizes,
)
from codegen.direct_convolution.spec import DirectConvolutionSpec
from codegen.spec import KernelSource
from codegen.target import PORTABLE
from fusegraph.lowering.direct_convolution import suits
from fusegraph.report.check import random_inputs
from fusegraph.runtime import host_compiler
from fusegraph.runtime.cache import default_cache

# ---- which convolutions, which schedules


def best_tiled_schedule(spec: DirectConvolutionSpec) -> schedules.TiledSchedule:
    """Returns the schedule that costs least among those whose halo tile fits."""
    return (schedules.channels(spec, PORTABLE) or schedules.planes(spec, PORTABLE))[0]


def _convolution(
    x: tuple[int, ...], w: tuple[int, ...], dtype: str = "float32", **attributes: Any
) -> tuple[fg.Graph, str, str | None]:
    graph = fg.Graph("any")
    y = graph.conv_fprop(
        graph.tensor("x", x, dtype, layout=attributes.pop("layout", "contiguous")),
        graph.tensor("w", w, dtype),
        **attributes,
    )
    graph.output(y)
    (kernel,) = executable(Case(graph)).plan.kernels
    return graph, kernel.group.family, suits(graph.nodes[0], graph)


def test_what_is_no_direct_convolution_is_a_contraction_and_says_why():
    for family, reason, x, w, attributes in [
        ("direct_convolution", None, (1, 3, 9, 9), (8, 3, 3, 3), {}),
        ("contraction", "5 channels", (1, 5, 9, 9), (8, 5, 3, 3), {}),
        ("contraction", "9 filters", (1, 3, 9, 9), (9, 3, 3, 3), {}),
        ("direct_convolution", None, (1, 8, 20, 20), (8, 1, 17, 17), {"groups": 8}),
        ("contraction", "338 products", (1, 8, 20, 20), (8, 2, 13, 13), {"groups": 4}),
        ("contraction", "578 products", (1, 8, 20, 20), (4, 2, 17, 17), {"groups": 4}),
        ("contraction", "shared memory", (1, 4, 2000, 20), (8, 4, 2, 2), {"dilation": (900, 1)}),
        ("contraction", "shared memory", (1, 8, 20, 9000), (8, 1, 15, 15), {"groups": 8, "dilation": (1, 400)}),
        ("contraction", "empty", (0, 8, 20, 20), (8, 1, 3, 3), {"groups": 8}),
        ("contraction", "registers", (1, 8, 300, 4), (8, 1, 200, 1), {"groups": 8, "layout": "NHWC"}),
    ]:
        _, chosen, why = _convolution(x, w, **attributes)
        assert chosen == family, (x, w)
        assert why is None if reason is None else reason in str(why)


@pytest.mark.parametrize("dtype", quick("bfloat16", "float32", "float64", "int8"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_best_schedule_fits(layout, dtype):
    for size, count, taps, stride in [
        (7, 512, 3, 1),
        (56, 128, 3, 1),
        (56, 100, 5, 2),
        (112, 33, 7, 1),
        (28, 24, 15, 1),
    ]:
        spec = spec_of(
            direct((8, count, size, size), (taps, taps), dtype, layout=layout, stride=stride, padding=taps // 2)
        )
        s = best_tiled_schedule(spec)
        assert isinstance(s, ChannelsSchedule if layout == "channels_last" else PlanesSchedule)
        assert fits(spec) is None
        assert buffers(spec, s).bytes <= SHARED_LIMIT
        assert 64 <= s.threads <= 256
        # What shared memory a kernel declares is what the schedule says.
        arrays = re.findall(r"__shared__ (?:__align__\(16\) )?(\w+) \w+((?:\[\d+\])+);", rendered(spec, s).code)
        declared = [_size(ctype) * prod(map(int, re.findall(r"\d+", sizes))) for ctype, sizes in arrays]
        assert sum(declared) == buffers(spec, s).bytes


def _size(ctype: str) -> int:
    return {"float": 4, "double": 8, "uint32": 4, "uint64": 8, "bfloat16": 2, "int8": 1}[ctype]


def test_a_tile_reads_little_more_than_its_outputs_need():
    """The share of a halo tile that is halo, for filters and images of common sizes."""
    for layout, limit in (("contiguous", 1.45), ("channels_last", 1.95)):
        for size in (14, 28, 56, 112, 224):
            spec = spec_of(direct((32, 64, size, size), (3, 3), "bfloat16", layout=layout, padding=1))
            s = best_tiled_schedule(spec)
            _, rows, cols = tile_sizes(spec, s)
            assert rows * cols / (s.out_rows * s.out_cols) < limit, (layout, size, s)


def _schedules(layout: str, itype: str) -> list[PlanesSchedule | ChannelsSchedule]:
    if layout == "contiguous":
        shapes = [
            (4, 4, 32, 8, 1),
            (1, 4, 8, 2, 3),
            (2, 1, 16, 4, 2),
            (3, 2, 4, 4, 4),
            (1, 1, 1, 1, 32),
            (8, 4, 2, 2, 1),
        ]
        return [PlanesSchedule(*s, itype, planes) for *s, planes in shapes]
    return [
        ChannelsSchedule(*s, itype) for s in [(8, 7, 8, 4), (1, 16, 4, 1), (3, 5, 2, 2), (2, 1, 32, 1), (5, 64, 1, 4)]
    ]


@pytest.mark.parametrize("itype", quick("int32", "int64"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_schedules(layout, itype):
    cases = []
    for number, schedule in enumerate(_schedules(layout, itype)):
        x, taps, attributes = [
            ((3, 12, 13, 37), (3, 3), {"padding": 1}),
            ((2, 20, 9, 10), (3, 5), {"stride": (2, 1), "dilation": (1, 2), "padding": 2}),
            ((2, 8, 4, 5, 6), (2, 3, 3), {"padding": 1}),
        ][number % 3]
        made = direct(
            x, taps, layout=layout, epilogue=activated, case={"schedule": lambda _, s=schedule: s}, **attributes
        )
        made.label = str(schedule)
        cases.append(made)
    check_cases(cases, guard=True)


def test_indices_are_64_bit_when_32_are_not_enough():
    assert best_schedule(spec_of(direct((8, 64, 56, 56), (3, 3)))).itype == "int32"
    assert best_schedule(spec_of(direct((64, 512, 256, 256), (3, 3)))).itype == "int64"
    assert best_schedule(spec_of(direct((2, 8, 8, 8), (3, 3), x_strides=(2**31, 64, 8, 1)))).itype == "int64"


# ---- how often memory is read


@pytest.mark.parametrize(
    "case",
    [
        direct((2, 3, 37, 70), (3, 3), padding=1),
        direct((2, 6, 9, 9), (5, 3), channels=3, filters=2, stride=(2, 1)),
        direct((2, 3, 12, 40), (3, 3), channels=3, layout="channels_last", padding=1),
        direct((2, 40, 19, 21), (3, 3), "bfloat16", layout="channels_last", padding=1),
        direct((1, 9, 4, 7, 30), (2, 3, 3), layout="channels_last", padding=1, stride=(1, 2, 2)),
        direct((70, 8, 5, 5), (3, 3), padding=1),
    ],
    ids=["planes", "grouped", "interleaved", "channels", "3-D", "small planes"],
)
def test_each_element_is_read_once_a_tile(case):
    """Counts every read of x while the kernel runs: a tile reads what lies under it once, and never the padding."""
    (kernel,) = executable(case).plan.kernels
    spec = kernel.group.lowered.spec
    counted = _counting(rendered(replace(spec, name=kernel.name), best_tiled_schedule(spec)), spec)
    module = host_compiler.build([counted], cache=default_cache())
    given = random_inputs(case.graph, 0)
    x, w = given["x"], given["w"]
    extent = sum((n - 1) * s for n, s in zip(x.shape, x.strides)) // x.itemsize + 1
    reads = np.zeros(extent, np.int32)
    y = np.zeros(case.graph.outputs[0].size, case.graph.outputs[0].dtype.numpy)
    module.launch(0, [x.ctypes.data, w.ctypes.data, y.ctypes.data, reads.ctypes.data])
    np.testing.assert_array_equal(reads, _tiles_over(spec).reshape(-1)[: reads.size])


def _counting(source: KernelSource, spec: DirectConvolutionSpec) -> KernelSource:
    """Returns the kernel with one more parameter: a counter per element of x, incremented at each read."""
    last = f"{spec.w.dtype.ctype}* __restrict__ y"
    code = source.code.replace(f"{last})", f"{last}, int* reads)")
    assert code != source.code
    count = "atomicAdd(&reads[{}], 1)"
    code, single = re.subn(r"\bx\[([^;]*?)\](?= :|\) :)", lambda m: f"x[{count.format(m[1])} * 0 + ({m[1]})]", code)
    code, wide = re.subn(
        r"value = load<(\d+)>\(x \+ ([^;]*)\);",
        lambda m: f"{{ for (int v = 0; v < {m[1]}; ++v) {count.format(m[2] + ' + v')}; {m[0]} }}",
        code,
    )
    assert single + wide == 1
    return replace(source, code=code)


def _tiles_over(spec: DirectConvolutionSpec) -> np.ndarray[Any, Any]:
    """Returns how many tiles cover each element of x (as it lies in memory), computed from the tile sizes alone."""
    s = best_tiled_schedule(spec)
    depth, rows, cols = tile_sizes(spec, s)

    def along(axis: int, step: int, span: list[int]) -> np.ndarray[Any, Any]:
        count = np.zeros(spec.sizes[axis], np.int64)
        for tile in range(-(-spec.out[axis] // step)):
            for offset in span:
                place = tile * step * spec.stride[axis] + offset - spec.before[axis]
                if 0 <= place < spec.sizes[axis]:
                    count[place] += 1
        return count

    counts = (
        along(0, 1, [k * spec.dilation[0] for k in range(depth)]),
        along(1, s.out_rows, list(range(rows))),
        along(2, s.out_cols, list(range(cols))),
    )
    sizes = (spec.images, spec.groups, spec.in_channels, *spec.sizes)
    every = np.broadcast_to(np.einsum("d,h,w->dhw", *counts), sizes)
    extent = 1 + sum((n - 1) * st for n, st in zip(sizes, spec.x.strides))
    memory = np.zeros(extent, np.int64)
    places = sum(
        np.arange(n).reshape([-1 if d == k else 1 for k in range(6)]) * st
        for d, (n, st) in enumerate(zip(sizes, spec.x.strides))
    )
    memory[np.broadcast_to(places, sizes)] = every
    return memory


@pytest.mark.parametrize("width", [257, 2592, 20000])
@pytest.mark.parametrize("lead", [(), (3,)])
def test_wide_images(lead: tuple[int, ...], width: int):
    """Tiles of channels have as many columns as a block has threads for, however wide an image is."""
    case = (2, 48, *lead, width), (48, 1, *(1 for _ in lead), 3)
    graph, family, _ = _convolution(*case, "float16", layout="channels_last", padding=(*(0 for _ in lead), 1))
    assert family == "direct_convolution"
    tiles = schedules.channels(spec_of(Case(graph)), PORTABLE)
    assert tiles
    assert all(s.columns * s.lanes <= schedules.THREADS for s in tiles)
