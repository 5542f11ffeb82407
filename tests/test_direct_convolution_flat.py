"""The flat form of direct convolution, run on the CPU against the reference; what its schedules promise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from graphs import quick
from kernel_cases import Case, check_cases
from test_direct_convolution import activated, direct, indexed, plain, spec_of

import fusegraph as fg
from codegen import render, target
from codegen.direct_convolution.flat_schedule import FlatSchedule, flat_schedules, flat_threads
from codegen.direct_convolution.spec import DirectConvolutionSpec
from fusegraph.runtime import nvrtc
from fusegraph.runtime.cache import default_cache

#: (rows, cols, planes)
SCHEDULES = [(2, 4, 4), (100, 1, 8), (5, 3, 2), (3, 8, 16), (1, 2, 4), (40, 7, 8), (7, 5, 64), (4, 2, 1), (3, 3, 3)]

PROBLEMS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 16, 13, 11), (3, 3), {"padding": 1}),
    ((1, 24, 9, 14), (3, 5), {"padding": ((2, 0), (1, 3)), "mode": "convolution"}),
    ((2, 5, 17, 12), (3, 3), {"stride": 2, "padding": 1}),
    ((1, 16, 19, 13), (2, 3), {"stride": (1, 3), "dilation": (3, 2), "padding": ((3, 2), (4, 4))}),
    ((3, 8, 7, 9), (1, 1), {"stride": (3, 1)}),
    ((2, 8, 3, 2), (5, 7), {"padding": ((2, 2), (3, 4))}),  # a filter larger than the image
    ((1, 8, 5, 5), (3, 3), {"padding": 6, "stride": 4}),  # windows that lie in the padding alone
    ((1, 16, 40), (3,), {"padding": 1}),
    ((2, 9, 4, 9, 7), (2, 3, 3), {"padding": 1}),
    ((1, 8, 6, 7, 50), (3, 3, 3), {"padding": 1, "stride": (2, 4, 4), "dilation": (2, 1, 1)}),
    ((1, 16, 60, 5), (7, 7), {"padding": 3}),  # a filter whose code is a loop
    ((2, 9, 20, 9), (3, 3), {"padding": 1, "filters": 4}),  # a channel multiplier
    ((3, 11, 7, 7), (3, 3), {"padding": 1, "filters": 3, "stride": 2}),
    ((3, 6, 8, 6), (3, 3), {"padding": 1, "x_strides": (12 * 48, 48, 6, 1)}),  # half of the channels of other images
]


def across(graph: fg.Graph, y: fg.Tensor) -> None:
    """Writes the result with contiguous channels, and as it is."""
    bias = graph.tensor("bias", (y.shape[1], *(1,) * (y.rank - 2)), y.dtype)
    graph.output(y + bias, name="y", layout="channels_last" if y.rank in (4, 5) else "contiguous")
    graph.output(graph.cast(y, "float64"), name="inner")


def case(
    problem: int, sizes: tuple[int, ...], dtype: str = "float32", epilogue: Any = plain, itype: str = "int32"
) -> Case:
    x, taps, attributes = PROBLEMS[problem % len(PROBLEMS)]

    def schedule(spec: DirectConvolutionSpec) -> FlatSchedule:
        rows, cols, planes = sizes
        planes = min(planes, spec.runs[1])
        made = FlatSchedule(min(rows, spec.out[1]), cols, planes, itype)
        while flat_threads(spec, made) > 1024:
            made = replace(made, rows=2 * made.rows)
        return made

    made = direct(x, taps, dtype, **attributes, epilogue=epilogue)
    made.schedule = schedule
    made.label = f"{sizes} {x} {taps} {attributes}"
    return made


def test_flat_equals_the_reference():
    """Ragged columns, rows, planes; strides, dilation, padding, depth; every schedule meets several problems."""
    every = [
        case(n, SCHEDULES[n % len(SCHEDULES)], epilogue=(plain, activated, indexed, across)[n % 4])
        for n in range(len(PROBLEMS))
    ]
    check_cases([*every, case(2, SCHEDULES[1], itype="int64"), case(0, SCHEDULES[3], epilogue=across)], guard=True)


@pytest.mark.slow
def test_every_flat_schedule_on_every_problem():
    check_cases([case(n, sizes) for n in range(len(PROBLEMS)) for sizes in SCHEDULES], guard=True)


@pytest.mark.parametrize(
    "dtype", quick("bfloat16", "float64", "float16", "float8_e5m2", "int8", "int32", "int64", "uint8")
)
def test_flat_of_every_dtype(dtype):
    cases = [case(0, SCHEDULES[0], dtype, activated), case(12, SCHEDULES[5], dtype, across)]
    cases += [case(4, SCHEDULES[6], dtype)]
    cases += [case(n, sizes, dtype) for n, sizes in ((0, (4, 2, 1)), (3, (3, 3, 3)), (13, (2, 3, 5)))]  # odd planes
    cases[1].special = 0.02
    check_cases(cases, guard=True)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_candidates_compile_without_spills(arch):
    """Left alone, ptxas spills at 40 registers."""
    for size, taps, stride in ((28, 3, 2), (14, 5, 1), (7, 7, 1), (56, 3, 1)):
        spec = spec_of(direct((8, 96, size, size), (taps, taps), "bfloat16", padding=taps // 2, stride=stride))
        found = flat_schedules(spec, target(arch), "int32")[:9:4]
        sources = [render(spec, s) for s in found]
        for s, kernel in zip(found, nvrtc.compile_kernels(sources, arch, cache=default_cache())):
            assert kernel.spill_bytes == 0, s
