"""Direct convolutions of the window family, run on the CPU against the reference."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from graphs import quick
from kernel_cases import Case, check_cases, executable, rendered

import fusegraph as fg
from codegen import best_schedule, schedules
from codegen.cpu.guarded import GuardedArray
from codegen.dtypes import ALL
from codegen.spec import KernelSource, WindowSpec
from codegen.window_schedule import (
    SHARED_LIMIT,
    ChannelsSchedule,
    PlanesSchedule,
    StripsSchedule,
    best_tiled_schedule,
    fits,
    shared_bytes,
    tile_sizes,
)
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.lowering.base import Options
from fusegraph.lowering.window import suits
from fusegraph.report.check import check_executable, random_inputs, run
from fusegraph.runtime import host_compiler
from fusegraph.runtime.cache import default_cache

DTYPES = [d.name for d in ALL]
LAYOUTS = ("contiguous", "channels_last")
Epilogue = Callable[[fg.Graph, fg.Tensor], None]


def plain(graph: fg.Graph, y: fg.Tensor) -> None:
    graph.output(y, name="y")


def direct(
    x: tuple[int, ...],
    taps: tuple[int, ...],
    dtype: Any = "float32",
    second: Any = None,
    *,
    filters: int = 1,
    channels: int = 1,
    layout: str = "contiguous",
    w_layout: str = "contiguous",
    x_strides: Any = None,
    result: Any = None,
    epilogue: Epilogue = plain,
    case: dict[str, Any] | None = None,
    **attributes: Any,
) -> Case:
    """A convolution with ``channels`` channels and ``filters`` filters a group: depthwise unless told otherwise."""
    graph = fg.Graph("direct")
    groups = x[1] // channels
    where = {"strides": x_strides} if x_strides else {"layout": layout}
    image = graph.tensor("x", x, dtype, **where)
    weights = graph.tensor("w", (groups * filters, channels, *taps), second or dtype, layout=w_layout)
    epilogue(graph, graph.conv_fprop(image, weights, groups=groups, dtype=result, **attributes))
    return Case(graph, "window", **(case or {}))


def spec_of(case: Case) -> WindowSpec:
    (kernel,) = executable(case).plan.kernels
    spec = kernel.group.lowered.spec
    assert isinstance(spec, WindowSpec)
    return spec


def activated(graph: fg.Graph, y: fg.Tensor) -> None:
    """Bias a channel, a residual, an image for all channels; two outputs."""
    ones = (1,) * (y.rank - 2)
    bias = graph.tensor("bias", (y.shape[1], *ones), y.dtype)
    residual = graph.tensor("residual", y.shape, y.dtype, strides=y.strides)
    image = graph.tensor("image", (y.shape[0], 1, *y.shape[2:]), y.dtype)
    inner = graph.relu(y + bias + residual)
    graph.output(inner * image, name="y")
    graph.output(graph.cast(inner, "float64"), name="inner")


def indexed(graph: fg.Graph, y: fg.Tensor) -> None:
    for axis in range(y.rank):
        y = y + graph.gen_index(y, axis=axis)
    graph.output(y, name="y")


# ---- shapes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_depthwise_of_ragged_widths_and_channels(layout):
    cases = []
    widths, channels = (1, 2, 5, 31, 33, 127, 129, 257), (8, 12, 20, 33, 100, 8, 64, 9)
    for width, count in zip(widths, channels):
        cases.append(direct((1, count, 5, width), (3, 3), padding=1, layout=layout))
    cases.append(direct((2, 9, 33, 4), (3, 3), padding=1, layout=layout, filters=2))  # a channel multiplier
    cases.append(direct((3, 16, 7, 7), (3, 3), padding=1, layout=layout, epilogue=activated))
    check_cases(cases, guard=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [1, 2, 5, 31, 33, 127, 129, 257])
def test_depthwise_of_all_ragged_widths_and_channels(layout, width):
    cases = []
    for number, (channels, filters) in enumerate(itertools.product((8, 12, 20, 33, 100), (1, 2, 5))):
        taps, padding = (((3, 3), 1), ((1, 5), ((0, 0), (1, 3))))[(number + LAYOUTS.index(layout)) % 2]
        cases.append(direct((2, channels, 4, width), taps, padding=padding, layout=layout, filters=filters))
    check_cases(cases, guard=True)


def test_direct_convolution_of_few_channels():
    cases = []
    for channels, filters in ((1, 1), (1, 8), (3, 1), (3, 8), (4, 3), (2, 4)):
        for layout in LAYOUTS:
            cases.append(
                direct((2, channels, 6, 37), (3, 3), channels=channels, filters=filters, layout=layout, padding=1)
            )
    cases.append(direct((1, 6, 9, 10), (3, 2), channels=3, filters=2, w_layout="channels_last", epilogue=activated))
    cases.append(direct((1, 12, 9, 10), (3, 3), channels=4, filters=4, layout="channels_last", epilogue=activated))
    check_cases(cases, guard=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_stride_dilation_and_padding(layout):
    cases = []
    for x, taps, attributes in [
        ((2, 8, 40), (3,), {"padding": 1}),
        ((2, 9, 131), (7,), {"stride": 2, "padding": ((3, 0),)}),
        ((1, 1, 300), (31,), {"padding": 15}),
        ((1, 8, 300), (25,), {"dilation": 3, "padding": 36}),
        ((1, 10, 17, 19), (3, 3), {"stride": (2, 1), "padding": ((0, 1), (2, 0))}),
        ((1, 8, 17, 19), (3, 5), {"stride": (1, 3), "dilation": (2, 1), "padding": ((3, 2), (4, 4))}),
        ((1, 8, 30, 12), (3, 3), {"dilation": (8, 5), "padding": 5}),
        ((2, 8, 9, 9), (2, 2), {"stride": 2}),
        ((2, 8, 9, 9), (1, 1), {"stride": 3}),
        ((2, 8, 3, 2), (5, 7), {"padding": ((2, 2), (3, 4))}),  # a filter larger than the image
        ((2, 8, 5, 5), (3, 3), {"padding": 6, "stride": 4}),  # windows that lie in the padding alone
        ((1, 8, 5, 6, 7), (3, 3, 3), {"padding": 1}),
        (
            (2, 9, 4, 5, 18),
            (2, 1, 3),
            {"stride": (2, 1, 2), "dilation": (2, 1, 1), "padding": ((1, 2), (0, 1), (1, 1))},
        ),
        ((1, 8, 1, 5, 5), (1, 3, 3), {"padding": ((1, 0), (1, 1), (1, 1))}),  # planes of padding alone
    ]:
        mode = ("cross_correlation", "convolution")[len(cases) % 2]
        epilogue = activated if len(cases) % 3 == 0 else plain
        cases.append(direct(x, taps, layout=layout, mode=mode, epilogue=epilogue, **attributes))
    check_cases(cases, guard=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_filters_of_every_size(layout):
    sizes = [(1, 1), (2, 5), (9, 9), (15, 15)] if layout == "contiguous" else [(1, 1), (5, 2), (11, 11), (15, 15)]
    cases = [direct((1, 8, 20, 22), taps, layout=layout, padding=taps[0] // 2, mode="convolution") for taps in sizes]
    cases.append(direct((1, 8, 4, 100), (1, 64), "float64", layout=layout, padding=((0, 0), (31, 32))))
    cases.append(direct((1, 8, 100, 4), (64, 1), layout=layout, padding=((31, 32), (0, 0))))
    cases.append(direct((1, 4, 20, 21), (8, 8), channels=4, filters=8, layout=layout, padding=3))
    check_cases(cases, guard=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", range(1, 16))
def test_square_filters_up_to_15(layout, size):
    cases = []
    for number, (stride, dilation) in enumerate(((1, 1), (2, 1), (1, 2), (3, 2))):
        cases.append(
            direct(
                (1, 12, 13, 35),
                (size, size),
                layout=layout,
                stride=stride,
                dilation=dilation,
                padding=((size // 2 * dilation, size * dilation), (size * dilation, size // 2 * dilation)),
                mode=("convolution", "cross_correlation")[(size + number) % 2],
            )
        )
    check_cases(cases, guard=True)


# ---- values


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_dtype(layout):
    cases = [direct((1, 12, 6, 9), (3, 3), d, padding=1, layout=layout) for d in DTYPES]
    for a, b in (("bfloat16", "float32"), ("uint8", "int8"), ("int8", "float16"), ("float8_e5m2", "float8_e4m3")):
        cases.append(direct((1, 12, 6, 9), (3, 3), a, b, padding=1, layout=layout))
    for a, result in (("int8", "int8"), ("uint8", "float32"), ("bfloat16", "float32"), ("float8_e4m3", "float8_e4m3")):
        cases.append(direct((1, 12, 6, 9), (3, 3), a, result=result, padding=1, layout=layout, epilogue=activated))
    check_cases(cases)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_epilogues_by_vectors_and_by_elements(layout):
    """Widths and channel counts that vectors divide, and that they do not; strided outputs; indices; strict."""

    def gaps(graph: fg.Graph, y: fg.Tensor) -> None:
        strides, step = [], 2
        for size in reversed(y.shape):
            strides.insert(0, step)
            step = step * size + 3
        graph.output(graph.relu(y), name="y", strides=strides)

    def across(graph: fg.Graph, y: fg.Tensor) -> None:
        other = LAYOUTS[layout == "contiguous"]
        graph.output(y + graph.tensor("residual", y.shape, y.dtype, layout=other), name="y")
        graph.output(graph.tanh(y), name="other", layout=other)

    cases = []
    for epilogue in (activated, indexed, gaps, across):
        for x, dtype in (((2, 12, 5, 16), "bfloat16"), ((2, 9, 5, 13), "float32")):
            cases.append(direct(x, (3, 3), dtype, padding=1, layout=layout, epilogue=epilogue))
    strict = {"options": Options(strict=True)}
    cases.append(direct((2, 12, 5, 16), (3, 3), "float16", padding=1, layout=layout, epilogue=activated, case=strict))
    made = check_cases(cases, guard=True)
    assert all(len(e.plan.kernels) == 1 for e in made)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_infinity_and_wrapping_integers(layout):
    special = {"special": 0.02}
    cases = [direct((1, 8, 7, 9), (3, 3), d, padding=1, layout=layout, case=special) for d in DTYPES[:5]]
    rng = np.random.default_rng(0)
    for dtype, result in (("int32", None), ("int64", None), ("int32", "float32"), ("int32", "int64")):
        case = direct((1, 8, 7, 9), (3, 3), dtype, padding=1, layout=layout, result=result)
        bits = 31 if dtype == "int32" else 62
        case.inputs = {
            t.name: _laid_out(rng.integers(-(2**bits), 2**bits, t.shape).astype(dtype), t) for t in case.graph.inputs
        }
        cases.append(case)
    check_cases(cases)


def _laid_out(values: np.ndarray[Any, Any], tensor: fg.Tensor) -> np.ndarray[Any, Any]:
    order = sorted(range(tensor.rank), key=lambda d: -tensor.strides[d])
    return np.ascontiguousarray(values.transpose(order)).transpose(np.argsort(order))


def test_misaligned_and_strided_inputs():
    cases = [
        direct((2, 16, 5, 8), (3, 3), "bfloat16", padding=1, layout="channels_last", epilogue=activated),
        direct((2, 8, 5, 8), (3, 3), padding=1, epilogue=activated),
    ]
    for exe, case in zip(check_cases(cases), cases):
        given = random_inputs(case.graph, 5)
        expected = run(exe, given)
        inputs = [_shifted(a) for a in given.values()]
        outputs = [_shifted(a) for a in expected.values()]
        for array in outputs:
            array[...] = 0
        exe(*inputs, out=outputs)
        for seen, wanted in zip(outputs, expected.values()):
            np.testing.assert_array_equal(seen.astype(np.float64), wanted.astype(np.float64))
    # Pixels whose channels do not start at multiples of a vector, images far apart.
    check_cases(
        [
            direct((2, 16, 5, 8), (3, 3), "bfloat16", padding=1, x_strides=(1000, 1, 18 * 8, 18)),
            direct((2, 16, 5, 8), (3, 3), "int8", padding=1, x_strides=(1001, 1, 160, 20)),
            direct((2, 16, 5, 8), (3, 3), padding=1, x_strides=(1000, 50, 10, 1)),
            direct((2, 16, 5, 8), (3, 3), padding=1, x_strides=(0, 40, 8, 1)),  # one image, repeated
        ],
        guard=True,
    )


def _shifted(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy in the same layout whose address is no multiple of 16."""
    base = np.zeros(array.size + 1, array.dtype)
    start = 1 if base.ctypes.data % 16 == 0 else 0
    copy = np.ndarray(array.shape, array.dtype, base, start * array.itemsize, array.strides)
    copy[...] = array
    assert copy.ctypes.data % 16
    return copy


def test_misaligned_output_between_two_kernels():
    """What one kernel writes for the caller and another reads is no more aligned than the caller's array."""
    graph = fg.Graph("two")
    x = graph.tensor("x", (1, 16, 6, 7), "bfloat16", layout="NHWC")
    first = graph.conv_fprop(x, graph.tensor("v", (16, 1, 3, 3), "bfloat16"), padding=1)
    graph.output(first, name="first")
    graph.output(graph.conv_fprop(first, graph.tensor("w", (16, 1, 3, 3), "bfloat16"), padding=1), name="second")
    (made,) = check_cases([Case(graph, "window")])
    given = random_inputs(graph, 1)
    expected = run(made, given)
    outputs = [_shifted(a) for a in expected.values()]
    made(*given.values(), out=outputs)
    for seen, wanted in zip(outputs, expected.values()):
        np.testing.assert_array_equal(seen.astype(np.float32), wanted.astype(np.float32))


# ---- which convolutions, which schedules


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
        ("window", None, (1, 3, 9, 9), (8, 3, 3, 3), {}),
        ("contraction", "5 channels", (1, 5, 9, 9), (8, 5, 3, 3), {}),
        ("contraction", "9 filters", (1, 3, 9, 9), (9, 3, 3, 3), {}),
        ("contraction", "289 products", (1, 8, 20, 20), (8, 1, 17, 17), {"groups": 8}),
        ("contraction", "shared memory", (1, 4, 2000, 20), (8, 4, 2, 2), {"dilation": (900, 1)}),
        ("contraction", "shared memory", (1, 8, 20, 9000), (8, 1, 15, 15), {"groups": 8, "dilation": (1, 400)}),
        ("contraction", "empty", (0, 8, 20, 20), (8, 1, 3, 3), {"groups": 8}),
        ("contraction", "registers", (1, 8, 300, 4), (8, 1, 200, 1), {"groups": 8, "layout": "NHWC"}),
    ]:
        _, chosen, why = _convolution(x, w, **attributes)
        assert chosen == family, (x, w)
        assert why is None if reason is None else reason in str(why)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int8"])
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
        assert shared_bytes(spec, s) <= SHARED_LIMIT
        assert 64 <= s.threads <= 256
        # What shared memory a kernel declares is what the schedule says.
        arrays = re.findall(r"__shared__ (?:__align__\(16\) )?(\w+) \w+((?:\[\d+\])+);", rendered(spec, s).code)
        declared = [_size(ctype) * prod(map(int, re.findall(r"\d+", sizes))) for ctype, sizes in arrays]
        assert sum(declared) == shared_bytes(spec, s)


def _size(ctype: str) -> int:
    return {"float": 4, "double": 8, "uint32": 4, "uint64": 8, "bfloat16": 2, "int8": 1}[ctype]


def test_a_tile_reads_little_more_than_its_outputs_need():
    """The share of a halo tile that is halo, for filters and images of common sizes."""
    for layout, limit in (("contiguous", 1.45), ("channels_last", 1.65)):
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
        return [PlanesSchedule(*s, itype) for s in shapes]
    return [
        ChannelsSchedule(*s, itype) for s in [(8, 7, 8, 4), (1, 16, 4, 1), (3, 5, 2, 2), (2, 1, 32, 1), (5, 64, 1, 4)]
    ]


@pytest.mark.parametrize("itype", ["int32", "int64"])
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


def _counting(source: KernelSource, spec: WindowSpec) -> KernelSource:
    """The kernel with one more parameter: a counter for each element of x, raised whenever it is read."""
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


def _tiles_over(spec: WindowSpec) -> np.ndarray[Any, Any]:
    """How many tiles each element of x (as it lies in memory) is under, from the sizes of the tiles alone."""
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


# ---- together


def test_random_problems():
    check_cases([_random_case(random.Random(seed)) for seed in range(30)], guard=True)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 1300, 50))
def test_more_random_problems(start):
    check_cases([_random_case(random.Random(seed)) for seed in range(start, start + 50)], guard=True)


def _random_case(r: random.Random) -> Case:
    rank = r.choice([1, 2, 2, 2, 3])
    if r.random() < 0.6:
        channels, filters, groups = 1, r.choice([1, 1, 2]), r.choice([1, 3, 8, 12, 20, 33, 40])
    else:
        channels, filters, groups = r.randint(1, 4), r.randint(1, 8), r.choice([1, 2])
    sizes = {1: [1, 2, 5, 31, 33, 127, 257], 2: [1, 2, 5, 7, 13, 14, 33], 3: [1, 2, 5, 7]}[rank]
    spatial, taps = (
        [r.choice(sizes) for _ in range(rank)],
        [r.choice([1, 2, 3, 3, 5, 7][: 8 - rank]) for _ in range(rank)],
    )
    while channels * np.prod(taps) > 256:
        taps[taps.index(max(taps))] = 1
    dilation = [r.choice([1, 1, 2, 3]) for _ in range(rank)]
    reach = [(t - 1) * d + 1 for t, d in zip(taps, dilation)]
    dtype = r.choice(DTYPES)
    return direct(
        (r.choice([1, 2, 3]), groups * channels, *spatial),
        tuple(taps),
        dtype,
        dtype if r.random() < 0.7 else r.choice(DTYPES),
        channels=channels,
        filters=filters,
        layout=r.choice(LAYOUTS),
        w_layout=r.choice(LAYOUTS),
        epilogue=r.choice([plain, indexed, activated]),
        stride=[r.choice([1, 1, 2, 3]) for _ in range(rank)],
        dilation=dilation,
        padding=[(r.randint(0, w), max(r.randint(0, w), w - size)) for w, size in zip(reach, spatial)],
        mode=r.choice(["convolution", "cross_correlation"]),
        case={"special": r.choice([0, 0, 0.02]), "options": Options(strict=r.random() < 0.2)},
    )


STRIPS = [
    # (height, width, taps, padding, dilation)
    (19, 48, 3, 1, 1),
    (19, 48, 3, ((0, 3), (2, 1)), 1),
    (9, 32, 3, 2, 2),
    (5, 16, 5, 2, 1),
    (1, 64, 1, 0, 1),
    (33, 16, 3, 0, 1),
]


def test_strips_take_unstrided_filters_over_aligned_rows():
    def chosen(*args, **attributes):
        return isinstance(best_schedule(spec_of(direct(*args, **attributes))), StripsSchedule)

    assert chosen((2, 3, 19, 48), (3, 3), padding=1)
    assert not chosen((2, 3, 19, 47), (3, 3), padding=1)  # rows that are not whole vectors
    assert not chosen((2, 3, 19, 48), (3, 3), padding=1, stride=2)
    assert not chosen((2, 3, 19, 48), (11, 11), padding=5)  # more weights than registers
    assert not chosen((2, 16, 19, 48), (3, 3), padding=1, layout="channels_last")


@pytest.mark.parametrize("dtype", quick("float32", "float64", "bfloat16", "float8_e5m2", "int8", "int32", "uint8"))
def test_strips_equal_the_reference(dtype):
    graphs = []
    for height, width, taps, padding, dilation in STRIPS:
        for mode in ("cross_correlation", "convolution"):
            g = fg.Graph("strips", io_dtype=dtype)
            x, w = g.tensor("x", (2, 3, height, width)), g.tensor("w", (6, 1, taps, taps))
            y = g.conv_fprop(x, w, padding=padding, dilation=dilation, mode=mode)
            bias = g.tensor("bias", (6, 1, 1), y.dtype)
            residual = g.tensor("residual", y.shape, y.dtype)
            g.output(g.relu(y + bias) + residual, name="out")
            g.output(y, name="plain")
            graphs.append(g)
    built = [CpuExecutable(g, Options(), lazy=True) for g in graphs]
    for each in built:
        spec = each.plan.kernels[0].group.lowered.spec
        assert isinstance(best_schedule(spec), StripsSchedule)
    build_together(built)
    for each in built:
        for special in (0.0, 0.05):
            result = check_executable(each, random_inputs(each.graph, 3, special=special))
            assert result.ok, str(result)


def test_strips_of_every_schedule():
    cases = []
    for number, (height, width, taps, padding, dilation) in enumerate(STRIPS):
        x = (2, 3, height, width)
        made = direct(x, (taps, taps), "bfloat16", padding=padding, dilation=dilation, epilogue=activated)
        tried = [s for s in schedules(spec_of(made)) if isinstance(s, StripsSchedule)]
        assert len(tried) == len(set(tried))
        assert len(tried) > 2 or height == 1
        for schedule in tried[number % 2 :: 2]:
            again = direct(x, (taps, taps), "bfloat16", padding=padding, dilation=dilation, epilogue=activated)
            again.schedule, again.label = lambda _, s=schedule: s, f"{schedule} {x}"
            cases.append(again)
    check_cases(cases, guard=True)


def test_strips_stay_within_their_arrays():
    """Every pointer at the end and at the start of readable memory: an access outside faults."""
    for height, width, taps, padding, dilation in STRIPS:
        g = fg.Graph("strips")
        x, w = g.tensor("x", (2, 3, height, width)), g.tensor("w", (3, 1, taps, taps))
        g.output(g.conv_fprop(x, w, padding=padding, dilation=dilation), name="out")
        compiled = g.compile("cpu")
        inputs = random_inputs(g, 1)
        wanted = compiled(*inputs.values())
        for flush in ("end", "start"):
            arrays = [GuardedArray(a, flush=flush, writable=False) for a in inputs.values()]
            out = GuardedArray(np.zeros_like(wanted), flush=flush)
            compiled(*(a.array for a in arrays), out=out.array)
            assert out.damage() is None
            np.testing.assert_array_equal(out.array, wanted)


FAR = 2**30  # elements: three such steps are more than an int holds


@pytest.mark.parametrize("width", [16, 9])
@pytest.mark.parametrize("family", ["window", "contraction"])
def test_offsets_beyond_an_int(family, width):
    """Channels and filters so far apart that offsets need 64 bits; the memory between is never touched."""
    channels = 4 if family == "window" else 5
    g = fg.Graph("far", io_dtype="int8")
    x = g.tensor("x", (1, channels, 6, width), strides=(channels * FAR, FAR, width, 1))
    w = g.tensor("w", (4, channels, 3, 3))
    y = g.conv_fprop(x, w, padding=1, dtype="int8")
    g.output(y, name="y", strides=(4 * FAR, FAR, width, 1))
    depthwise = g.tensor("v", (channels, 1, 3, 3))
    g.output(g.conv_fprop(x, depthwise, padding=1, groups=channels, dtype="int8"), name="z")
    compiled = g.compile("cpu")
    assert [k.group.family for k in compiled.plan.kernels].count(family) >= 1
    inputs = random_inputs(g, 1)
    compact = {n: np.ascontiguousarray(a) for n, a in inputs.items()}
    results = run(compiled, inputs)
    h = fg.Graph("near", io_dtype="int8")
    image, filters, single = (h.tensor(n, a.shape) for n, a in compact.items())
    h.output(h.conv_fprop(image, filters, padding=1, dtype="int8"), name="y")
    h.output(h.conv_fprop(image, single, padding=1, groups=channels, dtype="int8"), name="z")
    for name, wanted in run(h.compile("reference"), compact).items():
        np.testing.assert_array_equal(results[name], wanted)
