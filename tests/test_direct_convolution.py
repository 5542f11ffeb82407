"""Direct convolutions, run on the CPU against the reference."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import quick
from kernel_cases import Case, check_cases, executable

import fusegraph as fg
from codegen.direct_convolution.spec import DirectConvolutionSpec
from codegen.dtypes import ALL
from fusegraph.lowering.base import Options
from fusegraph.report.check import random_inputs, run

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
    """Returns a convolution with ``channels`` channels and ``filters`` filters per group; depthwise by default."""
    graph = fg.Graph("direct")
    groups = x[1] // channels
    where = {"strides": x_strides} if x_strides else {"layout": layout}
    image = graph.tensor("x", x, dtype, **where)
    weights = graph.tensor("w", (groups * filters, channels, *taps), second or dtype, layout=w_layout)
    epilogue(graph, graph.conv_fprop(image, weights, groups=groups, dtype=result, **attributes))
    return Case(graph, "direct_convolution", **(case or {}))


def spec_of(case: Case) -> DirectConvolutionSpec:
    (kernel,) = executable(case).plan.kernels
    spec = kernel.group.lowered.spec
    assert isinstance(spec, DirectConvolutionSpec)
    return spec


def activated(graph: fg.Graph, y: fg.Tensor) -> None:
    """An epilogue with a bias per channel, a residual and an image for all channels; two outputs."""
    ones = (1,) * (y.rank - 2)
    bias = graph.tensor("bias", (y.shape[1], *ones), y.dtype)
    residual = graph.tensor("residual", y.shape, y.dtype, strides=y.strides)
    image = graph.tensor("image", (y.shape[0], 1, *y.shape[2:]), y.dtype)
    inner = graph.relu(y + bias + residual)
    graph.output(inner * image, name="y")
    graph.output(graph.cast(inner, "float64"), name="inner")


def indexed(graph: fg.Graph, y: fg.Tensor) -> None:
    for axis in range(y.rank):
        y = y + graph.cast(graph.gen_index(y, axis=axis), y.dtype)
    graph.output(y, name="y")


# ---- shapes


@pytest.mark.parametrize("layout", quick("contiguous", "channels_last"))
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
    """Every width with every number of channels and of filters, each in one of the layouts."""
    cases = []
    for number, (channels, filters) in enumerate(itertools.product((8, 12, 20, 33, 100), (1, 2, 5))):
        if (number + width.bit_length() + LAYOUTS.index(layout)) % 2:
            continue
        taps, padding = (((3, 3), 1), ((1, 5), ((0, 0), (1, 3))))[number // 2 % 2]
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


@pytest.mark.parametrize("layout", quick("contiguous", "channels_last"))
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


@pytest.mark.parametrize("layout", quick("channels_last", "contiguous"))
def test_filters_of_every_size(layout):
    sizes = [(1, 1), (2, 5), (9, 9), (15, 15)] if layout == "contiguous" else [(1, 1), (5, 2), (11, 11), (15, 15)]
    cases = [direct((1, 8, 20, 22), taps, layout=layout, padding=taps[0] // 2, mode="convolution") for taps in sizes]
    cases.append(direct((1, 8, 4, 100), (1, 64), "float64", layout=layout, padding=((0, 0), (31, 32))))
    cases.append(direct((1, 8, 100, 4), (64, 1), layout=layout, padding=((31, 32), (0, 0))))
    cases.append(direct((1, 4, 20, 21), (8, 8), channels=4, filters=8, layout=layout, padding=3))
    cases.append(direct((2, 6, 5, 9, 8), (7, 7, 7), layout=layout, padding=3))
    cases.append(direct((1, 6, 20, 17), (31, 17), "bfloat16", layout=layout, padding=(15, 8)))
    check_cases(cases, guard=True)


@pytest.mark.slow
@pytest.mark.parametrize("size", range(1, 16))
def test_square_filters_up_to_15(size):
    """In each layout with every other way to stride and dilate."""
    cases = []
    for number, (stride, dilation) in enumerate(((1, 1), (2, 1), (1, 2), (3, 2))):
        cases.append(
            direct(
                (1, 12, 13, 35),
                (size, size),
                layout=LAYOUTS[(number + size) % 2],
                stride=stride,
                dilation=dilation,
                padding=((size // 2 * dilation, size * dilation), (size * dilation, size // 2 * dilation)),
                mode=("convolution", "cross_correlation")[(size + number) % 2],
            )
        )
    check_cases(cases, guard=True)


# ---- values


@pytest.mark.parametrize("layout", quick("contiguous", "channels_last"))
def test_filters_of_many_taps(layout):
    """No product of matrices: all of its columns but one would be empty."""
    cases = [
        direct((1, 12, 9, 10), (31, 31), layout=layout, padding=15),
        direct((1, 16, 12, 7), (21, 17), "bfloat16", layout=layout, padding=(10, 8), stride=(2, 1)),
        direct((1, 9, 4, 5, 6), (7, 7, 7), layout=layout, padding=3),
        direct((1, 8, 8, 7, 9), (7, 7, 7), "float16", layout=layout, padding=3, epilogue=activated),
    ]
    check_cases(cases, guard=True)


@pytest.mark.parametrize("layout", quick("channels_last", "contiguous"))
def test_every_dtype(layout):
    cases = [direct((1, 12, 6, 9), (3, 3), d, padding=1, layout=layout) for d in DTYPES]
    for a, b in (("bfloat16", "float32"), ("uint8", "int8"), ("int8", "float16"), ("float8_e5m2", "float8_e4m3")):
        cases.append(direct((1, 12, 6, 9), (3, 3), a, b, padding=1, layout=layout))
    for a, result in (("int8", "int8"), ("uint8", "float32"), ("bfloat16", "float32"), ("float8_e4m3", "float8_e4m3")):
        cases.append(direct((1, 12, 6, 9), (3, 3), a, result=result, padding=1, layout=layout, epilogue=activated))
    check_cases(cases)


@pytest.mark.parametrize("layout", quick("channels_last", "contiguous"))
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


@pytest.mark.parametrize("layout", quick("contiguous", "channels_last"))
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
    """Returns a copy in the same layout whose address is not a multiple of 16."""
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
    (made,) = check_cases([Case(graph, "direct_convolution")])
    given = random_inputs(graph, 1)
    expected = run(made, given)
    outputs = [_shifted(a) for a in expected.values()]
    made(*given.values(), out=outputs)
    for seen, wanted in zip(outputs, expected.values()):
        np.testing.assert_array_equal(seen.astype(np.float32), wanted.astype(np.float32))


# ---- together


@pytest.mark.parametrize("seeds", quick(range(15), range(15, 30)), ids=str)
def test_random_problems(seeds):
    check_cases([_random_case(random.Random(seed)) for seed in seeds], guard=True)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 1150, 50))
def test_more_random_problems(start):
    check_cases([_random_case(random.Random(seed)) for seed in range(start, start + 50)], guard=True)


def _random_case(r: random.Random) -> Case:
    rank = r.choice([1, 2, 2, 2, 3])
    if r.random() < 0.6:
        channels, filters, groups = 1, r.choice([1, 1, 2]), r.choice([1, 3, 8, 12, 20, 33, 40])
    else:
        # Tensor cores multiply groups of 4 channels of 16 bits: in another family.
        groups = r.choice([1, 2])
        channels, filters = r.randint(1, 4 if groups == 1 else 3), r.randint(1, 8)
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
        dtype if r.random() < 0.7 or dtype == "uint64" else r.choice([d for d in DTYPES if d != "uint64"]),
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


FAR = 2**30  # elements: three such steps are more than an int holds


@pytest.mark.parametrize("width", [16, 9])
@pytest.mark.parametrize("family", ["direct_convolution", "contraction"])
def test_offsets_beyond_an_int(family, width):
    """Channels and filters so far apart that offsets need 64 bits; the memory between is never touched."""
    channels = 4 if family == "direct_convolution" else 5
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
