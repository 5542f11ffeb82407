"""The slide form of direct convolution, run on the CPU against the reference; what its schedules promise."""

from __future__ import annotations

from typing import Any

import pytest
from graphs import quick
from kernel_cases import Case, check_cases
from test_direct_convolution import activated, direct, indexed, plain
from test_direct_convolution_ring import PROBLEMS as FLAT_PROBLEMS

from codegen.direct_convolution.slide_schedule import SlideSchedule, slide_vector
from codegen.direct_convolution.spec import DirectConvolutionSpec
from fusegraph.lowering.base import Options

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
    *FLAT_PROBLEMS,
    ((2, 8, 4, 9, 7), (2, 3, 3), {"padding": 1}),
    ((1, 8, 6, 7, 50), (3, 3, 3), {"padding": 1, "stride": (2, 4, 4), "dilation": (2, 1, 1)}),
    ((1, 16, 60, 5), (7, 7), {"padding": 3}),  # a filter whose code is a loop
    ((2, 8, 40, 9), (5, 3), {"padding": (4, 1), "dilation": (2, 1)}),
    ((2, 9, 20, 9), (3, 3), {"padding": 1, "filters": 4}),  # a channel multiplier
    ((2, 11, 7, 20), (3, 3), {"padding": 1, "filters": 3, "stride": 2}),
]


def case(problem: int, sizes: tuple[int, ...], dtype: str = "float32", epilogue: Any = plain, itype: str = "int32") -> Case:
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
        case(n, SCHEDULES[n % len(SCHEDULES)], epilogue=(plain, activated, indexed)[n % 3]) for n in range(len(PROBLEMS))
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
