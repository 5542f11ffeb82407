"""Operands in tf32 are rounded to nearest, whoever brings them: tensor cores alone would cut them off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from graphs import check_on_gpu
from kernel_cases import Case, check_cases

import fusegraph as fg
from codegen.contraction import mma_schedule as contraction_mma_schedule
from codegen.contraction import wgmma_schedule as contraction_wgmma_schedule
from codegen.target import target as named
from fusegraph.report.check import random_inputs, run

#: 1 + 3/4 of the distance between neighbours in tf32, which becomes the upper one of them.
BETWEEN, ROUNDED = 1 + 0.75 * 2.0**-10, 1 + 2.0**-10

Chooser = Callable[[Any], Any]


def wgmma(**wanted: bool) -> Chooser:
    """Returns a chooser of the first wgmma schedule with all of these fields."""

    def choose(spec: Any) -> Any:
        every = contraction_wgmma_schedule.schedules(spec, named("sm_90a"))
        return next(s for s in every if all(bool(getattr(s, name)) == value for name, value in wanted.items()))

    return choose


def ring_of_two(spec: Any) -> Any:
    """A chooser of schedules with few stages and one block for all tiles: gathered operands are rounded at once, tile
    after tile.
    """
    return replace(wgmma(gather=True)(spec), stages=2, blocks=1)


def mma(spec: Any) -> Any:
    return contraction_mma_schedule.schedules(spec, named("sm_80"))[0]


def product(schedule: Chooser, prologue: bool = False) -> Case:
    g = fg.Graph("product", compute_dtype="tf32")
    a, b = g.tensor("a", (70, 40)), g.tensor("b", (40, 48), strides=(1, 40))
    g.output((g.relu(a) if prologue else a) @ b, name="y")
    return Case(g, "contraction", schedule=schedule, arch="sm_90a")


def windows(channels: int, schedule: Chooser) -> Case:
    g = fg.Graph("windows", compute_dtype="tf32")
    x, w = g.tensor("x", (2, channels, 9, 9), layout="NHWC"), g.tensor("w", (16, channels, 3, 3), layout="NHWC")
    g.output(g.conv_fprop(x, w, padding=1), name="y")
    return Case(g, "contraction", schedule=schedule, arch="sm_90a")


def given(graph: fg.Graph, number: int) -> dict[str, Any]:
    """Returns inputs of ones, except one input of values between two tf32 numbers."""
    arrays = random_inputs(graph, 0)
    for n, tensor in enumerate(graph.inputs):
        np.copyto(arrays[tensor.name], BETWEEN if n == number else 1.0)
    return arrays


@pytest.mark.slow
def test_operands_are_rounded():
    cases = [
        product(wgmma(producer_warpgroups=False)),
        product(wgmma(producer_warpgroups=True), prologue=True),
        product(mma),
        windows(32, wgmma(producer_warpgroups=False)),
        windows(12, wgmma(gather=False)),
        windows(12, wgmma(gather=True)),
        windows(12, ring_of_two),
        windows(12, mma),
    ]
    for case, exe in zip(cases, check_cases(cases)):
        products = 40 if case.graph.name == "product" else 9 * exe.graph.inputs[0].shape[1]
        for number in (0, 1):
            y = run(exe, given(case.graph, number))["y"]
            assert y.max() == products * ROUNDED, (case.graph.name, number)


@pytest.mark.gpu
@pytest.mark.parametrize("number", [0, 1])
def test_operands_are_rounded_on_a_gpu(number):
    """Cutting them off would be an error of 1.5 times the bound."""
    cases = [product(mma), product(mma, prologue=True), windows(3, mma), windows(12, mma), windows(32, mma)]
    check_on_gpu([case.graph for case in cases], inputs=lambda graph: given(graph, number))
