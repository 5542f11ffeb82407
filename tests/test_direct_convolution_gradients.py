"""Gradients of depthwise convolutions with strides: direct convolutions of an input with zeros between its elements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from graphs import quick
from kernel_cases import Case, check_cases
from test_convolution_gradients import gradient

from codegen import schedules, target
from codegen.direct_convolution.flat_schedule import FlatSchedule
from codegen.direct_convolution.slide_schedule import SlideSchedule
from codegen.direct_convolution.spec import DirectConvolutionSpec
from codegen.spec import KernelSpec

LAYOUTS = ("contiguous", "channels_last")
#: The image, the taps, attributes of the convolution
PROBLEMS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 16, 14, 12), (3, 3), {"padding": 1, "stride": 2}),
    ((1, 24, 9, 15), (5, 3), {"padding": (2, 1), "stride": (2, 1), "mode": "convolution"}),
    ((2, 8, 17, 13), (3, 3), {"padding": ((0, 1), (2, 0)), "stride": (1, 2), "dilation": (2, 1)}),
    ((1, 8, 12, 9), (2, 2), {"stride": 3}),  # rows and columns that no window meets
    ((1, 9, 23), (4,), {"stride": 2, "padding": 1}),
    ((1, 8, 40, 6), (7, 7), {"padding": 3, "stride": 2}),
    ((2, 10, 7, 7), (1, 1), {"stride": 2}),
    ((1, 8, 5, 6, 9), (3, 3, 3), {"padding": 1, "stride": (2, 2, 4)}),
]


def case(number: int, layout: str, which: int = 0, dtype: str = "float32", kind: type = object) -> Case:
    """Returns the n-th problem with one of the schedules of a kind."""
    image, taps, how = PROBLEMS[number]

    def schedule(spec: KernelSpec) -> Any:
        assert isinstance(spec, DirectConvolutionSpec)
        every = [s for s in schedules(spec, target("sm_90a")) if isinstance(s, kind)]
        return every[which % len(every)]

    more = {"layout": layout} if len(taps) > 1 else {}
    made = gradient("dgrad", image, (image[1], 1, *taps), dtype, groups=image[1], **more, **how)
    return replace(made, family="direct_convolution", schedule=schedule, label=f"{layout} {PROBLEMS[number]} {which}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_equal_the_reference(layout):
    kinds = (SlideSchedule,) if layout == "channels_last" else (FlatSchedule, SlideSchedule)
    check_cases([case(n, layout, n, kind=kinds[n % len(kinds)]) for n in range(len(PROBLEMS))], guard=True)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_schedules_of_gradients(layout):
    check_cases([case(n, layout, which) for n in range(len(PROBLEMS)) for which in range(0, 24, 3)], guard=True)


@pytest.mark.parametrize("dtype", quick("bfloat16", "float64", "float16", "int8"))
def test_gradients_of_every_dtype(dtype):
    cases = [case(n, layout, n, dtype) for n, layout in ((0, LAYOUTS[0]), (0, LAYOUTS[1]), (2, LAYOUTS[1]))]
    cases[0].special = cases[1].special = 0.02
    check_cases(cases)
