"""The ring form of direct convolution, run on the CPU against the reference; what its schedules promise."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
from graphs import quick
from kernel_cases import Case, check_cases
from test_direct_convolution import activated, direct, indexed, plain, spec_of

from codegen import PORTABLE, best_schedule, render, schedules, target
from codegen.direct_convolution.ring_schedule import (
    MAX_SUMS,
    RingSchedule,
    ring_buffer,
    ring_copy,
    ring_cycles,
    ring_schedules,
)
from codegen.direct_convolution.spec import DirectConvolutionSpec
from codegen.spec import KernelSource
from codegen.target import Target
from fusegraph.lowering.base import Options
from fusegraph.report.check import random_inputs
from fusegraph.runtime import host_compiler, nvrtc
from fusegraph.runtime.cache import default_cache

HOPPER = target("sm_90a")

#: (rows, cols, across, lanes, vector, steps, ahead)
SCHEDULES = [
    (2, 4, 3, 4, 4, 5, 2),
    (1, 1, 16, 2, 4, 4, 3),
    (1, 2, 5, 8, 1, 100, 1),
    (3, 1, 1, 32, 2, 2, 4),
    (4, 8, 2, 8, 2, 1, 1),
    (2, 3, 7, 1, 4, 3, 2),
]

#: x, taps, attributes of the convolution
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
]


def ring(spec: DirectConvolutionSpec, sizes: tuple[int, ...], itype: str = "int32") -> RingSchedule:
    rows, cols, across, lanes, vector, steps, ahead = sizes
    copy = min(ring_copy(spec), lanes * vector)
    assert copy
    return RingSchedule(rows, cols, across, lanes, vector, steps, ahead, copy, itype)


def case(number: int, dtype: str = "float32", epilogue: Any = plain, itype: str = "int32", **more: Any) -> Case:
    """Returns the n-th problem with the n-th schedule; both lists are cycled through."""
    x, taps, attributes = PROBLEMS[number % len(PROBLEMS)]
    sizes = SCHEDULES[number % len(SCHEDULES)]
    made = direct(x, taps, dtype, layout="channels_last", epilogue=epilogue, **attributes, **more)
    made.schedule = lambda spec: ring(spec, sizes, itype)
    made.label = f"{sizes} {x} {taps} {attributes}"
    return made


@pytest.mark.slow
def test_rings_equal_the_reference():
    """Ragged columns, rows, channels; strides, dilation, padding; every schedule meets several problems."""
    cases = [case(n, epilogue=(plain, activated, indexed)[n % 3]) for n in range(24)]
    cases += [case(n, itype="int64") for n in (0, 3)]
    check_cases(cases, guard=True)


@pytest.mark.slow
def test_every_ring_on_every_problem():
    cases = []
    for problem in PROBLEMS:
        for sizes in SCHEDULES:
            made = direct(problem[0], problem[1], layout="channels_last", **problem[2])
            made.schedule = lambda spec, sizes=sizes: ring(spec, sizes)
            made.label = f"{sizes} {problem}"
            cases.append(made)
    check_cases(cases, guard=True)


@pytest.mark.parametrize(
    "dtype", quick("bfloat16", "float64", "float16", "float8_e5m2", "int8", "int32", "int64", "uint8")
)
def test_rings_of_every_dtype(dtype):
    cases = [case(0, dtype, activated), case(6, dtype), case(1, dtype)]
    cases[1].special = 0.02
    check_cases(cases)


def test_strict_rings_and_results_of_other_dtypes():
    strict = case(0, "float16", activated)
    strict.options = Options(strict=True)
    check_cases([strict, case(0, "int8", activated, result="int8"), case(0, "bfloat16", result="float32")])


def test_pixels_far_apart_and_copies_of_every_width():
    """Channels that do not start at multiples of 16 bytes are copied 8 or 4 bytes at a time."""
    cases, copies = [], set()
    for strides in ((2000, 1, 16 * 9, 16), (2010, 1, 18 * 9, 18), (2004, 1, 20 * 9, 20), (0, 1, 16 * 9, 16)):
        made = direct((2, 16, 11, 9), (3, 3), "bfloat16", padding=1, x_strides=strides, epilogue=activated)
        copies.add(ring_copy(spec_of(made)))
        made.schedule = lambda spec: ring(spec, (2, 2, 5, 4, 2, 3, 2))
        cases.append(made)
    assert copies == {8, 4, 2}
    check_cases(cases, guard=True)


def test_a_ring_is_chosen_for_depthwise_convolutions_with_contiguous_channels():
    def kind(*args: Any, arch: Target = PORTABLE, **attributes: Any) -> str:
        return type(best_schedule(spec_of(direct(*args, **attributes)), arch)).__name__

    last = {"layout": "channels_last", "padding": 1}
    assert kind((2, 64, 19, 48), (3, 3), **last) == "RingSchedule"
    assert kind((2, 64, 19, 48), (3, 3), "bfloat16", stride=2, **last) == "RingSchedule"
    assert kind((2, 64, 19, 48), (3, 3), arch=target("sm_75"), **last) == "ChannelsSchedule"  # no cp.async
    assert kind((2, 33, 19, 48), (3, 3), "bfloat16", **last) == "ChannelsSchedule"  # pixels at odd addresses
    assert kind((2, 64, 9, 19, 48), (3, 3, 3), **last) == "ChannelsSchedule"
    assert kind((2, 64, 19, 48), (15, 15), **last) == "ChannelsSchedule"  # more weights than registers
    assert kind((2, 64, 19, 48), (3, 3), padding=1) == "StripsSchedule"
    assert kind((2, 64, 19, 47), (3, 3), padding=1) == "PlanesSchedule"
    unaligned = direct((2, 64, 19, 48), (3, 3), "bfloat16", case={"options": Options(alignment=1)}, **last)
    assert type(best_schedule(spec_of(unaligned))).__name__ == "ChannelsSchedule"


SHAPES = [(64, 256, 56), (1, 256, 56), (32, 96, 112), (128, 960, 7), (8, 384, 14), (16, 12, 100), (256, 8, 3)]


@pytest.mark.parametrize("dtype", quick("bfloat16", "float32", "float64", "int8"))
def test_schedules_fit_and_cover_the_machine(dtype):
    for images, channels, size in SHAPES:
        for stride in (1, 2):
            shape = (images, channels, size, size)
            spec = spec_of(direct(shape, (3, 3), dtype, layout="channels_last", padding=1, stride=stride))
            found = ring_schedules(spec, HOPPER, "int32")
            assert found
            costs = [ring_cycles(spec, s, HOPPER) for s in found]
            assert costs == sorted(costs)
            assert costs[0] < float("inf")
            for s in found:
                assert ring_buffer(spec, s).bytes <= HOPPER.arch.shared_bytes_per_block
                assert s.threads <= 1024
                assert s.channels % s.copy == 0 == s.threads % (s.channels // s.copy)
                assert s.rows * s.cols * s.vector <= MAX_SUMS
            best = found[0]
            outputs = images * channels * prod(spec.out)
            if outputs >= 2**20:
                blocks = render(spec, best).grid[0]
                assert blocks >= 0.8 * HOPPER.sms, (shape, best)


def test_a_ring_as_large_as_the_image_reads_each_element_once():
    """Counts every copy while the kernel runs: blocks that share no rows and columns read nothing twice."""
    made = direct((2, 24, 11, 9), (3, 3), "bfloat16", layout="channels_last", padding=1)
    spec = replace(spec_of(made), name="direct_kernel")
    whole = ring(spec, (2, 3, 3, 4, 4, 6, 2))
    for s, most in ((whole, 1), (replace(whole, steps=3), 2), (replace(whole, across=2), 2)):
        reads = _reads(render(spec, s), made)
        assert reads.min() == 1, s
        assert reads.max() == most, s


def _reads(source: KernelSource, made: Case) -> np.ndarray[Any, Any]:
    """Returns how often each element of x is read."""
    code = source.code.replace("bfloat16* __restrict__ y)", "bfloat16* __restrict__ y, int* reads)")
    code, count = re.subn(
        r"copy_async<(\d+)>\(&ring.*?, (row .*), (inside.*) \? \d+ : 0\);",
        r"{ if (\3) for (int v = 0; v < \1 / 2; ++v) atomicAdd(&reads[\2 - x + v], 1); \g<0> }",
        code,
    )
    assert count == 1
    module = host_compiler.build([replace(source, code=code)], cache=default_cache())
    given = random_inputs(made.graph, 0)
    x, w = given["x"], given["w"]
    reads = np.zeros(x.size, np.int32)
    y = np.zeros(made.graph.outputs[0].size, made.graph.outputs[0].dtype.numpy)
    module.launch(0, [x.ctypes.data, w.ctypes.data, y.ctypes.data, reads.ctypes.data])
    return reads


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_candidates_compile_without_spills(dtype):
    for size, stride in ((3, 1), (3, 2), (5, 1), (7, 1)):
        spec = spec_of(
            direct((64, 256, 56, 56), (size, size), dtype, layout="channels_last", padding=size // 2, stride=stride)
        )
        tried = [s for s in schedules(spec, HOPPER) if isinstance(s, RingSchedule)][:6:2]
        assert tried
        sources = [render(spec, s) for s in tried]
        for s, kernel in zip(tried, nvrtc.compile_kernels(sources, "sm_90a", cache=default_cache())):
            assert kernel.spill_bytes == 0, s
            assert ring_buffer(spec, s).stages > s.rows
