"""The simt form of a contraction where an operand is fetched four neighbours at a time, or copied asynchronously."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from graphs import check_on_gpu
from kernel_cases import Case, check_cases, executable, rendered
from test_contraction import convolution, epilogues, matmul, plain, transposed

from codegen import contraction
from codegen.contraction.simt_schedule import RINGS, SimtSchedule, schedules
from codegen.spec import ContractionSpec
from codegen.target import target
from fusegraph.lowering.base import Options
from fusegraph.runtime import nvrtc

Shape = tuple[int, ...]

HOPPER = target("sm_90a")


def turned(a: Shape, b: Shape, dtype: str = "float32", **how: Any) -> Case:
    """Returns a product whose operand B is contiguous along the reduction, like the weights of linear layers."""
    return matmul(a, b, dtype, b_strides=transposed(b), **how)


def spec_of(case: Case) -> ContractionSpec:
    (kernel,) = (k for k in executable(case).plan.kernels if k.group.family == "contraction")
    spec: ContractionSpec = replace(kernel.group.lowered.spec, name=kernel.name)
    return spec


def with_tile(tile: tuple[int, ...]) -> Callable[[ContractionSpec], SimtSchedule]:
    return lambda spec: next(s for s in schedules(spec, HOPPER) if s.tile == tile)


def through_registers(spec: ContractionSpec) -> SimtSchedule:
    return next(s for s in schedules(spec, HOPPER) if not s.copied)


LARGEST = RINGS[0].tile


@pytest.mark.slow
def test_rings():
    """Ragged rows and columns, reductions that end within a stage or before the ring is full, every transposition."""
    everything = epilogues()["everything"]
    cases = []
    for tile in (RINGS[0].tile, RINGS[2].tile, RINGS[-1].tile):
        ring = with_tile(tile)
        cases += [
            turned((tile[0] + 1, 20), (20, tile[1] + 3), schedule=ring, epilogue=everything),
            turned((2, 40, 36), (2, 36, 129), schedule=ring),
            matmul((tile[0] - 3, 53), (53, 132), schedule=ring, special=0.02),
            matmul((3, 50, 4), (4, 260), schedule=ring, epilogue=everything),
            matmul((50, 67), (67, 33), a_strides=transposed((50, 67)), schedule=ring),
            turned((5, 1), (1, 7), schedule=ring),
        ]
    check_cases(cases, guard=True)


def test_rings_of_windows():
    """Padding, strides, dilation, groups and both gradients: what does not exist is copied as zeros."""
    ring = with_tile(RINGS[2].tile)
    forms = [{"padding": 1}, {"padding": (2, 0), "stride": 2, "dilation": (1, 2)}]
    cases = [convolution((2, 7, 12, 11), (40, 7, 3, 3), **how) for how in forms]
    cases.append(convolution((2, 64, 9, 9), (72, 32, 3, 3), groups=2, padding=1))
    check_cases([replace(case, schedule=ring) for case in cases], guard=True)


@pytest.mark.slow
def test_every_schedule_of_a_product_in_vectors():
    cases = []
    for number, name in enumerate(epilogues()):
        along_a, along_b = bool(number & 1), bool(number & 2)
        a, b = (68 + 4 * number, 44), (44, 136)
        strides = {"a_strides": None if along_a else transposed(a), "b_strides": transposed(b) if along_b else None}
        every = schedules(spec_of(matmul(a, b, epilogue=epilogues()[name], **strides)), HOPPER)
        for nth in range(number % 4, len(every), 4):
            chosen = with_tile(every[nth].tile)
            cases.append(matmul(a, b, epilogue=epilogues()[name], schedule=chosen, special=0.02, **strides))
    check_cases(cases, guard=True)


def test_images_whose_channels_lie_together():
    shapes = ((2, 32, 24, 22), (36, 32, 3, 3))
    last = {"layout": "channels_last", "filters": "channels_last"}
    forms = [{}, {"padding": 1}, {"padding": (2, 0), "stride": 2, "dilation": (1, 2)}]
    cases = [convolution(*shapes, **how, **last) for how in forms]
    cases += [convolution((2, 64, 19, 19), (72, 32, 3, 3), groups=2, padding=1, **last)]
    made = check_cases([replace(c, schedule=through_registers) for c in cases], guard=True)
    assert all(any("load<4>(x + " in k.source.code for k in m.plan.kernels) for m in made)


def test_what_is_fetched_four_at_a_time():
    def fetched(case: Case) -> list[bool]:
        case = replace(case, schedule=with_tile((32, 32, 16, 4, 4)))
        (kernel,) = executable(case).plan.kernels
        return [re.search(rf"{side}_next\[i\] = (.* \? )?load<4>", kernel.source.code) is not None for side in "ab"]

    assert fetched(matmul((64, 32), (32, 64))) == [True, True]
    assert fetched(turned((64, 32), (32, 64))) == [True, True]
    assert fetched(matmul((64, 30), (30, 64))) == [False, True], "fours of a row would end in the next one"
    assert fetched(matmul((64, 32), (32, 62))) == [True, False]
    assert fetched(matmul((64, 32), (32, 64), a_strides=(33, 1))) == [False, True], "not on a boundary of 16 bytes"
    assert fetched(matmul((64, 32), (32, 64), a_strides=(64, 2))) == [False, True], "not neighbours"
    assert fetched(matmul((64, 32), (32, 64), "float64")) == [False, False]
    assert fetched(matmul((64, 32), (32, 64), "float16")) == [False, False], "they are converted one by one"
    assert fetched(replace(matmul((64, 32), (32, 64)), options=Options(alignment=4))) == [False, False]
    assert fetched(convolution((4, 2, 64, 64), (40, 2, 5, 5), padding=2))[0] is False, "padding between neighbours"


def test_what_is_copied():
    def rings(case: Case, machine: str = "sm_90a") -> list[tuple[int, ...]]:
        return [s.tile for s in schedules(spec_of(case), target(machine)) if s.copied]

    square = (512, 512)
    assert set(rings(turned(square, square))) == {ring.tile for ring in RINGS}
    assert LARGEST not in rings(matmul((8, 8), (8, 8), a_strides=(2**31, 1))), "addresses take twice the registers"
    assert LARGEST not in rings(convolution((1, 32, 8, 8), (32, 32, 3, 3), padding=1)), "and those of windows more"
    assert rings(convolution((1, 32, 8, 8), (32, 32, 3, 3), padding=1))
    assert rings(matmul(square, square, "float64")) == rings(matmul(square, square, "float16")) == []
    assert rings(turned(square, square), "sm_75") == [], "there are no asynchronous copies"
    for size, tile in ((8192, LARGEST), (1023, RINGS[4].tile)):
        best = schedules(spec_of(turned((size, size), (size, size))), HOPPER)[0]
        assert (best.tile, best.copied) == (tile, True)


@pytest.mark.slow
def test_registers_are_rationed_without_spills():
    sources = []
    for number, name in enumerate(("plain", "everything", "several", "reused")):
        strides = transposed((4096, 4096)) if number % 2 == 0 else None
        case = matmul((4100, 4096), (4096, 4095), b_strides=strides, epilogue=epilogues().get(name, plain))
        spec = spec_of(case)
        chosen = [s for s in schedules(spec, HOPPER) if s.copied][number % 2 :: 2]
        sources += [rendered(replace(spec, name=f"product_{name}_{n}"), s) for n, s in enumerate(chosen)]
    windows = spec_of(convolution((8, 64, 56, 56), (256, 64, 3, 3), padding=1))
    rings = [s for s in schedules(windows, HOPPER) if s.copied]
    sources += [rendered(replace(windows, name=f"windows_{n}"), s) for n, s in enumerate(rings)]
    for arch in ("sm_80", "sm_90a"):
        made = nvrtc.compile_kernels(sources, arch)
        assert [(k.name, arch, k.spill_bytes) for k in made if k.spill_bytes] == []


@pytest.mark.gpu
def test_rings_on_the_gpu(monkeypatch: pytest.MonkeyPatch):
    chosen = with_tile(LARGEST)
    monkeypatch.setattr(contraction.FAMILY, "schedules", lambda spec, arch: iter([chosen(spec)]))
    shapes = [((4004, 768), (768, 772)), ((2, 1000, 256), (2, 256, 1028)), ((9600, 64), (64, 128)), ((7, 20), (20, 4))]
    shapes += [((515, 70), (70, 513))]  # lanes pass their sums to each other
    check_on_gpu([make(*s, epilogue=epilogues()["everything"]).graph for s in shapes for make in (matmul, turned)])
