"""Sums of fp8 products on Hopper, of which tensor cores keep 14 bits: as they are, and added up in float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_cases import Case, check_cases
from test_contraction import matmul
from test_contraction_wgmma import bias, everything, hopper, image, shape

from fusegraph.report.bounds import bounded
from fusegraph.report.check import check_executable, random_inputs, rounding_of


def eights(k: int, compute: str, n: int = 16, **more: Any) -> Case:
    strides = {"b_strides": (1, k), "a_strides": (k, 1)}
    return matmul((64, k), (k, n), "float8_e4m3", epilogue=bias, compute=compute, **strides, **more)


def test_sums_of_fp8_are_added_up_in_float32():
    """Unless the graph wants those of the tensor cores: then long sums have their 14 bits, and so has the bound."""
    errors, bounds = [], []
    computes = ("float32", "fast_float_for_fp8")
    for made, compute in zip(check_cases(hopper(eights(2048, c), shape(1, 16, 1)) for c in computes), computes):
        given = random_inputs(made.graph, 0)
        errors.append(check_executable(made, given).outputs[0].rel_error)
        bounds.append(np.median(bounded(made.graph, given, rounding_of(made))[made.graph.outputs[0]][1]))
        assert ("part[" in made.plan.kernels[0].source.code) == (compute == "float32")
    assert errors[0] < errors[1] / 2
    assert bounds[0] < bounds[1] / 8


@pytest.mark.slow
def test_sums_of_fp8_in_every_form():
    cases = [hopper(eights(k, "float32"), shape(groups)) for k in (16, 144, 272) for groups in (1, 2, 3)]
    cases += [hopper(eights(2048, "float32", 32), shape(split_k=2)), hopper(eights(400, "float32", special=0.01))]
    wide = matmul((300, 160), (160, 400), "float8_e5m2", b_strides=(1, 160), result="bfloat16", epilogue=everything)
    cases += [hopper(wide, shape(2, 192)), hopper(wide, shape(3, 128), blocks=2), hopper(wide, shape(1), blocks=3)]
    nhwc = image((2, 32, 9, 9), (48, 32, 3, 3), "float8_e4m3", result="float16", padding=1)
    cases += [hopper(nhwc), hopper(image((2, 16, 9, 9), (48, 16, 3, 3), "float8_e4m3"), shape(gather=True))]
    check_cases(cases, guard=True)
