"""conv_dgrad and conv_wgrad: what their kernels are made of."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from golden_files import check_golden
from graphs import compile_for, share
from kernel_cases import Case, check_cases
from test_convolution_gradients import KINDS, LAYOUTS, PROBLEMS, gradient

import fusegraph as fg
from codegen import best_schedule
from codegen.contraction import simt as contraction_simt
from codegen.contraction import simt_schedule as contraction_simt_schedule
from codegen.target import target
from fusegraph.plan import plan

pytestmark = pytest.mark.slow


def code(case: Case) -> str:
    (kernel,) = plan(case.graph).kernels
    spec = replace(kernel.group.lowered.spec, name=kernel.name)
    return contraction_simt.render(spec).code


def test_what_need_not_be_tested_is_not():
    def conditions(**how: Any) -> tuple[bool, bool, bool]:
        text = code(gradient("dgrad", (2, 16, 16, 16), (16, 16, 4, 4), layout="channels_last", **how))
        return "a_start0" in text, "bool term" in text, "h1) >= 16" in text or "h2) >= 16" in text

    assert conditions() == (True, False, False)  # beyond the positions there is nothing
    assert conditions(padding=3) == (False, False, False)  # every tap lies over every element
    assert conditions(stride=2, padding=1) == (True, False, False)  # two taps a phase
    assert conditions(stride=3, padding=0) == (True, True, True)  # 2, 1 and 1 taps; 6, 5 and 5 elements


def test_rows_are_written_together_where_they_are_neighbours():
    """NCHW: with a stride along the height alone, elements of a row of the image still lie side by side."""
    cases = [gradient("dgrad", (2, 6, 9, 16), (4, 6, 3, 3), padding=1, stride=stride) for stride in ((2, 1), (1, 2), 2)]
    assert [["h2", "store(y"][k] in code(case) for case in cases for k in range(2)] == [False, True, *[True, False] * 2]
    check_cases(cases, guard=True)


def test_phases_without_taps_are_not_computed():
    text = code(gradient("dgrad", (1, 32, 8, 8), (32, 32, 1, 1), stride=2))
    assert "if (!(b0 >= 1 || b1 >= 1)) {" in text
    assert "bool term" not in text


def test_golden_source():
    g = fg.Graph("conv_dgrad_strided")
    loss, w = g.tensor("loss", (2, 16, 14, 14), layout="NHWC"), g.tensor("w", (16, 24, 3, 3), layout="KRSC")
    y = g.conv_dgrad(loss, w, size=28, stride=2, padding=1, name="upsampled")
    g.output(g.relu(y + g.tensor("bias", (24, 1, 1))), name="y")
    (kernel,) = plan(g).kernels
    check_golden("conv_dgrad_strided", kernel.source.code)


def test_gradients_of_the_board_are_for_tensor_cores():
    for kind, how in itertools.product(KINDS, ({"padding": 1}, {"padding": 1, "stride": 2})):
        for layout in LAYOUTS[1:]:
            case = gradient(kind, (8, 64, 28, 28), (64, 64, 3, 3), "bfloat16", layout=layout, other=layout, **how)
            (kernel,) = plan(case.graph).kernels
            for name in ("sm_80", "sm_90a"):
                best = best_schedule(kernel.group.lowered.spec, target(name))
                assert not isinstance(best, contraction_simt_schedule.SimtSchedule), (kind, how, name)


@pytest.mark.parametrize("name", ["sm_80", "sm_90a", "sm_120"])
def test_kernels_compile_without_spills(name):
    graphs = [
        gradient(k, *p[:2], d, **p[2]).graph for k in KINDS for p in PROBLEMS[3:9] for d in ("float32", "float64")
    ]
    assert [k.name for k in compile_for(name, share(name, graphs)) if k.spill_bytes] == []
