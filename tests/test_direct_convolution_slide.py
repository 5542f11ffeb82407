"""The slide form of direct convolution, run on the CPU against the reference; what its schedules promise."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from graphs import quick
from kernel_cases import Case, check_cases, executable
from test_direct_convolution import activated, direct, indexed, plain, spec_of

import fusegraph as fg
from codegen import PORTABLE, best_schedule, render, schedules, target
from codegen.direct_convolution.slide_schedule import SlideSchedule, slide_cycles, slide_schedules, slide_vector
from codegen.direct_convolution.spec import DirectConvolutionSpec
from codegen.target import Target
from fusegraph.lowering.base import Options
from fusegraph.report.check import random_inputs
from fusegraph.runtime import nvrtc
from fusegraph.runtime.cache import default_cache

HOPPER = target("sm_90a")

#: (rows, cols, vector, ahead, lanes)
SCHEDULES = [
    (2, 4, 4, 1, 4),
    (100, 1, 8, 3, 1),
    (5, 3, 1, 2, 8),
    (3, 8, 2, 100, 3),
    (1, 2, 4, 1, 32),
    (40, 2, 2, 1, 2),
    (7, 5, 4, 4, 2),
]

PROBLEMS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 16, 13, 11), (3, 3), {"padding": 1}),
    ((1, 24, 9, 14), (3, 5), {"padding": ((2, 0), (1, 3)), "mode": "convolution"}),
    ((2, 40, 17, 12), (3, 3), {"stride": 2, "padding": 1}),
    ((1, 16, 19, 13), (2, 3), {"stride": (1, 3), "dilation": (3, 2), "padding": ((3, 2), (4, 4))}),
    ((3, 8, 7, 9), (1, 1), {"stride": (3, 1)}),
    ((2, 8, 3, 2), (5, 7), {"padding": ((2, 2), (3, 4))}),  # a filter larger than the image
    ((1, 8, 5, 5), (3, 3), {"padding": 6, "stride": 4}),  # windows that lie in the padding alone
    ((1, 16, 40), (3,), {"padding": 1}),
    ((1, 20, 7, 1), (3, 3), {"padding": 2, "dilation": (1, 2)}),
    # A dimension of one element, whose stride is 1: it says nothing about alignment.
    ((1, 20, 1), (2,), {"padding": ((2, 3),), "dilation": 3, "x_strides": (20, 1, 1)}),
    ((2, 8, 4, 9, 7), (2, 3, 3), {"padding": 1}),
    ((1, 8, 6, 7, 50), (3, 3, 3), {"padding": 1, "stride": (2, 4, 4), "dilation": (2, 1, 1)}),
    ((1, 16, 60, 5), (7, 7), {"padding": 3}),  # a filter whose code is a loop
    ((2, 8, 40, 9), (5, 3), {"padding": (4, 1), "dilation": (2, 1)}),
    ((2, 9, 20, 9), (3, 3), {"padding": 1, "filters": 4}),  # a channel multiplier
    ((2, 11, 7, 20), (3, 3), {"padding": 1, "filters": 3, "stride": 2}),
]


def gated(graph: fg.Graph, y: fg.Tensor) -> None:
    """An epilogue with a value of its own for every channel of every image."""
    ones = (1,) * (y.rank - 2)
    gate = graph.tensor("gate", (*y.shape[:2], *ones), "float32")
    graph.output(graph.relu(y * gate), name="y", dtype=y.dtype)


def case(
    problem: int, sizes: tuple[int, ...], dtype: str = "float32", epilogue: Any = plain, itype: str = "int32"
) -> Case:
    x, taps, attributes = PROBLEMS[problem % len(PROBLEMS)]

    def schedule(spec: DirectConvolutionSpec) -> SlideSchedule:
        rows, cols, vector, ahead, lanes = sizes
        rows = min(rows, spec.out[1])
        vector = min(vector, slide_vector(spec)) if spec.filters == 1 else 1
        return SlideSchedule(rows, cols, vector, min(ahead, spec.under(1, rows)), lanes, 64, itype)

    made = direct(x, taps, dtype, **({"layout": "channels_last"} | attributes), epilogue=epilogue)
    made.schedule = schedule
    made.label = f"{sizes} {x} {taps} {attributes}"
    return made


def test_slides_equal_the_reference():
    """Ragged columns, rows, channels; strides, dilation, padding, depth; every schedule meets several problems."""
    every = [
        case(n, SCHEDULES[n % len(SCHEDULES)], epilogue=(plain, activated, indexed)[n % 3])
        for n in range(len(PROBLEMS))
    ]
    check_cases([*every, case(2, SCHEDULES[1], itype="int64")], guard=True)


@pytest.mark.slow
def test_every_slide_on_every_problem():
    check_cases([case(n, sizes) for n in range(len(PROBLEMS)) for sizes in SCHEDULES], guard=True)


@pytest.mark.parametrize(
    "dtype", quick("bfloat16", "float64", "float16", "float8_e5m2", "int8", "int32", "int64", "uint8")
)
def test_slides_of_every_dtype(dtype):
    cases = [case(0, SCHEDULES[0], dtype, activated), case(12, SCHEDULES[5], dtype), case(4, SCHEDULES[6], dtype)]
    cases[1].special = 0.02
    check_cases(cases)


def test_pixels_far_apart_and_accesses_of_every_width():
    """Channels that do not start at multiples of 16 bytes are loaded 8 or 4 bytes at a time, or one by one."""
    cases, widths = [], set()
    for strides in ((2000, 1, 16 * 9, 16), (2010, 1, 18 * 9, 18), (2004, 1, 20 * 9, 20), (0, 1, 17 * 9, 17)):
        made = direct((2, 16, 11, 9), (3, 3), "bfloat16", padding=1, x_strides=strides, epilogue=activated)
        widths.add(vector := slide_vector(spec_of(made)))
        made.schedule = lambda spec, vector=vector: SlideSchedule(4, 2, vector, 2, 2, 64, "int32")
        cases.append(made)
    assert widths == {8, 4, 2, 1}
    check_cases(cases, guard=True)


def test_strict_slides_and_results_of_other_dtypes():
    strict = case(0, SCHEDULES[0], "float16", activated)
    strict.options = Options(strict=True)
    others = [
        direct((2, 16, 9, 9), (3, 3), dtype, padding=1, layout="channels_last", result=result, epilogue=activated)
        for dtype, result in (("int8", "int8"), ("bfloat16", "float32"))
    ]
    check_cases([strict, *others])


def test_infinite_weights_meet_the_padding():
    """Rows outside of the image are left out where all weights are finite, and only there."""
    made = case(12, (60, 5, 1, 1, 4))
    given = random_inputs(made.graph, 0)
    given["w"][3, 0, 0, 2] = np.inf
    given["w"][5, 0, 6, 3] = np.nan
    made.inputs = given
    check_cases([made])
    assert "zero != 0" in executable(made).plan.kernels[0].source.code


def test_slides_are_chosen_for_depthwise_convolutions_with_contiguous_channels():
    def kind(*args: Any, arch: Target = PORTABLE, **attributes: Any) -> str:
        return type(best_schedule(spec_of(direct(*args, **attributes)), arch)).__name__

    last = {"layout": "channels_last", "padding": 1}
    assert kind((2, 64, 19, 48), (3, 3), **last) == "SlideSchedule"
    assert kind((2, 64, 19, 48), (3, 3), "bfloat16", stride=2, **last) == "SlideSchedule"
    assert kind((2, 64, 19, 48), (3, 3), arch=target("sm_75"), **last) == "SlideSchedule"
    assert kind((2, 33, 19, 48), (3, 3), "bfloat16", **last) == "SlideSchedule"  # pixels at odd addresses
    assert kind((2, 64, 9, 19, 48), (3, 3, 3), **last) == "SlideSchedule"
    assert kind((2, 64, 19, 48), (15, 15), **last) == "ChannelsSchedule"  # more weights than registers
    assert kind((2, 64, 19, 48), (3, 3), padding=1) == "StripsSchedule"
    assert kind((2, 64, 19, 47), (3, 3), padding=1) == "FlatSchedule"
    assert kind((2, 64, 19, 47), (3, 3), padding=1, arch=target("sm_75")) == "PlanesSchedule"  # no cp.async
    assert kind((2, 64, 19, 47), (3, 3), padding=1, x_strides=(64 * 900, 900, 47, 1)) == "PlanesSchedule"


SHAPES = [(64, 256, 56), (1, 256, 56), (32, 96, 112), (128, 960, 7), (8, 384, 14), (16, 12, 100), (256, 8, 3)]


@pytest.mark.parametrize("dtype", quick("bfloat16", "float32", "float64", "int8"))
def test_schedules_cover_the_machine(dtype):
    for images, channels, size in SHAPES:
        for stride in (1, 2):
            shape = (images, channels, size, size)
            spec = spec_of(direct(shape, (3, 3), dtype, layout="channels_last", padding=1, stride=stride))
            found = slide_schedules(spec, HOPPER, "int32")
            costs = [slide_cycles(spec, s, HOPPER) for s in found]
            assert found
            assert costs == sorted(costs)
            assert images * channels * prod(spec.out) < 2**20 or render(spec, found[0]).grid[0] >= HOPPER.sms, shape


def test_where_planes_are_written_neighbours_take_neighbouring_columns():
    """A warp's accesses of a result fill sectors of memory in either layout."""
    for layout in ("channels_last", "contiguous"):

        def written(graph: fg.Graph, y: fg.Tensor, layout: str = layout) -> None:
            graph.output(y, name="y", layout=layout)

        shape = (8, 128, 112, 112)
        spec = spec_of(direct(shape, (3, 3), "float32", layout="channels_last", padding=1, epilogue=written))
        best = slide_schedules(spec, HOPPER, "int32")[0]
        assert (best.lanes * best.vector * 4 == 32) == (layout == "contiguous")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_candidates_compile_without_spills(dtype):
    for size, stride in ((3, 1), (3, 2), (5, 1), (7, 1)):
        how = {"layout": "channels_last", "padding": size // 2, "stride": stride}
        spec = spec_of(direct((64, 256, 56, 56), (size, size), dtype, **how))
        sources = [render(spec, s) for s in schedules(spec, HOPPER)[:9:4]]
        for kernel in nvrtc.compile_kernels(sources, "sm_90a", cache=default_cache()):
            assert kernel.spill_bytes == 0, kernel.name
