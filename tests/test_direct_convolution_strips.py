"""Strips: direct convolutions that carry the rows of an image in registers."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import quick
from kernel_cases import check_cases
from test_direct_convolution import activated, direct, spec_of

import fusegraph as fg
from codegen import best_schedule, schedules
from codegen.cpu.guarded import GuardedArray
from codegen.direct_convolution.schedule import StripsSchedule, strip_candidates
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.lowering.base import Options
from fusegraph.report.check import check_executable, random_inputs

STRIPS = [
    # (height, width, taps, padding, dilation)
    (19, 48, 3, 1, 1),
    (19, 48, 3, ((0, 3), (2, 1)), 1),
    (9, 32, 3, 2, 2),
    (5, 16, 5, 2, 1),
    (1, 64, 3, 1, 1),
    (33, 16, 3, 0, 1),
]


def test_strips_take_unstrided_filters_over_aligned_rows():
    def chosen(*args, **attributes):
        return isinstance(best_schedule(spec_of(direct(*args, **attributes))), StripsSchedule)

    assert chosen((2, 3, 19, 48), (3, 3), padding=1)
    assert not chosen((2, 3, 19, 47), (3, 3), padding=1)  # rows that are not whole vectors
    assert not chosen((2, 3, 19, 48), (3, 3), padding=1, stride=2)
    assert not chosen((2, 3, 19, 48), (3, 3))  # results that are not whole vectors
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
        row = spec.out[2] * spec.x.dtype.itemsize
        # Else whole images in shared memory are faster, or more threads.
        assert isinstance(best_schedule(spec), StripsSchedule) == (row % 16 == 0 and row > 16)
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
        spec = spec_of(made)
        tried = [s for s in schedules(spec) if isinstance(s, StripsSchedule)]
        assert len(tried) == len(set(tried))
        assert len(tried) > 2 or height == 1 or spec.out[2] % 8
        tried = tried or [next(strip_candidates(spec))]
        for schedule in tried[number % 2 :: 2]:
            again = direct(x, (taps, taps), "bfloat16", padding=padding, dilation=dilation, epilogue=activated)
            again.schedule, again.label = lambda _, s=schedule: s, f"{schedule} {x}"
            cases.append(again)
    check_cases(cases, guard=True)


#: sizes, taps, and how: planes of taps that are walked, padded, strided, dilated, turned around
DEEP = [
    ((6, 18, 20), (3, 3, 3), {"padding": 1}),
    ((7, 9, 16), (3, 3, 3), {"padding": ((0, 2), (1, 1), (2, 0))}),
    ((9, 8, 24), (5, 1, 3), {"padding": (2, 0, 1), "stride": (2, 1, 1)}),
    ((5, 8, 24), (3, 5, 5), {"padding": (2, 2, 2), "dilation": (2, 1, 1), "mode": "convolution"}),
    ((5, 8, 24), (1, 3, 3), {"padding": (0, 1, 1)}),
]


@pytest.mark.parametrize("dtype", quick("float32", "float16", "float64"))
def test_strips_of_three_dimensions(dtype):
    cases = []
    for (sizes, taps, how), rows, filters in zip(DEEP, (2, 3, 1, 4, 2), (1, 2, 1, 2, 1)):
        vector = 16 // np.dtype(dtype).itemsize
        if sizes[2] % vector == 0:
            made = direct((2, 3, *sizes), taps, dtype, filters=filters, epilogue=activated, **how)
            strips = StripsSchedule(rows, vector, 128, "int32")
            made.schedule = lambda _, s=strips: s
            cases.append(made)
    check_cases(cases, guard=True)


def test_deep_images_take_strips_where_they_do_not_fit_shared_memory():
    def chosen(*sizes):
        return isinstance(best_schedule(spec_of(direct((8, 16, *sizes), (3, 3, 3), padding=1))), StripsSchedule)

    assert chosen(48, 48, 48)
    assert not chosen(48, 48, 46)
    assert not chosen(8, 8, 8)


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
